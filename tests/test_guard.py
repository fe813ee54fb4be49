"""How wide the tie guard's zone of doubt is: the errors of the texts last measured, and those it was shown since."""

import pytest
import torch
from tiny import embedded_decoder, embedded_folder, gcd_requests, generate, make_engine, texts

from tlt_hpc.models.folder import folder_weights
from tlt_hpc.rollout import guard
from tlt_hpc.rollout.guard import SAFETY, TieGuard, doubt
from tlt_hpc.rollout.sampling import SamplingRule

REQUESTS = gcd_requests(2, 4)


@pytest.fixture
def measured(monkeypatch):
    """The texts that guards measure; the error of each is its length in thousandths."""
    probed = []

    def error(decoder, text, attention):
        probed.append(text)
        return len(text) / 1000

    monkeypatch.setattr(guard, "_error", error)
    return probed


def zones(tie_guard, *lengths):
    """The tolerance in thousandths of SAFETY after each further probe of a text of that length."""
    found = []
    for length in lengths:
        tie_guard.probe([[0] * length])
        found.append(round(tie_guard.logit_tolerance / SAFETY * 1000, 6))
    return found


def test_the_largest_error_of_the_last_four_texts_counts(measured):
    assert zones(TieGuard(embedded_decoder(), active=True), 9, 3, 4, 2, 1, 0, 0, 0) == [9, 9, 9, 9, 4, 4, 2, 1]


def test_an_error_shown_by_a_guarded_token_counts_as_long(measured):
    tie_guard = TieGuard(embedded_decoder(), active=True)
    tie_guard.probe([[0]] * 4)
    tie_guard._check(0.5)
    assert tie_guard.logit_tolerance == SAFETY * 0.5
    assert zones(tie_guard, 1, 1, 1, 1) == [500, 500, 500, 1]


def test_the_zone_has_a_floor(measured):
    assert zones(TieGuard(embedded_decoder(), active=True), 0) == [0.001]


def test_each_load_measures_the_longest_text_since_the_last(measured):
    engine = make_engine(max_new_tokens=60)  # calibrated: four texts
    assert len(measured) == 4
    for version in (1, 2):
        rollouts = generate(engine, REQUESTS[4 * version - 4 : 4 * version])
        engine.load_policy(folder_weights(embedded_folder()), version)
        assert len(measured) == 4 + version
        whole = [[*r.prompt_tokens.tolist(), *r.response_tokens.tolist()] for r in rollouts]
        assert measured[-1] in whole and len(measured[-1]) == max(map(len, whole))
    engine.load_policy(folder_weights(embedded_folder()), 3)
    assert measured[-1] == measured[-2], "no text since: the last one again, on the new weights"


def test_a_guard_that_is_off_measures_nothing(measured):
    engine = make_engine(max_new_tokens=60, tie_guard=False)
    plain = texts(generate(engine, REQUESTS))
    engine.load_policy(folder_weights(embedded_folder()), 1)
    assert not measured and texts(generate(engine, REQUESTS)) == plain


@pytest.mark.parametrize("temperature", [0.0, 0.3, 20.0])
def test_the_zone_is_the_same_on_host_and_device(temperature):
    tie_guard = TieGuard(embedded_decoder(), active=True)
    for tie_guard.logit_tolerance in (8e-6, 3e-3):
        zone = doubt(torch.tensor([tie_guard.logit_tolerance]), torch.tensor([temperature]))
        assert float(zone) == pytest.approx(tie_guard.tolerance(SamplingRule(temperature, 20)), rel=1e-6)
    assert float(doubt(torch.zeros(1), torch.tensor([temperature]))) == 0
