"""Plain decoding at the shape of a large model with random weights: tokens per second against the memory's limit.

    python tools/bench_shape.py --device cuda --dtype bfloat16            # Qwen2.5-7B
    python tools/bench_shape.py --config MODEL/config.json --batches 1,32

What plain decoding costs does not depend on what the weights say, so no download is needed; drafts would, so there are
none. Prompts are random, responses all of one length. Prints a table and, with --json, writes it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import numpy as np
import torch
from torch import Tensor

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.records import Request, SampleKey, SamplingParams, Stream
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.folder import DTYPES
from tlt_hpc.models.shape import ModelShape, shape_from
from tlt_hpc.models.tokenizer import read_json
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.settings import EngineSettings

QWEN_7B = {
    "model_type": "qwen2",
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}


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
    return buffer.nbytes / min(timed(buffer.sum, device) for _ in range(8))


def timed(work: Callable[[], object], device: torch.device) -> float:
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

    decoder.load(((name, values(name, cut.sizes)) for name, cut in decoder.weight_cuts().items()), 0)
    return decoder


def make_engine(decoder: Decoder, batch: int, prompt: int, response: int) -> RolloutEngine:
    """An engine that decodes plainly, and ends no response before its length."""
    settings = EngineSettings(
        params=SamplingParams(response),
        num_tokens=decoder.shape.vocab_size,
        eos_token_ids=(),
        max_live=batch,
        max_prompt_tokens=prompt,
        tie_guard=False,
    )
    engine = RolloutEngine(decoder, settings)
    engine.calibrate(requests(decoder, 1, prompt, 99))
    return engine


def requests(decoder: Decoder, count: int, prompt: int, step: int) -> list[Request]:
    """Random prompts."""
    source = np.random.default_rng(step)
    draws = source.integers(0, decoder.shape.vocab_size, (count, prompt)).astype(np.int32)
    return [Request(SampleKey(0, Stream.TRAIN, step, draw, 0), tokens) for draw, tokens in enumerate(draws)]


def measure(decoder: Decoder, batch: int, prompt: int, response: int, repeats: int) -> dict[str, Any]:
    """Tokens per second of ``batch`` responses side by side: the median of ``repeats`` after a first one."""
    engine, seconds = make_engine(decoder, batch, prompt, response), []
    for repeat in range(repeats + 1):
        engine.submit(requests(decoder, batch, prompt, repeat))
        while engine.has_waiting:
            engine.step()
        engine.take_counts()
        if decoder.device.type == "cuda":
            torch.cuda.synchronize(decoder.device)
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
        seconds.append(time.perf_counter() - start)
        num_tokens = engine.take_counts().num_tokens
        engine.collect()
    rate = num_tokens / statistics.median(seconds[1:])
    engine.close()  # the next one needs the memory
    return {"tokens_per_second": rate, "rounds_per_second": rate / batch, "memory": engine.memory_table()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a config.json; without it Qwen2.5-7B")
    parser.add_argument("--layers", type=int, help="fewer layers than the config has, to try it out")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16")
    parser.add_argument("--batches", default="1,8,32", help="sequences side by side, N,...")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--library", action="store_true", help="products by the library, as with batch_invariant = false"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = choose_device(options.device)
    raw = read_json(options.config) if options.config else QWEN_7B
    shape = shape_from(raw, str(options.config or "Qwen2.5-7B"))
    shape = replace(shape, num_layers=options.layers or shape.num_layers)
    torch.set_num_threads(1)
    is_invariant = device.type == "cuda" and options.dtype == "bfloat16" and not options.library
    decoder = random_decoder(shape, DTYPES[options.dtype], device, is_invariant)
    read = decoder.weight_bytes - (0 if shape.tied_head else decoder.embedding.nbytes)
    bandwidth = read_bandwidth(device)
    print(f"{shape.num_parameters / 1e9:.2f} G parameters, {options.dtype}; memory reads {bandwidth / 1e9:.0f} GB/s")
    report: dict[str, Any] = {"bandwidth": bandwidth, "bytes_per_round": read, "shape": raw, "batch": {}}
    for batch in map(int, options.batches.split(",")):
        found = measure(decoder, batch, options.prompt_tokens, options.new_tokens, options.repeats)
        found["bandwidth_fraction"] = found["rounds_per_second"] * read / bandwidth
        report["batch"][str(batch)] = found
        print(
            f"batch {batch:4}: {found['tokens_per_second']:9,.1f} tokens/s, "
            f"{1000 / found['rounds_per_second']:7.2f} ms a round, {found['bandwidth_fraction']:.0%} of the bandwidth",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(ending("bench_shape", main))
