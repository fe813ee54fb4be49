"""The chooser finds what pays, loses next to nothing on what does not, and is a function of what it observed."""

import json
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import chooser_study
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_hpc.rollout import acceptance
from tlt_hpc.rollout import chooser as chooser_module
from tlt_hpc.rollout.acceptance import FamilyAcceptance
from tlt_hpc.rollout.chooser import Chooser, RandomChooser, TrialBudget
from tlt_hpc.rollout.costs import RoundCosts, _Correction
from tlt_hpc.rollout.strategy import OFF, Strategy, parse_strategies, parse_strategy


def chains(depths: Sequence[int]) -> tuple[Strategy, ...]:
    """Off, and chains of both drafters."""
    return parse_strategies("full", [f"{source}-{depth}" for source in ("ngram", "drafter") for depth in depths])


ARMS = chains((2, 4, 6))
COSTS = {arm: 0.01 + 0.001 * arm.depth * (2 if arm.source == "drafter" else 1) for arm in ARMS}


def draw(strategy: Strategy, chance: float, num_live: int, source: random.Random) -> list[int]:
    """Accepted drafts by sequence, each position matching with the same chance."""
    accepted = []
    for _ in range(num_live):
        count = 0
        while count < strategy.reach and source.random() < chance:
            count += 1
        accepted.append(count)
    return accepted


def play(chooser: Chooser, rounds: int, chance: Callable[[Strategy], float], num_live: int = 8) -> list[Strategy]:
    """Rounds of a constant batch; returns what was chosen."""
    source, chosen = random.Random(0), []
    for _ in range(rounds):
        strategy, _ = chooser.choose(num_live, chooser.strategies)
        accepted = draw(strategy, chance(strategy), num_live, source)
        chooser.observe(strategy, num_live, sum(accepted) + num_live, COSTS[strategy], accepted)
        chosen.append(strategy)
    return chosen


def make(arms: Sequence[Strategy] = ARMS, epsilon: float = chooser_module.TRIAL_CHANCE) -> Chooser:
    chooser = Chooser(arms)
    chooser._trial_chance = epsilon
    return chooser


def only_drafter(chance: float) -> Callable[[Strategy], float]:
    return lambda strategy: chance if strategy.source == "drafter" else 0.0


# -- names ----------------------------------------------------------------------------------------------------------


def test_strategies_of_a_mode():
    names = ("ngram-2", "drafter-4", "drafter-3x2v6", "ngram-2")
    assert parse_strategies("plain", names) == (OFF,)
    assert [s.name for s in parse_strategies("ngram", names)] == ["off", "ngram-2"]
    assert [s.name for s in parse_strategies("full", names)] == ["off", "ngram-2", "drafter-4", "drafter-3x2v6"]


@pytest.mark.parametrize(
    ("strategy", "slots"),
    [
        (OFF, 1),
        (Strategy("ngram", 4), 5),
        (Strategy("drafter", 6, 4, 16, 2.5), 22),
        (Strategy("drafter", 3, 2), 6),
        (Strategy("drafter", 2, 3, 12), 13),
        (Strategy("drafter", 32), 33),
    ],
)
def test_a_strategy_is_told_by_its_name(strategy: Strategy, slots: int):
    named = parse_strategy(strategy.name)
    assert (named.name, named.num_drafts, named.reach) == (strategy.name, strategy.num_drafts, strategy.reach)
    same = "source", "depth", "branching", "sharpness"
    assert [getattr(named, each) for each in same] == [getattr(strategy, each) for each in same]
    assert named.num_slots == slots


WRONG_NAMES = "hybrid-4x2v8 of drafter magic-4 drafter-4x2 off-3 drafter-33 drafter-4a0 drafter-4x1v4 ngram-4x2v6"


@pytest.mark.parametrize("name", ["", *WRONG_NAMES.split(), "drafter-2x2v50", "drafter-4x20v40", "drafter-5x16v16"])
def test_a_wrong_name_is_an_error(name: str):
    with pytest.raises(ValueError, match="drafter"):
        parse_strategy(name)
    assert parse_strategy("drafter-4x16v63").num_slots == 64


# -- costs ----------------------------------------------------------------------------------------------------------


def linear_cost(arm: Strategy, num_live: int) -> float:
    steps = arm.depth if arm.has_drafter else 0
    return 2e-3 + num_live * (1e-4 + 6e-5 * arm.widest_pass + 3e-5 * steps) + 4e-4 * steps


