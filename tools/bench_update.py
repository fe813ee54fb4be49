"""Tokens per second of the policy's forward and backward pass: packed documents against padded rows of transformers.

    python tools/bench_update.py                          # the embedded model on its own responses
    python tools/bench_update.py MODEL --budget 4096      # a Hugging Face folder

Interleaved passes over the same responses, micro-batches of at most ``--budget`` tokens each, padding counted where
there is any; medians of ratios. Give it one thread (OMP_NUM_THREADS=1), as a rank has it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import numpy as np
import torch

from tlt_hpc.common.records import Rollout, Stream
from tlt_hpc.config import EMBEDDED_MODEL
from tlt_hpc.models.folder import find_model, load_policy_model
from tlt_hpc.models.policy_model import PolicyModel, token_log_probs
from tlt_hpc.rl.batches import cut_micro_batches, pack
from tlt_hpc.rollout.strategy import OFF
from tlt_hpc.studies.bench.subject import Limits, make_engine, open_subject, roll_out
from tlt_hpc.studies.bench.workload import Workload, built_in_prompts

CPU = torch.device("cpu")


def make_rollouts(model: str, count: int, max_new_tokens: int) -> list[Rollout]:
    """Responses of the model itself, whose lengths are what is packed."""
    subject = open_subject(model, None, "float32", CPU)
    prompts = None if model == EMBEDDED_MODEL else built_in_prompts(subject.tokenizer)
    workload = Workload(prompts, subject.tokenizer, "own", max_new_tokens, 1.0, seed=0)
    limits = Limits(32, workload.max_prompt_tokens, workload.max_new_tokens)
    engine = make_engine(subject, limits, 1.0, [OFF], workload.requests(4, 0, Stream.CALIBRATION))
    return list(roll_out(engine, workload.requests(count, 0, Stream.EVALUATION)).rollouts)


def packed_loss(model: PolicyModel, rollouts: Sequence[Rollout]) -> torch.Tensor:
    """Summed log-probability of all response tokens, laid end to end."""
    batch = pack(rollouts)
    arrays = (torch.from_numpy(array) for array in (batch.tokens, batch.positions))
    places = (torch.from_numpy(array) for array in (batch.where, batch.targets))
    log_probs, _ = model(*arrays, batch.lengths, *places, 1.0)
    total: torch.Tensor = log_probs.sum()
    return total


def padded_loss(model: Any, rollouts: Sequence[Rollout]) -> torch.Tensor:
    """The same of right-padded rows, by transformers."""
    texts = [np.concatenate([r.prompt_tokens, r.response_tokens]) for r in rollouts]
    tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.from_numpy(text)
    logits = model(input_ids=tokens, use_cache=False).logits
    parts = [
        token_log_probs(
            logits[row, r.prompt_tokens.size - 1 : len(text) - 1], tokens[row, r.prompt_tokens.size : len(text)], 1.0
        )
        for row, (r, text) in enumerate(zip(rollouts, texts, strict=True))
    ]
    return torch.cat(parts).sum()


def cut_padded(lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Micro-batches of rows, longest first, so that rows times longest stays within the budget."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > budget:
            batches.append([])
        batches[-1].append(index)
    return [tuple(batch) for batch in batches]


def seconds_of(
    loss: Callable[[Sequence[Rollout]], torch.Tensor], parts: Sequence[Sequence[Rollout]]
) -> tuple[float, float]:
    """One pass over all micro-batches; and the loss, which both ways must agree on."""
    start, total = time.perf_counter(), 0.0
    for part in parts:
        value = loss(part)
        value.backward()  # type: ignore[no-untyped-call]
        total += float(value.detach())
    return time.perf_counter() - start, total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=EMBEDDED_MODEL, metavar="MODEL")
    parser.add_argument("--responses", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=480)
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    rollouts = make_rollouts(options.model, options.responses, options.max_new_tokens)
    lengths = [r.prompt_tokens.size + r.response_tokens.size for r in rollouts]
    folder = find_model(options.model)
    packed, padded = PolicyModel(load_policy_model(folder, "float32")), load_policy_model(folder, "float32")
    ways = {
        "packed": (
            lambda part: packed_loss(packed, part),
            [[rollouts[i] for i in part] for part in cut_micro_batches(range(len(lengths)), lengths, options.budget)],
        ),
        "padded": (
            lambda part: padded_loss(padded, part),
            [[rollouts[i] for i in part] for part in cut_padded(lengths, options.budget)],
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses = {}
    for repetition in range(options.repeats + 1):
        for name, (loss, parts) in ways.items():
            spent, losses[name] = seconds_of(loss, parts)
            if repetition:  # the first warms up
                seconds[name].append(spent)
    tokens = sum(lengths)
    print(
        f"{len(lengths)} responses with prompts: median {statistics.median(lengths):.0f}, longest {max(lengths)} tokens"
    )
    for name in ways:
        rate = tokens / statistics.median(seconds[name])
        print(f"{name}: {rate:,.0f} tokens/s in {len(ways[name][1])} micro-batches, summed log-prob {losses[name]:.2f}")
    ratio = statistics.median(b / a for a, b in zip(seconds["packed"], seconds["padded"], strict=True))
    print(f"packed over padded: {ratio:.2f} times (median of pairs)")
    return 0


if __name__ == "__main__":
    sys.exit(ending("bench_update", main))
