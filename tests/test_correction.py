"""Corrections of the rollout's probabilities by hand-computed values, their place in the loss, and what is told."""

from __future__ import annotations

import math
import re

import pytest
import torch

from tlt_hpc.config import Config, ConfigError, load_config
from tlt_hpc.config.recipes import CorrectionName, correction_with
from tlt_hpc.rl.correction import TOLD_EVERY, Mismatch, MismatchWatch, correction_weights, likely_cause, mismatch_terms

ROWS = torch.tensor([0, 0, 0, 1, 1])
RATIOS = torch.tensor([1.5, 4.0, 0.4, 0.8, 1.5])
ROLLOUT = torch.tensor([-1.0, -3.0, -0.5, -2.0, -1.2])
OLD = ROLLOUT + RATIOS.log()


@pytest.mark.parametrize(
    ("name", "wanted", "outside"),
    [
        ("none", [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
        ("tis", [1.5, 2, 0.4, 0.8, 1.5], [0, 1, 0, 0, 0]),
        ("mis", [1.5, 0, 0.4, 0.8, 1.5], [0, 1, 0, 0, 0]),
        ("icepop", [1.5, 4, 0, 0.8, 1.5], [0, 0, 1, 0, 0]),
        # the responses' ratios are 1.5 x 4 x 0.4 = 2.4 and 0.8 x 1.5 = 1.2
        ("sequence-tis", [2, 2, 2, 1.2, 1.2], [1, 1, 1, 0, 0]),
        ("sequence-mis", [0, 0, 0, 1.2, 1.2], [1, 1, 1, 0, 0]),
    ],
)
def test_weights_by_hand(name: CorrectionName, wanted: list[float], outside: list[int]) -> None:
    old = OLD.clone().requires_grad_()
    weights, found = correction_weights(correction_with(name, "auto", "auto"), old, ROLLOUT, ROWS)
    torch.testing.assert_close(weights, torch.tensor(wanted, dtype=torch.float32), rtol=1e-5, atol=0)
    assert found.tolist() == [bool(value) for value in outside]
    assert not weights.requires_grad


def test_bounds_of_ones_own() -> None:
    weights, _ = correction_weights(correction_with("tis", 0.5, 1.2), OLD, ROLLOUT, ROWS)
    torch.testing.assert_close(weights, torch.tensor([1.2, 1.2, 0.5, 0.8, 1.2]), rtol=1e-5, atol=0)


def test_a_wild_ratio_stays_finite_and_no_token_is_fine() -> None:
    weights, _ = correction_weights(
        correction_with("tis", 0.0, math.inf), torch.tensor([0.0]), torch.tensor([-500.0]), torch.tensor([0])
    )
    assert weights.isfinite().all()
    nothing = torch.zeros(0)
    assert correction_weights(
        correction_with("sequence-tis", 0.0, 2.0), nothing, nothing, nothing.long()
    )[0].shape == (0,)  # fmt: skip


def test_distances_are_those_of_the_distributions() -> None:
    """Over all tokens of a vocabulary, weighted by the rollout's probabilities, both estimates are the KL distance."""
    generator = torch.Generator().manual_seed(0)
    rollout, old = torch.randn(2, 50, generator=generator, dtype=torch.float64).log_softmax(-1)
    wanted = (rollout.exp() * (rollout - old)).sum()
    distance, k1, k3 = mismatch_terms(old, rollout)
    for estimate in (k1, k3):
        torch.testing.assert_close((rollout.exp() * estimate).sum(), wanted)
    assert (k3 >= 0).all()
    torch.testing.assert_close(distance, (old.exp() - rollout.exp()).abs())


# -- what is told -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "first", "dtype", "corrected", "said"),
    [
        (Mismatch(1e-8, 1e-13), None, "float32", False, ""),
        (Mismatch(2e-3, 5e-4), None, "bfloat16", False, ""),
        (
            Mismatch(0.02, 1e-3),
            None,
            "float32",
            False,
            "the rollout's probabilities are off the trainer's by 0.02 in the mean (k3 0.001), far more than float32 "
            "explains: engine and trainer do not hold the same weights, or one of them computes wrongly on this "
            "device; run `tlt compare` with speculation.mode = 'plain' and report it",
        ),
        (
            Mismatch(0.05, 0.02),
            Mismatch(0.04, 0.01),
            "bfloat16",
            False,
            "the rollout's probabilities are off the trainer's by 0.05 in the mean (k3 0.02), more than bfloat16's "
            "rounding usually gives: the kernels of engine and trainer differ; set algorithm.rollout_correction = "
            "'tis' or 'icepop', or use model.dtype = 'float32'",
        ),
        (
            Mismatch(0.05, 0.02),
            Mismatch(0.001, 0.0005),
            "bfloat16",
            True,
            "the rollout's probabilities are off the trainer's by 0.05 in the mean (k3 0.02), 40 times the first "
            "step's: the policy has sharpened where bfloat16 is coarse; lower optimizer.learning_rate, or use "
            "model.dtype = 'float32'",
        ),
    ],
)
def test_the_likely_cause(now: Mismatch, first: Mismatch | None, dtype: str, corrected: bool, said: str) -> None:
    assert likely_cause(now, first, dtype, corrected) == said


@pytest.mark.parametrize("first", [0.0, -1e-9])
def test_a_first_step_without_any_distance_is_no_divisor(first: float) -> None:
    assert "200 times the first step's" in likely_cause(Mismatch(0.1, 0.02), Mismatch(0.0, first), "bfloat16", False)


def test_it_is_told_at_once_and_then_now_and_again() -> None:
    watch = MismatchWatch("bfloat16", False)
    assert not watch.look(Mismatch(1e-3, 1e-4), lambda: pytest.fail("nothing is to be told"))
    told = [bool(watch.look(Mismatch(0.05, 0.02), lambda: None)) for _ in range(2 * TOLD_EVERY + 1)]
    assert [index for index, value in enumerate(told) if value] == [0, TOLD_EVERY, 2 * TOLD_EVERY]
    for _ in range(TOLD_EVERY - 1):  # steps that are well count too
        watch.look(Mismatch(1e-3, 1e-4), lambda: None)
    assert watch.look(Mismatch(0.05, 0.02), lambda: None)


def test_it_is_told_with_the_first_steps_distance_and_what_is_corrected() -> None:
    now, first = Mismatch(0.05, 0.02), Mismatch(0.001, 0.0005)
    assert MismatchWatch("bfloat16", True).look(now, lambda: first) == likely_cause(now, first, "bfloat16", True)


# -- configuration ----------------------------------------------------------------------------------------------------


def load(*overrides: str) -> Config:
    return load_config("jobs/tiny.toml", [f"algorithm.{override}" for override in overrides])


def test_bounds_are_resolved() -> None:
    algorithm = load("rollout_correction=icepop", "rollout_correction_high=4").algorithm
    assert (algorithm.rollout_correction_low, algorithm.rollout_correction_high) == (0.5, 4.0)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["rollout_correction_high=2"],
            "algorithm.rollout_correction_low = 0.0 and rollout_correction_high = 2.0 say nothing with "
            "algorithm.rollout_correction = 'none'; name a correction such as 'tis', or leave them out",
        ),
        (
            ["rollout_correction=icepop", "rollout_correction_low=1.5"],
            "algorithm.rollout_correction_low = 1.5 and rollout_correction_high = 5.0 do not lie on both sides of 1, "
            "the ratio where rollout and trainer agree; use bounds such as 0.5 and 5.0",
        ),
        (["rollout_correction=TIS"], "algorithm.rollout_correction = 'TIS': input should be 'none', 'tis'"),
        (
            ["rollout_correction_low=-1"],
            "algorithm.rollout_correction_low = -1: use a number from 0 to 1e+06, or 'auto'",
        ),
    ],
)
def test_bad_values_are_told(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(*overrides)
