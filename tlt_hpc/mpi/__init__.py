"""The MPI floor: the world of ranks and the pulse that tells them who has finished; knows nothing of what they compute.

Empty on purpose, so that the pure ``roster`` can be imported where there is no MPI.
"""
