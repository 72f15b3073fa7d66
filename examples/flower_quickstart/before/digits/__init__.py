"""A Flower app: a small network that clients train on their own points of ten classes."""
