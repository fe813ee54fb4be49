"""Owns the import of mpi4py, so that it neither initialises MPI on import nor forgets to finalise it at exit.

Knows nothing of ranks. Importing it starts nothing: ``World.connect`` does, and says which thread level it wants.
"""

from __future__ import annotations

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = True

from mpi4py import MPI  # noqa: E402  (the settings above are read when the library loads)

__all__ = ["MPI"]
