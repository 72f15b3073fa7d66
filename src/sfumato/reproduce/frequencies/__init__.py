"""Figures of paper 000."""
