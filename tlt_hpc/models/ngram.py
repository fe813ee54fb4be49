"""The model-free drafter: what followed the same last tokens before, in this response, its siblings or any other.

Knows no weights, no noise, no tree and no strategy; one plain dictionary from hashed contexts to what came after them.
The idea of drafting from a suffix of the text is prompt lookup's and REST's (He et al., arXiv 2311.08252), that of
sharing it within a GRPO group is SuffixDecoding's (Oliaro et al., arXiv 2411.04975).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

Continuation = tuple[int, float]
"""A token and the estimated chance that it comes next."""

ORDERS = (12, 8, 6, 4, 2, 1)
"""Context lengths: between these, neighbours say almost the same, and each costs time in ``learn``."""

_Table = dict[int, tuple[int, ...]]
"""Hash of a context -> what followed it the last few times, newest first."""
_KEPT = 4
_MOST_CONTINUATIONS = 4
# Tuned on recorded rollouts of the embedded model, in accept length of chains at temperature 1. At that temperature
# the unlikely continuations count too: the noise asks for them just as often as the target does.
_LEVELS = 3
"""Context lengths that are heard: the longest that is known and the next shorter ones."""
_SHORTER = 0.2
"""Weight of a context length relative to the next longer one."""
_OLDER = 0.85
"""Weight of an occurrence relative to the next newer one."""
_OWN = 16.0
"""Weight of evidence from the own group, where it has any, in place of everybody's."""
_DOUBT = 3.0
"""A context of n tokens leaves 1 part in ``1 + n**1.5 / _DOUBT`` to what never followed it (fits prose as well)."""


def _weights(scale: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Weights of a context's occurrences, newest first, and the sums of the first 0, 1, .. of them."""
    each = tuple(scale * _OLDER**age for age in range(_KEPT))
    return each, tuple(sum(each[:count]) for count in range(_KEPT + 1))


_OWN_WEIGHTS = tuple(_weights(_OWN * _SHORTER**level) for level in range(_LEVELS))
_SHARED_WEIGHTS = tuple(_weights(_SHORTER**level) for level in range(_LEVELS))


class SuffixDrafter:
    """Continuations of the longest known suffixes, bounded in tokens by forgetting the older half.

    A group is whatever names a prompt: responses to it, of this step or of earlier ones, count for more than others.
    """

    def __init__(self, history_tokens: int, orders: Sequence[int] = ORDERS) -> None:
        self.orders = tuple(sorted(set(orders), reverse=True))
        assert self.orders and self.orders[-1] > 0, "context lengths are positive"
        self._ascending = self.orders[::-1]
        self._seen = tuple(1 / (1 + _DOUBT / order**1.5) for order in self.orders)
        self._history_tokens = history_tokens
        self._recent: _Table = {}
        self._older: _Table = {}
        self._num_recent = 0

    def learn(self, group: Hashable, tokens: Sequence[int], start: int) -> None:
        """Learn the continuations of contexts in ``tokens``, from index ``start`` on (those before are context)."""
        recent, older, salt = self._recent, self._older, hash((group,))
        base = max(0, start - self.orders[0])
        text = tuple(tokens[base:])
        for end in range(max(start - base, 1), len(text)):
            newest = text[end : end + 1]
            for order in self._ascending:
                if order > end:
                    break
                shared = hash(text[end - order : end])
                for key in (shared, shared ^ salt):
                    known = recent.get(key) or older.get(key)
                    recent[key] = newest + known[: _KEPT - 1] if known else newest
        self._num_recent += len(tokens) - start
        if self._num_recent > self._history_tokens // 2:
            self._older, self._recent, self._num_recent = recent, {}, 0

    def continuations(self, group: Hashable, context: Sequence[int]) -> list[Continuation]:
        """At most four tokens that may come after ``context``, the likeliest first; none where nothing is known.

        Their weights are estimated chances: the sum is below 1, and the further below, the less is known.
        """
        tail, salt = tuple(context[-self.orders[0] :]), hash((group,))
        recent, older, orders, num_tail = self._recent, self._older, self.orders, len(tail)
        scores: dict[int, float] = {}
        total, level, longest = 0.0, 0, len(orders)
        for index, order in enumerate(orders):
            if order > num_tail:
                continue
            key = hash(tail[num_tail - order :])
            own = recent.get(key ^ salt) or older.get(key ^ salt)
            known = own or recent.get(key) or older.get(key)
            if not known:
                continue
            weights, sums = _OWN_WEIGHTS[level] if own else _SHARED_WEIGHTS[level]
            count, newest = len(known), known[0]
            total += sums[count]
            if known.count(newest) == count:
                scores[newest] = scores.get(newest, 0.0) + sums[count]
            else:
                for token, weight in zip(known, weights):  # noqa: B905 (strict costs a tenth of the walk)
                    scores[token] = scores.get(token, 0.0) + weight
            level += 1
            if level == 1:
                longest = index
            elif level == _LEVELS:
                break
        return _ranked(scores, self._seen[longest] / total) if scores else []


def _ranked(scores: dict[int, float], scale: float) -> list[Continuation]:
    """Scores times ``scale``, the highest first; equal ones in the order they were found."""
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:_MOST_CONTINUATIONS]
    return [(token, scores[token] * scale) for token in best]
