"""Plans and results of rounds, and the counts of an engine. Host data only."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from tlt_hpc.common.records import NO_SPANS, EngineSpans
from tlt_hpc.rollout.acceptance import DraftCounts
from tlt_hpc.rollout.responses import Response
from tlt_hpc.rollout.stored_text import StoredText
from tlt_hpc.rollout.strategy import STORED, Strategy


@dataclass
class PhaseSeconds:
    """Seconds of rounds by phase; ``sample`` includes making the noise.

    Rounds that run as graphs know drafts from the target's pass alone, and sampling is part of that.
    """

    draft: float = 0.0
    verify: float = 0.0
    sample: float = 0.0
    other: float = 0.0

    def add(self, other: PhaseSeconds) -> None:
        """Add the seconds of another round."""
        for phase in fields(self):
            setattr(self, phase.name, getattr(self, phase.name) + getattr(other, phase.name))


@dataclass(frozen=True)
class RoundPlan:
    """The decoding of the live rows in a round."""

    strategy: Strategy
    """Of the rows that do not draft from a stored text."""
    stored: Mapping[int, StoredText] = field(default_factory=dict)
    """By row, the stored text that it drafts from; the round is read before the text's cursor moves."""
    stored_depth: int = 0
    """Most drafts from a stored text."""
    prepared_seconds: float = 0.0
    """Time of the host for this round before its launch."""
    is_next: bool = False
    """Nothing else was given to the device since the round before."""

    @property
    def name(self) -> str:
        """Its name in logs and metrics."""
        return STORED if self.stored else self.strategy.name

    @property
    def deepest(self) -> int:
        """Most drafts that a row may accept."""
        return max(self.strategy.reach, self.stored_depth if self.stored else 0)


@dataclass(frozen=True)
class RoundResult:
    """Tokens that a round gave each sequence that had a row when it was launched.

    A sequence that has left its row since is given nothing: its next round gives the same tokens.
    """

    plan: RoundPlan
    responses: list[Response]
    num_tokens: list[int]
    """New tokens at the end of each text, cut at an end token and at the cap."""
    ended: list[bool]
    """True where the last of them is an end token."""
    accepted: list[int]
    """Drafts accepted before any cut, of each sequence that was still running."""
    seconds: float
    """Seconds by which the round made the rollout longer."""
    phases: PhaseSeconds
    is_sound: bool
    """False if the drafter took part and gave no numbers."""
    is_measurement: bool
    """True if seconds and tokens are typical of the strategy: the drafter is sound, and no graph was captured."""
    is_typical: bool
    """True if the drafter had no backlog to read, so that the strategy will take as long again."""
    overlapped: bool
    """True if the host works on the round while the device computes the next one."""

    @property
    def is_ahead(self) -> bool:
        """True if the round was of responses of a later step."""
        return self.responses[0].is_ahead

    def new_tokens(self) -> list[list[int]]:
        """New tokens of each sequence."""
        pairs = zip(self.responses, self.num_tokens, strict=True)
        return [response.text[len(response.text) - count :] for response, count in pairs]

    def cut_at_stops(self) -> None:
        """End responses at the token that completes a stop string; later tokens of the same round are dropped."""
        for i, response in enumerate(self.responses):
            if response.stops is None or not self.num_tokens[i]:
                continue
            start = response.prompt_length
            index = response.stops.first_stop(response.text, start + response.num_checked, start)
            response.num_checked = response.num_response_tokens
            if index is not None:
                dropped = len(response.text) - (index + 1)
                del response.text[index + 1 :]
                self.num_tokens[i] -= dropped
                response.is_stopped = not (self.ended[i] and dropped == 0)
                self.ended[i] = True


@dataclass
class EngineCounts:
    """Counts of an engine since they were last taken; of rounds ahead, only tokens and drafter faults."""

    num_tokens: int = 0
    num_row_passes: int = 0
    """Sequences, summed over rounds: tokens divided by this is the accept length."""
    num_guarded: int = 0
    """Near-ties that the tie guard decided."""
    num_preempted: int = 0
    num_drafter_faults: int = 0
    """Rounds in which the drafter gave no numbers."""
    num_stored: int = 0
    """Drafts from stored texts that were verified."""
    num_stored_accepted: int = 0
    num_ahead: int = 0
    """Tokens generated ahead."""
    strategies: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Rounds and tokens of each strategy."""
    drafts: dict[str, DraftCounts] = field(default_factory=dict)
    """Drafts verified and accepted by position, of each family of strategies."""
    seconds: PhaseSeconds = field(default_factory=PhaseSeconds)
    rows: list[tuple[int, int, int, float, float]] = field(default_factory=list)
    """Rows of ``spans``."""

    @property
    def spans(self) -> EngineSpans:
        """Times of each round and each prefill pass."""
        columns = zip(*self.rows, strict=True) if self.rows else ((),) * len(vars(NO_SPANS))
        kinds = [column.dtype for column in vars(NO_SPANS).values()]
        return EngineSpans(*map(np.array, columns, kinds))

    def add_span(self, index: int, num_live: int, num_tokens: int, seconds: float) -> None:
        """A round of the strategy with this index, or with ``PREFILL`` a prefill pass, that has just ended."""
        self.rows.append((index, num_live, num_tokens, time.time() - seconds, seconds))

    def add_round(self, result: RoundResult, seconds: float) -> None:
        """A round that has just been read."""
        num_tokens = sum(result.num_tokens)
        self.num_drafter_faults += not result.is_sound
        if result.is_ahead:
            self.num_ahead += num_tokens
            return
        self.num_tokens += num_tokens
        self.num_row_passes += sum(map(bool, result.num_tokens))
        self.seconds.add(result.phases)
        self.add_span([*self.strategies].index(result.plan.name), len(result.responses), num_tokens, seconds)
        if num_tokens and result.is_measurement:
            self._add_drafts(result.plan, result.accepted, num_tokens)

    def _add_drafts(self, plan: RoundPlan, accepted: Sequence[int], num_tokens: int) -> None:
        strategy = plan.strategy
        rounds, tokens = self.strategies.get(plan.name, (0, 0))
        self.strategies[plan.name] = rounds + 1, tokens + num_tokens
        if plan.stored:
            self.num_stored += sum(min(text.num_drafts, plan.stored_depth) for text in plan.stored.values())
            self.num_stored_accepted += sum(accepted[row] for row in plan.stored)
            accepted = [number for row, number in enumerate(accepted) if row not in plan.stored]
        if accepted:
            self.drafts.setdefault(strategy.family, DraftCounts()).add(strategy.reach, accepted)

    def without_shared_counts(self) -> EngineCounts:
        """Only seconds and spans: for ranks that decode together, of which one reports the rest."""
        strategies = dict.fromkeys(self.strategies, (0, 0))
        return EngineCounts(strategies=strategies, seconds=self.seconds, rows=self.rows)
