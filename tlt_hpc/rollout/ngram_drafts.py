"""Proposes what followed the same context before, in the response, its siblings and earlier responses to its prompt.

The table learns a text when it is asked for drafts next: where it is never asked it costs nothing. Knows no model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from tlt_hpc.models.ngram import SuffixDrafter
from tlt_hpc.rollout.responses import Response
from tlt_hpc.rollout.strategy import Strategy
from tlt_hpc.rollout.tree import DraftTree, from_lists

NoiseAt = Callable[[int, int, int], float]
"""Noise of one number: row, d-th drafted position, token."""


def noise_of(noise: Tensor) -> NoiseAt:
    """That of noise [B, D, V] on the host; narrow vocabularies are read faster from lists."""
    rows = noise.tolist() if noise.shape[-1] <= 256 else noise
    return lambda row, d, token: float(rows[row][d][token])


class NgramDrafts:
    """A suffix table over the texts, whose known continuations compete under the noise."""

    def __init__(self, history_tokens: int, orders: tuple[int, ...], active: bool) -> None:
        self._table, self._history_tokens = SuffixDrafter(history_tokens, orders), history_tokens
        self.active = active
        """Whether any strategy asks; while none does nothing is kept."""
        self._unlearned: deque[Response] = deque()
        """Finished responses that the table has not seen to their ends, and their tokens that it lacks."""
        self._num_unlearned = 0

    def finish(self, response: Response) -> None:
        """Keep a finished response for the table, as long as it has room for it."""
        if not self.active:
            return
        self._unlearned.append(response)
        self._num_unlearned += len(response.text) - response.num_learned
        while self._num_unlearned > self._history_tokens:
            oldest = self._unlearned.popleft()
            self._num_unlearned -= len(oldest.text) - oldest.num_learned

    def learn(self, responses: Sequence[Response]) -> None:
        """Teach the table what came since it was last asked, of finished responses and of these."""
        if not self.active:
            return
        while self._unlearned:
            self._learn(self._unlearned.popleft())
        self._num_unlearned = 0
        for response in responses:
            self._learn(response)

    def _learn(self, response: Response) -> None:
        if response.num_learned < len(response.text):
            self._table.learn(response.prompt, response.text, response.num_learned)
            response.num_learned = len(response.text)

    def chains(self, responses: Sequence[Response], noise: NoiseAt, strategy: Strategy) -> list[list[int]]:
        """At most ``depth`` drafts for each row's tokens so far, fewer where no context is known."""
        return [self._chain(response, b, noise, strategy) for b, response in enumerate(responses)]

    def _chain(self, response: Response, row: int, noise: NoiseAt, strategy: Strategy) -> list[int]:
        cursor, drafts = self._table.cursor(response.prompt, response.text), list[int]()
        known = response.rule.num_tokens  # a prompt may hold ids that are never sampled
        while len(drafts) < strategy.depth and (found := [c for c in cursor.continuations() if c[0] < known]):
            token = found[0][0]
            if len(found) > 1 and response.rule.temperature > 0:
                d = len(drafts)
                token = max(found, key=lambda one: strategy.sharpness * math.log(one[1]) + noise(row, d, one[0]))[0]
            drafts.append(token)
            cursor.advance(token)
        return drafts


def hybrid(drafted: DraftTree, chains: Sequence[Sequence[int]]) -> DraftTree:
    """Drafted trees with a further branch each: the chain that the n-grams know."""
    tokens = drafted.tokens.tolist()
    parents = (
        drafted.parents.tolist()
        if drafted.parents is not None
        else [[max(0, i - 1) for i in range(drafted.num_nodes)]] * len(tokens)
    )
    rows = [_graft(list(zip(t, p, strict=True)), more) for t, p, more in zip(tokens, parents, chains, strict=True)]
    return from_lists(rows, drafted.tokens.device)


def _graft(nodes: list[tuple[int, int]], more: Sequence[int]) -> list[tuple[int, int]]:
    """Add a chain from the root on, along nodes that are there already as far as it goes."""
    child = {(parent, token): i for i, (token, parent) in enumerate(nodes) if i}
    at = 0
    for token in more:
        if (at, token) not in child:
            child[at, token] = len(nodes)
            nodes.append((token, at))
        at = child[at, token]
    return nodes
