"""What reading this machine's counters of energy costs, in microseconds a reading.

    python tools/bench_energy.py --gpu GPU-5d1a...     # as `nvidia-smi -L` names it

Without counters of the processors, files are made that look like them (two processors and a memory), so that what the
program itself takes is told.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import numpy as np

from tlt_hpc.look.energy import rapl
from tlt_hpc.look.energy.counter import Counter, NoCounterError
from tlt_hpc.look.energy.nvml import Nvml
from tlt_hpc.look.energy.rapl import Rapl

_TIMES, _READINGS = 20, 1000
_MADE = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "dram", "intel-rapl:1": "package-1"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Time each counter that there is."""
    parser = argparse.ArgumentParser(description="What reading this machine's counters of energy costs.")
    parser.add_argument("--gpu", metavar="UUID", help="time this GPU's counter too")
    options = parser.parse_args(arguments)
    try:
        show("processors", Rapl())
    except NoCounterError as error:
        print(f"processors: {error}")
        with tempfile.TemporaryDirectory() as folder:
            rapl.POWERCAP = make_files(Path(folder))
            show("processors, of files made for it", Rapl())
    if options.gpu:
        try:
            show(f"GPU {options.gpu}", Nvml(options.gpu))
        except NoCounterError as error:
            print(f"GPU {options.gpu}: {error}")


def make_files(folder: Path) -> Path:
    """A powercap folder that counts nothing."""
    for zone, name in _MADE.items():
        (folder / zone).mkdir()
        for file, text in (("name", name), ("max_energy_range_uj", "65532610987"), ("energy_uj", "0")):
            (folder / zone / file).write_text(f"{text}\n", encoding="utf-8")
    return folder


def show(name: str, counter: Counter) -> None:
    """One line."""
    taken = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        for _ in range(_READINGS):
            counter.joules()
        taken.append(1e6 * (time.perf_counter() - start) / _READINGS)
    counter.close()
    print(f"{name}: {np.median(taken):.1f} us a reading, {min(taken):.1f} at best ({_TIMES} times {_READINGS})")


if __name__ == "__main__":
    sys.exit(ending("bench_energy", main))
