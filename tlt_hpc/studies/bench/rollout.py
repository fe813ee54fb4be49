"""``tlt bench rollout``: plain and adaptive decoding against transformers' ``generate``, and against the memory.

All ways run the same prompts to the same lengths in one process, interleaved; a figure is the median of its
repetitions. Knows the engine through ``subject`` alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tlt_hpc.common.records import Rollout, Stream
from tlt_hpc.models.generate import WAYS, Generate
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.strategy import OFF, Strategy
from tlt_hpc.studies.bench.bandwidth import read_bandwidth, timed
from tlt_hpc.studies.bench.subject import Limits, Run, Subject, make_engine, roll_out
from tlt_hpc.studies.bench.workload import Workload

WARM_UP_PART, MEASURED_PART = 1, 0
"""Parts of the workload: the adaptive engine learns on other prompts than it is measured on."""
_LEAST_SEQUENCES, _SEQUENCES_PER_ROW = 16, 4
"""Of a batch size: enough refills that the tail, with few sequences left, does not decide the rate."""
_LINEAR_STEPS = 24

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    batches: tuple[int, ...]
    num_sequences: int
    """Of the rollout; a batch has at most as many."""
    max_live: int
    """Of the rollout."""
    strategies: tuple[Strategy, ...]
    repeats: int
    each_strategy: bool
    profile_seconds: float
    """Most that the adaptive engine may take to measure the cost of rounds; 0: it learns as it goes."""


@dataclass(frozen=True)
class Load:
    """One measurement's work: ``count`` sequences, ``max_live`` of them at a time, refilled as they end."""

    max_live: int
    count: int


@dataclass(frozen=True)
class Milliseconds:
    """Of one round on average, prefill included."""

    draft: float
    """Drafts, and the noise that they share with the choice of tokens; so plain rounds have some, too."""
    verify: float
    sample: float
    """Choice of tokens, acceptance, the tie guard."""
    overhead: float
    """What is left of the wall time: bookkeeping, refills, choosing the strategy."""
    num_rounds: int


@dataclass(frozen=True)
class Contest:
    """All ways on one load; seconds are those of every repetition."""

    load: Load
    num_tokens: int
    seconds: dict[str, list[float]]
    skipped: dict[str, str]
    """Why a way was not run."""
    num_plain_rounds: int
    linear_seconds: float
    """Median of a decoding step's linear layers, run alone on ``max_live`` rows beside every plain run."""
    accept_length: float
    """Of adaptive decoding, over all repetitions."""
    rounds_by_strategy: dict[str, int]
    num_compared: int
    num_mismatched: int
    num_guarded: int
    """Near-ties that the tie guard decided, adaptive."""
    milliseconds: dict[str, Milliseconds]
    """Of plain and adaptive decoding."""

    def median(self, way: str) -> float:
        """Median seconds of a way."""
        return statistics.median(self.seconds[way])

    def tokens_per_second(self, way: str) -> float:
        return self.num_tokens / self.median(way)

    @property
    def plain_rounds_per_second(self) -> float:
        return self.num_plain_rounds / self.median("plain")

    @property
    def share_of_linear_only(self) -> float:
        """Rate of plain rounds over that of their linear layers alone, always on ``max_live`` rows."""
        return self.plain_rounds_per_second * self.linear_seconds


@dataclass(frozen=True)
class StrategyFigures:
    """One strategy alone on a load."""

    accept_length: float
    tokens_per_second: float


@dataclass(frozen=True)
class BatchReport:
    """Everything measured at one batch size."""

    contest: Contest
    strategies: dict[str, StrategyFigures]


@dataclass(frozen=True)
class RolloutReport:
    """Everything measured; bytes per second and bytes."""

    bandwidth: float
    bytes_per_round: int
    """Weights that one decoding round reads."""
    batches: dict[int, BatchReport]
    rollout: Contest

    def bandwidth_fraction(self, batch: int) -> float:
        """Share of the measured bandwidth that plain decoding spends on reading the weights once a round."""
        return self.bytes_per_round * self.batches[batch].contest.plain_rounds_per_second / self.bandwidth


