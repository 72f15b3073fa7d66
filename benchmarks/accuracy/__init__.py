"""Errors and intervals, against the plain decoder and against what was promised."""