def test_rounds_of_some_strategies_tell_the_cost_of_all_at_any_batch():
    arms = (*chains((2, 4, 8)), Strategy("drafter", 4, 2, 9))
    costs, source = RoundCosts(arms), random.Random(0)
    for i in range(120):
        assert costs.plain_cost_is_known == (i > 2) and costs.is_known(arms.index(OFF)) == (i > 0)
        ran = (OFF, Strategy("ngram", 4), Strategy("drafter", 2))
        arm, num_live = (OFF if i < 3 else source.choice(ran)), source.choice((1, 2, 12, 24))
        costs.add_measurement(arms.index(arm), num_live, linear_cost(arm, num_live) * source.lognormvariate(0, 0.1))
    for num_live in (1, 5, 16, 32):
        wanted = [linear_cost(arm, num_live) for arm in arms[:-1]]
        assert costs.expected_seconds(num_live)[:-1] == pytest.approx(wanted, rel=0.25), "most of them never ran"
    assert costs.is_measured(0, 10) and not costs.is_measured(0, 8) and not costs.is_measured(6, 12)


def test_what_is_not_linear_is_a_correction_that_fades_where_it_is_not_measured():
    arms = chains((2, 4, 8))
    costs, drafter = RoundCosts(arms), arms.index(Strategy("drafter", 4))
    for i in range(300):
        num_live = (4, 16)[i % 2]
        for index, arm in enumerate(arms):
            dear = 1.8 if (index, num_live) == (drafter, 16) else 1.0
            costs.add_measurement(index, num_live, dear * linear_cost(arm, num_live))
    assert costs.expected_seconds(16)[drafter] == pytest.approx(1.8 * linear_cost(arms[drafter], 16), rel=0.1)
    assert costs.expected_seconds(4)[drafter] == pytest.approx(linear_cost(arms[drafter], 4), rel=0.15)
    before = costs.expected_seconds(16)[drafter]
    for _ in range(4000):
        costs.add_measurement(0, 4, linear_cost(OFF, 4))
    assert costs.expected_seconds(16)[drafter] < 0.9 * before


def linear_cost_with_stored(arm: Strategy, num_rest: int, num_stored: int, num_tokens: int) -> float:
    return linear_cost(arm if num_rest else OFF, num_rest) + 1e-4 * num_stored + 6e-5 * num_tokens


def test_rounds_with_stored_texts_are_predicted_and_tell_of_the_others():
    """Without any strategy of their own: by their sequences and tokens."""
    arms = chains((2, 4))
    costs, source = RoundCosts(arms), random.Random(0)
    for i in range(200):
        index, num_live = (0 if i < 3 else source.randrange(5)), source.choice((1, 4, 16))
        costs.add_measurement(index, num_live, linear_cost(arms[index], num_live))
    for mixed in ((4, 4, 4 * 9), (0, 8, 8 * 33), (7, 1, 17)):
        wanted = [linear_cost_with_stored(arm, *mixed) for arm in arms]
        assert costs.expected_seconds_with_stored(*mixed) == pytest.approx(wanted, rel=0.25)
    for _ in range(60):
        for index in range(len(arms)):
            costs.add_measurement_with_stored(index, 8, 8, 200, 3 * linear_cost_with_stored(arms[index], 8, 8, 200))
    assert costs.expected_seconds_with_stored(8, 8, 200)[0] > 2 * linear_cost_with_stored(OFF, 8, 8, 200)


def test_slow_rounds_of_a_busy_machine_change_little_and_a_lasting_change_is_followed():
    costs = RoundCosts((OFF,))
    for seconds in (1.0,) * 50 + (9.0,) * 2:
        costs.add_measurement(0, 4, seconds)
    assert costs.expected_seconds(4)[0] < 1.2
    for _ in range(150):
        costs.add_measurement(0, 4, 3.0)
    assert costs.expected_seconds(4)[0] == pytest.approx(3.0, rel=0.1)


# -- estimates ------------------------------------------------------------------------------------------------------


def test_counts_of_deep_chains_give_the_accept_length_of_every_shallower_one(monkeypatch: pytest.MonkeyPatch):
    """And a chain accepted whole says nothing of what lies beyond it."""
    monkeypatch.setattr(acceptance, "WINDOW", 100_000)
    accepted = [0] * 4 + [1] * 3 + [2] * 6 + [4] * 2 + [5] + [6] * 4
    matches, mixed = FamilyAcceptance(6), FamilyAcceptance(4)
    for _ in range(10_000):
        matches.add(6, accepted)
        mixed.add(2, [2, 2])  # depth 2 always stands; depth 4 tells that the third position matches half of the time
        mixed.add(4, [2, 4])
    wanted = [1 + np.minimum(accepted, depth).mean() for depth in range(7)]
    assert matches.accept_lengths() == pytest.approx(wanted, abs=2e-3)
    assert (mixed.accept_lengths()[2], mixed.accept_lengths()[4]) == pytest.approx((3, 4), abs=0.01)


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


