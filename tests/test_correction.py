"""Corrections of the rollout's probabilities by hand-computed values, their place in the loss, and what is told."""

from __future__ import annotations

import math
import re

import pytest
import torch

from tlt_hpc.config import AlgorithmSection
from tlt_hpc.config.recipes import Correction, CorrectionName
from tlt_hpc.rl.correction import MismatchWatch, correction_weights, mismatch_terms

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
    ],
)
def test_weights_by_hand(name: CorrectionName, wanted: list[float], outside: list[int]) -> None:
    old = OLD.clone().requires_grad_()
    weights, found = correction_weights(AlgorithmSection(rollout_correction=name).correction, old, ROLLOUT)
    torch.testing.assert_close(weights, torch.tensor(wanted, dtype=torch.float32), rtol=1e-5, atol=0)
    assert found.tolist() == [bool(value) for value in outside]
    assert not weights.requires_grad


def test_a_wild_ratio_stays_finite() -> None:
    weights, _ = correction_weights(Correction("tis", 0.0, math.inf), torch.tensor([0.0]), torch.tensor([-500.0]))
    assert weights.isfinite().all()


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
    ("k3", "dtype", "corrected", "said"),
    [
        (1e-13, "float32", False, "^$"),
        (5e-4, "bfloat16", False, "^$"),
        (1e-3, "float32", False, "mean difference 0.05, k3 0.001, far more .* run `tlt compare`"),
        (0.02, "bfloat16", False, "set algorithm.rollout_correction"),
        (0.02, "bfloat16", True, "lower optimizer.learning_rate"),
    ],
)
def test_the_warning_names_a_remedy(k3: float, dtype: str, corrected: bool, said: str) -> None:
    assert re.search(said, MismatchWatch(dtype, corrected).look(0.05, k3))


def test_it_warns_once() -> None:
    watch = MismatchWatch("bfloat16", False)
    assert [bool(watch.look(0.05, k3)) for k3 in (1e-4, 0.02, 0.02)] == [False, True, False]
