"""The cost profile interpolates what was measured, keeps to its time, and trusts no file that is not its own."""

import json
import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest
from launch_ranks import run_on_ranks

from tlt_hpc.rollout import cost_profile
from tlt_hpc.rollout.cost_profile import (
    CostGrid,
    CostProfile,
    ProfileKey,
    load_or_measure,
    measure_profile,
    processor_name,
    profile_folder,
    read_profile,
    write_profile,
)
from tlt_hpc.rollout.strategy import OFF, Strategy, strategies_of

T = TypeVar("T")
KEY = ProfileKey("processor", 2, "cpu", 1, "2.10", "qwen2-8x128", "float32")


def chains(depths):
    """Off, and chains of both drafters."""
    names = [f"{source}-{depth}" for source in ("ngram", "drafter") for depth in depths]
    return strategies_of("full", names)


ARMS = (*chains((2, 6)), Strategy("drafter", 4, 2, 8))


@dataclass
class FakeMachine:
    """Costs by a formula, linear in log2 of the batch and in width, so that interpolation is exact."""

    seconds_a_call: float = 0.0
    """By its own clock, ``seconds``."""
    seconds: float = 0.0
    before_first: Callable[[], None] = lambda: None
    slow_first: float = 0.0
    slow_every: int = 0
    speed: float = 1.0
    slow_from: int = 1
    """The batch from which on ``speed`` counts."""
    calls: Counter[tuple[str, int, int]] = field(default_factory=Counter)

    @property
    def batches(self) -> set[int]:
        """What was measured."""
        return {batch for _, batch, _ in self.calls}

    def measure_verify(self, batch: int, width: int) -> float:
        return self._run(("verify", batch, width), 1e-3 * (1 + (batch.bit_length() - 1) * (1 + 0.1 * width)))

    def measure_draft(self, batch: int, depth: int, strategy: Strategy) -> float:
        factor = {"ngram": 0.1, "drafter": 1.0, "hybrid": 1.5}[strategy.source] * strategy.branching
        return self._run((strategy.source, batch, depth), 1e-3 * factor * depth * batch.bit_length())

    def _run(self, call: tuple[str, int, int], seconds: float) -> float:
        if not self.calls:
            self.before_first()
        self.seconds += self.seconds_a_call
        self.calls[call] += 1
        is_slow = self.slow_every and self.calls.total() % self.slow_every != 0
        speed = self.speed if call[1] >= self.slow_from else 1.0
        return (seconds + (self.slow_first if self.calls[call] == 1 else 0.0)) / speed + (5.0 if is_slow else 0.0)


def measured(max_live: int = 32, machine: FakeMachine | None = None) -> CostProfile:
    return measure_profile(KEY, ARMS, max_live, machine or FakeMachine(slow_first=5.0))


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


def test_the_first_run_of_a_point_does_not_count():
    once = measure_profile(KEY, ARMS, 4, FakeMachine(slow_first=5.0), repetitions=1)
    assert once.verify == measured(max_live=4).verify
    assert max(seconds for _, row in once.verify.rows for _, seconds in row) < 1


def test_other_work_on_the_machine_counts_in_no_point():
    """Three runs of four are five seconds slow, at any place in the turns."""
    busy = FakeMachine(slow_every=4)
    assert measured(max_live=4, machine=busy).verify == measured(max_live=4).verify
    assert measured(max_live=4, machine=FakeMachine(slow_every=4)).drafts == measured(max_live=4).drafts


def test_a_profile_of_a_machine_under_press_is_measured_anew(tmp_path: Path):
    load(tmp_path, FakeMachine(speed=0.3))
    machine = FakeMachine()
    assert load(tmp_path, machine).verify == measured(max_live=8).verify
    again = FakeMachine(speed=1.2)
    assert load(tmp_path, again).verify == measured(max_live=8).verify
    assert machine.batches > {1, 8} and again.batches == {1, 8}


def test_press_on_the_largest_batches_alone_is_seen_too(tmp_path: Path):
    load(tmp_path, FakeMachine(speed=0.3, slow_from=8))
    assert load(tmp_path, FakeMachine()).verify == measured(max_live=8).verify


def test_under_press_a_job_has_a_profile_of_its_own_and_the_good_one_stays(tmp_path: Path):
    good = load(tmp_path, FakeMachine())
    slow = FakeMachine(speed=0.3)
    assert load(tmp_path, slow).seconds(OFF, 1) == pytest.approx(good.seconds(OFF, 1) / 0.3)
    assert slow.batches > {1, 8}
    quiet = FakeMachine()
    assert load(tmp_path, quiet) == good and quiet.batches == {1, 8}


def test_ranks_of_a_kind_measure_anew_together(tmp_path: Path) -> None:
    """The first says so for all, whatever the others find."""
    kept, anew, machine = measured(max_live=8), measured(max_live=8, machine=FakeMachine(speed=9.0)), FakeMachine()
    node = CountingNode([kept, cost_profile.IS_FASTER, anew])
    assert load_or_measure(KEY, ARMS, 8, machine, folder=tmp_path, node=node) == anew
    assert machine.batches > {1, 8} and node.given == []


