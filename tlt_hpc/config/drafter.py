"""How rollouts are speculated on, and how the drafter is trained: [speculation], [drafter] and [warmup]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tlt_hpc.config.base import (
    MAX_ITEMS,
    MAX_SECONDS,
    ConfigError,
    Count,
    FilePath,
    Fraction,
    LearningRate,
    NumBytes,
    PositiveInt,
    PositiveSeconds,
    Seconds,
    Section,
    Share,
    SomePath,
    StrategyName,
    Weight,
)

LossKind = Literal["feature", "cross-entropy", "total-variation"]


_NgramOrder = Annotated[int, Field(ge=1, le=1024)]


class SpeculationSection(Section):
    mode: Literal["plain", "ngram", "full"] = "full"
    """``plain``: none; ``ngram``: model-free drafter; ``full``: n-gram and learned drafter, trained in the tail."""
    strategies: Annotated[tuple[StrategyName, ...], Field(strict=False, min_length=1, max_length=64)] = (
        "ngram-4",
        "drafter-2",
        "drafter-4",
        "drafter-8",
    )
    """What to choose from, beside ``off``: source-depth for chains (``drafter-6``), with ``x`` branching and ``v``
    drafts to verify for trees (``drafter-5x2v9``), with ``a`` and the drafter's sharpness (``drafter-4a1.5``).
    Sources: ``ngram``, ``drafter``, ``hybrid`` (both in one tree)."""
    chooser: Literal["goodput", "bandit"] = "goodput"
    """``goodput``: expected tokens over measured cost; ``bandit``: the paper's bucketed epsilon-greedy (BEG-MAB)."""
    profile_seconds: Seconds = 3.0
    """Most that measuring the cost of rounds may take at the first start on a machine; later starts read it; 0: off."""
    epsilon: Fraction = 0.05
    window: Annotated[int, Field(ge=1, le=10**6)] = 128
    """Rounds of a strategy that its expected accept length is taken over."""
    ngram_orders: Annotated[tuple[_NgramOrder, ...], Field(strict=False, min_length=1, max_length=64)] = (
        12,
        8,
        6,
        4,
        2,
        1,
    )
    """Context lengths that the n-gram drafter tries, longest first."""
    ngram_history_tokens: Annotated[int, Field(ge=1, le=10**9)] = 200_000
    """Tokens of earlier responses that the n-gram drafter remembers on each rank."""


class DrafterSection(Section):
    form: Literal["eagle", "eagle3"] = "eagle"
    """``eagle``: one layer on the last hidden state, read by the policy's head; ``eagle3``: on three layers' features,
    with a head of its own over a smaller vocabulary."""
    init: SomePath = "random"
    """``random``, ``embedded:tiny``, or the drafter folder of an earlier run: weights only."""
    vocabulary: PositiveInt = 32768
    """Tokens that an ``eagle3`` drafter made anew drafts among, at most."""
    learning_rate: LearningRate = 1e-3
    loss: Literal["auto", "feature", "cross-entropy", "total-variation"] = "auto"
    """``feature``: smooth-L1 on features plus soft cross-entropy, weighted by the two keys below (``auto`` for
    ``eagle``); ``cross-entropy``: that alone, on the draft vocabulary (``auto`` for ``eagle3``); ``total-variation``:
    minus the most that a draft can be accepted with, sum of min(p, q)."""
    feature_loss_weight: Weight = 1.0
    token_loss_weight: Weight = 0.1
    unroll_steps: Annotated[int, Field(ge=0, le=64)] = 0
    """Steps of its own that the drafter is trained along; 0: 1 for ``eagle``, 7 for ``eagle3``."""
    unroll_decay: Share = 0.8
    """Weight of each of them relative to the one before."""
    micro_step_tokens: PositiveInt = 2048
    """Most tokens of one micro-step; the time budget may make it smaller."""
    micro_step_seconds: PositiveSeconds = 0.2
    average_merges: PositiveInt = 5
    """The engine drafts with the mean of the drafter's weights after about so many of the last merges, which forgives a
    learning rate that is too high; 1: with those of the last merge."""
    min_idle: PositiveInt = 1
    """Ranks that must be idle before any of them trains."""
    train: bool = True
    """False: the drafter stays as it starts."""
    schedule: Literal["always", "every", "falling"] = "always"
    """Which steps train it: all; every ``every_steps``-th, the first among them; those from which its own accept length
    has fallen by the share ``fall`` under its best until it is back at half the fall, or those after five in a row
    that could not judge it; one that begins at random trains until it has stopped growing."""
    every_steps: PositiveInt = 1
    fall: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    cache_bytes: Annotated[NumBytes, Field(ge=1)] = 2_000_000_000
    """Bytes of features on disk that one rank may keep: half for the step under way, half for the one before."""
    cache_folder: FilePath = ""
    """A folder of each node's own for these features, such as ``$TMPDIR``: ``~`` and environment variables are expanded
    on each node, whose ranks then see each other's features alone. Empty: in the run's folder, where all see all."""
    cache_compression: Literal["none", "zstd"] = "none"
    """``zstd`` takes a third off what is written, for a share of a core: for file systems that many ranks share."""

    @property
    def loss_kind(self) -> LossKind:
        """The loss that ``auto`` stands for, or the one asked for."""
        if self.loss != "auto":
            return self.loss
        return "feature" if self.form == "eagle" else "cross-entropy"

    @property
    def num_unrolled(self) -> int:
        """Steps of its own that the drafter is trained along."""
        return self.unroll_steps or (1 if self.form == "eagle" else 7)


