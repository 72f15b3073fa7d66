"""Secure summation: a collector learns the sum of many devices' arrays, and no single one.

Both roles, device and collector, are here, as pure steps over bytes: no clock, no network, and
randomness is an argument. A service and a simulation drive the same code.
"""
