"""Plain decoding of SmolLM2-135M on one thread: tokens per second of this engine, CTranslate2 and llama.cpp.

    make smollm2
    pip install --no-deps ctranslate2==4.8.5
    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-deps diskcache llama-cpp-python==0.3.36    # compiles, six minutes
    OMP_NUM_THREADS=1 python tools/bench_decoding.py

All sides have the same weights in float32, keep keys and values in float32, answer the same prompts, sample at
temperature 1 from the whole vocabulary and ignore the end token; nothing is drafted. Ours has the tie guard on and
keeps each token's log-probability, as in training. First it is checked whether all sides generate the same text at
temperature 0. Sides take turns; a figure is the median of the repetitions, prompts included, and a ratio is the median
of those of each turn, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import numpy as np
import torch
from fetch_smollm2 import default_folder, packaged_file

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.records import Request, SampleKey, SamplingParams, Stream
from tlt_hpc.look.series import paired_ratio
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.folder import folder_weights
from tlt_hpc.models.shape import read_shape
from tlt_hpc.models.tokenizer import load_tokenizer
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.settings import EngineSettings

Prompts = list[list[int]]
Generate = Callable[[Prompts, int, float], Prompts]
"""Responses of so many tokens at a temperature, 0 or 1."""


def prompts_of(tokenizer: Any, batch: int, turn: int) -> Prompts:
    """Different prompts of one length."""
    numbers = np.random.default_rng(turn).integers(100, 1000, (batch, 2)).tolist()
    return [tokenizer.encode(f"The greatest common divisor of {a} and {b} is found as so:").ids for a, b in numbers]


def requests(prompts: Prompts, stream: Stream, turn: int, params: SamplingParams) -> list[Request]:
    """The prompts as requests of this project's engine."""
    tokens = [np.array(prompt, np.int32) for prompt in prompts]
    return [Request(SampleKey(0, stream, turn, draw, 0), each, params) for draw, each in enumerate(tokens)]


def ours(folder: Path, batch: int, prompt: int, response: int) -> Generate:
    """This project's engine."""
    decoder = Decoder(shape := read_shape(folder), torch.float32, torch.device("cpu"))
    decoder.load(folder_weights(folder), 0)
    params = SamplingParams(response)
    engine = RolloutEngine(decoder, EngineSettings(params, shape.vocab_size, (), batch, prompt, tie_guard=True))
    turns = itertools.count()

    def generate(prompts: Prompts, length: int, temperature: float) -> Prompts:
        engine.submit(requests(prompts, Stream.TRAIN, next(turns), SamplingParams(length, temperature)))
        while engine.has_work:
            engine.step()
        return [done.response_tokens.tolist() for done in sorted(engine.collect(), key=lambda done: done.key)]

    engine.calibrate(requests(prompts_of(load_tokenizer(folder), 1, 0), Stream.CALIBRATION, 0, params))
    return generate


def ctranslate2(folder: Path, batch: int, prompt: int, response: int) -> Generate:
    """CTranslate2, converted from the same folder."""
    import ctranslate2 as library
    from ctranslate2.converters import TransformersConverter

    with tempfile.TemporaryDirectory() as place:
        TransformersConverter(str(folder)).convert(f"{place}/model")
        generator = library.Generator(f"{place}/model", compute_type="float32", intra_threads=1)
    tokenizer = load_tokenizer(folder)

    def generate(prompts: Prompts, length: int, temperature: float) -> Prompts:
        done = generator.generate_batch(
            [[tokenizer.id_to_token(token) for token in tokens] for tokens in prompts],
            max_length=length,
            min_length=length,
            end_token="<|im_start|>",  # min_length bans it: the model's own end token is sampled, as on the other sides
            sampling_topk=0 if temperature else 1,
            include_prompt_in_result=False,
        )
        return [result.sequences_ids[0] for result in done]

    return generate


