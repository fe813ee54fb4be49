"""Figures of the analyses, with matplotlib."""
