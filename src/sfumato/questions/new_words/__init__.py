"""Which words that nobody listed are common? Under local privacy."""
