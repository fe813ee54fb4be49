"""Which responses of a step are kept within so many rows of features: the shortest are evicted first.

The rows of a prompt are stored once for all its responses. The tail of a rollout comes last and matters most, so a
response that needs room takes it from shorter ones, never from one as long. The rows of a prompt come with its first
response only, so they stay when its responses are evicted, for a longer one that may follow, until the rows are needed:
the oldest such prompt is evicted first. A response that comes later still is kept after the prompt's last token alone,
which takes no rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(eq=False)
class Span:
    """``tokens`` [n] int32 and the ``rows`` [m] int64 of the file that hold their features, in ascending order.

    A prompt of P tokens has the features of its first P - 1.
    """

    tokens: NDArray[np.int32]
    rows: NDArray[np.int64]
    features: NDArray[np.uint16] | None = None
    """[m, layer, hidden], until they are in the file."""
    is_kept: bool = True


@dataclass(eq=False)
class StoredResponse(Span):
    """A response of R tokens with R features: of the prompt's last token, then of its own but the last."""

    prompt: Span = field(kw_only=True)


class RowSpace:
    """``num_free`` rows to hand out. Freed rows are used first, so the file has no more rows than were held at once."""

    def __init__(self, capacity: int) -> None:
        self.num_free = capacity
        self.high_water = 0
        self._holes = np.zeros(0, np.int64)

    def take(self, count: int) -> NDArray[np.int64]:
        """The numbers of so many rows, the lowest free ones, in ascending order."""
        assert 0 <= count <= self.num_free
        self.num_free -= count
        reused, self._holes = self._holes[:count], self._holes[count:]
        start, self.high_water = self.high_water, self.high_water + count - len(reused)
        return np.concatenate([reused, np.arange(start, self.high_water)])

    def give_back(self, rows: NDArray[np.int64]) -> None:
        """Free rows that were taken."""
        self.num_free += len(rows)
        self._holes = np.sort(np.concatenate([self._holes, rows]))


class Retention:
    """The prompts and responses of one step, within ``capacity`` rows."""

    def __init__(self, capacity: int) -> None:
        self.space = RowSpace(capacity)
        self.responses: list[StoredResponse] = []
        """Those that are kept, in order of arrival."""
        self.num_evicted = 0
        """Responses that were evicted, or not taken."""
        self._prompts: dict[bytes, Span] = {}

    @property
    def prompts(self) -> list[Span]:
        """Prompts of the kept responses, in order of arrival."""
        used = {response.prompt for response in self.responses}
        return [prompt for prompt in self._prompts.values() if prompt in used]

    def add(
        self, tokens: NDArray[np.int32], prompt_length: int, features: NDArray[np.uint16], first: int = 0
    ) -> list[Span]:
        """Store a response, with its prompt if that is new; the arguments are those of ``FeatureCacheWriter.append``.

        Returns what was stored: nothing if only responses that are as long could make room for it.
        """
        key = tokens[:prompt_length].tobytes()
        prompt = self._prompts.get(key)
        if prompt is None and first:
            return self.add(tokens[first:], prompt_length - first, features)
        split = prompt_length - 1 - first
        num_rows = len(features) - (split if prompt else 0)
        if not self._make_room(num_rows, len(features) - split, prompt):
            self.num_evicted += 1
            return []
        added: list[Span] = []
        if prompt is None:
            prompt = self._prompts[key] = Span(tokens[:prompt_length], self.space.take(split), features[:split])
            added.append(prompt)
        rows = self.space.take(len(features) - split)
        self.responses.append(StoredResponse(tokens[prompt_length:], rows, features[split:], prompt=prompt))
        return [*added, self.responses[-1]]

    def _make_room(self, num_rows: int, length: int, own: Span | None) -> bool:
        """Evict until ``num_rows`` are free: unused prompts but ``own``, then the shortest responses below ``length``.

        A prompt whose last response is evicted follows when no shorter response is left. Nothing is evicted, and False
        returned, where all of them would not do.
        """
        if self.space.num_free >= num_rows:
            return True
        shorter = [response for response in self.responses if len(response.rows) < length]
        used = {own, *(response.prompt for response in self.responses)}
        needed = {own, *(response.prompt for response in self.responses if len(response.rows) >= length)}
        unused = [prompt for prompt in self._prompts.values() if prompt not in used]
        last = [prompt for prompt in self._prompts.values() if prompt in used - needed]
        room, victims = self.space.num_free, set[Span]()
        for span in [*unused, *sorted(shorter, key=lambda response: len(response.rows)), *last]:
            if room >= num_rows:
                break
            victims.add(span)
            room += len(span.rows)
        if room < num_rows:
            return False
        self.num_evicted += sum(response in victims for response in self.responses)
        self.responses = [response for response in self.responses if response not in victims]
        self._prompts = {key: prompt for key, prompt in self._prompts.items() if prompt not in victims}
        for span in victims:
            span.is_kept, span.features = False, None
            self.space.give_back(span.rows)
        return True
