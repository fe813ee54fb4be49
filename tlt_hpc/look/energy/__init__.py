"""Energy of GPUs and processors: counters, the meter of a run's steps, and what a run used."""
