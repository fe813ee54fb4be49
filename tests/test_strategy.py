"""Choosers find what pays, lose next to nothing on what does not, agree with each other, and can be replayed."""

import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from test_cost_profile import KEY, chains
from test_rollout_log import make_record

from tlt_hpc.rollout.chooser import BanditChooser, GoodputChooser, make_chooser
from tlt_hpc.rollout.cost_profile import CostGrid, CostProfile, write_profile
from tlt_hpc.rollout.decisions import Chooser, Decision, ReplayChooser
from tlt_hpc.rollout.estimates import Matches, TrialBudget
from tlt_hpc.rollout.strategy import OFF, Strategy, strategies_of, strategy_named
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import write_step

TOOL = Path(__file__).parents[1] / "tools" / "compare_choosers.py"
ARMS = chains((2, 4, 6))
KINDS = ("goodput", "bandit")


@dataclass(frozen=True)
class Table:
    """Costs by strategy, the same at every batch size."""

    by_strategy: dict[Strategy, float]
    catch_up: float = 0.0

    def seconds(self, strategy: Strategy, num_live: int) -> float:
        return self.by_strategy[strategy]

    def catch_up_seconds(self, strategy: Strategy, backlog: int) -> float:
        return self.catch_up * backlog


COSTS = Table({arm: 0.01 + 0.001 * arm.depth * (2 if arm.source == "drafter" else 1) for arm in ARMS})


def draw(strategy: Strategy, chance: float, num_live: int, source: random.Random) -> list[int]:
    """Accepted drafts by sequence, each position matching with the same chance."""
    accepted = []
    for _ in range(num_live):
        count = 0
        while count < strategy.reach and source.random() < chance:
            count += 1
        accepted.append(count)
    return accepted


def play(
    chooser: Chooser,
    rounds: int,
    chance: Callable[[Strategy], float],
    num_live: int = 8,
    seconds: Callable[[Strategy], float] = lambda strategy: COSTS.by_strategy[strategy],
    seed: int = 0,
) -> list[Strategy]:
    """Rounds of a constant batch; returns what was chosen."""
    source, chosen = random.Random(seed), []
    for _ in range(rounds):
        strategy = chooser.choose(num_live, chooser.strategies)
        accepted = draw(strategy, chance(strategy), num_live, source)
        chooser.observe(strategy, num_live, sum(accepted) + num_live, seconds(strategy), accepted)
        chosen.append(strategy)
    return chosen


def make(kind: str, arms: Sequence[Strategy] = ARMS, costs: Table | None = COSTS, **changes: float) -> Chooser:
    settings = {"epsilon": 0.05, "window": 64, "seed": 0, **changes}
    return make_chooser(kind, arms, costs=costs, **settings)


def only_drafter(chance: float) -> Callable[[Strategy], float]:
    return lambda strategy: chance if strategy.source == "drafter" else 0.0


# -- names ----------------------------------------------------------------------------------------------------------


def test_strategies_of_a_mode():
    names = ("ngram-2", "drafter-4", "hybrid-3x2v6", "ngram-2")
    assert strategies_of("plain", names) == (OFF,)
    assert [s.name for s in strategies_of("ngram", names)] == ["off", "ngram-2"]
    assert [s.name for s in strategies_of("full", names)] == ["off", "ngram-2", "drafter-4", "hybrid-3x2v6"]


@pytest.mark.parametrize(
    "strategy",
    [
        OFF,
        Strategy("ngram", 4),
        Strategy("drafter", 6, 4, 16, 2.5),
        Strategy("hybrid", 3, 2),
    ],
)
def test_a_strategy_is_told_by_its_name(strategy: Strategy):
    named = strategy_named(strategy.name)
    assert (named.name, named.num_drafts, named.reach) == (strategy.name, strategy.num_drafts, strategy.reach)
    assert (named.source, named.depth, named.branching, named.sharpness) == (
        strategy.source, strategy.depth, strategy.branching, strategy.sharpness,
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "",
        "of",
        "drafter",
        "magic-4",
        "drafter-4x2",
        "off-3",
        "drafter-33",
        "drafter-4a0",
        "drafter-4x1v4",
        "ngram-4x2v6",
        "drafter-2x2v50",
        "drafter-4x20v40",
    ],
)
def test_a_wrong_name_is_an_error(name: str):
    with pytest.raises(ValueError, match="drafter"):
        strategy_named(name)


