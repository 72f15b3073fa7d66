"""The collector: a service that takes reports from devices, and gives releases to analysts."""
