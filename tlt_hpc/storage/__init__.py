"""The files of a run: their paths, the permanent rollout log, the feature cache. Imports neither torch nor MPI."""