def test_chains_of_a_drafter_are_a_family_and_a_tree_is_its_own():
    assert Strategy("drafter", 2).family == Strategy("drafter", 6).family == Strategy("drafter", 6, 1, 3).family
    others = [Strategy("ngram", 2), Strategy("drafter", 2, sharpness=2.0), Strategy("drafter", 2, 2), OFF]
    assert len({Strategy("drafter", 2).family, *(other.family for other in others)}) == 5


# -- estimates ------------------------------------------------------------------------------------------------------


def test_counts_of_a_deep_chain_give_the_accept_length_of_every_shallower_one():
    counts = [4, 3, 6, 0, 2, 1, 4]
    accepted = [k for k, count in enumerate(counts) for _ in range(count)]
    matches = Matches(window=100_000, reach=6)
    for _ in range(20_000):
        matches.add(6, accepted)
    for depth in range(7):
        assert matches.expected(depth) == pytest.approx(1 + np.minimum(accepted, depth).mean(), abs=2e-3)


def test_a_chain_accepted_whole_says_nothing_of_what_lies_beyond():
    """Depth 2 always stands; depth 4 tells that the third position matches half of the time."""
    matches = Matches(window=100_000, reach=4)
    for _ in range(5_000):
        matches.add(2, [2, 2])
        matches.add(4, [2, 4])
    assert matches.expected(2) == pytest.approx(3, abs=0.01)
    assert matches.expected(4) == pytest.approx(4, abs=0.01)


def test_tokens_alone_give_the_mean():
    matches = Matches(window=1000, reach=4)
    for _ in range(5_000):
        matches.add_mean(4, 1.7, 8)
    assert matches.expected(4) == pytest.approx(2.7, abs=0.01)
    assert 1.5 < matches.expected(1) < 1.7
    for _ in range(5_000):
        matches.add_mean(4, 0.0, 8)
    assert matches.expected(4) == pytest.approx(1, abs=0.03)


def test_the_budget_holds_under_every_sequence_of_trials():
    for seed in range(20):
        source, budget, spent, lost = random.Random(seed), TrialBudget(0.02), 0.0, 0.0
        for _ in range(3000):
            loss = source.uniform(0.0, 3.0)
            if source.random() < 0.5 and budget.allows(loss):
                budget.add(1 + loss, loss)
                spent, lost = spent + 1 + loss, lost + loss
            else:
                budget.add(1.0, 0.0)
                spent += 1
            assert lost <= 0.0201 * spent
        assert lost > 0.01 * spent


# -- choice ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("costs", [COSTS, None])
@pytest.mark.parametrize("kind", KINDS)
def test_what_pays_is_found_and_left_when_it_no_longer_does(kind: str, costs: Table | None):
    chooser = make(kind, costs=costs)
    chosen = play(chooser, 600, only_drafter(0.95))
    assert chosen[-200:].count(Strategy("drafter", 6)) > 150
    chosen = play(chooser, 600, only_drafter(0.05))
    assert chosen[-200:].count(OFF) > 180


def test_one_depth_tells_of_all_others():
    """A few rounds of depth 6 and one drafter: depth 2 is known to be best without ever having been tried."""
    arms = (OFF, *(Strategy("drafter", depth) for depth in (2, 4, 6)))
    chooser = make("goodput", arms, epsilon=0.0)
    for _ in range(40):
        chooser.observe(Strategy("drafter", 6), 8, 16, COSTS.by_strategy[arms[3]], [0, 0, 2, 2, 2, 2, 2, 2])
    assert chooser.choose(8, arms) == Strategy("drafter", 2)


