"""The files of a run: their paths, the permanent rollout log, the feature cache. Knows no torch and no MPI."""
