"""The data of the collector, and the only SQL."""
