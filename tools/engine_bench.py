"""What the developers' benchmarks share: a model with an engine around it, a workload, and the memory's speed."""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from tlt_hpc.common.records import Request, Rollout, SampleKey, SamplingParams, Stream
from tlt_hpc.config import EMBEDDED_MODEL
from tlt_hpc.data.prompts import GcdPrompts
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.drafter_file import load_drafter
from tlt_hpc.models.folder import DTYPES, end_token_ids, find_model, folder_weights, load_tokenizer, num_used_tokens
from tlt_hpc.models.shape import read_shape
from tlt_hpc.rollout.engine import EngineCounts, RolloutEngine
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.strategy import Strategy

T = TypeVar("T")
Lengths = Literal["own", "long-tail"]
Tokens = NDArray[np.int32]


def choose_device(name: str) -> torch.device:
    """The device asked for.

    Raises:
        ValueError: there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch sees no CUDA device; use --device cpu or fix the allocation")
    return torch.device(name)


def list_of(kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """A parser of values that commas separate; argparse names ``kind`` in its error."""

    def parse(text: str) -> tuple[T, ...]:
        return tuple(kind(part) for part in text.split(","))

    parse.__name__ = f"list of {kind.__name__}"
    return parse


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


# Ordinary requests, for models that come without a prompt file; fed as they stand.
BUILT_IN = (
    "Explain in a few sentences why the sky is blue.",
    "List the planets of the solar system with one fact about each.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Think step by step.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "What is the difference between a virus and a bacterium?",
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "Summarise the causes of the First World War.",
    "Give me a recipe for a vegetable soup that takes less than half an hour.",
    "Solve for x: 3x + 7 = 31. Show every step.",
    "Describe how a bicycle stays upright while it moves.",
    "Write an email that asks a colleague to move a meeting from Tuesday to Thursday.",
    "What are the main steps of photosynthesis?",
    "Tell me three arguments for and three against working from home.",
    "How many ways are there to arrange the letters of the word LEVEL? Explain.",
    "Write a poem of eight lines about the sea in winter.",
    "Explain what a hash table is to somebody who has never programmed.",
)
_MEDIAN_SHARE, _SIGMA = 1 / 6, 0.9
"""Of the long tail: log-normal around a sixth of the cap, so that one response in forty reaches it."""


@dataclass(frozen=True)
class Workload:
    """Where prompts come from and how long the responses are."""

    prompts: tuple[Tokens, ...] | None
    """None: fresh problems of the embedded task for every draw."""
    tokenizer: Tokenizer
    lengths: Lengths
    max_new_tokens: int
    temperature: float
    seed: int

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt there may be."""
        longest = self.prompts or (self.tokenizer.encode("gcd(399,399)=").ids,)
        return max(map(len, longest))

    def requests(self, count: int, part: int, stream: Stream = Stream.EVALUATION) -> list[Request]:
        """``count`` requests, one response each; another ``part`` has other keys, and other problems where fresh."""
        keys = [SampleKey(self.seed, stream, part, draw, 0) for draw in range(count)]
        prompts = self._prompts(count, part)
        params = self._params(count, part)
        return [Request(*each) for each in zip(keys, prompts, params, strict=True)]

    def _prompts(self, count: int, part: int) -> list[Tokens]:
        if self.prompts is None:
            return [p.tokens for p in GcdPrompts(self.tokenizer, self.seed, count).batch(part)]
        # parts of different parity share no prompt: what an n-gram table saw in one tells it nothing of the other
        mine = self.prompts[part % 2 :: 2] or self.prompts
        return [mine[draw % len(mine)] for draw in range(count)]

    def _params(self, count: int, part: int) -> Sequence[SamplingParams | None]:
        if self.lengths == "own":
            return [None] * count
        source = random.Random(f"lengths/{self.seed}/{part}")
        drawn = [source.lognormvariate(math.log(self.max_new_tokens * _MEDIAN_SHARE), _SIGMA) for _ in range(count)]
        return [self._forced(max(1, min(self.max_new_tokens, round(length)))) for length in drawn]

    def _forced(self, length: int) -> SamplingParams:
        return SamplingParams(max_tokens=length, temperature=self.temperature, min_tokens=length)


def read_prompts(path: Path, tokenizer: Tokenizer) -> tuple[Tokens, ...]:
    """The ``prompt`` of every row of a .jsonl file, tokenized as it stands; other keys are not read.

    Raises:
        ValueError: no such file, or a row without one, naming the line.
    """
    if not path.is_file():
        raise ValueError(f"--prompts {path} does not exist; give a .jsonl file whose rows have a 'prompt'")
    lines = enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
    prompts = tuple(_tokens_of(line, f"{path}:{number}", tokenizer) for number, line in lines if line.strip())
    if not prompts:
        raise ValueError(f"--prompts {path} has no rows; each line needs a 'prompt'")
    return prompts


def built_in_prompts(tokenizer: Tokenizer) -> tuple[Tokens, ...]:
    """The ordinary requests, tokenized."""
    return tuple(_encode(text, tokenizer) for text in BUILT_IN)


def _tokens_of(line: str, where: str, tokenizer: Tokenizer) -> Tokens:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg}); each line must be one JSON object") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"]:
        raise ValueError(f"{where}: needs a text 'prompt'; mend or remove the row")
    return _encode(row["prompt"], tokenizer)


def _encode(text: str, tokenizer: Tokenizer) -> Tokens:
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)


_BUFFER_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
_REPEATS = 7


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second that a plain read of the device's memory reaches: the fastest way tried, median of several.

    A sum and a matrix-vector product read alike but for their inner loops; the better one is the closer to the limit.
    """
    numbers = _BUFFER_BYTES[device.type] // 4
    buffer = torch.ones(numbers, dtype=torch.float32, device=device)
    matrix, vector = buffer.view(-1, 4096), torch.ones(4096, device=device)
    ways: tuple[Callable[[], Tensor], ...] = (buffer.sum, lambda: matrix @ vector, buffer.max)
    return max(_bytes_per_second(way, buffer) for way in ways)


def _bytes_per_second(read: Callable[[], Tensor], buffer: Tensor) -> float:
    read()
    seconds = [timed(read, buffer.device) for _ in range(_REPEATS)]
    return buffer.numel() * buffer.element_size() / statistics.median(seconds)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that ``work`` takes, the device's own included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