class Bench:
    """The parts that all measurements share."""

    def __init__(self, subject: Subject, workload: Workload, plan: Plan, generate: Generate) -> None:
        self._subject, self._workload, self._plan, self._generate = subject, workload, plan, generate
        self._calibration = workload.requests(4, 0, Stream.CALIBRATION)
        first = self._calibration[0].prompt_tokens
        generate.run("generate", [first], [4], 1, workload.temperature)  # the first call of a process is slower

    def contest(self, load: Load) -> Contest:
        """All ways on one load, interleaved."""
        requests = self._workload.requests(load.count, MEASURED_PART)
        plain_engine = self._engine((OFF,), load.max_live)
        reference = roll_out(plain_engine, requests)
        skipped = {way: why for way in WAYS if (why := self._generate.why_not(way, load.max_live))}
        generate_ways = [way for way in WAYS if way not in skipped]
        seconds: dict[str, list[float]] = {way: [] for way in ("plain", "adaptive", *generate_ways)}
        plain: list[Run] = []
        adaptive: list[Run] = []
        linear: list[float] = []
        for repeat in range(self._plan.repeats):
            for way in rotated(list(seconds), repeat):
                if way == "plain":
                    plain.append(roll_out(plain_engine, requests))
                    linear += self._linear_seconds(load.max_live)
                elif way == "adaptive":
                    adaptive.append(roll_out(self._warm_engine(self._plan.strategies, load), requests))
                else:
                    seconds[way].append(self._generate_seconds(way, reference, load))
        seconds |= {"plain": [run.seconds for run in plain], "adaptive": [run.seconds for run in adaptive]}
        return make_contest(load, seconds, skipped, plain, adaptive, statistics.median(linear))

    def batch(self, load: Load) -> BatchReport:
        """The contest and all that explains it."""
        contest = self.contest(load)
        strategies = self._plan.strategies if self._plan.each_strategy else ()
        return BatchReport(
            contest=contest,
            strategies={strategy.name: self._alone(strategy, load) for strategy in strategies},
        )

    def _engine(self, strategies: Sequence[Strategy], max_live: int) -> RolloutEngine:
        limits = Limits(max_live, self._workload.max_prompt_tokens, self._workload.max_new_tokens)
        profile_seconds = self._plan.profile_seconds if len(strategies) > 1 else 0.0
        temperature = self._workload.temperature
        return make_engine(self._subject, limits, temperature, strategies, self._calibration, profile_seconds)

    def _warm_engine(self, strategies: Sequence[Strategy], load: Load) -> RolloutEngine:
        """A new engine that has seen other prompts, so that it knows its strategies but none of the responses."""
        engine = self._engine(strategies, load.max_live)
        roll_out(engine, self._workload.requests(min(load.count, 2 * load.max_live + 2), WARM_UP_PART))
        return engine

    def _generate_seconds(self, way: str, reference: Run, load: Load) -> float:
        prompts = [rollout.prompt_tokens for rollout in reference.rollouts]
        lengths = [len(rollout.response_tokens) for rollout in reference.rollouts]
        return self._generate.run(way, prompts, lengths, load.max_live, self._workload.temperature)

    def _alone(self, strategy: Strategy, load: Load) -> StrategyFigures:
        run = roll_out(self._warm_engine((strategy,), load), self._workload.requests(load.count, MEASURED_PART))
        return StrategyFigures(run.accept_length, run.tokens_per_second)

    def _linear_seconds(self, num_rows: int) -> list[float]:
        decoder = self._subject.decoder
        decoder.linear_only(num_rows)
        return [timed(lambda: decoder.linear_only(num_rows), decoder.device) for _ in range(_LINEAR_STEPS)]


