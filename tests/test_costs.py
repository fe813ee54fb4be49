"""The cost profile interpolates what was measured, keeps to its time, and no damaged file is taken for one."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from tlt_hpc.rollout import costs
from tlt_hpc.rollout.costs import (
    CostGrid,
    CostProfile,
    ProfileKey,
    measure_profile,
    processor_name,
    read_profile,
    to_json,
)
from tlt_hpc.rollout.strategy import OFF, Strategy, strategies_of

KEY = ProfileKey("processor", 2, "cpu", 1, "2.10", "qwen2-8x128", "float32")


def write_profile(path: Path, profile: CostProfile) -> None:
    path.write_text(json.dumps(to_json(profile)))


def chains(depths):
    """Off, and chains of both drafters."""
    return strategies_of("full", [f"{source}-{depth}" for source in ("ngram", "drafter") for depth in depths])


ARMS = (*chains((2, 6)), Strategy("drafter", 4, 2, 8))


@dataclass
class FakeMachine:
    """Costs by a formula, linear in log2 of the batch and in width, so that interpolation is exact."""

    slow_first: float = 0.0
    slow_every: int = 0
    """All but every n-th run are five seconds slow."""
    seconds: float = 0.0
    """Its clock: 2 ms a run."""
    calls: Counter[tuple[str, int, int]] = field(default_factory=Counter)

    def measure_verify(self, batch: int, width: int) -> float:
        return self._run(("verify", batch, width), 1e-3 * (1 + (batch.bit_length() - 1) * (1 + 0.1 * width)))

    def measure_draft(self, batch: int, depth: int, strategy: Strategy) -> float:
        factor = {"ngram": 0.1, "drafter": 1.0}[strategy.source] * strategy.branching
        return self._run((strategy.source, batch, depth), 1e-3 * factor * depth * batch.bit_length())

    def _run(self, call: tuple[str, int, int], seconds: float) -> float:
        self.calls[call] += 1
        self.seconds += 0.002
        is_slow = self.slow_every and self.calls.total() % self.slow_every != 0
        return seconds + (self.slow_first if self.calls[call] == 1 else 0.0) + (5.0 if is_slow else 0.0)


def measured(max_live: int = 32, machine: FakeMachine | None = None) -> CostProfile:
    return measure_profile(KEY, ARMS, max_live, machine or FakeMachine(slow_first=5.0), 10.0)


def test_a_profile_gives_back_what_was_measured_and_what_lies_between():
    """The first call of each point is five seconds slow, which the profile does not see."""
    profile, machine = measured(), FakeMachine()
    for batch in (1, 2, 8, 32):
        assert profile.seconds(OFF, batch) == pytest.approx(machine.measure_verify(batch, 1))
        for source, depth in (("drafter", 2), ("drafter", 6), ("ngram", 6), ("drafter", 4), ("ngram", 3)):
            strategy = Strategy(source, depth)
            expected = machine.measure_verify(batch, depth + 1) + machine.measure_draft(batch, depth, strategy)
            assert profile.seconds(strategy, batch) == pytest.approx(expected)
    tree = ARMS[-1]
    assert profile.seconds(tree, 4) == pytest.approx(machine.measure_verify(4, 9) + machine.measure_draft(4, 4, tree))
    assert profile.seconds(OFF, 8) < profile.seconds(OFF, 11) < profile.seconds(OFF, 16)
    halfway = CostGrid(((4, ((1, 1.0), (3, 2.0))), (16, ((1, 3.0), (3, 6.0)))))
    assert halfway.seconds(8, 2) == pytest.approx(3.0)
    step = machine.measure_draft(32, 6, ARMS[3]) / (6 * 32)
    assert profile.catch_up_seconds(Strategy("drafter", 2), 1000) == pytest.approx(1000 * step)


def test_other_work_on_the_machine_counts_in_no_point():
    """One of two runs is five seconds slow, at any place in the turns."""
    busy = measured(max_live=4, machine=FakeMachine(slow_every=2))
    assert (busy.verify, busy.drafts) == (measured(max_live=4).verify, measured(max_live=4).drafts)


def test_a_batch_that_is_no_power_of_two_and_a_single_row():
    profile = measured(max_live=20)
    assert [batch for batch, _ in profile.verify.rows] == [1, 2, 4, 8, 16, 20]
    assert profile.covers(ARMS, 20)
    assert not profile.covers(ARMS, 21)
    assert not profile.covers([Strategy("drafter", 7)], 4)
    assert not profile.covers([Strategy("drafter", 4, 3, 8)], 4)
    assert [batch for batch, _ in measured(max_live=1).verify.rows] == [1]


def test_measuring_keeps_to_its_seconds_and_goes_from_coarse_to_fine(monkeypatch: pytest.MonkeyPatch):
    machine = FakeMachine()
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: machine.seconds))
    a_batch = (4 + 5) * 4 * 0.002  # widths 1, 3, 7, 9; two depths of each kind of chain, and the tree; four runs each
    profile = measure_profile(KEY, ARMS, 512, machine, max_seconds=4.5 * a_batch)
    assert profile.measured_seconds == pytest.approx(4 * a_batch)
    assert [batch for batch, _ in profile.verify.rows] in ([1, 4, 16, 512], [1, 4, 32, 512], [1, 16, 32, 512])
    told = []
    measure_profile(KEY, ARMS, 512, FakeMachine(), 10.0, agree=lambda late: bool(told.append(late)) or len(told) == 2)
    assert told == [0, 0], "the first rank's clock decides"


def edited(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        tree = json.loads(path.read_text())
        change(tree)
        path.write_text(json.dumps(tree))

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text(path.read_text()[:-40]),
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text(100_000 * "["),
        edited(lambda tree: tree.update(schema=0)),
        edited(lambda tree: tree.pop("drafts")),
        edited(lambda tree: tree["key"].update(colour="red")),
        edited(lambda tree: tree["verify"].reverse()),
        edited(lambda tree: tree["verify"][0][1][0].__setitem__(1, -1.0)),
        edited(lambda tree: tree["verify"][0][1][0].__setitem__(1, float("nan"))),
        edited(lambda tree: tree["verify"][0][1][0].__setitem__(1, 10**400)),
        edited(lambda tree: tree["verify"][0].__setitem__(0, float("inf"))),
        edited(lambda tree: tree["verify"][0][1].clear()),
        edited(lambda tree: tree.update(verify=[])),
    ],
)
def test_a_profile_reads_back_and_a_damaged_one_is_refused(tmp_path: Path, damage: Callable[[Path], object]):
    path = tmp_path / "profile.json"
    write_profile(path, measured())
    assert read_profile(path) == measured_as_read(read_profile(path))
    damage(path)
    with pytest.raises(ValueError, match="holds no cost profile"):
        read_profile(path)


def measured_as_read(read: CostProfile) -> CostProfile:
    profile = measured()
    return CostProfile(KEY, profile.verify, profile.drafts, read.measured_seconds)


def test_the_processor_has_a_name():
    assert processor_name()
