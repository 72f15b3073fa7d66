"""Seconds and bytes, as ratios to a peer and to a floor measured in the same run."""
