"""What truncated rollouts do to an update that scores the whole softmax: by enumeration of all responses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch_ranks import ROOT, tlt
from test_laws import PROMPT, V, model, triples_law

from tlt_hpc.cli.main import main
from tlt_hpc.config import load_config, truncation_warning
from tlt_hpc.rollout.sampling import SamplingRule


def gradients(rule: SamplingRule) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The mean reward's gradient under a rule's law, the mean of the trainer's estimate of it, and the mean of minus
    the logarithm of the kept mass, per token.

    A response is worth 1 if its tokens add up to an even number. Which tokens are kept does not change with a step.
    """
    policy, law = model(), triples_law(rule)
    rewards = {tokens: float(sum(tokens) % 2 == 0) for tokens in law}
    baseline = sum(p * rewards[tokens] for tokens, p in law.items())
    logits = policy(torch.tensor([[*PROMPT, *tokens[:2]] for tokens in law])).logits[:, len(PROMPT) - 1 :]
    exact, estimate, lost = torch.zeros(()), torch.zeros(()), 0.0
    for row, (tokens, p) in zip((logits / rule.temperature).log_softmax(-1), law.items(), strict=True):
        full = torch.stack([row[i, token] for i, token in enumerate(tokens)]).sum()
        kept = [sorted({other[i] for other in law if other[:i] == tokens[:i]}) for i in range(3)]
        mass = torch.stack([row[i, among].logsumexp(0) for i, among in enumerate(kept)]).sum()
        weight = p * (rewards[tokens] - baseline)
        exact, estimate, lost = exact + weight * (full - mass), estimate + weight * full, lost - p * mass.item() / 3
    parameters = list(policy.parameters())
    of_exact, of_estimate = (
        torch.cat([part.flatten() for part in torch.autograd.grad(value, parameters, retain_graph=True)])
        for value in (exact, estimate)
    )
    return of_exact, of_estimate, lost


@pytest.mark.parametrize(
    ("rule", "distance", "error"),
    [
        (SamplingRule(1.0, V), 0.0, 0.0),
        (SamplingRule(1.0, V, top_p=0.99), 0.006, 0.007),
        (SamplingRule(1.0, V, top_p=0.95), 0.035, 0.029),
        (SamplingRule(1.0, V, top_p=0.9), 0.067, 0.047),
        (SamplingRule(1.0, V, top_p=0.8), 0.140, 0.107),
        (SamplingRule(1.0, V, top_k=4), 0.067, 0.028),
    ],
    ids=str,
)
def test_the_bias_that_the_page_states(rule: SamplingRule, distance: float, error: float) -> None:
    """The figures of docs/train.md; the distance is KL(sampled || scored) in nats a token."""
    exact, estimate, lost = gradients(rule)
    assert lost == pytest.approx(distance, abs=1e-3)
    assert float((estimate - exact).norm() / exact.norm()) == pytest.approx(error, abs=2e-3)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], ""),
        (["rollout.temperature=0.7"], ""),
        (["rollout.top_p=0.9"], "rollout.top_p = 0.9: responses"),
        (["rollout.top_k=20", "rollout.top_p=0.8"], "rollout.top_k = 20 and rollout.top_p = 0.8: responses"),
        (["rollout.temperature=0", "rollout.top_p=0.9", "algorithm.name=reinforce++"], ""),
    ],
)
def test_a_start_says_that_the_gradient_is_biased(overrides: list[str], said: str) -> None:
    found = truncation_warning(load_config(ROOT / "jobs" / "tiny.toml", overrides).rollout)
    assert found.startswith(said) and bool(found) == bool(said) and "\n" not in found


@pytest.mark.mpi
def test_the_warning_is_printed_at_a_start_and_at_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["train", str(ROOT / "jobs" / "tiny.toml"), f"run.folder={tmp_path}", "run.ranks=1", "run.num_steps=1"]
    job += ["rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=8", "speculation.mode=plain"]
    said = "rollout.top_p = 0.9: responses come from a truncated distribution"
    assert main([*job, "rollout.top_p=0.9", "--dry-run"]) == 0
    assert capsys.readouterr().out.count(f"warning     {said}") == 1
    assert main([*job, "--dry-run"]) == 0
    assert "truncated" not in capsys.readouterr().out
    done = tlt(1, *job, "rollout.top_p=0.9")
    assert (done.stdout + done.stderr).count(said) == 1