def test_a_batch_that_is_no_power_of_two_and_a_single_row():
    profile = measured(max_live=20)
    assert [batch for batch, _ in profile.verify.rows] == [1, 2, 4, 8, 16, 20]
    assert profile.covers(ARMS, 20)
    assert not profile.covers(ARMS, 21)
    assert not profile.covers([Strategy("drafter", 7)], 4)
    assert not profile.covers([Strategy("hybrid", 4)], 4)
    assert [batch for batch, _ in measured(max_live=1).verify.rows] == [1]
    with pytest.raises(ValueError, match="max_live = 0"):
        measured(max_live=0)


def test_measuring_keeps_to_its_seconds(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    machine = FakeMachine(seconds_a_call=0.002)
    monkeypatch.setattr(cost_profile, "time", SimpleNamespace(perf_counter=lambda: machine.seconds))
    num_points = 4 + 5  # of a batch: widths 1, 3, 7, 9; two depths of each kind of chain, and the tree
    with caplog.at_level(logging.INFO):
        profile = measure_profile(KEY, ARMS, 512, machine, max_seconds=0.4)
    assert machine.seconds < 0.4 + num_points * 6 * 0.004
    batches = [batch for batch, _ in profile.verify.rows]
    assert {1, 512} <= set(batches)
    assert 2 < len(batches) < 10
    assert profile.measured_seconds > 0.1
    assert "interpolated" in caplog.text
    assert "measured in" in caplog.text


def test_coarse_batches_come_before_fine_ones():
    assert cost_profile._batches(32)[:3] in ([1, 32, 4], [1, 32, 8])
    assert sorted(cost_profile._batches(32)) == [1, 2, 4, 8, 16, 32]


def test_catching_up_costs_by_the_position():
    profile, machine = measured(), FakeMachine()
    drafter = Strategy("drafter", 2)
    step = machine.measure_draft(32, 6, drafter) / (6 * 32)
    assert profile.catch_up_seconds(drafter, 1000) == pytest.approx(1000 * step)


def load(folder: Path, machine: FakeMachine, key: ProfileKey = KEY, arms: tuple[Strategy, ...] = ARMS) -> CostProfile:
    return load_or_measure(key, arms, 8, machine, folder=folder)


def test_a_kept_profile_is_read_and_not_measured(tmp_path: Path):
    first, second = FakeMachine(), FakeMachine()
    profile = load(tmp_path, first)
    assert load(tmp_path, second) == profile
    assert first.calls and second.batches == {1, 8}, "the least and the most tell whether it still holds"
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


@pytest.mark.parametrize(
    "other",
    [
        {"processor": "another"},
        {"num_cores": 3},
        {"device": "cuda"},
        {"num_threads": 2},
        {"torch_version": "3"},
        {"model": "qwen2-9x128"},
        {"dtype": "bfloat16"},
    ],
)
def test_another_machine_or_model_is_measured_anew(tmp_path: Path, other: dict[str, str]):
    load(tmp_path, FakeMachine())
    machine = FakeMachine()
    load(tmp_path, machine, replace(KEY, **other))
    assert machine.calls
    kept = FakeMachine()
    load(tmp_path, kept)
    assert kept.batches == {1, 8}


def test_other_strategies_are_measured_and_both_stay(tmp_path: Path):
    load(tmp_path, FakeMachine())
    machine = FakeMachine()
    load(tmp_path, machine, arms=chains((9,)))
    assert machine.calls
    for arms in (ARMS, chains((9,))):
        machine = FakeMachine()
        load(tmp_path, machine, arms=arms)
        assert machine.batches == {1, 8}


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
        edited(lambda tree: tree.update(schema=0)),
        edited(lambda tree: tree.pop("drafts")),
        edited(lambda tree: tree["drafts"].pop("drafter")),
        edited(lambda tree: tree["key"].update(num_cores=64)),
        edited(lambda tree: tree["key"].update(colour="red")),
        edited(lambda tree: tree["verify"].reverse()),
        edited(lambda tree: tree["verify"][0][1][0].__setitem__(1, -1.0)),
        edited(lambda tree: tree["verify"][0][1][0].__setitem__(1, float("nan"))),
        edited(lambda tree: tree["verify"][0][1][0].__setitem__(1, 10**400)),
        edited(lambda tree: tree["verify"][0].__setitem__(0, float("inf"))),
        lambda path: path.write_text(100_000 * "["),
        edited(lambda tree: tree["verify"][0][1].clear()),
        edited(lambda tree: tree.update(verify=[])),
    ],
)
def test_a_damaged_or_foreign_file_is_measured_anew(
    tmp_path: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
):
    whole = load(tmp_path, FakeMachine())
    (path,) = tmp_path.iterdir()
    damage(path)
    machine = FakeMachine()
    assert load(tmp_path, machine).verify == whole.verify
    assert machine.calls
    assert "measuring anew" in caplog.text
    assert read_profile(path).verify == whole.verify


