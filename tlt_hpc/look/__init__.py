"""What a run measures, and everything that reads and shows it."""
