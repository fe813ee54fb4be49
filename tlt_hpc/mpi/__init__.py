"""MPI: the world of ranks, and the pulse that tells each rank what the others do.

Empty on purpose, so that the pure ``roster`` can be imported where there is no MPI.
"""
