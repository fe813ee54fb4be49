"""What a report says first: a few large figures with what they mean, and the same in sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.analysis.result import count, seconds, share
from tlt_hpc.report.findings import Findings
from tlt_hpc.report.gain import Gain, Text, text_of


@dataclass(frozen=True)
class Card:
    """``tone``: good, plain or bad, for the page's colours; the words say it too."""

    label: str
    value: str
    words: str
    tone: str = "plain"


@dataclass(frozen=True)
class Answer:
    """A question that a reader has, and its answer."""

    question: str
    words: str


def cards(found: Findings, gain: Gain | None) -> list[Card]:
    """Those that can be told."""
    told = [_learned(found), _idle(found), _harvested(found), _gained(found, gain), _text(found)]
    return [card for card in told if card is not None]


def answers(found: Findings, gain: Gain | None, why_no_gain: str) -> list[Answer]:
    """In the order in which they are asked."""
    told = [
        Answer("What was trained?", trained(found)),
        Answer("Did it learn?", found.learning.verdict),
        Answer("What did speculation gain?", gain.words if gain else why_no_gain),
        Answer("Is the text the same as without it?", text_in_words(found)),
        Answer("Where did the time go?", found.throughput.verdict),
    ]
    return [answer for answer in told if answer.words]


def trained(found: Findings) -> str:
    """Model, data, algorithm, how many steps of what on how many ranks, and whether it has ended."""
    model, data = found.log.setting("model", "path"), found.log.setting("data", "source")
    algorithm = found.log.setting("algorithm", "name")
    what = f"{model} on {_shown(data)}" if model and data else "A policy"
    what += f" with {algorithm}" if algorithm else ""
    num_steps, planned = len(found.learning.steps), found.log.setting("run", "num_steps")
    prompts, group = found.log.setting("rollout", "prompts_per_step"), found.log.setting("rollout", "group_size")
    of = f" of {planned}" if isinstance(planned, int) and planned > num_steps else ""
    parts = [f"{what}: {num_steps}{of} steps" if num_steps != 1 or of else f"{what}: one step"]
    if isinstance(prompts, int) and isinstance(group, int):
        parts[0] += f", {count(prompts, 'prompt')} with {count(group, 'response')} each"
    tokens = int(found.throughput.tokens.sum())
    if found.num_ranks:
        parts[0] += f", on {count(found.num_ranks, 'rank')}; {tokens:,} tokens in all"
    took = float(np.nansum(found.throughput.step_seconds))
    parts[0] += f", in {seconds(took)} of steps." if took else "."
    parts.append(_state(found))
    return " ".join(filter(None, parts))


def text_in_words(found: Findings) -> str:
    """Whether speculation changed a token, and how that is known."""
    text = text_of(found)
    if found.comparison is not None and text is not Text.UNKNOWN:
        other = found.comparison.runs[0].name
        steps = len(found.comparison.compared_steps)
        if text is Text.SAME:
            return (
                f"Yes: every token of {count(steps, 'step')} was held against {other}, and all are the same"
                f"{_same_policy(found)}."
            )
        first = next(step for step in found.comparison.first_difference.values() if step is not None)
        why = "" if found.is_guarded else ": in this precision near-ties may fall either way (README, Tie guard)"
        return f"No: against {other} the tokens differ from step {first} on{why}."
    if found.mode == "plain":
        return "There was no speculation in this run."
    if not found.mode:
        return ""
    if found.is_guarded:
        return (
            "By construction, yes: the same noise decides every token, and near-ties were decided alike on all paths. "
            "To see it proved, give a run of the same seed without speculation: tlt report RUN --against PLAIN_RUN."
        )
    return (
        "Nearly: the same noise decides every token, but in this precision near-ties may fall either way. Every path "
        "is an exact sample of its own logits."
    )


def _state(found: Findings) -> str:
    if found.final:
        return f"It has finished; the policy's digest is {str(found.final.get('policy_sha256', ''))[:12]}."
    return "It has not finished; this is how far it has come." if found.is_begun else "No step is committed yet."


def _same_policy(found: Findings) -> str:
    """Also the weights, where both runs have ended at the same step."""
    own, other = found.final, found.other_final
    is_same = own and other and own.get("num_steps") == other.get("num_steps")
    if is_same and own.get("policy_sha256") == other.get("policy_sha256"):
        return "; the trained weights are equal to the last bit"
    return ""


def _learned(found: Findings) -> Card | None:
    score = found.learning.series["score"]
    told = score[np.isfinite(score)]
    if len(told) < 2:
        return None
    quarter = max(1, len(told) // 4)
    first, last = float(told[:quarter].mean()), float(told[-quarter:].mean())
    error = _error(told, quarter)
    clear = bool(abs(last - first) >= 2 * error)
    words = f"mean score, first and last {'step' if quarter == 1 else f'{quarter} steps'}"
    words += "" if clear else "; within what steps vary by"
    tone = ("good" if last > first else "bad") if clear else "plain"
    return Card("Score", f"{first:.2f} \u2192 {last:.2f}", words, tone)


def _error(told: NDArray[np.float64], quarter: int) -> float:
    """Standard error of the difference of two such means, from what the score changes by from step to step."""
    return float(np.std(np.diff(told)) / np.sqrt(2) * np.sqrt(2 / quarter)) if len(told) > 2 else float("inf")


def _idle(found: Findings) -> Card | None:
    if found.num_ranks < 2:
        return None
    told = found.throughput.is_whole
    idle = float(found.throughput.idle_rank_seconds[told].sum())
    whole = float((found.throughput.rollout_seconds * found.throughput.num_ranks)[told].sum())
    if whole <= 0:
        return None
    words = f"of the ranks' rollout time they had finished and waited for the last rank ({seconds(idle)} together)"
    return Card("Idle", share(idle, whole), words)


def _harvested(found: Findings) -> Card | None:
    told = found.throughput.is_whole
    idle = float(found.throughput.idle_rank_seconds[told].sum())
    harvested = float(found.throughput.harvested_rank_seconds[told].sum())
    if found.num_ranks < 2 or found.mode != "full" or idle <= 0:
        return None
    updates = found.acceptance.drafter_version
    updates = updates[np.isfinite(updates)]
    made = f": {count(float(updates[-1]), 'update')} of it" if len(updates) and updates[-1] else ""
    return Card("Harvested", share(harvested, idle), f"of that waiting trained the draft model{made}")


def _gained(found: Findings, gain: Gain | None) -> Card | None:
    if gain is None:
        return None
    known = "measured" if gain.is_measured else "estimated"
    words = f"as fast as without speculation, on the same rollouts ({known}); whole steps: {gain.step:.2f}\u00d7"
    return Card("Gained", f"{gain.rollout:.2f}\u00d7", words, "good" if gain.rollout >= 1.02 else "bad")


def _text(found: Findings) -> Card | None:
    text = text_of(found)
    if text is Text.SAME:
        assert found.comparison is not None
        steps = count(len(found.comparison.compared_steps), "step")
        return Card("Text", "the same", f"token for token, with and without speculation ({steps} compared)", "good")
    if text is Text.DIFFERENT:
        return Card("Text", "differs", "from that of the other run", "bad")
    if found.mode in ("plain", ""):
        return None
    if found.is_guarded:
        return Card("Text", "the same", "by construction; not compared here (--against proves it)")
    return Card("Text", "exact samples", "near-ties may fall either way in this precision")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value[:3])) + (", ..." if len(value) > 3 else "")
    return str(value)
