"""Figures and tables of paper 002."""
