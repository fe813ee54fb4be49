"""The sampling rule and its zones of doubt, against plain float64 definitions."""

import pytest
import torch

from tlt_hpc.rollout.sampling import SamplingRule, choose, kept_tokens, lowest_kept, token_log_probs

V = 12


def kept_by_definition(logits, rule):
    """One position's kept tokens, written from the definitions with loops."""
    scaled = (logits / rule.temperature).double()
    order = sorted(range(V), key=lambda v: -scaled[v])
    probabilities = torch.softmax(scaled, 0)
    kept = set(range(V))
    if rule.top_k:
        kept &= set(order[: rule.top_k])
    if rule.top_p < 1:
        nucleus, mass = set(), 0.0
        for v in order:
            if mass >= rule.top_p:
                break
            nucleus.add(v)
            mass += float(probabilities[v])
        kept &= nucleus
    if rule.min_p:
        kept &= {v for v in range(V) if probabilities[v] >= rule.min_p * probabilities.max()}
    return kept


RULES = [
    SamplingRule(1.0, V),
    SamplingRule(0.7, V, top_k=3),
    SamplingRule(1.0, V, top_p=0.8),
    SamplingRule(1.3, V, min_p=0.1),
    SamplingRule(0.9, V, top_k=5, top_p=0.9, min_p=0.02),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_kept_tokens_follow_the_definitions(rule):
    logits = torch.randn(200, V, generator=torch.Generator().manual_seed(1)) * 2
    surely, perhaps = kept_tokens(logits / rule.temperature, rule, 0.0)
    for row in range(len(logits)):
        wanted = kept_by_definition(logits[row], rule)
        assert set(surely[row].nonzero().flatten().tolist()) == wanted
        assert set(perhaps[row].nonzero().flatten().tolist()) == wanted


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_outside_doubt_no_small_error_changes_the_choice(rule):
    """The guard's promise: what is not doubtful survives any error up to half the tolerance."""
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(4000, V, generator=generator) * 1.5).round(decimals=1)  # rounding makes ties
    noise = -torch.log(-torch.log(torch.rand(4000, V, generator=generator)))
    tolerance = 0.04
    choice = choose(logits, noise, rule, tolerance)
    error = tolerance / 2 * rule.temperature
    changed = torch.zeros(4000, dtype=torch.bool)
    for _ in range(20):
        shaken = logits + (torch.rand(4000, V, generator=generator) * 2 - 1) * error
        changed |= choose(shaken, noise, rule, 0.0).token != choice.token
    assert not (changed & ~choice.doubtful).any()
    assert changed.any(), "the shaking was too weak to test anything"
    assert choice.doubtful.float().mean() < 0.35


def test_temperature_zero_is_argmax_and_reads_no_noise():
    logits = torch.randn(50, V, generator=torch.Generator().manual_seed(3))
    nan = torch.full((50, V), torch.nan)
    assert torch.equal(choose(logits, nan, SamplingRule(0.0, V), 0.0).token, logits.argmax(-1))


def test_padding_rows_of_the_vocabulary_are_never_chosen():
    logits = torch.zeros(300, V)
    logits[:, 8:] = 50.0
    noise = torch.randn(300, 8, generator=torch.Generator().manual_seed(4))
    for rule in (SamplingRule(1.0, 8), SamplingRule(0.0, 8), SamplingRule(1.0, 8, top_p=0.9)):
        assert int(choose(logits, noise, rule, 1e-3).token.max()) < 8


def test_log_probs_are_of_the_scaled_policy_before_truncation():
    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(5))
    tokens = torch.arange(6)
    wanted = torch.log_softmax(logits / 0.5, -1)[torch.arange(6), tokens]
    torch.testing.assert_close(token_log_probs(logits, tokens, torch.tensor(0.5)), wanted)


@pytest.mark.parametrize("seed", range(20))
def test_rules_in_tensors_keep_the_same_tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    scaled = torch.randn(6, 40, generator=generator).mul_(3).round_(decimals=1)  # with equals
    rules = [
        SamplingRule(1.0, 40, top_k, top_p, min_p)
        for top_k, top_p, min_p in (
            (0, 1.0, 0.0),
            (5, 1.0, 0.0),
            (0, 0.7, 0.0),
            (0, 1.0, 0.2),
            (9, 0.9, 0.01),
            (99, 0.3, 0),
        )
    ]
    fields = ([rule.top_k for rule in rules], [rule.top_p for rule in rules], [rule.min_p for rule in rules])
    kept = scaled >= lowest_kept(scaled, *map(torch.tensor, fields))
    for row, rule in enumerate(rules):
        surely, perhaps = kept_tokens(scaled[row], rule, 0.0)
        assert torch.equal(kept[row], perhaps), f"{rule}"
        assert not bool((surely & ~kept[row]).any())
