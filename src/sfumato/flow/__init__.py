"""From values to a release: one file per station, in the order data passes."""
