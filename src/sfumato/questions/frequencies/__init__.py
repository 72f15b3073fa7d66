"""How common is each of these items? Answered by sums."""
