"""How rollouts are speculated on, and how the drafter is trained: [speculation], [drafter] and [warmup]."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tlt_hpc.config.base import (
    MAX_ITEMS,
    ConfigError,
    FilePath,
    LearningRate,
    NumBytes,
    NumRanks,
    NumTokens,
    PositiveInt,
    PositiveSeconds,
    Seconds,
    Section,
    SomePath,
    StrategyName,
    Unit,
)

LossKind = Literal["feature", "cross-entropy", "total-variation"]


class SpeculationSection(Section):
    """Speculative decoding of rollouts; it changes their speed, not their text."""

    mode: Literal["plain", "ngram", "full"] = "full"
    """``plain``: no speculation; ``ngram``: n-gram drafts only; ``full``: n-grams and the learned drafter, which is
    trained in the tail."""
    strategies: Annotated[tuple[StrategyName, ...], Field(strict=False, min_length=1, max_length=64)] = (
        "ngram-4",
        "drafter-2",
        "drafter-4",
        "drafter-8",
    )
    """Strategies to choose from each round, in addition to ``off``. A chain is source-depth (``drafter-6``); a tree
    adds ``x`` with the branching and ``v`` with the number of drafts to verify (``drafter-5x2v9``); ``a`` adds the
    drafter's sharpness (``drafter-4a1.5``). Sources: ``ngram``, ``drafter``."""
    profile_seconds: Seconds = 3.0
    """Time limit for measuring the cost of rounds at a start. 0: no measurement."""


class DrafterSection(Section):
    """The learned drafter and its training on idle ranks."""

    form: Literal["eagle", "eagle3"] = "eagle"
    """Architecture. ``eagle``: one layer on the last hidden state, with the policy's head, trained one step ahead;
    ``eagle3``: one layer on the features of three layers, with a head of its own over a smaller vocabulary, trained
    seven steps ahead."""
    init: SomePath = "random"
    """Initial weights: ``random``, ``embedded:tiny``, or the drafter folder of an earlier run."""
    vocabulary: NumTokens = 32768
    """Largest vocabulary of a new ``eagle3`` drafter."""
    learning_rate: LearningRate = 1e-3
    """Learning rate of AdamW, constant."""
    loss: Literal["auto", "feature", "cross-entropy", "total-variation"] = "auto"
    """``feature``: smooth L1 on features plus 0.1 times the soft cross-entropy (``auto`` for ``eagle``);
    ``cross-entropy``: soft cross-entropy on the draft vocabulary (``auto`` for ``eagle3``); ``total-variation``: minus
    the acceptance probability, sum of min(p, q)."""
    micro_step_tokens: NumTokens = 2048
    """Most tokens of one micro-step; the time limit may make it smaller."""
    micro_step_seconds: PositiveSeconds = 0.2
    """Longest micro-step, and so the longest that training may delay the end of a rollout."""
    average_merges: PositiveInt = 5
    """The engine drafts with a running average of the drafter's weights over about this many merges, which tolerates a
    learning rate that is too high. 1: with the last weights."""
    min_idle: NumRanks = 1
    """Ranks that must be idle before any of them trains."""
    train: bool = True
    """Train the drafter; otherwise it keeps its initial weights."""
    schedule: Literal["always", "falling"] = "always"
    """Steps that train the drafter. ``always``: all; ``falling``: from where the accept length has fallen 10 % below
    its best until it has regained half of that, and after five steps without enough drafts to measure it; a drafter
    that began with random weights trains until it no longer improves."""
    cache_bytes: Annotated[NumBytes, Field(ge=1)] = 2_000_000_000
    """Disk space for one rank's training features: half for the current step, half for the one before."""
    cache_folder: FilePath = ""
    """Folder for these features on each node, such as ``$TMPDIR``; ``~`` and environment variables are expanded on the
    node. Ranks then train on the features of their own node only. Empty: in the run's folder, where all ranks read all
    features."""

    @property
    def loss_kind(self) -> LossKind:
        """The loss that ``auto`` stands for, or the one asked for."""
        if self.loss != "auto":
            return self.loss
        return "feature" if self.form == "eagle" else "cross-entropy"

    @property
    def num_unrolled(self) -> int:
        """Steps ahead that the drafter is trained on its own predictions: EAGLE 1, EAGLE-3 7 (its training-time
        test)."""
        return 1 if self.form == "eagle" else 7


class WarmupSection(Section):
    """``tlt warmup``, which trains the drafter before reinforcement learning; ``tlt train`` does not read it."""

    init: SomePath = "random"
    """Initial weights of the drafter, as in ``drafter.init``."""
    sources: Annotated[tuple[FilePath, ...], Field(strict=False, max_length=MAX_ITEMS)] = ()
    """Run folders whose logged responses are trained on, newest first (``--from``). Empty: responses are generated."""
    responses: PositiveInt = 4096
    """Responses to generate, one per prompt, or to read from the logs, at most; ``drafter.cache_bytes`` limits them
    too."""
    updates: PositiveInt = 2000
    """Most optimizer steps; the learning rate falls to 0 over them. The warm-up ends earlier after eight validations
    without a new best."""
    batch_tokens: NumTokens = 8192
    """Response tokens of one update over all ranks; a single longer response exceeds it."""
    learning_rate: LearningRate = 1e-3
    """Highest learning rate: reached after 50 updates, followed by a cosine."""
    noise: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    """Width of the uniform noise added to the drafter's input features; EAGLE uses 0.2."""
    validate_every: Annotated[PositiveInt, Unit("updates")] = 100
    """Interval at which the accept length is measured and the training saved."""
    validation_prompts: Annotated[PositiveInt, Unit("prompts")] = 64
    """Prompts held out from the training; at most a fifth of all."""

    validation_tokens: ClassVar[int] = 512
    """Longest validation response: the accept length changes little beyond."""
    patience: ClassVar[int] = 8
    """Validations without a new best that end the warm-up: where it has converged, or diverged."""
    ramp_updates: ClassVar[int] = 50
    """Updates in which the learning rate rises, as Adam's moments are formed."""


def check_drafter(drafter: DrafterSection) -> None:
    if drafter.form == "eagle3" and drafter.loss == "feature":
        raise ConfigError(
            "drafter.loss = 'feature' with drafter.form = 'eagle3', whose states are no features of the target; use "
            "drafter.loss = 'cross-entropy' or 'total-variation'"
        )
