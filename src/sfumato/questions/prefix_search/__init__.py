"""Which words that nobody listed are common? By sums over growing prefixes."""
