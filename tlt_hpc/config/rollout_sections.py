"""Sections of the rollout: how responses are generated, and the drafter that makes it faster."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tlt_hpc.config.fields import (
    MAX_ITEMS,
    FilePath,
    LearningRate,
    NumBytes,
    NumRanks,
    NumTokens,
    PositiveInt,
    Section,
    Share,
    SomePath,
    Temperature,
    TokenCount,
    Unit,
)

_StopString = Annotated[str, Field(min_length=1, max_length=1024)]


class RolloutSection(Section):
    """The responses of a step and how they are generated."""

    prompts_per_step: Annotated[int, Field(ge=1, le=2**20), Unit("prompts")]
    """Prompts of one step, over all ranks."""
    group_size: Annotated[int, Field(ge=1, le=2**10), Unit("responses")]
    """Responses to each prompt."""
    max_new_tokens: NumTokens
    """Longest response."""
    temperature: Temperature = 1.0
    """Sampling temperature. 0: greedy."""
    top_k: TokenCount = 0
    """Sample among this many most likely tokens. 0: all."""
    top_p: Share = 1.0
    """Sample among the most likely tokens that together have this probability."""
    stop_strings: Annotated[tuple[_StopString, ...], Field(strict=False, max_length=MAX_ITEMS)] = ()
    """A response ends with the token that completes one of these strings."""
    max_live: Annotated[int, Field(ge=1, le=2**20), Unit("sequences")] = 64
    """Sequences that one rank decodes at the same time."""
    kv_bytes: NumBytes = 0
    """Memory of one rank for keys, values and features. 0: enough for ``max_live`` responses of full length."""
    shard: Literal["group", "sample"] = "group"
    """How responses are divided among ranks: by whole groups, or by single samples of all groups."""
    tensor_parallel: NumRanks = 1
    """Consecutive ranks of a node that hold one copy of the model for the rollout, each a part of every layer."""

    page_size: ClassVar[int] = 128
    """Tokens of a page of that memory."""
    prefill_tokens: ClassVar[int] = 4096
    """Prompt tokens of one pass, which is then bound by arithmetic; longer prompts are read in chunks between
    rounds."""


_StrategyName = Annotated[str, Field(min_length=1, max_length=64)]
_STRATEGIES = ("ngram-4", "drafter-2", "drafter-4", "drafter-8")


class SpeculationSection(Section):
    """Speculative decoding of rollouts; it changes their speed, not their text."""

    mode: Literal["plain", "ngram", "frozen", "full"] = "full"
    """``plain``: no speculation; ``ngram``: n-gram drafts only; ``full``: n-grams and the drafter, which is trained in
    the tail; ``frozen``: as ``full``, but the drafter keeps its initial weights."""
    strategies: Annotated[tuple[_StrategyName, ...], Field(strict=False, min_length=1, max_length=64)] = _STRATEGIES
    """What to choose from each round, beside ``off``. Chains: ``ngram-4``, ``drafter-6``; a tree: ``drafter-5x2v9``
    (depth, branching, drafts to verify); ``a1.5`` at the end sharpens the drafter's choice."""
    ahead: Literal["auto", "on", "off"] = "auto"
    """Idle ranks generate the next step's responses ahead once training no longer pays; these texts become drafts.
    ``auto``: if enough of them are accepted and ranks do not outnumber cores."""

    @property
    def has_drafter(self) -> bool:
        """Whether there is a learned drafter."""
        return self.mode in ("frozen", "full")

    @property
    def trains_drafter(self) -> bool:
        """Whether idle ranks train it."""
        return self.mode == "full"


class DrafterSection(Section):
    """The learned drafter and its training on idle ranks."""

    form: Literal["eagle", "eagle3"] = "eagle"
    """``eagle``: one layer on the last hidden state, with the policy's head; ``eagle3``: one layer on the features of
    three layers, with a head of its own over a smaller vocabulary."""
    init: SomePath = "random"
    """Initial weights, of a run and of its warm-up: ``random``, ``embedded:tiny``, the drafter folder of a run, or a
    published EAGLE or EAGLE-3 head for the model."""
    vocabulary: NumTokens = 32768
    """Most tokens that drafts are chosen from: end tokens, added tokens, and the most frequent in prompts and answers
    (``eagle3``, in a warm-up: in responses). Fewer make drafts cheaper, but fewer may be accepted."""
    learning_rate: LearningRate = 1e-3
    """Learning rate of Adam: constant in a run; in a warm-up the highest, reached after 50 updates and followed by a
    cosine."""
    micro_step_tokens: NumTokens = 2048
    """Most tokens of one micro-step. It has fewer where they would take longer than 0.3 s, the most by which training
    may delay the end of a rollout."""
    cache_bytes: Annotated[NumBytes, Field(ge=1)] = 2_000_000_000
    """Disk space for one rank's training features: half for the current step, half for the one before."""
    cache_folder: FilePath = ""
    """Folder for these features on each node, such as ``$TMPDIR``. Ranks then train on those of their own node only.
    Empty: in the run's folder, where all ranks read all."""

    micro_step_seconds: ClassVar[float] = 0.3
    """Longest micro-step, and so the longest that training may delay the end of a rollout."""

    @property
    def num_unrolled(self) -> int:
        """Steps ahead that the drafter is trained on its own predictions: EAGLE 1, EAGLE-3 7 (its training-time
        test)."""
        return 1 if self.form == "eagle" else 7


class WarmupSection(Section):
    """``tlt warmup``, which trains the drafter before reinforcement learning; ``tlt train`` does not read it."""

    sources: Annotated[tuple[FilePath, ...], Field(strict=False, max_length=MAX_ITEMS)] = ()
    """Run folders whose logged responses are trained on, newest first (``--from``). Empty: responses are generated."""
    responses: PositiveInt = 4096
    """Most responses to generate, one per prompt, or to read from the logs; ``drafter.cache_bytes`` limits them too."""
    updates: PositiveInt = 2000
    """Most optimizer steps; the learning rate falls to 0 over them. Eight validations without a new best end the
    warm-up earlier."""
    batch_tokens: NumTokens = 8192
    """Response tokens of one update over all ranks; a single longer response exceeds it."""

    validation_prompts: ClassVar[int] = 64
    """Prompts held out from the training; at most a fifth of all."""
    validation_tokens: ClassVar[int] = 512
    """Longest validation response: the accept length changes little beyond."""
    patience: ClassVar[int] = 8
    """Validations without a new best that end the warm-up: it has converged, or diverged."""
    ramp_updates: ClassVar[int] = 50
    """Updates in which the learning rate rises, while Adam's moments are formed."""

    @property
    def validation_interval(self) -> int:
        """Updates after which the accept length is measured and the training saved."""
        return max(1, min(100, self.updates // 20))
