"""What a run's files say about it, as arrays and a verdict in words. Knows numpy: no torch, no MPI, no pictures."""