def run_bench(subject: Subject, workload: Workload, plan: Plan, generate: Generate, say: Say) -> RolloutReport:
    """Measure every batch size, then the rollout; ``say`` is told each result in a line."""
    bandwidth = read_bandwidth(subject.decoder.device)
    say(f"memory     {bandwidth / 1e9:.1f} GB/s read")
    bench, batches = Bench(subject, workload, plan, generate), {}
    for size in plan.batches:
        batches[size] = bench.batch(load_of(size, plan))
        say(f"batch {size:<4d} {contest_line(batches[size].contest)}")
    whole = Load(plan.max_live, plan.num_sequences)
    done = [batch.contest for batch in batches.values() if batch.contest.load == whole]
    rollout = done[0] if done else bench.contest(whole)
    say(f"rollout    {contest_line(rollout)}")
    return RolloutReport(bandwidth, bytes_per_round(subject), batches, rollout)


def load_of(batch_size: int, plan: Plan) -> Load:
    """The work that a batch size is measured on."""
    return Load(batch_size, min(plan.num_sequences, max(_LEAST_SEQUENCES, _SEQUENCES_PER_ROW * batch_size)))


def make_contest(
    load: Load,
    seconds: dict[str, list[float]],
    skipped: dict[str, str],
    plain: Sequence[Run],
    adaptive: Sequence[Run],
    linear_seconds: float,
) -> Contest:
    """Sum up; every run is compared with the first plain one token by token."""
    reference = plain[0]
    rounds: dict[str, int] = {}
    for run in adaptive:
        for name, (count, _) in run.counts.strategies.items():
            rounds[name] = rounds.get(name, 0) + count
    return Contest(
        load=load,
        num_tokens=reference.num_tokens,
        seconds=seconds,
        skipped=skipped,
        num_plain_rounds=reference.counts.strategies[OFF.name][0],
        linear_seconds=linear_seconds,
        accept_length=sum(r.counts.num_tokens for r in adaptive) / sum(r.counts.num_row_passes for r in adaptive),
        rounds_by_strategy=rounds,
        num_compared=sum(run.num_tokens for run in (*plain[1:], *adaptive)),
        num_mismatched=sum(num_mismatched(reference.rollouts, run.rollouts) for run in (*plain[1:], *adaptive)),
        num_guarded=sum(run.counts.num_guarded for run in adaptive),
        milliseconds={"plain": milliseconds_of(plain), "adaptive": milliseconds_of(adaptive)},
    )


def milliseconds_of(runs: Sequence[Run]) -> Milliseconds:
    """Where the rounds of all runs spent their time, by the engine's own clock and the wall's."""
    phases = [run.counts.seconds for run in runs]
    num_rounds = sum(count for run in runs for count, _ in run.counts.strategies.values())
    draft, verify, sample, whole = (
        1000 * sum(seconds) / num_rounds
        for seconds in (
            [phase.draft for phase in phases],
            [phase.verify for phase in phases],
            [phase.sample for phase in phases],
            [run.seconds for run in runs],
        )
    )
    return Milliseconds(draft, verify, sample, whole - draft - verify - sample, num_rounds)


def num_mismatched(left: Sequence[Rollout], right: Sequence[Rollout]) -> int:
    """Tokens that differ, or that only one of both has, between responses in the order of their keys."""
    total = 0
    for mine, other in zip(left, right, strict=True):
        assert mine.key == other.key
        a, b = mine.response_tokens, other.response_tokens
        shared = min(len(a), len(b))
        total += int(np.count_nonzero(a[:shared] != b[:shared])) + max(len(a), len(b)) - shared
    return total


def bytes_per_round(subject: Subject) -> int:
    """Bytes of the weights that one round reads: all but an embedding that is not the head as well."""
    decoder = subject.decoder
    return decoder.weight_bytes - (0 if decoder.shape.tied_head else decoder.embedding.nbytes)


def contest_line(contest: Contest) -> str:
    """One line: tokens per second of every way."""
    rates = (f"{way} {contest.tokens_per_second(way):,.0f}" for way in contest.seconds)
    return f"{', '.join(rates)} tokens/s; accept length {contest.accept_length:.2f}"


def rotated(ways: list[str], by: int) -> list[str]:
    """The ways, beginning with another one each time: none always follows the same one's heat."""
    by %= len(ways)
    return ways[by:] + ways[:by]
