"""How should replicas of the drafter, each trained in its own rank's tail, become one? Four rules from the same start.

    python tools/compare_merges.py --replicas 2 4 8 --json merges.json
    mpiexec -n 2 python -m mpi4py tools/compare_merges.py --allreduce 259000000    # one gradient sum

In one process, with the trainer, loss, cache and pool that a run uses, on responses of the embedded model (its weights
stand still). A step is a rollout and its tail: how long each replica is idle follows from the longest response of its
share, so stragglers join late and the last not at all. All rules harvest the same seconds:

    apart       no merge; the best replica counts
    mean        at the release, weights and Adam moments as a mean weighted with tokens: what a run does
    weights     the same of the weights alone, each replica keeps its moments
    allreduce   the idle replicas sum their gradients at every micro-step; a sum, and the weights for a replica that
                joins, cost --allreduce-seconds (else measured with mpiexec on this machine, for this drafter)
    free        the same if sums cost nothing: more than any machine can do

Judged by the accept length of a chain of four at temperature 1 on problems of their own.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_hpc.common.records import Request, Rollout, SampleKey, SamplingParams, Stream
from tlt_hpc.config import EMBEDDED_MODEL, DrafterSection
from tlt_hpc.data.gcd import draw_from_split
from tlt_hpc.drafting.spot import SpotTrainer
from tlt_hpc.models import drafter_file
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter_file import make_drafter
from tlt_hpc.models.folder import find_model, folder_weights, load_tokenizer
from tlt_hpc.models.shape import read_shape
from tlt_hpc.mpi.world import World
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.leaving import FeatureSink
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.strategy import OFF, Strategy
from tlt_hpc.storage.feature_cache import FeatureCache
from tlt_hpc.storage.folder import RunFolder

RULES = ("apart", "mean", "weights", "allreduce", "free")
SUMMING = ("allreduce", "free")
CPU = torch.device("cpu")


class Together:
    """The replicas' sums in one process: those that post first wait for the others."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._arrays: list[NDArray[np.float32]] = []

    def start_sum(self, array: NDArray[np.float32]) -> Together:
        self._arrays.append(array)
        return self

    def wait(self) -> NDArray[np.float32]:
        assert len(self._arrays) == self.size
        summed: NDArray[np.float32] = np.sum(self._arrays, 0, dtype=np.float32)
        return summed

    def allgather(self, item: tuple[int, str]) -> list[tuple[int, str]]:
        return [item] * self.size


class GradientTrainer(SpotTrainer):
    """A member of a group that sums gradients: leaves its own in the parameters instead of taking a step."""

    def _update(self, loss: Tensor) -> float:
        return float(loss.detach())


@dataclass(frozen=True)
class Tail:
    """When each replica becomes idle and when the release comes, in seconds from the first one's idleness."""

    starts: tuple[float, ...]
    release: float

    def num_micro_steps(self, rank: int, seconds: float) -> int:
        return int((self.release - self.starts[rank]) / seconds + 1e-6)

    def groups(self, seconds: float, sum_seconds: float) -> list[list[int]]:
        """Who takes part in each micro-step of a group that sums gradients."""
        now, known, groups = min(self.starts), 0, list[list[int]]()
        while True:
            group = [rank for rank, start in enumerate(self.starts) if start <= now + 1e-9]
            cost = seconds + (sum_seconds if len(group) > 1 else 0.0)
            cost += sum_seconds if known and len(group) > known else 0.0  # whoever joins is given the weights
            if now + cost > self.release + 1e-9:
                return groups
            groups.append(group)
            now, known = now + cost, len(group)


def tail_of(shares: Sequence[Sequence[Rollout]], mean_seconds: float) -> Tail:
    """A rank is busy until its longest response ends; idle times are scaled to ``mean_seconds`` over the ranks."""
    longest = np.array([max(len(rollout.response_tokens) for rollout in share) for share in shares], float)
    idle = longest.max() - longest
    idle *= mean_seconds / max(idle.mean(), 1e-9)
    return Tail(tuple((idle.max() - idle).tolist()), float(idle.max()))


@dataclass(frozen=True)
class Bench:
    """The model and the options, for all replicas and rules alike."""

    decoder: Decoder
    options: argparse.Namespace
    sum_seconds: dict[int, float]

    def trainer(self, rule: str, start: str, cache: FeatureCache, rank: int, seed: int) -> SpotTrainer:
        kind = GradientTrainer if rule in SUMMING else SpotTrainer
        rate = self.options.learning_rate[start != "random"]
        settings = DrafterSection(
            micro_step_tokens=self.options.tokens, micro_step_seconds=1e9, learning_rate=rate, average_merges=1
        )
        trainer = kind(self.decoder, cache, settings, seed, rank)
        if start != "random":
            trainer.start_from(drafter_file.read_drafter(start, self.decoder.shape, "--starts"))
        return trainer

    def roll_out(
        self, requests: Sequence[Request], strategy: Strategy, trainer: SpotTrainer, sink: FeatureSink | None
    ) -> tuple[list[Rollout], float]:
        """Responses and the accept length."""
        settings = EngineSettings(SamplingParams(512), 20, (1,), 64, 16, tie_guard=False, strategies=(strategy,))
        served = make_drafter(self.decoder.shape, 0, torch.float32, CPU)
        served.load_state_dict(trainer.drafter.state_dict())
        engine = RolloutEngine(self.decoder, settings, served)
        engine.drafter_ready, engine.feature_sink = True, sink
        engine.submit(requests)
        while engine.has_work:
            engine.step()
        rollouts, counts = engine.collect(), engine.take_counts()
        return rollouts, counts.num_tokens / counts.num_row_passes


