"""Errors and intervals, against the plain decoder and against the promises."""
