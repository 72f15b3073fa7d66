"""Which items of an open domain do many devices hold? Lists and histograms."""
