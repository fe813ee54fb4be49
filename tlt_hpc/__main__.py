"""``tlt`` and ``python -m tlt_hpc``: the command line, whose imports may be interrupted."""

import sys

import tlt_hpc.common.script  # noqa: F401  names a library that this Python lacks

INTERRUPTED = 130


def main() -> int:
    """Run one command; returns its exit status."""
    try:
        from tlt_hpc.cli.main import main as run
    except KeyboardInterrupt:
        print("tlt: stopped; nothing was written", file=sys.stderr)
        return INTERRUPTED
    return run()


if __name__ == "__main__":
    sys.exit(main())