def test_what_pays_is_found_and_left_when_it_no_longer_does():
    chooser = make()
    assert play(chooser, 600, only_drafter(0.95))[-200:].count(Strategy("drafter", 6)) > 150
    assert play(chooser, 600, only_drafter(0.05))[-200:].count(OFF) > 180
    chooser.acceptance.discount(0.0)
    assert sum(s.source == "drafter" for s in play(chooser, 100, only_drafter(0.85))) > 60, "found soon after a swap"


@pytest.mark.parametrize(("num_live", "usual", "worst"), [(1, 0.045, 0.25), (8, 0.025, 0.12)])
def test_a_fresh_chooser_is_soon_as_fast_as_the_best_strategy(num_live: int, usual: float, worst: float):
    """Over 500 rounds of each of 24 tables; tests/chooser_study.py takes 200 of them, and more sequences."""
    losses = [chooser_study.loss(table, num_live, seed) for seed, table in enumerate(chooser_study.make_tables(24))]
    assert sum(losses) / len(losses) < usual and max(losses) < worst


def test_one_depth_tells_of_all_others():
    """A few rounds of depth 6 and few plain ones: depth 2 is known to be best after a single round of it."""
    arms = (OFF, *(Strategy("drafter", depth) for depth in (2, 4, 6)))
    chooser = make(arms, epsilon=0.0)
    for arm in (OFF, OFF, OFF, *arms):
        chooser.observe(arm, 8, 8, COSTS[arm], [0] * 8 if arm == OFF else [min(2, arm.reach)] * 8)
    for _ in range(40):
        chooser.observe(arms[3], 8, 16, COSTS[arms[3]], [0, 0, 2, 2, 2, 2, 2, 2])
    assert chooser.choose(8, arms)[0] == Strategy("drafter", 2)


def test_accept_length_learned_at_one_batch_size_serves_at_another():
    chooser = make(epsilon=0.0)
    play(chooser, 200, only_drafter(0.8), num_live=32)
    chosen = play(chooser, 10, only_drafter(0.8), num_live=2)  # one plain, two of a strategy that never ran
    assert [strategy.source for strategy in chosen].count("drafter") >= 7


def test_trials_stay_under_their_share_and_never_cease():
    chooser = make(epsilon=0.3)
    chosen = play(chooser, 6000, lambda _: 0.05)
    lost = sum(COSTS[s] - COSTS[OFF] for s in chosen)
    assert lost < 0.03 * sum(COSTS[s] for s in chosen)
    assert any(strategy != OFF for strategy in chosen[-1000:])


def test_a_checkpoint_keeps_acceptance_and_survives_other_settings():
    chooser = make()
    play(chooser, 200, only_drafter(0.8))
    saved = json.loads(json.dumps(chooser.acceptance.state()))
    again = make()
    again.choose(8, ARMS)  # as if nothing were known
    again.acceptance.load_state(saved)
    assert again.acceptance.state() == chooser.acceptance.state()
    length = again.acceptance.accept_lengths(8)[0][ARMS.index(Strategy("drafter", 2))]
    assert length == pytest.approx(1 + 0.8 + 0.8**2, rel=0.05), "before it, 1 + 0.6 + 0.6**2"
    again.acceptance.discount(0.5)
    assert again.acceptance.state()["ngram:a1"] == saved["ngram:a1"], "of the drafter alone, which was replaced"
    assert again.acceptance.state()["drafter:a1"] == [value / 2 for value in saved["drafter:a1"]]
    shallower = make(chains((2,)))
    shallower.acceptance.load_state({**saved, "off": [1.0, 1.0], "gone-3": [2.0]})
    assert shallower.acceptance.state()["drafter:a1"] == saved["drafter:a1"][:5]


def stored(num_drafts: int, *, is_sure: bool) -> SimpleNamespace:
    """What a chooser reads of a stored text."""
    return SimpleNamespace(num_drafts=num_drafts, is_sure=is_sure)


