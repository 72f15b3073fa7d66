"""From values to a release: one file per station, in the order in which data passes."""
