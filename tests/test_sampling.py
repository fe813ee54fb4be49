"""The sampling rule and its zones of doubt, against plain float64 definitions."""

import numpy as np
import pytest
import torch
from by_definition import choice_of, law_of, noise_of

from tlt_hpc.common.records import SampleKey
from tlt_hpc.kernels.gumbel import gumbel_argmax
from tlt_hpc.rollout.noise import noise_key
from tlt_hpc.rollout.sampling import (
    Choice,
    SamplingRule,
    choose_tokens,
    choose_tokens_by_rule,
    kept_token_masks,
    lowest_kept_scores,
    token_log_probs,
)

V = 12


TRUNCATIONS = [{}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.9}]


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.4, 0.7, 1.0, 1.8])
def test_choices_follow_the_definition_at_every_temperature(temperature, truncation):
    """On the host and as a device chooses; with the temperature in the wrong place most rows here differ."""
    rule = SamplingRule(temperature, V, **truncation)
    logits = torch.randn(300, V, generator=torch.Generator().manual_seed(6)) * 2
    keys = [SampleKey(3, 0, 0, 0, row) for row in range(300)]
    noise = torch.tensor(np.array([noise_of(key, 9, V) for key in keys]), dtype=torch.float32)
    wanted = [choice_of(*row, rule) for row in zip(logits, noise, strict=True)]
    assert choose_tokens(logits, noise if temperature else noise * torch.nan, rule, 0.0).token.tolist() == wanted
    temperatures, fields = torch.full((300,), temperature), (rule.top_k, rule.top_p)
    scaled = logits / (temperature or 1.0)
    allowed = logits.masked_fill(
        scaled < lowest_kept_scores(scaled, *(torch.tensor([x] * 300) for x in fields)), -torch.inf
    )
    words, positions = torch.tensor([noise_key(key) for key in keys]), torch.full((300,), 9)
    found = gumbel_argmax(allowed, temperatures, words, positions, V)
    assert found.token.tolist() == wanted
    masks = (*kept_token_masks(scaled, rule, 0.0), allowed.isfinite())
    for row in range(0, 300, 7):
        kept = set(law_of(logits[row], rule).nonzero()[0].tolist()) if temperature else {wanted[row]}
        found_kept = [set(mask[row].nonzero().flatten().tolist()) for mask in masks]
        assert all(each == kept if temperature else each >= kept for each in found_kept)
        scores = np.sort(np.where(allowed[row].isfinite(), scaled[row] + noise[row] * (temperature > 0), -np.inf))
        assert float(found.best[row] - found.second[row]) == pytest.approx(scores[-1] - scores[-2], abs=1e-5)
        if not truncation and temperature > 0:
            log_prob = float(found.scaled_logit[row] - found.log_normaliser[row])
            assert np.exp(log_prob) == pytest.approx(law_of(logits[row], rule)[wanted[row]], rel=1e-5)
            token, heat = torch.tensor(wanted[row]), torch.tensor(temperature)
            assert float(token_log_probs(logits[row], token, heat)) == pytest.approx(log_prob, abs=1e-5)


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_outside_doubt_no_small_error_changes_the_choice(truncation):
    """The guard's promise: what is not doubtful survives any error up to half the tolerance."""
    rule = SamplingRule(0.7, V, **truncation)
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(4000, V, generator=generator) * 1.5).round(decimals=1)  # rounding makes ties
    noise = -torch.log(-torch.log(torch.rand(4000, V, generator=generator)))
    tolerance = 0.04
    choice = choose_tokens(logits, noise, rule, tolerance)
    error = tolerance / 2 * rule.temperature
    changed = torch.zeros(4000, dtype=torch.bool)
    for _ in range(20):
        shaken = logits + (torch.rand(4000, V, generator=generator) * 2 - 1) * error
        changed |= choose_tokens(shaken, noise, rule, 0.0).token != choice.token
    assert not (changed & ~choice.doubtful).any()
    assert changed.any(), "the shaking was too weak to test anything"
    assert choice.doubtful.float().mean() < 0.35


def test_rows_of_several_rules_have_each_its_own_choice_and_zone():
    rules = [SamplingRule(0.5, V), SamplingRule(2.0, V), SamplingRule(0.5, V), SamplingRule(0.0, V)]
    generator = torch.Generator().manual_seed(7)
    logits, noise = torch.randn(4, 400, V, generator=generator), torch.randn(4, 400, V, generator=generator)
    rows, flat = torch.arange(4).repeat(400), [x.transpose(0, 1).flatten(0, 1) for x in (logits, noise)]
    found = choose_tokens_by_rule(*flat, rules, rows, lambda rule: 0.02 / (rule.temperature or 1.0))
    found = Choice(found.token.view(400, 4).T, found.doubtful.view(400, 4).T)
    for row, rule in enumerate(rules):
        heat, zone = rule.temperature or 1.0, 0.02 / (rule.temperature or 1.0)
        scores = (logits[row] / heat + noise[row] * (rule.temperature > 0)).double().sort(-1).values
        gaps = scores[:, -1] - scores[:, -2]
        clear = (gaps - zone).abs() > 1e-5
        assert torch.equal(found.doubtful[row][clear], (gaps < zone)[clear]) and found.doubtful[row].sum() > 1
        wanted = [choice_of(*one, rule) for one in zip(logits[row], noise[row], strict=True)]
        assert found.token[row].tolist() == wanted


def test_padding_rows_of_the_vocabulary_are_never_chosen():
    logits = torch.zeros(300, V)
    logits[:, 8:] = 50.0
    noise = torch.randn(300, 8, generator=torch.Generator().manual_seed(4))
    for rule in (SamplingRule(1.0, 8), SamplingRule(0.0, 8), SamplingRule(1.0, 8, top_p=0.9)):
        assert int(choose_tokens(logits, noise, rule, 1e-3).token.max()) < 8


@pytest.mark.parametrize("seed", range(20))
def test_rules_in_tensors_keep_the_same_tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    scaled = torch.randn(6, 40, generator=generator).mul_(3).round_(decimals=1)  # with equals
    truncations = (0, 1.0), (5, 1.0), (0, 0.7), (9, 0.9), (99, 0.3), (2, 1.0)
    rules = [SamplingRule(1.0, 40, top_k, top_p) for top_k, top_p in truncations]
    kept = scaled >= lowest_kept_scores(scaled, *map(torch.tensor, zip(*truncations, strict=True)))
    for row, rule in enumerate(rules):
        surely, perhaps = kept_token_masks(scaled[row], rule, 0.0)
        assert torch.equal(kept[row], perhaps), f"{rule}"
        assert not bool((surely & ~kept[row]).any())
