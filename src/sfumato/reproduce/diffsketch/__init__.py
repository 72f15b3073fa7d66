"""Figures of paper 003."""
