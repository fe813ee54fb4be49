"""Compiles every Triton program of ``tlt_hpc.kernels`` for a GPU that need not be there, and shows what each takes.

    python tools/compile_kernels.py 90     # for sm_90 (H100, H200)

Exit status 1: forms of a program for half precision do not all compute alike.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import torch
from check_kernels import all_cases

from tlt_hpc.kernels import dispatch


class CompileOnly:
    """Stands in for Triton's driver: kernels are compiled to machine code for a GPU that is not there.

    Follows the driver interface of Triton 3.6 and 3.7.
    """

    def __init__(self, architecture: str, max_shared_bytes: int) -> None:
        self.architecture = architecture
        self.rows: list[tuple[str, int, str]] = []
        self.utils = SimpleNamespace(
            load_binary=self._take, get_device_properties=lambda _: {"max_shared_mem": max_shared_bytes}
        )

    def get_current_target(self) -> Any:
        """The architecture that is compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", int(self.architecture), 32)

    def get_current_device(self) -> int:
        """The number of the absent GPU."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """The number of its stream."""
        return 0

    def launcher_cls(self, _source: object, _metadata: object) -> Callable[..., None]:
        """A launcher that launches nothing."""
        return lambda *_: None

    def _take(self, name: str, binary: bytes, shared: int, _device: int) -> tuple[int, int, int, int, int]:
        """The place where a real driver loads the machine code."""
        self.rows.append((name, shared, usage_of(binary)))
        return 0, 0, 0, 0, 1024


def usage_of(binary: bytes) -> str:
    """Registers and stack (spilled) bytes of a compiled kernel, as cuobjdump has them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return next(line.strip() for line in shown.splitlines() if "REG:" in line)


def arithmetic_of(compiled: Any) -> tuple[str, int, str]:
    """The properties of a compiled program on which the bits of its result depend.

    Its matrix instruction without the width; how many multiplications are fused with additions, without those of a
    logarithm (ftz); over which layout it sums.
    """
    code = compiled.asm["ptx"]
    sums = re.findall(r"tensor<[^>]*> *\) -> tensor<[^>]*#ttg.slice[^>]*>", compiled.asm["ttgir"])
    instructions = re.findall(r"(?:wgmma\.mma_async|mma\.sync)\.[\w.]+", code)
    layouts = re.findall(r"warpsPerCTA = \[[\d, ]*\]", compiled.asm["ttgir"]) if sums else []
    kinds = {re.sub(r"n\d+k", "nNk", name) for name in instructions}
    return " ".join(sorted(kinds)), len(re.findall(r"\bfma\.(?!rn\.ftz)", code)), " ".join(sorted({*sums, *layouts}))


def num_unlike(groups: Sequence[Sequence[Any]]) -> int:
    """Groups of programs whose forms for half precision do not all compute alike; prints what each computes with."""
    unlike = 0
    for programs in groups:
        caches = [cache for program in programs for cache in program.device_caches.values()]
        forms = [arithmetic_of(one) for cache in caches for one in cache[0].values()]
        alike = {form for form in forms if form[0]}  # float32 has no matrix instruction, and tiles of its own
        unlike += len(alike) != 1
        names = ", ".join(program.__name__ for program in programs)
        print(f"{names}: {len(forms)} forms, {'; '.join(sorted(form[0] for form in alike))}")
    return unlike


def compile_all(architecture: str) -> int:
    """Compile what the cases launch and print what each program takes; a compiler's error ends it."""
    import triton

    from tlt_hpc.kernels.programs import attention as programs

    max_shared_bytes = {"80": 166_912, "90": 232_448}.get(architecture, 101_376)
    driver = CompileOnly(architecture, max_shared_bytes)
    triton.runtime.driver.set_active(driver)
    programs.is_hopper = lambda x: architecture == "90"
    spilled = 0
    with dispatch.forced():
        for case in all_cases(torch.device("cpu"), small=True):
            before = len(driver.rows)
            case.run()
            for name, shared, usage in driver.rows[before:]:
                print(f"{case.name:44} {name:20} shared {shared:6}  {usage}")
                spilled += "STACK:0" not in usage
    print(f"{len(driver.rows)} programs for {architecture}, {spilled} with spilled registers")
    from tlt_hpc.kernels.programs.attention import _attend, _attend_spans
    from tlt_hpc.kernels.programs.linear import _multiply, _multiply_experts

    unlike = num_unlike([(_attend, _attend_spans), (_multiply,), (_multiply_experts,)])
    print("NOT batch-invariant" if unlike else "batch-invariant: all forms of a program compute alike")
    return 1 if unlike else 0


def main() -> int:
    """Compile for the architecture that the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architecture", help="e.g. 90 for H100 and H200")
    architecture = parser.parse_args().architecture
    if not dispatch.has_triton():
        raise SystemExit("triton is not installed: it comes with a CUDA build of torch, or pip install triton==3.7.1")
    return compile_all(architecture)


if __name__ == "__main__":
    sys.exit(ending("compile_kernels", main))
