"""An example question, as a contributor would add it: the median of one whole number, 0 to 120."""
