"""Analyses of a run's files; each gives data and a verdict in words."""
