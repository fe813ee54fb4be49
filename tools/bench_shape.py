"""Plain decoding at the shape of a large model with random weights: tokens per second against the memory's limit.

    python tools/bench_shape.py --device cuda --dtype bfloat16            # Qwen2.5-7B
    python tools/bench_shape.py --config MODEL/config.json --batches 1,32

What plain decoding costs does not depend on what the weights say, so no download is needed; drafts would, so there are
none. Prompts are random, responses all of one length.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import run_script

# isort: split
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.records import Request, SampleKey, SamplingParams, Stream
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.folder import DTYPES
from tlt_hpc.models.shape import ModelShape
from tlt_hpc.plan.memory.shapes import find_shape
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.settings import EngineSettings

PROMPT_TOKENS = 128


def choose_device(name: str) -> torch.device:
    """The device asked for.

    Raises:
        UserError: there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no CUDA device; use --device cpu or fix the allocation")
    return torch.device(name)


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second that a plain read of the device's memory reaches: the fastest of several."""
    buffer = torch.ones((1 << 29) // 4 if device.type == "cuda" else (1 << 27) // 4, device=device)
    return buffer.nbytes / min(timed(device, buffer.sum) for _ in range(8))


def timed(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes, the device's own included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def random_decoder(shape: ModelShape, dtype: torch.dtype, device: torch.device, is_invariant: bool) -> Decoder:
    """A decoder of random weights, small enough that activations stay in range."""
    decoder = Decoder(shape, dtype, device, is_invariant=is_invariant)
    generator = torch.Generator(device).manual_seed(0)

    def values(name: str, sizes: tuple[int, ...]) -> Tensor:
        empty = torch.empty(sizes, dtype=dtype, device=device)
        return empty.fill_(1.0) if name.endswith("norm.weight") else empty.normal_(0.0, 0.02, generator=generator)

    decoder.load_weights(((name, values(name, cut.sizes)) for name, cut in decoder.weight_cuts().items()), 0)
    return decoder


def plain_engine(decoder: Decoder, batch: int, prompt: int, response: int) -> RolloutEngine:
    """An engine that decodes plainly and ends no response before its length."""
    limits = SamplingParams(response), decoder.shape.vocab_size, (), batch, prompt
    return RolloutEngine(decoder, EngineSettings(*limits, tie_guard=False))


def requests_of(prompts: Iterable[Any], step: int, stream: Stream = Stream.TRAIN) -> list[Request]:
    """A request for each prompt, an array of tokens."""
    return [Request(SampleKey(0, stream, step, draw, 0), prompt) for draw, prompt in enumerate(prompts)]


def random_prompts(vocabulary: int, count: int, length: int, step: int) -> NDArray[np.int32]:
    """Prompts [count, length]."""
    return np.random.default_rng(step).integers(0, vocabulary, (count, length)).astype(np.int32)


def run_all(engine: RolloutEngine) -> None:
    """Decode until the engine has no requests left."""
    while engine.has_work:
        engine.step()


def measure(decoder: Decoder, batch: int, response: int, repeats: int) -> tuple[float, int]:
    """Seconds and tokens of ``batch`` responses side by side, without prompts: the median after a first time."""
    device, num_tokens, seconds = decoder.device, 0, list[float]()
    engine = plain_engine(decoder, batch, PROMPT_TOKENS, response)
    engine.calibrate(requests_of(random_prompts(decoder.shape.vocab_size, 1, PROMPT_TOKENS, 99), 99))
    for repeat in range(repeats + 1):
        engine.submit(requests_of(random_prompts(decoder.shape.vocab_size, batch, PROMPT_TOKENS, repeat), repeat))
        while engine.may_prefill:
            engine.step()
        engine.take_counts()
        seconds.append(timed(device, partial(run_all, engine)))
        num_tokens = engine.take_counts().num_tokens
        engine.take_finished_rollouts()
    engine.close()  # the next one needs the memory
    return statistics.median(seconds[1:]), num_tokens


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="Qwen2.5-7B", help="a config.json, or the name of a model (Qwen2.5-7B)")
    parser.add_argument("--layers", type=int, help="fewer layers than the config has, to try it out")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--batches", default="1,8,32", help="sequences side by side, N,...")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--library", action="store_true", help="products by the library, as with batch_invariant = false"
    )
    return parser


def main() -> None:
    """Measure as the command line says, and print a line for each batch size."""
    options = make_parser().parse_args()
    device = choose_device(options.device)
    shape = find_shape(options.config, None)
    shape = replace(shape, num_layers=options.layers or shape.num_layers)
    torch.set_num_threads(1)
    is_invariant = device.type == "cuda" and options.dtype == "bfloat16" and not options.library
    decoder = random_decoder(shape, DTYPES[options.dtype], device, is_invariant)
    read = decoder.weight_bytes - (0 if shape.tied_head else decoder.embedding.nbytes)
    bandwidth = read_bandwidth(device)
    print(f"{shape.num_parameters / 1e9:.2f} G parameters, {options.dtype}; memory reads {bandwidth / 1e9:.0f} GB/s")
    for batch in map(int, options.batches.split(",")):
        seconds, num_tokens = measure(decoder, batch, options.new_tokens, options.repeats)
        rounds = num_tokens / batch / seconds
        print(
            f"batch {batch:4}: {num_tokens / seconds:9,.1f} tokens/s, {1000 / rounds:7.2f} ms a round, "
            f"{rounds * read / bandwidth:.0%} of the bandwidth",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(run_script("bench_shape", main))