@pytest.mark.parametrize(
    ("row", "step", "wanted"),
    [
        # 8 sequences alike: 8 * 4.7 tokens in 8.4 ms. Half of them with stored texts, and the drafter for the others:
        # (4 * 8.0 + 4 * 4.7) in 8.9 ms; without the drafter (4 * 8.0 + 4) in 7.0 ms
        (stored(8, is_sure=True), 2e-4, (Strategy("drafter", 4), 8)),
        # a step of the drafter takes ten times as long: (4 * 8.0 + 4 * 4.7) in 16.1 ms
        (stored(8, is_sure=True), 2e-3, (OFF, 8)),
        # 4 * 2.5 and 4 * 4.7 tokens in 7.9 ms; 8 * 4.7 in 8.4 ms
        (stored(3, is_sure=False), 2e-4, (Strategy("drafter", 4), 0)),
        # 4 * 20.5 + 4 * 4.7 in 10.8 ms; with drafts of 16 tokens, 4 * 13.5 + 4 * 4.7 in 9.6 ms
        (stored(99, is_sure=True), 2e-4, (Strategy("drafter", 4), 32)),
    ],
)
def test_stored_texts_and_the_strategy_of_the_others_are_chosen_together(row, step, wanted):
    """Known costs: 5 ms a round, 50 us a verified token, a step of the drafter and 20 us a token of it."""
    arms = (OFF, Strategy("drafter", 4))
    chooser = make(arms, epsilon=0.0)
    costs = chooser._costs
    costs._coefficients, costs._num_off_rounds = np.array([5e-3, 0, 5e-5, step, 2e-5]), 3
    costs._corrections, costs._have_run = [{3: _Correction()} for _ in arms], {0, 1}
    for _ in range(200):
        chooser.acceptance.add(arms[1], 8, [4] * 7 + [2])
    assert chooser.acceptance.accept_lengths(8)[0][1] == pytest.approx(4.7, abs=0.1)
    assert chooser.choose(8, arms, [row] * 4, 1000) == wanted
    assert chooser.choose(8, arms, [row] * 4, 39)[1] in (0, 4), "a pass of no more than 39 tokens"


def test_stored_texts_are_drafted_from_as_long_as_they_are_accepted():
    arms, rows = (OFF,), dict.fromkeys(range(4), stored(8, is_sure=True))
    chooser = make(arms, epsilon=0.0)
    for _ in range(3):
        assert chooser.choose(4, arms, rows.values(), 1000) == (OFF, 0), "plain costs come first"
        chooser.observe(OFF, 4, 4, 0.01, [0] * 4)
    for accepted, following in ((0, 0), (8, 8)):
        assert chooser.choose(4, arms, rows.values(), 1000)[1] != following
        for _ in range(800):
            chooser.observe_with_stored(OFF, 0.012, [accepted] * 4, rows, 8)
        assert chooser.choose(4, arms, rows.values(), 1000)[1] == following


def test_drafts_that_are_accepted_in_small_batches_alone_are_made_there_alone():
    arms = (OFF, Strategy("drafter", 4))
    chooser = make(arms, epsilon=0.0)
    for num_live, count in ((32, 0), (2, 4)) * 100:
        chooser.observe(OFF, num_live, num_live, COSTS[OFF], [0] * num_live)
        chooser.observe(arms[1], num_live, num_live * (1 + count), COSTS[arms[1]], [count] * num_live)
    assert [chooser.choose(num_live, arms)[0] for num_live in (32, 2)] == list(arms)


@pytest.mark.parametrize("kind", [Chooser, RandomChooser])
def test_choosers_that_are_told_the_same_agree(kind: type[Chooser]):
    """Two ranks of a replica, told one round late, over batches that shrink; only usable strategies are chosen."""
    ranks = [kind(ARMS, 0) for _ in range(2)]
    source, late = random.Random(1), None
    chosen = []
    for i in range(1500):
        num_live = 1 + (1500 - i) // 60
        usable = ARMS if i % 3 else [arm for arm in ARMS if arm.source != "drafter"]
        first, second = (rank.choose(num_live, usable)[0] for rank in ranks)
        assert first == second and first in usable
        chosen.append(first)
        if late is not None:
            for rank in ranks:
                rank.observe(*late)
        accepted = draw(first, 0.6, num_live, source)
        seconds = COSTS[first] * source.lognormvariate(0, 0.2)
        late = (first, num_live, sum(accepted) + num_live, seconds, accepted)
    assert len(set(chosen)) > 3


@given(
    st.floats(0.0, 0.95),
    st.floats(0.0, 0.95),
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.3, 3.0)), min_size=3, max_size=6),
)
@settings(max_examples=25, deadline=None)
def test_the_time_lost_against_plain_decoding_is_bounded(drafter, ngram, phases):
    """Against an oracle that decodes plainly, at plain costs that jump tenfold; seen: up to 1.4 times its time."""
    source, chooser = random.Random(0), make()
    spent = plain = 0.0
    for num_live, factor in phases:
        for _ in range(150):
            strategy, _ = chooser.choose(num_live, ARMS)
            chance = {"drafter": drafter, "ngram": ngram, "off": 0.0}[strategy.source]
            accepted = draw(strategy, chance, num_live, source)
            seconds = COSTS[strategy] * (factor if strategy == OFF else 1.0) * (0.5 + num_live / 8)
            tokens = sum(accepted) + num_live
            chooser.observe(strategy, num_live, tokens, seconds, accepted)
            spent += seconds
            plain += tokens / num_live * COSTS[OFF] * factor * (0.5 + num_live / 8)
    assert spent < 2 * plain
