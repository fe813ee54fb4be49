"""What is benched: a model folder with its decoder, tokenizer and drafter, and an engine round them.

``make_engine`` is the one place where a bench builds the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tlt_hpc.common.records import Request, Rollout, SamplingParams
from tlt_hpc.config import EMBEDDED_MODEL
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.drafter_file import load_drafter
from tlt_hpc.models.folder import (
    DTYPES,
    end_token_ids,
    find_model,
    folder_weights,
    load_tokenizer,
    num_used_tokens,
)
from tlt_hpc.models.shape import read_shape
from tlt_hpc.rollout.engine import EngineCounts, RolloutEngine
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.strategy import Strategy


@dataclass(frozen=True)
class Subject:
    """A model on a device, and the drafter that belongs to it."""

    name: str
    folder: Path
    tokenizer: Tokenizer
    decoder: Decoder
    drafter: Drafter | None
    num_tokens: int
    """The vocabulary without its padding rows."""
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """What an engine is to hold."""

    max_live: int
    max_prompt_tokens: int
    max_new_tokens: int


@dataclass(frozen=True)
class Run:
    """One rollout: wall seconds from submit to the last token, the responses in key order, what the engine counted."""

    seconds: float
    rollouts: list[Rollout]
    counts: EngineCounts

    @property
    def num_tokens(self) -> int:
        return sum(len(rollout.response_tokens) for rollout in self.rollouts)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def accept_length(self) -> float:
        return self.counts.num_tokens / self.counts.num_row_passes


def open_subject(model: str, drafter: str | None, dtype: str, device: torch.device) -> Subject:
    """Load a model, and its drafter where one is named; ``embedded:tiny`` has its own.

    Raises:
        ValueError: a folder or file is missing, or does not fit.
    """
    folder = find_model(model)
    shape = read_shape(folder)
    tokenizer = load_tokenizer(folder)
    decoder = Decoder(shape, DTYPES[dtype], device)
    decoder.load(folder_weights(folder), 0)
    place = drafter or (EMBEDDED_MODEL if model == EMBEDDED_MODEL else None)
    return Subject(
        name=model,
        folder=folder,
        tokenizer=tokenizer,
        decoder=decoder,
        drafter=None if place is None else load_drafter(place, decoder, f"--drafter {place}"),
        num_tokens=num_used_tokens(tokenizer, shape),
        eos_token_ids=end_token_ids(folder, shape),
    )


def make_engine(
    subject: Subject,
    limits: Limits,
    temperature: float,
    strategies: Sequence[Strategy],
    calibration: Sequence[Request],
    profile_seconds: float = 0.0,
) -> RolloutEngine:
    """An engine with the subject's weights, as a run has it: its tie guard (float32 only) set on the
    ``calibration`` requests, and the cost of rounds measured on them, or read where it was measured before.
    """
    settings = EngineSettings(
        params=SamplingParams(max_tokens=limits.max_new_tokens, temperature=temperature),
        num_tokens=subject.num_tokens,
        eos_token_ids=subject.eos_token_ids,
        max_live=limits.max_live,
        max_prompt_tokens=limits.max_prompt_tokens,
        tie_guard=subject.decoder.dtype == torch.float32,
        strategies=tuple(strategies),
    )
    wants_drafter = any(strategy.has_drafter for strategy in strategies)
    engine = RolloutEngine(subject.decoder, settings, subject.drafter if wants_drafter else None)
    engine.drafter_ready = wants_drafter
    engine.calibrate(calibration)
    if profile_seconds:
        engine.profile(calibration, profile_seconds)
    return engine


def roll_out(engine: RolloutEngine, requests: Sequence[Request]) -> Run:
    """Generate the responses to all requests; what the engine counted before is left out."""
    engine.take_counts()
    _wait(engine)
    start = time.perf_counter()
    engine.submit(requests)
    while engine.has_work:
        engine.step()
    _wait(engine)
    seconds = time.perf_counter() - start
    rollouts = engine.collect()
    for request, rollout in zip(sorted(requests, key=lambda request: request.key), rollouts, strict=True):
        forced = None if request.params is None else request.params.max_tokens
        assert forced in (None, len(rollout.response_tokens)), f"{len(rollout.response_tokens)} tokens, not {forced}"
    return Run(seconds, rollouts, engine.take_counts())


def _wait(engine: RolloutEngine) -> None:
    if engine.decoder.device.type == "cuda":
        torch.cuda.synchronize(engine.decoder.device)
