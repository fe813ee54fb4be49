"""Experiments made of several runs or of parts of one: warm-up and comparison."""
