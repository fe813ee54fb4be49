"""Multi-round rejection: the tokens follow the target for every drafter, and the chances are the algorithm's own."""

import pytest
import torch

from tlt_hpc.studies.bench.rejection import acceptance, overlap, reject_rounds

VOCAB = 8
CHI_SQUARE_7_DEGREES = 24.3  # 0.1 %
TARGET = torch.tensor([0.31, 0.22, 0.17, 0.12, 0.09, 0.05, 0.03, 0.01])
DRAFTERS = {
    "the target": TARGET,
    "reversed": TARGET.flip(0),
    "uniform": torch.full((VOCAB,), 1 / VOCAB),
    "sharp": TARGET**3 / (TARGET**3).sum(),
    "sure of the rarest": torch.tensor([1e-4] * 7 + [1 - 7e-4]),
    "blind to half": torch.tensor([0.0, 0.4, 0.0, 0.3, 0.0, 0.2, 0.0, 0.1]),
}


def literal(draft: torch.Tensor, num_candidates: int, num: int = 40_000) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_candidates)
    return reject_rounds(TARGET.expand(num, -1), draft.expand(num, -1), num_candidates, generator)


@pytest.mark.parametrize("num_candidates", [1, 2, 4])
@pytest.mark.parametrize("name", DRAFTERS)
def test_tokens_follow_the_target_whatever_the_drafter(name, num_candidates):
    token, _ = literal(DRAFTERS[name], num_candidates)
    counts = torch.bincount(token, minlength=VOCAB)
    expected = TARGET * len(token)
    assert float(((counts - expected) ** 2 / expected).sum()) < CHI_SQUARE_7_DEGREES


@pytest.mark.parametrize("name", DRAFTERS)
def test_chances_are_those_of_the_algorithm(name):
    """Overall and given each token; four standard errors of the literal algorithm's frequencies."""
    draft, num_candidates = DRAFTERS[name], 4
    token, accepted_in = literal(draft, num_candidates)
    every = torch.arange(VOCAB)
    generator = torch.Generator().manual_seed(1)
    chance = acceptance(TARGET.expand(VOCAB, -1), draft.expand(VOCAB, -1), every, num_candidates, 4000, generator)
    for k in range(num_candidates):
        accepted = (accepted_in >= 0) & (accepted_in <= k)
        assert float(accepted.float().mean()) == pytest.approx(float(chance.overall[k, 0]), abs=0.012)
        for v in range(VOCAB):
            of_v = accepted[token == v].float()
            error = 4 * 0.5 / len(of_v) ** 0.5 + 0.01
            assert float(of_v.mean()) == pytest.approx(float(chance.of_token[k, v]), abs=error)


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_single_draw_is_exact_and_a_chance(name):
    draft, every = DRAFTERS[name].expand(VOCAB, -1), torch.arange(VOCAB)
    chance = acceptance(TARGET.expand(VOCAB, -1), draft, every, 4, 1, torch.Generator().manual_seed(0))
    assert float(chance.of_token.min()) >= -1e-5
    assert float(chance.of_token.max()) <= 1 + 1e-5
    # one candidate needs no draw: min(1, q / p) of a token, 1 - TV of all
    assert chance.of_token[0].tolist() == pytest.approx((draft[0] / TARGET).clamp(max=1).tolist(), abs=1e-5)
    assert float(chance.overall[0, 0]) == pytest.approx(float(overlap(TARGET[None], draft[:1])), abs=1e-6)


def test_more_candidates_never_hurt_and_the_target_itself_is_always_accepted():
    draws = torch.Generator().manual_seed(0)
    target, draft = (torch.randn(200, VOCAB, generator=draws).softmax(-1) for _ in range(2))
    chance = acceptance(target, draft, target.argmax(-1), 4, 2, draws)
    assert bool((chance.overall.diff(dim=0) > -1e-6).all())
    same = acceptance(target, target, target.argmax(-1), 2, 2, draws)
    assert float(same.overall.min()) > 1 - 1e-5
