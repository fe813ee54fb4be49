"""How wide the tie guard's zone of doubt is: the errors of the texts last measured, and those it was shown since."""

import pytest
import torch
from tiny import embedded_decoder, embedded_folder, gcd_requests, generate, make_engine, texts

from tlt_hpc.models.folder import read_folder_weights
from tlt_hpc.rollout import tie_guard
from tlt_hpc.rollout.sampling import SamplingRule
from tlt_hpc.rollout.tie_guard import SAFETY, TieGuard, score_tolerances

REQUESTS = gcd_requests(2, 4)


@pytest.fixture
def measured(monkeypatch):
    """The texts that guards measure; the error of each is its length in thousandths."""
    probed = []

    def error(decoder, text, attention):
        probed.append(text)
        return len(text) / 1000

    monkeypatch.setattr(tie_guard, "_logit_error", error)
    return probed


def zones(tie_guard, *lengths):
    """The tolerance in thousandths of SAFETY after each further probe of a text of that length."""
    found = []
    for length in lengths:
        tie_guard.measure_and_set_tolerance([[0] * length])
        found.append(round(tie_guard.logit_tolerance / SAFETY * 1000, 6))
    return found


def test_the_largest_error_of_the_last_four_texts_counts(measured):
    found = zones(TieGuard(embedded_decoder(), active=True), 9, 3, 4, 2, 1, 0, 0, 0, 0)
    assert found == [9, 9, 9, 9, 4, 4, 2, 1, 0.001], "the zone has a floor"


def test_an_error_shown_by_a_guarded_token_counts_as_long(measured):
    """And the token is the canonical one, whatever the fast path said."""
    tie_guard, prefix = TieGuard(embedded_decoder(), active=True), torch.from_numpy(REQUESTS[0].prompt_tokens).long()
    tie_guard.measure_and_set_tolerance([[0] * 10])
    exact, rule = embedded_decoder().reference_logits(prefix, 1)[0], SamplingRule(1.0, 20)
    best = int(exact[:20].argmax())
    assert tie_guard.decide_token_in_float64(prefix, torch.zeros(20), exact.float(), rule) == best
    assert (tie_guard.logit_tolerance, tie_guard.num_raised, tie_guard.num_guarded) == (SAFETY * 0.01, 0, 1)
    wrong = exact.float().index_fill(0, torch.tensor([best]), float(exact[best]) - 0.05)
    assert tie_guard.decide_token_in_float64(prefix, torch.zeros(20), wrong, rule) == best
    assert tie_guard.logit_tolerance == pytest.approx(SAFETY * 0.05, rel=1e-4)
    assert (tie_guard.num_raised, tie_guard.num_guarded) == (1, 2)
    assert zones(tie_guard, 1, 1, 1, 1)[1:] == [pytest.approx(50, rel=1e-4)] * 2 + [1]


def test_each_load_measures_the_longest_text_since_the_last(measured):
    engine = make_engine(max_new_tokens=60)  # calibrated: four texts
    assert len(measured) == 4
    for version in (1, 2):
        rollouts = generate(engine, REQUESTS[4 * version - 4 : 4 * version])
        engine.load_policy(read_folder_weights(embedded_folder()), version)
        assert len(measured) == 4 + version
        whole = [[*r.prompt_tokens.tolist(), *r.response_tokens.tolist()] for r in rollouts]
        assert measured[-1] in whole and len(measured[-1]) == max(map(len, whole))
    engine.load_policy(read_folder_weights(embedded_folder()), 3)
    assert measured[-1] == measured[-2], "no text since: the last one again, on the new weights"


def test_a_guard_that_is_off_measures_nothing(measured):
    engine = make_engine(max_new_tokens=60, tie_guard=False)
    plain = texts(generate(engine, REQUESTS))
    engine.load_policy(read_folder_weights(embedded_folder()), 1)
    assert not measured and texts(generate(engine, REQUESTS)) == plain


@pytest.mark.parametrize("temperature", [0.0, 0.3, 20.0])
def test_the_zone_is_the_same_on_host_and_device(temperature):
    tie_guard = TieGuard(embedded_decoder(), active=True)
    for tie_guard.logit_tolerance in (8e-6, 3e-3):
        zone = score_tolerances(torch.tensor([tie_guard.logit_tolerance]), torch.tensor([temperature]))
        assert float(zone) == pytest.approx(tie_guard.score_tolerance(SamplingRule(temperature, 20)), rel=1e-6)
    assert float(score_tolerances(torch.zeros(1), torch.tensor([temperature]))) == 0