def test_accept_length_learned_at_one_batch_size_serves_at_another():
    chooser = make("goodput", epsilon=0.0)
    play(chooser, 200, only_drafter(0.8), num_live=32)
    chosen = play(chooser, 10, only_drafter(0.8), num_live=2)  # one of them measures a plain round at this size
    assert [strategy.source for strategy in chosen].count("drafter") >= 9


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_win_is_never_tried(kind: str):
    """Each round of depth 6 costs more than seven plain ones: all drafts accepted would not pay."""
    costs = Table({OFF: 0.01, Strategy("drafter", 6): 0.071, Strategy("drafter", 2): 0.012})
    arms = tuple(costs.by_strategy)
    chooser = make(kind, arms, costs, epsilon=0.5, trial_share=0.9)
    chosen = play(chooser, 1000, only_drafter(0.3), seconds=lambda strategy: costs.by_strategy[strategy])
    assert Strategy("drafter", 6) not in chosen
    assert Strategy("drafter", 2) in chosen


@pytest.mark.parametrize("kind", KINDS)
def test_trials_stay_under_their_share_and_never_cease(kind: str):
    chooser = make(kind, epsilon=0.3)
    chosen = play(chooser, 6000, lambda _: 0.05)
    lost = sum(COSTS.by_strategy[s] - COSTS.by_strategy[OFF] for s in chosen)
    assert lost < 0.025 * sum(COSTS.by_strategy[s] for s in chosen)
    assert any(strategy != OFF for strategy in chosen[-1000:])


@pytest.mark.parametrize("kind", KINDS)
def test_no_trial_before_there_is_time_to_pay_for_it(kind: str):
    """Drafting is known not to pay: the first rounds are plain, however large epsilon is."""
    chooser = make(kind, epsilon=1.0)
    for arm in ARMS[1:]:
        for _ in range(20):
            chooser.observe(arm, 8, 8, COSTS.by_strategy[arm], [0] * 8)
    for _ in range(2):
        chooser.observe(OFF, 8, 8, COSTS.by_strategy[OFF])
    assert set(play(chooser, 50, lambda _: 0.0)) == {OFF}


def test_a_drafter_with_much_to_read_is_not_tried_until_that_is_paid_for():
    costs = Table(COSTS.by_strategy, catch_up=1e-4)
    for backlog, expected in ((0, "drafter"), (10_000, "off")):
        chooser = make("goodput", chains((2,))[::2], costs)
        assert chooser.choose(8, chooser.strategies, backlog).source == expected


def test_a_first_trial_is_free_once():
    """A rollout of a second could never save up for reading its prompts out of a fiftieth of its time."""
    costs = Table(COSTS.by_strategy, catch_up=1e-4)
    chooser = make("goodput", chains((2,))[::2], costs)
    drafter = chooser.strategies[1]
    seconds = COSTS.by_strategy[drafter]
    backlog = int(3 * seconds / 1e-4)
    assert chooser.choose(8, chooser.strategies, backlog) == drafter
    chooser.observe(drafter, 8, 8, seconds, [0] * 8)
    assert chooser.choose(8, chooser.strategies, backlog) == OFF


def test_slow_rounds_of_a_busy_machine_turn_nothing():
    chooser = make("goodput", epsilon=0.0)
    play(chooser, 300, only_drafter(0.8))
    best = chooser.choose(8, ARMS)
    for _ in range(5):
        chooser.observe(best, 8, 24, 0.5, [2] * 8)
    assert chooser.choose(8, ARMS) == best


@pytest.mark.parametrize("seed", range(4))
def test_measured_costs_replace_a_wrong_profile(seed: int):
    """It says that plain rounds take twice as long as they do, so that nothing seems worth leaving the drafter for."""
    wrong = Table({arm: 0.01 if arm.source == "drafter" else 0.02 for arm in ARMS})
    chosen = play(make("goodput", costs=wrong, seed=seed), 600, only_drafter(0.1))
    assert chosen[-300:].count(OFF) > 280