def test_a_profile_reads_back_as_it_was_written(tmp_path: Path):
    profile = measured()
    write_profile(tmp_path / "a" / "profile.json", profile)
    assert read_profile(tmp_path / "a" / "profile.json") == profile
    (tmp_path / "wrong.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no cost profile"):
        read_profile(tmp_path / "wrong.json")


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert load(blocked / "profiles", FakeMachine()).covers(ARMS, 8)
    assert "TLT_CACHE" in caplog.text


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    profile = measured()
    path = tmp_path / "profile.json"
    write_profile(path, profile)

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cost_profile.json, "dump", fail)
    with pytest.raises(OSError, match="No space"):
        write_profile(path, profile)
    assert list(tmp_path.iterdir()) == [path]
    assert read_profile(path) == profile


def test_where_profiles_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("TLT_CACHE", str(tmp_path))
    assert profile_folder() == tmp_path / "profiles"
    monkeypatch.setenv("TLT_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profile_folder() == tmp_path / ".cache" / "tlt_hpc" / "profiles"


def test_the_processor_has_a_name():
    assert processor_name()
    assert os.cpu_count()


# --- the ranks of a node ---


class CountingNode:
    """A node's first or second rank, whose marks are counted; what the second is given stands there already."""

    def __init__(self, given: list[object] | None = None) -> None:
        self.given, self.marks = given, []

    def alike(self, mark: int) -> "CountingNode":
        self.marks.append(mark)
        return self

    def once(self, do: Callable[[], T]) -> T:
        return do() if self.given is None else self.given.pop(0)


def test_a_rank_that_is_not_its_nodes_first_opens_nothing_and_takes_what_it_is_given(tmp_path: Path) -> None:
    profile, machine, folder = measured(max_live=8), FakeMachine(), tmp_path / "none"
    second = CountingNode([None, profile])
    assert load_or_measure(KEY, ARMS, 8, machine, folder=folder, node=second) == profile
    assert machine.calls, "no profile was kept: all measure at the same time"
    assert second.given == [] and not folder.exists()
    idle = FakeMachine()
    assert (
        load_or_measure(KEY, ARMS, 8, idle, folder=folder, node=CountingNode([profile, cost_profile.HOLDS])) == profile
    )
    assert idle.batches == {1, 8}


def test_ranks_that_compute_together_count_as_what_the_first_of_them_is(tmp_path: Path) -> None:
    first, other, second = CountingNode(), CountingNode(), CountingNode()
    load_or_measure(KEY, ARMS, 8, FakeMachine(), folder=tmp_path, node=first)
    key = replace(KEY, device="another GPU")
    load_or_measure(key, ARMS, 8, FakeMachine(), folder=tmp_path, node=other)
    load_or_measure(key, ARMS, 8, FakeMachine(), folder=tmp_path, node=second, agree=lambda number: first.marks[0])
    assert second.marks == first.marks != other.marks
    assert 0 <= first.marks[0] < 2**63, "it travels as a number of 64 bits"


def load_as_nodes(folder: str) -> dict[str, object]:
    """Three ranks on a node and two on another; the third's GPU is of another kind. Twice, as two starts."""
    import tlt_hpc.mpi.world as world_module

    rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    world_module.socket.gethostname = lambda: "here" if rank < 3 else "there"
    world = world_module.World.connect()
    key = replace(KEY, device="odd" if rank == 2 else "usual")
    read, write, opened = cost_profile.read_profile, cost_profile.write_profile, []
    cost_profile.read_profile = lambda path: (opened.append("read"), read(path))[1]
    cost_profile.write_profile = lambda path, profile: (opened.append("write"), write(path, profile))[1]
    found = []
    for _ in range(2):
        machine = FakeMachine(before_first=world.barrier)  # all have looked for a profile before one is written
        profile = load_or_measure(key, ARMS, 4, machine, folder=Path(folder), node=world.node_group)
        found.append([profile.key.device, profile.measured_seconds, machine.batches != {1, 4}])
        world.barrier()
    return {"opened": opened, "found": found}


@pytest.mark.mpi
def test_one_rank_of_each_kind_on_a_node_opens_the_profile(tmp_path: Path) -> None:
    results = run_on_ranks(5, load_as_nodes, str(tmp_path))
    first_of_its_kind = ["read", "write", "read"]
    assert [one["opened"] for one in results] == [first_of_its_kind, [], first_of_its_kind, first_of_its_kind, []]
    starts = [one["found"] for one in results]
    assert [[measures for _, _, measures in found] for found in starts] == [[True, False]] * 5
    assert [device for ((device, *_), _) in starts] == ["usual", "usual", "odd", "usual", "usual"]
    assert starts[0] == starts[1] and starts[3][0] == starts[4][0], "the node's ranks have the same one"
    assert starts[2][0][1] == starts[2][1][1], "the odd one has its own again"
    assert len({found[1][1] for found in starts[:2] + starts[3:]}) == 1, "the second start's is one file's"
    assert len(list(tmp_path.iterdir())) == 2
