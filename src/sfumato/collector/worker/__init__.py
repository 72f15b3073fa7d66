"""The background work of the collector: sealing, masked rounds, releases."""
