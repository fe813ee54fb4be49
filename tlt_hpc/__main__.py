"""``python -m tlt_hpc``."""

import sys

import tlt_hpc.common.script  # noqa: F401  names a library that this Python lacks

# isort: split
from tlt_hpc.cli.main import main

sys.exit(main())
