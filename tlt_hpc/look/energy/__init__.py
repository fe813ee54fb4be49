"""Joules that a run's GPUs and processors take, from their own counters, where a machine lets them be read."""
