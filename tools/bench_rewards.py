"""Rewards a second by kind, what a rank pays for them while it decodes, and their share of a run's steps.

    python tools/bench_rewards.py                                # every kind, synthetic answers
    python tools/bench_rewards.py --kinds math code --workers 4
    python tools/bench_rewards.py --run runs/tiny                # the share of the step, from a run's metrics.jsonl

Rewards a second are of a server with so many workers, all answers handed over at once; "in the rank" is CPU time of the
process that hands over, which is what decoding loses. "waited" pretends to decode for three times as long, in
rounds, offering one answer a round: what is left to wait for at the end, as a share of the whole. Repeats of all kinds
alternate, and the table has medians, since a machine's other work comes and goes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
from tlt_hpc.config import RewardSection
from tlt_hpc.rewards.answer import Answer
from tlt_hpc.rewards.client import RewardClient
from tlt_hpc.rewards.judge import judge, needs_worker
from tlt_hpc.rewards.standing import settings_of

FUNCTION = (
    "def f(data_source, solution_str, ground_truth, extra_info):\n    return float(ground_truth in solution_str)\n"
)
THOUGHT = "so 12 and 34 make 46, let me check that again.\n" * 40
"""Before every answer: 1,900 characters, about 500 tokens."""
ANSWERS = {
    "boxed": ("\\boxed{28}", "28"),
    "numeric": ("\\boxed{1,234.50}", "1234.5"),
    "choice": ("The answer is (C).", "C"),
    "format": ("<think>a</think>", ""),
    "math": ("the area is $\\boxed{\\frac{22\\sqrt{2}}{2}}$", "11\\sqrt{2}"),
    "function": ("28", "28"),
    "code": (
        "```python\nn = int(input())\nprint(sum(i * i for i in range(n)))\n```",
        json.dumps({"inputs": ["3\n", "10\n", "100\n", "0\n"], "outputs": ["5\n", "285\n", "328350\n", "0\n"]}),
    ),
}


@dataclass(frozen=True)
class Figures:
    """Of one kind, one repeat."""

    per_second: float
    rank_microseconds: float
    waited: float


class Bench:
    """One kind's server and answers."""

    def __init__(self, kind: str, num: int, workers: int, folder: Path) -> None:
        own = folder / "own.py"
        own.write_text(FUNCTION, encoding="utf-8")
        given = {"function": f"{own}:f"} if kind == "function" else {}
        section = RewardSection(default=kind, workers=workers, format_tags=("think",), **given)  # type: ignore[arg-type]
        self.settings = settings_of(section)
        text, truth = ANSWERS[kind]
        thought = THOUGHT if kind != "format" else ""
        self.answers = [Answer(kind, "a", thought + text, truth) for _ in range(num)]
        self.client = RewardClient(self.settings) if needs_worker(kind, self.settings) else None
        if self.client:
            self.client.wait_until_ready()

    def measure(self) -> Figures:
        """Once."""
        if self.client is None:
            return self._measure_here()
        start, own = time.perf_counter(), time.process_time()
        verdicts = self.client.wait([self.client.submit(answer) for answer in self.answers])
        seconds, own_seconds = time.perf_counter() - start, time.process_time() - own
        assert all(verdict.reward == 1 for verdict in verdicts.values()), next(iter(verdicts.values()))
        num = len(self.answers)
        return Figures(num / seconds, 1e6 * own_seconds / num, self._waited(self.client, 3 * seconds))

    def _measure_here(self) -> Figures:
        start = time.perf_counter()
        assert all(judge(answer, self.settings).reward == 1 for answer in self.answers)
        seconds = (time.perf_counter() - start) / len(self.answers)
        return Figures(1 / seconds, 1e6 * seconds, 0.0)

    def _waited(self, client: RewardClient, rollout_seconds: float) -> float:
        """The share of rollout and waiting that is waiting, where the rollout takes three times as long as judging."""
        start, numbers = time.perf_counter(), []
        pause = rollout_seconds / len(self.answers)
        for answer in self.answers:
            numbers.append(client.submit(answer))
            time.sleep(pause)  # a GPU's round: the core is free
            client.pump()
        ended = time.perf_counter()
        client.wait(numbers)
        now = time.perf_counter()
        return (now - ended) / (now - start)


def show_kinds(kinds: Sequence[str], options: argparse.Namespace) -> None:
    """The table."""
    with tempfile.TemporaryDirectory() as folder:
        benches = {kind: Bench(kind, options.answers, options.workers, Path(folder)) for kind in kinds}
        found: dict[str, list[Figures]] = {kind: [] for kind in kinds}
        for _ in range(options.repeats):
            for kind, bench in benches.items():
                found[kind].append(bench.measure())
        for bench in benches.values():
            if bench.client:
                bench.client.close()
    print("| kind | judged in | rewards/s | in the rank, us each | waited at the end |\n|---|---|---|---|---|")
    for kind, figures in found.items():
        place = f"{options.workers} workers" if benches[kind].client else "the rank"
        rate, own, waited = (statistics.median(getattr(each, name) for each in figures) for name in vars(figures[0]))
        print(f"| {kind} | {place} | {rate:,.0f} | {own:,.0f} | {waited:.1%} |")


def show_run(folder: Path) -> None:
    """What rewards took of a run's steps: the reward phase, and what was judged in the rank before it."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    step = sum(line["timing_s/step"] for line in lines)
    phase = sum(line["timing_s/reward"] for line in lines)
    ahead = sum(line["rollout/rewards_in_tail"] for line in lines)
    waited = sum(line.get("reward/waited_seconds", 0.0) for line in lines)
    failed = sum(value for line in lines for name, value in line.items() if name.startswith("reward/failed/"))
    print(f"steps                      {len(lines)}, {step:.2f} s on rank 0")
    print(f"reward phase               {phase:.3f} s, {phase / step:.2%} of the steps, with gathering all rollouts")
    print(
        f"judged before the phase    {ahead:.0f} answers; {rank_seconds(lines):.3f} rank-seconds, of ranks that waited"
    )
    print(f"waited for workers         {waited:.3f} rank-seconds")
    print(f"not judged                 {failed:.0f} answers")


def rank_seconds(lines: Sequence[dict[str, float]]) -> float:
    """Seconds of ranks that waited, spent on judging."""
    return sum(line["rollout/rewards_in_tail_seconds"] for line in lines)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(ANSWERS), default=list(ANSWERS))
    parser.add_argument("--answers", type=int, default=100, help="of each kind and repeat (default 100)")
    parser.add_argument("--repeats", type=int, default=5, help="medians are of so many (default 5)")
    parser.add_argument("--workers", type=int, default=2, help="as reward.workers (default 2)")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="only tell what rewards took of a run's steps")
    options = parser.parse_args()
    if options.run is not None:
        show_run(options.run)
    else:
        show_kinds(options.kinds, options)


if __name__ == "__main__":
    sys.exit(ending("bench_rewards", main))
