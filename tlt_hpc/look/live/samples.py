"""Responses of a run's newest committed step, for people: prompt, response, reward, and which tokens came as drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text
from tokenizers import Tokenizer

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.printable import printable
from tlt_hpc.common.records import FinishReason, Rollout
from tlt_hpc.common.words import count
from tlt_hpc.look.live.state import read_last_lines
from tlt_hpc.models.tokenizer import find_model, load_tokenizer
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.rollout_log import read_step

_CONTEXT = 8
"""Tokens before a piece that it is decoded with: what one says may hang on them, as a space before it does."""
DRAFTED = "black on bright_cyan"
"""Style of tokens that were drafts, and that the policy itself would have said."""


@dataclass(frozen=True)
class Sample:
    """One response of a step, and what it was given."""

    step: int
    rank: int
    rollout: Rollout
    reward: float


def draw_samples(folder: RunFolder, count: int, seed: int | None = None) -> list[Sample]:
    """``count`` responses of the newest step, drawn from all ranks' logs; ordered by key.

    Raises:
        UserError: there is no committed step, or its logs are damaged.
    """
    committed = read_last_lines(folder.metrics, [])
    for step in reversed(folder.rollout_steps()):
        if step in committed and (samples := list(_of_step(folder, step))):
            drawn = random.Random(seed).sample(samples, min(count, len(samples)))
            return sorted(drawn, key=lambda sample: sample.rollout.key)
    raise UserError(f"{folder.path} has no committed step with a log yet; wait for the first one")


def _of_step(folder: RunFolder, step: int) -> Iterator[Sample]:
    for path in folder.rollout_logs(step):
        try:
            record = read_step(path)
        except FileNotFoundError:  # taken back by a start that goes on from an earlier step
            continue
        except DamagedFile as error:
            raise UserError(str(error)) from None
        for rollout, reward in zip(record.rollouts, record.rewards.tolist(), strict=True):
            yield Sample(step, record.rank, rollout, reward)


def tokenizer_of(model_path: str) -> Tokenizer | None:
    """The model's; None where the model is not on this machine, and token ids have to do."""
    try:
        return load_tokenizer(find_model(model_path))
    except ValueError:
        return None


def sample_text(sample: Sample, tokenizer: Tokenizer | None) -> Text:
    """A head line, the prompt, and the response, its drafted tokens coloured."""
    rollout = sample.rollout
    num_tokens, num_passes = len(rollout.response_tokens), max(1, rollout.num_target_passes)
    key = rollout.key
    text = Text.assemble(
        (f"step {sample.step + 1}, prompt {key.draw}, sample {key.sample}, rank {sample.rank}", "bold"),
        (f"  reward {sample.reward:g}", "bold green" if sample.reward > 0 else "bold red"),
        f"  {count(num_tokens, 'token')} in {count(num_passes, 'pass')} ({num_tokens / num_passes:.2f} a pass)",
        "" if rollout.finish_reason is not FinishReason.LENGTH else "  cut at the longest length",
        "\n",
    )
    text.append(_words(rollout.prompt_tokens.tolist(), tokenizer), "dim")
    text.append("\n")
    before: list[int] = []
    for piece, is_draft in pieces_of(rollout):
        words = _words([*before, *piece], tokenizer)[len(_words(before, tokenizer)) :]
        text.append(words, DRAFTED if is_draft else "")
        before = [*before, *piece][-_CONTEXT:]
    return text


def pieces_of(rollout: Rollout) -> Iterator[tuple[list[int], bool]]:
    """The response's tokens in runs, each with whether they were drafts that stood.

    A pass emits the drafts that stood and then one token of the policy's own, but for a response's last pass, which may
    be cut before it. Where the passes were not logged all is the policy's.
    """
    tokens: Sequence[int] = rollout.response_tokens.tolist()
    lengths = rollout.pass_lengths.tolist()
    if sum(lengths) != len(tokens):
        lengths = [1] * len(tokens)
    start = 0
    for length in lengths:
        if length > 1:
            yield list(tokens[start : start + length - 1]), True
        if length:
            yield list(tokens[start + length - 1 : start + length]), False
        start += length


def _words(tokens: Sequence[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "".join(f"{token} " for token in tokens)
    return printable(str(tokenizer.decode(tokens, skip_special_tokens=False)))


def show_samples(path: Path, model_path: str, count: int, seed: int | None = None) -> list[Text]:
    """``count`` samples of a run, as text.

    Raises:
        UserError: as ``draw_samples``.
    """
    tokenizer = tokenizer_of(model_path)
    return [sample_text(sample, tokenizer) for sample in draw_samples(RunFolder(path), count, seed)]
