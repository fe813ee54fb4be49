"""Which responses of a step are kept within so many rows of features: the shortest go first.

A prompt's rows are held once, whatever the number of its responses. The tail of a rollout comes last and matters most,
so a response that needs room, with its prompt where that is new, takes it from shorter ones and never from one as long.
Prompts make room for one another: those of which no response is kept go, the oldest first. They wait until then because
a longer response of theirs may be on its way. Where it comes too late for its prompt's rows, which come but once, it is
kept all the same, after the prompt's last token alone, which takes no rows.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, takewhile

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.storage.row_space import Extent, RowSpace


@dataclass(eq=False)
class Span:
    """``tokens`` [n] int32 and the rows of the file that hold their features, one after another."""

    tokens: NDArray[np.int32]
    features: NDArray[np.uint16] | None
    """[rows, layer, hidden], until they are in the file."""
    num_rows: int
    extents: tuple[Extent, ...] = ()
    is_kept: bool = True


@dataclass(eq=False)
class StoredPrompt(Span):
    """A prompt of P tokens with the features of its first P - 1."""

    num_responses: int = 0


@dataclass(eq=False)
class StoredResponse(Span):
    """A response of R tokens with R features: of the prompt's last token, then of its own but the last."""

    prompt: StoredPrompt = field(kw_only=True)


class Retention:
    """The prompts and responses of one step, within ``capacity`` rows."""

    def __init__(self, capacity: int) -> None:
        self.space = RowSpace(capacity)
        self.num_evicted = 0
        """Responses that gave way, or were not taken."""
        self._prompts: dict[bytes, StoredPrompt] = {}
        self._responses: dict[int, StoredResponse] = {}
        self._by_length: list[tuple[int, int]] = []
        self._num_seen = 0

    @property
    def num_responses(self) -> int:
        return len(self._responses)

    @property
    def prompts(self) -> list[StoredPrompt]:
        """Prompts of which a response is kept, in order of arrival."""
        return [prompt for prompt in self._prompts.values() if prompt.num_responses]

    @property
    def responses(self) -> list[StoredResponse]:
        """The kept ones, in order of arrival."""
        return list(self._responses.values())

    def prompt(self, tokens: NDArray[np.int32]) -> StoredPrompt | None:
        """The stored prompt of these tokens."""
        return self._prompts.get(tokens.tobytes())

    def add(
        self, tokens: NDArray[np.int32], prompt_length: int, features: NDArray[np.uint16], first: int = 0
    ) -> list[Span]:
        """Store a response, with its prompt where that is new; the arguments are ``FeatureCacheWriter.append``'s.

        Returns what was stored: nothing where only responses as long could make room for it all.
        """
        prompt = self.prompt(tokens[:prompt_length])
        if prompt is None and first:  # the prompt's rows gave way, or were not taken
            return self.add(tokens[first:], prompt_length - first, features)
        split = prompt_length - 1 - first
        num_prompt_rows = 0 if prompt else split
        if not self._make_room_for(len(features) - split, num_prompt_rows, prompt):
            self.num_evicted += 1
            return []
        if prompt is not None:
            return [self._add_response(tokens[prompt_length:], features[split:], prompt)]
        prompt = self._add_prompt(tokens[:prompt_length], features[:split])
        return [prompt, self._add_response(tokens[prompt_length:], features[split:], prompt)]

    def _add_prompt(self, tokens: NDArray[np.int32], features: NDArray[np.uint16]) -> StoredPrompt:
        prompt = StoredPrompt(tokens, features, len(features), self.space.take(len(features)))
        self._prompts[tokens.tobytes()] = prompt
        return prompt

    def _add_response(
        self, tokens: NDArray[np.int32], features: NDArray[np.uint16], prompt: StoredPrompt
    ) -> StoredResponse:
        response = StoredResponse(tokens, features, len(tokens), self.space.take(len(tokens)), prompt=prompt)
        prompt.num_responses += 1
        self._responses[self._num_seen] = response
        insort(self._by_length, (len(tokens), self._num_seen))
        self._num_seen += 1
        return response

    def _make_room_for(self, length: int, num_prompt_rows: int, prompt: StoredPrompt | None) -> bool:
        shorter = takewhile(lambda response: response.num_rows < length, self._shortest_first())
        prompts = self._prompts_of_shorter(length, prompt)
        if not num_prompt_rows:
            return self._make_room(length, chain(shorter, prompts))
        idle = (other for other in self._prompts.values() if not other.num_responses)
        others = (other for other in prompts if other.num_responses)
        return self._make_room(num_prompt_rows + length, chain(idle, shorter, others))

    def _prompts_of_shorter(self, length: int, but: StoredPrompt | None) -> Iterator[StoredPrompt]:
        """Prompts all of whose responses are shorter, hence gone by the time that these are asked for."""
        needed = {id(response.prompt) for response in self._responses.values() if response.num_rows >= length}
        yield from (prompt for prompt in self._prompts.values() if id(prompt) not in needed and prompt is not but)

    def _shortest_first(self) -> Iterator[StoredResponse]:
        return (self._responses[number] for _, number in self._by_length)

    def _make_room(self, num_rows: int, candidates: Iterable[Span]) -> bool:
        """Evict as many candidates as it takes, in their order; none where all would not do."""
        room = self.space.num_free
        if room >= num_rows:
            return True  # without a look at the candidates: listing them takes long
        victims: list[Span] = []
        for span in candidates:
            victims.append(span)
            room += span.num_rows
            if room >= num_rows:
                self._evict(victims)
                return True
        return False

    def _evict(self, victims: list[Span]) -> None:
        num_responses = 0
        for span in victims:
            span.is_kept, span.features = False, None
            self.space.give_back(span.extents)
            if isinstance(span, StoredResponse):
                span.prompt.num_responses -= 1
                num_responses += 1
            else:
                del self._prompts[span.tokens.tobytes()]
        for _, number in self._by_length[:num_responses]:  # victims are the shortest
            del self._responses[number]
        del self._by_length[:num_responses]
        self.num_evicted += num_responses
