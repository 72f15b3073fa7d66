"""What the collector keeps, and the only SQL."""
