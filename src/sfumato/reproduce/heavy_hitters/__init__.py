"""Figures of paper 001."""
