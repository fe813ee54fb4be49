"""A job's way through Slurm: submission, start of ranks, the watch over them, and the stop."""
