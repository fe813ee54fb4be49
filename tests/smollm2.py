"""SmolLM2-135M-Instruct for tests that want real weights and a real vocabulary; `make smollm2` puts it in place."""

from __future__ import annotations

import os
import runpy
from functools import cache
from pathlib import Path

import pytest
import torch
from tiny import CPU

from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.folder import read_folder_weights
from tlt_hpc.models.shape import read_shape

TOOL = Path(__file__).parents[1] / "tools" / "fetch_model.py"

_FOLDER: Path = runpy.run_path(os.fspath(TOOL))["default_folder"]()

TEXTS = (
    "The greatest common divisor of two integers is the largest integer that divides both of them without a "
    "remainder. Euclid's algorithm finds it by division: replace the larger number by its remainder when it is "
    "divided by the smaller one, and continue until the remainder is zero. The last number that is not zero is the "
    "answer. For 196 and 364, for example, the remainders are 168, then 28, then 0, so the greatest common divisor "
    "is 28. The algorithm is more than two thousand years old.",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot = items[0]\n"
    "    less = [x for x in items[1:] if x < pivot]\n    more = [x for x in items[1:] if x >= pivot]\n"
    "    return quicksort(less) + [pivot] + quicksort(more)\n\n\nprint(quicksort([3, 6, 1, 8, 2, 9, 2]))\n"
    "print(quicksort(['pear', 'apple', 'fig']))\n",
    "<|im_start|>user\nWhat is the capital of France, and how many people live there?<|im_end|>\n"
    "<|im_start|>assistant\nThe capital of France is Paris. About 2.1 million people live in the city itself, and "
    "more than twelve million in the region around it, which makes it the most populous urban area of the European "
    "Union. It has been the seat of government for most of the time since the tenth century, "
    "and it is known for its museums and its architecture.<|im_end|>\n",
)


@cache
def smollm2_folder() -> Path:
    """The folder of the converted model. Without it the test is skipped, in CI it fails."""
    if not (_FOLDER / "config.json").is_file():
        reason = f"no SmolLM2 in {_FOLDER}; run `make smollm2`"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return _FOLDER


@cache
def smollm2_decoder(dtype: torch.dtype = torch.float32) -> Decoder:
    folder = smollm2_folder()
    decoder = Decoder(read_shape(folder), dtype, CPU)
    decoder.load_weights(read_folder_weights(folder), 0)
    return decoder
