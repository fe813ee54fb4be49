"""Drafts from n-grams: tokens that followed the same context in the response, its siblings and earlier responses.

The table learns texts just before it is asked for drafts, so it costs nothing while no strategy uses it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from tlt_hpc.models.ngram import ORDERS, SuffixDrafter
from tlt_hpc.rollout.responses import Response
from tlt_hpc.rollout.strategy import Strategy

HISTORY_TOKENS = 200_000
"""Tokens that the table remembers."""

NoiseAt = Callable[[int, int, int], float]
"""The noise of a row's d-th drafted position and one token."""


def make_noise_reader(noise: Tensor) -> NoiseAt:
    """Reads noise [B, D, V] on the host; lists are faster for small vocabularies."""
    rows = noise.tolist() if noise.shape[-1] <= 256 else noise
    return lambda row, d, token: float(rows[row][d][token])


class NgramDrafts:
    """A suffix table over the texts, whose known continuations compete under the noise."""

    def __init__(self, active: bool) -> None:
        self._table = SuffixDrafter(HISTORY_TOKENS)
        self.active = active
        """True if any strategy uses n-grams; otherwise nothing is kept."""
        self._unlearned: deque[Response] = deque()
        """Finished responses that the table has not seen to their ends, and their tokens that it lacks."""
        self._num_unlearned = 0

    def keep_finished_response(self, response: Response) -> None:
        """Keep a finished response for the table, as long as there is room for it."""
        if not self.active:
            return
        self._unlearned.append(response)
        self._num_unlearned += len(response.text) - response.num_learned
        while self._num_unlearned > HISTORY_TOKENS:
            oldest = self._unlearned.popleft()
            self._num_unlearned -= len(oldest.text) - oldest.num_learned

    def update_table(self, responses: Sequence[Response]) -> None:
        """Add to the table what is new in finished responses and in these; of these no more than it remembers.

        Many long responses have millions of new tokens where n-grams were long not asked: many seconds of one round.
        """
        if not self.active:
            return
        while self._unlearned:
            self._add_to_table(self._unlearned.popleft())
        self._num_unlearned = 0
        most = HISTORY_TOKENS // max(1, len(responses))
        for response in responses:
            response.num_learned = max(response.num_learned, len(response.text) - most)
            self._add_to_table(response)

    def _add_to_table(self, response: Response) -> None:
        if response.num_learned < len(response.text):
            self._table.learn(response.prompt, response.text, response.num_learned)
            response.num_learned = len(response.text)

    def draft_chains(self, responses: Sequence[Response], noise: NoiseAt, strategy: Strategy) -> list[list[int]]:
        """At most ``depth`` drafts for each row's tokens so far, fewer where no context is known."""
        return [self._draft_chain(response, b, noise, strategy) for b, response in enumerate(responses)]

    def _draft_chain(self, response: Response, row: int, noise: NoiseAt, strategy: Strategy) -> list[int]:
        prompt, context, drafts = response.prompt, response.text[-ORDERS[0] :], list[int]()
        known = response.rule.num_tokens  # a prompt may hold ids that are never sampled
        while len(drafts) < strategy.depth:
            found = [one for one in self._table.continuations(prompt, context + drafts) if one[0] < known]
            if not found:
                break
            token = found[0][0]
            if len(found) > 1 and response.rule.temperature > 0:
                d = len(drafts)
                token = max(found, key=lambda one: strategy.sharpness * math.log(one[1]) + noise(row, d, one[0]))[0]
            drafts.append(token)
        return drafts