@pytest.mark.parametrize("kind", KINDS)
def test_a_better_drafter_is_soon_found_after_a_swap(kind: str):
    chooser = make(kind)
    assert play(chooser, 1500, only_drafter(0.1))[-300:].count(OFF) > 280
    chooser.discount(0.0)
    assert sum(s.source == "drafter" for s in play(chooser, 100, only_drafter(0.85))) > 60


def test_without_a_swap_a_better_drafter_is_found_all_the_same():
    chooser = make("goodput")
    play(chooser, 1500, only_drafter(0.1))
    chosen = play(chooser, 6000, only_drafter(0.9))
    assert chosen[-100:].count(Strategy("drafter", 6)) > 90


def test_a_discount_leaves_ngrams_and_plain_rounds_alone():
    chooser = make("goodput")
    play(chooser, 300, lambda strategy: 0.5)
    before = chooser.state()
    chooser.discount(0.5)
    after = chooser.state()
    assert after["ngram:a1"] == before["ngram:a1"]
    assert after["drafter:a1"] == [value / 2 for value in before["drafter:a1"]]


def test_only_what_is_usable_is_chosen():
    for kind in (*KINDS, "random"):
        chooser = make(kind, epsilon=1.0)
        play(chooser, 100, only_drafter(0.9))
        usable = [strategy for strategy in ARMS if strategy.source != "drafter"]
        assert all(chooser.choose(8, usable) in usable for _ in range(200))


def test_the_bandit_keeps_batch_sizes_apart():
    """Drafting pays for 4 sequences but not for 5, and each bucket learns it of itself."""
    arms = (OFF, Strategy("drafter", 2))
    chooser = BanditChooser(arms, epsilon=0.0, window=10, seed=0)
    for _ in range(5):
        for num_live, drafted in ((4, 0.011), (5, 0.05)):
            chooser.observe(OFF, num_live, num_live, 0.01)
            chooser.observe(arms[1], num_live, 2 * num_live, drafted)
    assert [chooser.choose(n, arms).source for n in (2, 4, 5, 20)] == ["drafter", "drafter", "off", "off"]
    for _ in range(6):  # more than half of the window
        chooser.observe(arms[1], 4, 4, 0.05)
    assert chooser.choose(4, arms) == OFF


@pytest.mark.parametrize("chooser", [GoodputChooser, BanditChooser])
def test_a_choice_needs_off(chooser: type[GoodputChooser] | type[BanditChooser]):
    with pytest.raises(ValueError, match="off"):
        chooser([Strategy("ngram", 2), Strategy("ngram", 4)], 0.1, 64, 0)
    with pytest.raises(ValueError, match="only once"):
        chooser([OFF, Strategy("ngram", 2), Strategy("ngram", 2, num_verify=2)], 0.1, 64, 0)
    assert chooser([OFF], 0.1, 64, 0).choose(3, [OFF]) == OFF


def test_a_bandit_has_two_arms_or_speculation_is_off():
    with pytest.raises(ValueError, match="at least two"):
        BanditChooser([Strategy("ngram", 2)], 0.1, 64, 0)
    single = GoodputChooser([Strategy("ngram", 2)], 0.1, 64, 0)
    assert set(play(single, 20, lambda _: 0.0)) == {Strategy("ngram", 2)}


def test_a_checkpoint_keeps_acceptance_and_survives_other_settings():
    chooser = make("goodput")
    play(chooser, 200, only_drafter(0.8))
    saved = json.loads(json.dumps(chooser.state()))
    again = make("goodput")
    again.load_state(saved)
    assert again.state() == chooser.state()
    assert again.choose(8, ARMS) == chooser.choose(8, ARMS)
    shallower = make("goodput", chains((2,)))
    shallower.load_state({**saved, "off": [1.0, 1.0], "gone-3": [2.0]})
    assert shallower.choose(8, shallower.strategies) == Strategy("drafter", 2)


