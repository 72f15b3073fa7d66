"""Fingerprints and count sketches: each loop twice, compiled and in numpy."""
