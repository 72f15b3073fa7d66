"""Simulated devices: populations, fleets, and how they are asked."""