def llama_cpp(folder: Path, batch: int, prompt: int, response: int) -> Generate:
    """llama.cpp, by the C functions that its Python package wraps."""
    from llama_cpp import llama_cpp as library

    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    library.llama_backend_init()
    settings, quantization = library.llama_model_default_params(), library.llama_model_quantize_default_params()
    settings.use_mmap, quantization.allow_requantize, quantization.ftype = False, True, library.LLAMA_FTYPE_ALL_F32
    with tempfile.TemporaryDirectory() as place:
        file = f"{place}/model.gguf".encode()
        if library.llama_model_quantize(os.fsencode(packaged_file()), file, quantization):
            raise RuntimeError("llama.cpp did not convert its model to float32")
        model = library.llama_model_load_from_file(file, settings)
    own = library.llama_context_default_params()
    own.n_ctx, own.n_seq_max, own.n_batch = batch * (prompt + response), batch, batch * prompt
    own.n_threads = own.n_threads_batch = 1
    own.type_k = own.type_v = library.GGML_TYPE_F32
    context = library.llama_init_from_model(model, own)
    samplers = library.llama_sampler_init_greedy(), library.llama_sampler_init_dist(0)
    slots = library.llama_batch_init(batch * prompt, 0, 1)

    def decode(columns: Prompts, start: int) -> list[int]:
        """Read the next tokens of each sequence; returns where the logits of the last ones are."""
        slots.n_tokens = sum(map(len, columns))
        reads = [(row, offset, token) for row, tokens in enumerate(columns) for offset, token in enumerate(tokens)]
        for i, (row, offset, token) in enumerate(reads):
            slots.token[i], slots.pos[i], slots.n_seq_id[i], slots.seq_id[i][0] = token, start + offset, 1, row
            slots.logits[i] = offset == len(columns[row]) - 1
        if status := library.llama_decode(context, slots):
            raise RuntimeError(f"llama_decode returned {status}")
        return [i for i in range(len(reads)) if slots.logits[i]]

    def generate(prompts: Prompts, length: int, temperature: float) -> Prompts:
        library.llama_memory_clear(library.llama_get_memory(context), True)
        out: Prompts = [[] for _ in prompts]
        for step in range(length):
            columns, start = ([tokens[-1:] for tokens in out], prompt + step - 1) if step else (prompts, 0)
            for tokens, at in zip(out, decode(columns, start), strict=True):
                tokens.append(library.llama_sampler_sample(samplers[temperature > 0], context, at))
        return out

    return generate


SIDES = {"ours": ours, "CTranslate2": ctranslate2, "llama.cpp": llama_cpp}


def measure(sides: dict[str, Generate], turns: list[Prompts], num_tokens: int) -> dict[str, list[float]]:
    """Seconds by side and turn; the first turn is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for prompts in turns:
        for name, generate in sides.items():
            start = time.perf_counter()
            done = generate(prompts, num_tokens, 1.0)
            seconds[name].append(time.perf_counter() - start)
            assert [len(tokens) for tokens in done] == [num_tokens] * len(prompts), name
    return {name: own[1:] for name, own in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="sequences side by side")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of a response")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--against", nargs="+", choices=list(SIDES)[1:], default=list(SIDES)[1:])
    options = parser.parse_args()
    folder = default_folder()
    if not (folder / "config.json").is_file():
        raise UserError(f"no SmolLM2 in {folder}; run `make smollm2`")
    if missing := [name for name in options.against if not util.find_spec(SIDES[name].__name__)]:
        raise UserError(f"{' and '.join(missing)} not installed; --help says how, --against leaves one out")
    torch.set_num_threads(1)
    tokenizer, most = load_tokenizer(folder), max(options.batches)
    length = len(prompts_of(tokenizer, 1, 0)[0])
    sides = {name: SIDES[name](folder, most, length, options.tokens) for name in ("ours", *options.against)}
    texts = [generate(prompts_of(tokenizer, 2, 0), 32, 0.0) for generate in sides.values()]
    print(f"at temperature 0 all sides generate the same text: {all(text == texts[0] for text in texts)}")
    for batch in options.batches:
        turns = [prompts_of(tokenizer, batch, turn) for turn in range(options.repeats + 1)]
        seconds = measure(sides, turns, options.tokens)
        for name, own in seconds.items():
            median, low, high = paired_ratio(own, seconds["ours"])
            ratio = "" if name == "ours" else f"   ours {median:.2f}x ({low:.2f} to {high:.2f})"
            speed = batch * options.tokens / statistics.median(own)
            print(f"batch {batch:3}  {name:12}{speed:8,.1f} tokens/s{ratio}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(ending("bench_decoding", main))
