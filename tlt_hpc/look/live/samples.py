"""Responses of a run's newest committed step as text, with rewards, and with accepted draft tokens coloured."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate

from rich.text import Text
from tokenizers import Tokenizer

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.formatting import format_count
from tlt_hpc.common.printable import escape_control_characters
from tlt_hpc.common.records import FinishReason, Rollout
from tlt_hpc.look.run_log import RunLog
from tlt_hpc.models.tokenizer import find_model, load_tokenizer
from tlt_hpc.rollout.stops import BROKEN, LONGEST_CHARACTER
from tlt_hpc.storage.rollout_log import read_step

_CONTEXT = 8
"""Tokens before one that are decoded with it, because its text may depend on them (leading spaces, for example)."""
DRAFTED = "black on bright_cyan"
"""Style of accepted draft tokens."""


def read_samples_as_text(log: RunLog, num_samples: int) -> list[Text]:
    """Draw responses of the newest committed step from all ranks' logs; as text, ordered by key.

    Tokens are shown as numbers if the model is not on this machine.

    Raises:
        UserError: there is no committed step, or its logs are damaged.
    """
    if log.folder.is_warmup:
        raise UserError(f"{log.folder.path} is a drafter's warm-up, which has no rewards; show those of a training run")
    try:
        tokenizer = load_tokenizer(find_model(str(log.setting("model", "path") or "")))
    except ValueError:
        tokenizer = None
    committed = [step for step in log.steps if step in log.lines]
    if not committed:
        raise UserError(f"{log.folder.path} has no committed step with a log yet; wait for the first one")
    samples = [
        (record.rank, rollout, reward)
        for record in map(read_step, log.files(committed[-1]).values())
        for rollout, reward in zip(record.rollouts, record.rewards.tolist(), strict=True)
    ]
    drawn = random.sample(samples, min(num_samples, len(samples)))
    return [sample_text(committed[-1], *sample, tokenizer) for sample in sorted(drawn, key=lambda each: each[1].key)]


def sample_text(step: int, rank: int, rollout: Rollout, reward: float, tokenizer: Tokenizer | None) -> Text:
    """A headline, the prompt, and the response with accepted draft tokens coloured."""
    num_tokens, num_passes = len(rollout.response_tokens), max(1, rollout.num_target_passes)
    key = rollout.key
    text = Text.assemble(
        (f"step {step + 1}, prompt {key.draw}, sample {key.sample}, rank {rank}", "bold"),
        (f"  reward {reward:g}", "bold green" if reward > 0 else "bold red"),
        f"  {format_count(num_tokens, 'token')} in {format_count(num_passes, 'pass')} "
        f"({num_tokens / num_passes:.2f} a pass)",
        "" if rollout.finish_reason is not FinishReason.LENGTH else "  cut at the longest length",
        "\n",
    )
    text.append(_decode_tokens(rollout.prompt_tokens.tolist(), tokenizer), "dim")
    text.append("\n")
    before, held = list[int](), list[int]()
    for token, is_draft in tokens_with_draft_flags(rollout):
        held.append(token)
        words = _decode_tokens([*before, *held], tokenizer)[len(_decode_tokens(before, tokenizer)) :]
        if words.endswith(BROKEN) and len(held) < LONGEST_CHARACTER:
            continue  # a character may have its other bytes in the next tokens
        text.append(words, DRAFTED if is_draft else "")
        before, held = [*before, *held][-_CONTEXT:], []
    text.append(_decode_tokens([*before, *held], tokenizer)[len(_decode_tokens(before, tokenizer)) :])
    return text


def tokens_with_draft_flags(rollout: Rollout) -> Iterator[tuple[int, bool]]:
    """The response's tokens, each with whether it was an accepted draft.

    A pass emits the accepted drafts and then one token of the policy's own, except a response's last pass, which may be
    cut before it. If the passes were not logged, all tokens count as the policy's own.
    """
    tokens: Sequence[int] = rollout.response_tokens.tolist()
    lengths = rollout.pass_lengths.tolist()
    if sum(lengths) != len(tokens):
        lengths = [1] * len(tokens)
    ends = set(accumulate(lengths))
    yield from ((token, number not in ends) for number, token in enumerate(tokens, 1))


def _decode_tokens(tokens: Sequence[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "".join(f"{token} " for token in tokens)
    return escape_control_characters(str(tokenizer.decode(tokens, skip_special_tokens=False)))