def requests_of(num: int, step: int, seed: int) -> list[Request]:
    """Requests for problems of a step, one response each."""
    tokenizer, source = load_tokenizer(find_model(EMBEDDED_MODEL)), random.Random(f"merges/{seed}/{step}")
    prompts = [tokenizer.encode(draw_from_split(source, "train").prompt).ids for _ in range(num)]
    return [
        Request(SampleKey(seed, Stream.TRAIN, step, draw, 0), np.array(prompt, dtype=np.int32))
        for draw, prompt in enumerate(prompts)
    ]


@dataclass(frozen=True)
class Row:
    """What a rule had come to after so many steps; seconds are harvested by all replicas together."""

    replicas: int
    start: str
    rule: str
    seed: int
    step: int
    harvested_seconds: float
    accept_length: float


class Arm:
    """One rule's replicas from one start, carried through the steps."""

    def __init__(self, bench: Bench, rule: str, start: str, caches: Sequence[FeatureCache], seed: int) -> None:
        self.bench, self.rule, self.start = bench, rule, start
        self.replicas = [bench.trainer(rule, start, cache, rank, seed) for rank, cache in enumerate(caches)]
        self.leader = bench.trainer("mean", start, caches[0], 0, seed)
        """Takes the steps of a group that sums gradients."""

    def train(self, step: int, tail: Tail) -> None:
        for replica in self.replicas:
            replica.begin(step)
        if self.rule in SUMMING:
            self._train_as_group(tail)
        else:
            for rank, replica in enumerate(self.replicas):
                for _ in range(tail.num_micro_steps(rank, self.bench.options.micro_step_seconds)):
                    replica.micro_step()
        for replica in self.replicas:
            replica.end()
        if self.rule in ("mean", "weights"):
            self._merge()

    def accept_length(self, requests: Sequence[Request]) -> float:
        """Of the merged drafter; without a merge the best replica's."""
        judged = self.replicas if self.rule == "apart" else self.replicas[:1]
        chain = Strategy("drafter", 4)
        return max(self.bench.roll_out(requests, chain, replica, None)[1] for replica in judged)

    def _train_as_group(self, tail: Tail) -> None:
        sum_seconds = self.bench.sum_seconds[len(self.replicas)] if self.rule == "allreduce" else 0.0
        for group in tail.groups(self.bench.options.micro_step_seconds, sum_seconds):
            members = [self.replicas[rank] for rank in group if self.replicas[rank].micro_step()]
            total = sum(member.records[-1].num_tokens for member in members)
            for own, *others in zip(*(m.drafter.parameters() for m in (self.leader, *members)), strict=True):
                own.grad = torch.zeros_like(own)
                for p, member in zip(others, members, strict=True):
                    assert p.grad is not None
                    own.grad.add_(p.grad, alpha=member.records[-1].num_tokens / total)
                for p in others:
                    p.grad = None
            self.leader._update(torch.zeros(()))
            for replica in self.replicas:
                replica.drafter.load_state_dict(self.leader.drafter.state_dict())

    def _merge(self) -> None:
        moments = [replica.state() for replica in self.replicas]
        world = Together(len(self.replicas))
        for replica in self.replicas:
            replica.start_merge(world)
        for replica, own in zip(self.replicas, moments, strict=True):
            replica.finish_merge(world)
            if self.rule == "weights":
                merged = replica.state()
                replica.load_state({**own, **{n: t for n, t in merged.items() if n.endswith(".weight")}})


def compare(bench: Bench, num_replicas: int, seed: int) -> list[Row]:
    """All rules and starts over the same rollouts; one row for each of them and each moment of judging."""
    options, rows = bench.options, list[Row]()
    with tempfile.TemporaryDirectory() as place:
        sizes = 1, bench.decoder.shape.hidden_size, 1 << 34
        caches = [FeatureCache(RunFolder(Path(place)), rank, *sizes) for rank in range(num_replicas)]
        arms = [Arm(bench, rule, start, caches, seed) for start in options.starts for rule in options.rules]
        harvested = 0.0
        for step in range(options.steps):
            requests = requests_of(options.responses, step, seed)
            shares = [requests[rank::num_replicas] for rank in range(num_replicas)]
            sinks = [cache.begin_step(step, 0).append for cache in caches]
            rollouts = [bench.roll_out(s, OFF, arms[0].leader, k)[0] for s, k in zip(shares, sinks, strict=True)]
            tail = tail_of(rollouts, options.micro_steps * options.micro_step_seconds)
            harvested += sum(tail.release - start for start in tail.starts)
            for arm in arms:
                arm.train(step, tail)
            for cache in caches:
                cache.end_step()
            if (step + 1) % options.judge_every == 0:
                judged = requests_of(options.judged, 10_000, seed)
                for arm in arms:
                    judgement = num_replicas, arm.start, arm.rule, seed, step + 1, harvested
                    rows.append(Row(*judgement, arm.accept_length(judged)))
                    print(rows[-1], flush=True)
    return rows


