"""Which steps train the drafter: a function of the log, by an accept length that no choice of depth moves."""

from __future__ import annotations

import json
import random

import pytest

from tlt_hpc.config import ConfigError, DrafterSection, load_config
from tlt_hpc.drafting.schedule import BLIND_STEPS, JUDGED_DEPTH, PATIENCE, DraftCounts, decide, judge
from tlt_hpc.plan.shape_checks import check_strategies
from tlt_hpc.rollout.chooser import DraftTally
from tlt_hpc.rollout_loop import past_drafts
from tlt_hpc.storage.folder import RunFolder

WARM = {"init": "embedded:tiny", "schedule": "falling"}


def counts_of(length: float, sequences: float = 1000.0) -> DraftCounts:
    """Counts whose accept length this is: one chance at all positions."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**j for j in range(JUDGED_DEPTH + 1)) < length else (low, middle)
    return DraftCounts(
        tuple(sequences * high**j for j in range(JUDGED_DEPTH)),
        tuple(sequences * high ** (j + 1) for j in range(JUDGED_DEPTH)),
    )


def decisions(lengths: list[float], **settings) -> str:
    """One letter a step: T trains, . rests; step i decides on the lengths before it."""
    section = DrafterSection(**{**WARM, **settings})
    past = [counts_of(length) for length in lengths]
    return "".join("T" if decide(section, step, past[:step]).trains else "." for step in range(len(lengths) + 1))


def test_always() -> None:
    assert all(decide(DrafterSection(), step, []).trains for step in range(5))


def test_falling_begins_under_the_fall_and_ends_at_half_of_it() -> None:
    assert decisions([4.0, 3.7, 3.7, 3.59, 3.7, 3.79, 3.81, 3.7]) == "....TTT.."
    assert decisions([3.0, 4.0, 3.7, 4.4, 3.9]) == ".....T", "a new best moves the bounds"


def test_falling_from_random_trains_until_it_has_stopped_growing() -> None:
    grows = [1.0, 1.3, 1.7, 2.0, 2.2, 2.3, 2.4, 2.41, 2.42, 2.41, 2.42, 2.43, 2.43, 2.1]
    seen = decisions(grows, init="random")
    first_rest = seen.index(".")
    assert seen == "T" * first_rest + "." * (len(grows) - first_rest) + "T"
    assert PATIENCE + 1 < first_rest < len(grows) - 1
    assert decisions([], init="random") == "T" and decisions([]) == "."


def test_steps_with_few_rounds_of_the_drafter_are_not_judged() -> None:
    section = DrafterSection(**WARM)
    judged, thin = counts_of(4.0), counts_of(1.5, sequences=150)
    assert decide(section, 2, [judged, thin]) == decide(section, 1, [judged])
    assert "accept length 4.00, best 4.00, resting under 3.60" in decide(section, 2, [judged, thin]).reason


def test_few_rounds_of_several_steps_together_are_judged() -> None:
    section = DrafterSection(**WARM)
    judged, thin, nothing = counts_of(4.0), counts_of(1.5, sequences=90), counts_of(1.0, sequences=0)
    past = [judged, thin, thin, nothing, thin, thin]
    assert judge(past) == [pytest.approx(4.0), None, None, None, pytest.approx(1.5), None]
    assert [decide(section, step, past[:step]).trains for step in (4, 5, 6)] == [False, True, True]


@pytest.mark.parametrize("before", [[], [counts_of(4.0)] * 3])
def test_a_drafter_that_is_no_longer_asked_trains_until_it_can_be_judged(before: list[DraftCounts]) -> None:
    section, nothing = DrafterSection(**WARM), counts_of(1.0, sequences=0)
    blind = [*before, *[nothing] * BLIND_STEPS]
    assert not decide(section, len(blind) - 1, blind[:-1]).trains
    assert decide(section, len(blind), blind).reason == "falling: nothing judged in 5 steps, training until there is"
    seen = [decide(section, 99, [*blind, *more]).trains for more in ([nothing], [counts_of(4.0)], [counts_of(4.0)] * 2)]
    assert seen == [True, False, False]


def test_only_a_drafter_from_random_trains_while_it_grows() -> None:
    lengths = [3.0] * 6 + [2.6, 4.0, 4.0]
    assert decisions(lengths) == "." * 7 + "T.."
    grows = [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.7, 2.5, 2.5]
    assert decisions(grows) == "." * 7 + "T.." and decisions(grows, init="random")[-3:] == "TTT"


def test_the_accept_length_is_the_same_whichever_depths_were_chosen() -> None:
    source, chance = random.Random(0), (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)

    def accepted(reach: int) -> int:
        return next((j for j in range(reach) if source.random() > chance[j]), reach)

    def judged(depths: list[int]) -> DraftCounts:
        tally = DraftTally()
        for depth in depths:
            tally.add(depth, [accepted(depth) for _ in range(64)])
        columns = (tuple(map(float, column[:JUDGED_DEPTH])) for column in (tally.reached, tally.accepted))
        return DraftCounts(*columns)

    true = 1 + 0.9 + 0.9 * 0.8 + 0.9 * 0.8 * 0.7 + 0.9 * 0.8 * 0.7 * 0.6
    for depths in ([4] * 300, [8] * 300, [2] * 500 + [4] * 150, [2, 8] * 200):
        assert judged(depths).accept_length == pytest.approx(true, abs=0.05), depths
        assert judged(depths).first_draft_share == pytest.approx(0.9, abs=0.01)
    assert judged([2] * 300).accept_length > true, "beyond what was drafted the last chance is taken"
    assert DraftCounts((0.0,) * 4, (0.0,) * 4).accept_length == 1.0


def test_counts_survive_the_log_and_later_steps_are_not_read(tmp_path) -> None:
    """A resumed run finds lines of steps that it does again: it decides as if they were not there."""
    rows = [counts_of(length) for length in (4.0, 3.5, 3.9)]
    lines = [json.dumps({"training/global_step": float(i), **row.to_metrics()}) for i, row in enumerate(rows)]
    folder = RunFolder(tmp_path)
    assert past_drafts(folder, 0) == []
    folder.metrics.write_text("\n".join(lines) + "\n")
    assert past_drafts(folder, 3) == rows and past_drafts(folder, 2) == rows[:2]
    section = DrafterSection(**WARM)
    assert decide(section, 2, past_drafts(folder, 2)).trains and not decide(section, 3, past_drafts(folder, 3)).trains


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["drafter.schedule=falling", 'speculation.strategies=["ngram-4"]'], "judges the learned drafter's rounds"),
    ],
)
def test_combinations_that_make_no_sense_are_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_strategies(load_config("jobs/tiny.toml", overrides))
    assert message in str(caught.value) and "\n" not in str(caught.value)
