"""A rank of a rehearsed run: ``python -m mpi4py -m tlt_hpc.extras.rehearse.rehearsed_rank train JOB ...``."""

from __future__ import annotations

import os
import sys

from tlt_hpc.cli.main import main
from tlt_hpc.extras.rehearse.faults import inject_if_ordered

if __name__ == "__main__":
    inject_if_ordered(os.environ)
    sys.exit(main())