def test_totals_count_rounds_and_tokens():
    chooser = make("random")
    chosen = play(chooser, 50, lambda _: 0.0)
    assert chooser.totals() == {arm.name: (chosen.count(arm), 8 * chosen.count(arm)) for arm in ARMS}
    assert set(chosen) == set(ARMS)


# -- agreement and replay -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", (*KINDS, "random"))
def test_choosers_that_are_told_the_same_agree(kind: str):
    """Two ranks of a replica, told one round late, over batches that shrink."""
    ranks = [make(kind, epsilon=0.3), make(kind, epsilon=0.3)]
    source, late = random.Random(1), None
    seen = set()
    for i in range(1500):
        num_live = 1 + (1500 - i) // 60
        first, second = (rank.choose(num_live, ARMS) for rank in ranks)
        assert first == second
        seen.add(first)
        if late is not None:
            for rank in ranks:
                rank.observe(*late)
        accepted = draw(first, 0.6, num_live, source)
        seconds = COSTS.by_strategy[first] * source.lognormvariate(0, 0.2)
        late = (first, num_live, sum(accepted) + num_live, seconds, accepted)
    assert len(seen) > 3


def record(kind: str = "goodput") -> tuple[Chooser, list[Strategy]]:
    chooser = make(kind, epsilon=0.5, trial_share=0.5)
    return chooser, play(chooser, 60, only_drafter(0.6))


def test_decisions_are_kept_until_taken_and_replayed():
    chooser, chosen = record()
    taken = chooser.take_decisions()
    assert [chooser.strategies[decision.strategy_index] for decision in taken] == chosen
    assert next(iter(taken)) == Decision(0, 8, ARMS.index(chosen[0]))
    assert len(chooser.take_decisions()) == 0
    later = play(chooser, 5, only_drafter(0.6))
    assert [decision.round for decision in chooser.take_decisions()] == [60, 61, 62, 63, 64]
    assert play(ReplayChooser(taken, ARMS), 60, only_drafter(0.1)) == chosen
    assert len(later) == 5


def test_a_replay_that_parts_from_its_record_is_an_error():
    chooser, chosen = record()
    taken = chooser.take_decisions()
    replay = ReplayChooser(taken, ARMS)
    replay.choose(8, ARMS)
    with pytest.raises(ValueError, match="round 1: recorded with 8 live sequences, now 7"):
        replay.choose(7, ARMS)
    with pytest.raises(ValueError, match=f"{chosen[1].name}, which cannot be used"):
        replay.choose(8, [arm for arm in ARMS if arm != chosen[1]])
    play(replay, 59, only_drafter(0.1))
    with pytest.raises(ValueError, match="round 61 but 60"):
        replay.choose(8, ARMS)
    with pytest.raises(ValueError, match="same ones"):
        ReplayChooser(taken, ARMS[:-1])


# -- the simulation -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare_choosers", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def machine() -> CostProfile:
    """Verifying is nearly free for one sequence and costs by the token for many, as processors have it."""
    batches = (1, 4, 16, 64)
    verify = tuple(
        (b, tuple((w, 1e-3 * (2 + 0.45 * b + 0.05 * w + 0.2 * b * (w - 1))) for w in (1, 7))) for b in batches
    )
    drafts = tuple((b, tuple((d, 1e-3 * d * (0.3 + 0.05 * b)) for d in (2, 6))) for b in batches)
    cheap = tuple((b, ((2, 1e-4), (6, 1e-4))) for b in batches)
    return CostProfile(KEY, CostGrid(verify), {"drafter": CostGrid(drafts), "ngram": CostGrid(cheap)}, 0.1)


def chain(chance: float, depth: int) -> list[float]:
    return [chance**k * (1 - chance) for k in range(depth)] + [chance**depth]


def accepts(drafter: float, ngram: float) -> dict[str, list[float]]:
    chances = {"ngram": ngram, "drafter": drafter}
    return {f"{source}-{d}": chain(chance, d) for source, chance in chances.items() for d in (2, 4, 6)}


