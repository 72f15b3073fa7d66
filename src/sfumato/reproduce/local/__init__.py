"""Figures of paper 004."""
