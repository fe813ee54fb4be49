"""``python -m tlt_hpc``."""

import sys

from tlt_hpc.cli import main

sys.exit(main())