@pytest.mark.parametrize("with_prior", [True, False])
@pytest.mark.parametrize(("drafter", "ngram"), [(0.85, 0.3), (0.55, 0.2), (0.2, 0.05)])
def test_never_much_slower_than_off_and_near_the_best(tool: ModuleType, drafter: float, ngram: float, with_prior: bool):
    """Drafters that pay, that hardly pay and that do not; noisy costs; long-tailed lengths with refill."""
    distributions = {strategy_named(name): np.array(v) for name, v in accepts(drafter, ngram).items()}
    world = tool.World(machine(), {OFF: np.ones(1), **distributions}, 0.08)
    source = np.random.default_rng(0)
    rollouts = [np.minimum(600, source.lognormal(4, 0.8, 64).astype(np.int64) + 1) for _ in range(6)]
    outcomes = tool.compare(world, rollouts, 16, repeats=2, with_prior=with_prior)
    assert outcomes["off"].over_off == 1
    for kind in KINDS:
        assert outcomes[kind].worst_over_off > 0.97
    assert outcomes["goodput"].seconds < 1.05 * outcomes["oracle"].seconds


@pytest.fixture
def inputs(tmp_path: Path) -> list[str | Path]:
    write_profile(tmp_path / "profile.json", machine())
    (tmp_path / "accepts.json").write_text(json.dumps({"drafter-6": chain(0.8, 6)}))
    (tmp_path / "lengths.json").write_text(json.dumps([[5, 80, 12], [40, 3]]))
    return ["--costs", tmp_path / "profile.json", "--accepts", tmp_path / "accepts.json", "--max-live", "2"]


def run_tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, check=False)


def test_the_tool_prints_a_table_and_writes_json(inputs: list[str | Path], tmp_path: Path):
    command = [*inputs, "--lengths", tmp_path / "lengths.json", "--json", tmp_path / "out.json"]
    done = run_tool(*command, "--strategies", "drafter-2,drafter-6", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    assert "2 rollouts, 5 responses" in done.stdout
    figures = json.loads((tmp_path / "out.json").read_text())
    assert list(figures) == ["off", "drafter-2", "drafter-6", "goodput", "bandit", "oracle"]
    assert figures["off"]["accept_length"] == 1
    assert 1 < figures["drafter-2"]["accept_length"] < figures["drafter-6"]["accept_length"]


def test_the_tool_reads_a_runs_lengths(tool: ModuleType, tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    for step in range(2):
        write_step(folder.rollout_log(step, 0), make_record(3, step=step, rank=0))
    lengths = tool.read_lengths(folder.path)
    expected = [len(rollout.response_tokens) for rollout in make_record(3, step=0, rank=0).rollouts]
    assert lengths[0].tolist() == [length for length in expected if length]
    assert len(lengths) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--lengths", "{tmp}/none.json"], "cannot read"),
        (["--lengths", "{tmp}/accepts.json"], "JSON list of lengths"),
        (["--lengths", "{tmp}"], "holds no response"),
        (["--costs", "{tmp}/accepts.json"], "holds no cost profile"),
        (["--accepts", "{tmp}/lengths.json"], "JSON object"),
        (["--strategies", "ngram-2"], "tells nothing of ngram-2"),
        (["--strategies", "wrong"], "write off"),
        (["--max-live", "1000"], "does not cover"),
        (["--max-live", "0"], "at least 1"),
    ],
)
def test_wrong_input_is_one_line(
    tool: ModuleType,
    inputs: list[str | Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: list[str],
    message: str,
):
    base = [*map(str, inputs), "--lengths", str(tmp_path / "lengths.json")]
    assert tool.main([*base, *(change.format(tmp=tmp_path) for change in changes)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_choosing_needs_no_torch():
    code = "import sys, tlt_hpc.rollout.chooser, tlt_hpc.rollout.cost_profile; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