class WarmupSection(Section):
    """``tlt warmup``: the drafter trained before any reinforcement learning; ``tlt train`` reads none of it."""

    init: SomePath = "random"
    """What the warm-up begins from, as ``drafter.init`` names it."""
    sources: Annotated[tuple[FilePath, ...], Field(strict=False, max_length=MAX_ITEMS)] = ()
    """Run folders whose logged responses are learned from, newest first (``--from``); none: it rolls out itself."""
    responses: PositiveInt = 4096
    """Responses to roll out, one a prompt, or most to take from the logs; ``drafter.cache_bytes`` bounds them too."""
    strategy: StrategyName = "off"
    """How the warm-up's own rollouts are decoded: ``off``, or n-grams such as ``ngram-4``."""
    updates: PositiveInt = 2000
    """Optimiser steps at most; the learning rate falls to zero over them."""
    tokens: Annotated[int, Field(ge=0, le=10**15)] = 0
    """Response tokens to train on at most, repeats counted; 0: as many as the updates take."""
    minutes: Annotated[float, Field(ge=0.0, le=MAX_SECONDS / 60)] = 0.0
    """Wall-clock minutes after which training ends with a last validation, whatever the learning rate has come to (it
    does not follow the clock), restarts counted together; 0: never."""
    batch_tokens: PositiveInt = 8192
    """Response tokens of one update, over all ranks; one response may exceed it."""
    learning_rate: LearningRate = 1e-3
    """The highest: reached after ``ramp_updates``, left along a cosine."""
    ramp_updates: Count = 50
    noise: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    """Width of the uniform noise added to the features that the drafter reads; EAGLE: 0.2."""
    validate_every: PositiveInt = 100
    """Updates from one measurement of the accept length to the next; each saves the training as well."""
    validation_prompts: PositiveInt = 64
    """Prompts held out from the training; at most a fifth of all."""
    validation_tokens: PositiveInt = 512
    """Most tokens of a validation response."""
    validation_strategy: StrategyName = "drafter-5"
    """How validation speculates; the temperature is the rollout's."""
    patience: Count = 8
    """Validations without a new best after which the warm-up ends; 0: never."""


def check_drafter(drafter: DrafterSection) -> None:
    if drafter.form == "eagle3" and drafter.loss == "feature":
        raise ConfigError(
            "drafter.loss = 'feature' with drafter.form = 'eagle3', whose states are no features of the target; use "
            "drafter.loss = 'cross-entropy' or 'total-variation'"
        )
    if drafter.every_steps > 1 and drafter.schedule != "every":
        raise ConfigError(
            f"drafter.every_steps = {drafter.every_steps} says nothing with drafter.schedule = {drafter.schedule!r}; "
            "use drafter.schedule = 'every' or leave drafter.every_steps out"
        )
    if not drafter.train and drafter.schedule != "always":
        raise ConfigError(
            f"drafter.schedule = {drafter.schedule!r} with drafter.train = false, which trains nothing; "
            "use drafter.train = true or leave drafter.schedule out"
        )
