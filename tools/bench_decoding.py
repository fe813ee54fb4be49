"""Plain decoding of SmolLM2-135M on one thread: tokens per second of this engine, CTranslate2 and llama.cpp.

    make smollm2
    pip install --no-deps ctranslate2==4.8.5
    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-deps diskcache llama-cpp-python==0.3.36    # compiles, six minutes
    OMP_NUM_THREADS=1 python tools/bench.py decoding

All sides have the same weights in float32, keep keys and values in float32, answer the same prompts, sample at
temperature 1 from the whole vocabulary and ignore the end token; nothing is drafted. Ours has the tie guard on and
keeps each token's log-probability, as in training. First it is checked whether all sides generate the same text at
temperature 0. A ratio is printed with its 95 % interval.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import util
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from bench_shape import plain_engine, requests_of, run_all
from fetch_model import default_folder, packaged_file

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.records import SamplingParams, Stream
from tlt_hpc.look.series import paired_ratio
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.folder import folder_weights
from tlt_hpc.models.shape import read_shape
from tlt_hpc.models.tokenizer import load_tokenizer

Prompts = list[list[int]]
Generate = Callable[[Prompts, int, float], Prompts]
"""Responses of so many tokens at a temperature, 0 or 1."""


def prompts_of(tokenizer: Any, batch: int, turn: int) -> Prompts:
    """Different prompts of one length."""
    numbers = np.random.default_rng(turn).integers(100, 1000, (batch, 2)).tolist()
    return [tokenizer.encode(f"The greatest common divisor of {a} and {b} is found as so:").ids for a, b in numbers]


def ours(folder: Path, batch: int, prompt: int, response: int) -> Generate:
    """This project's engine."""
    decoder = Decoder(read_shape(folder), torch.float32, torch.device("cpu"))
    decoder.load(folder_weights(folder), 0)
    engine, turns = plain_engine(decoder, batch, prompt, response, tie_guard=True), itertools.count()

    def generate(prompts: Prompts, length: int, temperature: float) -> Prompts:
        arrays = (np.array(tokens, np.int32) for tokens in prompts)
        params = SamplingParams(length, temperature)
        engine.submit(replace(request, params=params) for request in requests_of(arrays, next(turns)))
        run_all(engine)
        return [done.response_tokens.tolist() for done in sorted(engine.collect(), key=lambda done: done.key)]

    first = np.array(prompts_of(load_tokenizer(folder), 1, 0), np.int32)
    engine.calibrate(requests_of(first, 0, Stream.CALIBRATION))
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
LIBRARIES = list(SIDES)[1:]
COMPARED = 32
"""Tokens that all sides generate at temperature 0."""


def bench(options: argparse.Namespace) -> None:
    """Print a line for each side at each batch size; the first turn is not counted."""
    folder = default_folder()
    if not (folder / "config.json").is_file():
        raise UserError(f"no SmolLM2 in {folder}; run `make smollm2`")
    if missing := [name for name in options.against if not util.find_spec(SIDES[name].__name__)]:
        raise UserError(f"{' and '.join(missing)} not installed; --help says how, --against leaves one out")
    torch.set_num_threads(1)
    tokenizer, most = load_tokenizer(folder), max(options.batches)
    length = len(prompts_of(tokenizer, 1, 0)[0])
    longest = max(options.tokens, COMPARED)
    sides = {name: SIDES[name](folder, most, length, longest) for name in ("ours", *options.against)}
    texts = [generate(prompts_of(tokenizer, 2, 0), COMPARED, 0.0) for generate in sides.values()]
    print(f"at temperature 0 all sides generate the same text: {all(text == texts[0] for text in texts)}")
    for batch in options.batches:
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(options.repeats + 1):
            for name, generate in sides.items():
                prompts, start = prompts_of(tokenizer, batch, turn), time.perf_counter()
                done = generate(prompts, options.tokens, 1.0)
                seconds[name].append(time.perf_counter() - start)
                assert [len(tokens) for tokens in done] == [options.tokens] * batch, name
        for name, (_, *own) in seconds.items():
            ratio = paired_ratio(own, seconds["ours"][1:])
            text = "" if name == "ours" else f"   ours {ratio.median:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})"
            print(f"batch {batch:3}  {name:12}{batch * options.tokens / median(own):8,.1f} tokens/s{text}", flush=True)
