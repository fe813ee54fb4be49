"""Records from the embedded model what tools/compare_choosers.py simulates: response lengths, accepted drafts, costs.

    python tools/record_workload.py --folder workload
    python tools/compare_choosers.py --lengths workload/lengths.json --costs workload/profile.json \\
        --accepts workload/accepts.json --max-live 32
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import torch
from prove_exactness import CPU, Way, make_engine, requests

from tlt_hpc.common.records import Request, SampleKey, Stream
from tlt_hpc.rollout.cost_profile import write_profile
from tlt_hpc.rollout.decisions import RandomChooser
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.strategy import Strategy, strategy_named

STRATEGIES = ("off", "ngram-4", "drafter-2", "drafter-4", "drafter-8", "drafter-5x2v9", "hybrid-4x2v8")
RESPONSES_PER_ROLLOUT = 128


class Listener(RandomChooser):
    """One strategy in every round; counts the drafts that were accepted."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__((strategy,), 0)
        self.accepted: Counter[int] = Counter()

    def _learn(self, index: int, num_live: int, num_tokens: int, seconds: float, accepted: object) -> None:
        assert isinstance(accepted, list)
        self.accepted.update(accepted)


def engine_for(names: tuple[str, ...], max_live: int, wanted: list[Request]) -> RolloutEngine:
    """A calibrated engine of the embedded model."""
    engine = make_engine(Way("recorded", names, max_live), tie_guard=True, device=CPU)
    engine.calibrate([Request(SampleKey(1, Stream.CALIBRATION, 0, 0, 0), wanted[0].prompt_tokens)])
    return engine


def generate(engine: RolloutEngine, wanted: list[Request]) -> list[int]:
    """Lengths of the responses in the order of their keys."""
    engine.submit(wanted)
    while engine.has_work:
        engine.step()
    return [len(rollout.response_tokens) for rollout in engine.collect()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rollouts", type=int, default=12)
    parser.add_argument("--max-live", type=int, default=32)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    wanted = requests(arguments.rollouts * RESPONSES_PER_ROLLOUT)
    engine = engine_for(STRATEGIES, arguments.max_live, wanted)
    write_profile(arguments.folder / "profile.json", engine.profile(wanted[:8], 20.0))
    lengths = generate(engine, wanted)
    rollouts = [lengths[i : i + RESPONSES_PER_ROLLOUT] for i in range(0, len(lengths), RESPONSES_PER_ROLLOUT)]
    (arguments.folder / "lengths.json").write_text(json.dumps(rollouts))
    accepts = {}
    for name in STRATEGIES[1:]:
        engine = engine_for((name,), arguments.max_live, wanted)
        engine.chooser = listener = Listener(strategy_named(name))
        generate(engine, wanted[: 4 * RESPONSES_PER_ROLLOUT])
        accepts[name] = [listener.accepted[i] for i in range(max(listener.accepted) + 1)]
        mean = 1 + sum(i * n for i, n in enumerate(accepts[name])) / sum(accepts[name])
        print(f"{name:16} accept length {mean:.2f}")
    (arguments.folder / "accepts.json").write_text(json.dumps(accepts))
    print(f"wrote {arguments.folder}")


if __name__ == "__main__":
    sys.exit(ending("record_workload", main))
