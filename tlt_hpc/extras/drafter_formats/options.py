"""The options of ``tlt export-drafter``; imports nothing heavy."""

from __future__ import annotations

import argparse

from tlt_hpc.export.export_options import add_common_options

FORMATS = ("sglang", "vllm", "speculators")


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``tlt export-drafter``."""
    command.add_argument("place", metavar="RUN", help="a run's folder, one with drafter.safetensors, or embedded:tiny")
    command.add_argument("--format", dest="kind", required=True, choices=FORMATS, help="the layout that it is to have")
    add_common_options(command, "FORMAT")