def allreduce_seconds(num_floats: int, repeats: int) -> float:
    """Median seconds of one sum over all ranks; collective."""
    world, array, seconds = World.connect(), np.ones(num_floats, np.float32), list[float]()
    for _ in range(repeats):
        world.barrier()
        start = time.perf_counter()
        world.sum(array)
        seconds.append(max(world.allgather(time.perf_counter() - start)))
    return float(np.median(seconds))


def measure_allreduce(num_ranks: int, num_floats: int) -> float:
    """``allreduce_seconds`` of a job of that many ranks."""
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        sys.exit("compare_merges: no mpiexec on PATH; give --allreduce-seconds")
    command = [mpiexec, "-n", str(num_ranks), sys.executable, "-m", "mpi4py", __file__, "--allreduce", str(num_floats)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["seconds"])


def table(rows: Sequence[Row]) -> str:
    """Accept lengths at the last judging, means over the seeds."""
    last = max(row.step for row in rows)
    found: dict[tuple[int, str], dict[str, list[float]]] = {}
    for row in rows:
        if row.step == last:
            found.setdefault((row.replicas, row.start), {}).setdefault(row.rule, []).append(row.accept_length)
    lines = [f"accept length after {last} steps", f"{'replicas':>8} {'start':>14}  " + _cells(RULES)]
    for (replicas, start), lengths in found.items():
        means = [f"{np.mean(lengths[rule]):.3f}" if rule in lengths else "-" for rule in RULES]
        lines.append(f"{replicas:>8} {start:>14}  " + _cells(means))
    return "\n".join(lines)


def _cells(texts: Sequence[str]) -> str:
    return "".join(f"{text:>11}" for text in texts)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--starts", nargs="+", default=["random", EMBEDDED_MODEL], help="random or a drafter's folder")
    parser.add_argument("--rules", nargs="+", default=RULES, choices=RULES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=8, help="rollouts with a tail")
    parser.add_argument("--responses", type=int, default=128, help="of a step, over all replicas")
    parser.add_argument("--micro-steps", type=float, default=6, help="that fit a replica's tail, in the mean")
    parser.add_argument("--tokens", type=int, default=512, help="of a micro-step")
    parser.add_argument("--micro-step-seconds", type=float, default=0.03, help="charged for one")
    parser.add_argument("--learning-rate", type=float, nargs=2, default=[2e-3, 5e-4], help="from random, else")
    parser.add_argument("--judge-every", type=int, default=4)
    parser.add_argument("--judged", type=int, default=96, help="responses that accept lengths are taken from")
    parser.add_argument("--allreduce-seconds", type=float, help="of a gradient sum, for any number of replicas")
    parser.add_argument("--allreduce", type=int, metavar="FLOATS", help="under mpiexec: only time sums of so many")
    parser.add_argument("--repeats", type=int, default=5, help="sums that are timed")
    parser.add_argument("--json", type=Path, help="write the rows there")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.allreduce is not None:
        seconds = allreduce_seconds(options.allreduce, options.repeats)
        world = World.connect()
        if world.rank == 0:
            print(json.dumps({"ranks": world.size, "floats": options.allreduce, "seconds": seconds}))
        return
    torch.set_num_threads(1)
    folder = find_model(EMBEDDED_MODEL)
    decoder = Decoder(read_shape(folder), torch.float32, CPU)
    decoder.load(folder_weights(folder), 0)
    unused = FeatureCache(RunFolder(Path()), 0, 1, decoder.shape.hidden_size, 1)
    num_floats = sum(p.numel() for p in SpotTrainer(decoder, unused, DrafterSection(), 0, 0).drafter.parameters())
    given = options.allreduce_seconds
    costs = {r: measure_allreduce(r, num_floats) if given is None else given for r in options.replicas}
    print(json.dumps({"drafter_weights": num_floats, "allreduce_seconds": costs}), flush=True)
    bench = Bench(decoder, options, costs)
    rows = [row for seed in options.seeds for replicas in options.replicas for row in compare(bench, replicas, seed)]
    print(table(rows))
    if options.json:
        options.json.write_text(
            json.dumps({"allreduce_seconds": costs, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    sys.exit(ending("compare_merges", main))
