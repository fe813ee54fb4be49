"""Decides which sequences hold pages and rows: admission, sharing of prompts, chunked prefill, preemption.

A sequence waits without pages, then is prefilled, then has a row. If pages run out, the one that arrived last gives up
its pages and waits again; it is prefilled again from its tokens, so only time is lost. Host integers: runs no model.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass
from operator import attrgetter

from tlt_hpc.rollout.drafts import LearnedDrafts
from tlt_hpc.rollout.kv_cache import Layout, PagedCache
from tlt_hpc.rollout.noise import NoiseWindow
from tlt_hpc.rollout.responses import Response
from tlt_hpc.rollout.rows import LiveRows
from tlt_hpc.rollout.stored_text import StoredText
from tlt_hpc.rollout.transfer import swap_rows_in_place

_MIN_DENSITY = 0.75
"""Below this share of used pages among those up to the highest used one, pages are worth moving together."""


class PagePool:
    """Pages 0..num_pages-1, the lowest free one handed out first; a page lives as long as anyone holds it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._holders = [0] * num_pages
        self._free = list(range(num_pages))

    @property
    def num_free(self) -> int:
        """Number of pages that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Number of pages that somebody holds."""
        return self.num_pages - len(self._free)

    @property
    def high_water(self) -> int:
        """One more than the highest page in use."""
        return next((page + 1 for page in range(self.num_pages - 1, -1, -1) if self._holders[page]), 0)

    def take_pages(self, count: int) -> list[int]:
        """Hold ``count`` free pages; the scheduler makes room first."""
        assert count <= len(self._free), f"{count} pages asked for, {len(self._free)} of {self.num_pages} free"
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """Hold pages that someone holds already."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] += 1

    def release(self, pages: list[int]) -> None:
        """Release pages; those that have no holder left are free again."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free already"
            self._holders[page] -= 1
            if not self._holders[page]:
                heapq.heappush(self._free, page)

    @property
    def is_fragmented(self) -> bool:
        """True if a pass over all pages up to the highest would read many unused ones."""
        return self.num_used < _MIN_DENSITY * self.high_water

    def compact(self) -> dict[int, int]:
        """Move the highest pages into the lowest holes; returns old -> new. Whoever holds pages relabels them."""
        moves = {}
        while (high := self.high_water) and self._free and self._free[0] < high - 1:
            source, target = high - 1, heapq.heappop(self._free)
            self._holders[target], self._holders[source] = self._holders[source], 0
            heapq.heappush(self._free, source)
            moves[source] = target
        return moves


@dataclass(frozen=True)
class PrefillChunk:
    """Positions that one pass reads of sequences without a row: in each at most ``width``, from ``num_cached`` on."""

    responses: list[Response]
    ends: list[int]
    """Position after the last one that is read, of each."""
    width: int
    layout: Layout | None

    @property
    def num_read(self) -> int:
        """Positions that the pass reads, repeated ones not counted."""
        return sum(self.ends) - sum(response.num_cached for response in self.responses)


class Scheduler:
    """The waiting, the prefilling and the live sequences, and the pages between them."""

    def __init__(self, rows: LiveRows, cache: PagedCache, noise: NoiseWindow, learned: LearnedDrafts | None) -> None:
        self.rows, self.cache, self._noise, self._learned = rows, cache, noise, learned
        self.pool = PagePool(cache.num_pages)
        self.waiting: list[Response] = []
        """Sequences without pages, new ones and preempted ones, in the order of their arrival."""
        self.prefilling: list[Response] = []
        self._layouts: dict[tuple[int, ...], Layout | None] = {}

    @property
    def num_unfinished(self) -> int:
        """Number of sequences that wait, are prefilled or have a row."""
        return len(self.waiting) + len(self.prefilling) + self.rows.num_live

    def layout_of_rows(self, rows: tuple[int, ...]) -> Layout | None:
        """The cache's layout of passes over these rows; made again only after pages have changed."""
        if not self._layouts and self.cache.wants_packing and self.pool.is_fragmented:
            self._compact_pages()
        if rows not in self._layouts:
            tables = [self.rows.responses[row].pages for row in rows]
            self._layouts[rows] = self.cache.build_layout(tables, self.pool.high_water)
        return self._layouts[rows]

    def num_pages_for(self, num_tokens: int) -> int:
        """Number of pages that so many tokens take."""
        return -(-num_tokens // self.cache.page_size)

    def enqueue(self, response: Response) -> None:
        """Add a sequence to those that wait for pages, at the place of its arrival."""
        insort(self.waiting, response, key=attrgetter("order"))

    # -- in -----------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Give pages to waiting sequences, first in line first, as long as there are rows and pages."""
        later: list[Response] = []
        # one that waits for its prompt to be prefilled by a sibling keeps its place among the rows
        while self.waiting and self.rows.num_live + len(self.prefilling) + len(later) < self.rows.capacity:
            response = self.waiting.pop(0)
            if self._prompt_is_prefilling(response):
                later.append(response)
            elif not self._try_admit(response):
                later.append(response)
                break
        for response in later:
            self.enqueue(response)

    def _prompt_is_prefilling(self, response: Response) -> bool:
        return any(other.prompt == response.prompt for other in self.prefilling)

    def _try_admit(self, response: Response) -> bool:
        sibling = next((other for other in self.rows.responses if other.prompt == response.prompt), None)
        num_shared = (response.prompt_length - 1) // self.cache.page_size if sibling else 0
        needed = self.num_pages_for(len(response.text)) - num_shared
        admitted = self.rows.num_live + len(self.prefilling)
        if self.pool.num_free < needed + (1 + admitted // 4 if admitted else 0):
            return False
        own = self.pool.take_pages(needed)
        response.num_cached = 0
        if sibling is not None:
            shared = sibling.pages[:num_shared]
            self.pool.share(shared)
            response.pages = shared + own
            response.num_cached = response.prompt_length - 1
            left = response.num_cached - num_shared * self.cache.page_size
            if left:
                self.cache.copy_page_start(sibling.pages[num_shared], own[0], left)
        else:
            response.pages = own
        if response.num_cached >= len(response.text) - 1:
            self._give_row(response)
        else:
            self.prefilling.append(response)
        return True

    def plan_prefill_chunk(self, max_tokens: int) -> PrefillChunk | None:
        """The next chunk of the prefilling sequences, of at most ``max_tokens`` positions; None if there are none.

        All positions are read so but the last, which the first round feeds.
        """
        chosen = self.prefilling[:max_tokens]
        if not chosen:
            return None
        unread = [len(response.text) - 1 - response.num_cached for response in chosen]
        width = min(max(unread), max(1, max_tokens // len(chosen)))
        ends = [response.num_cached + min(left, width) for response, left in zip(chosen, unread, strict=True)]
        readable = [response.pages[: self.num_pages_for(end)] for response, end in zip(chosen, ends, strict=True)]
        return PrefillChunk(chosen, ends, width, self.cache.build_layout(readable, self.pool.high_water))

    def finish_prefill_chunk(self, chunk: PrefillChunk) -> None:
        """Give rows to the sequences of which a chunk has read the last part."""
        for response, end in zip(chunk.responses, chunk.ends, strict=True):
            response.num_cached = end
        ready = [response for response in chunk.responses if response.num_cached >= len(response.text) - 1]
        self.prefilling = [response for response in self.prefilling if response not in ready]
        for response in ready:
            self._give_row(response)

    def _give_row(self, response: Response) -> None:
        row = self.rows.add(response)
        self.cache.set_table(row, response.pages)
        self._noise.set_row(row, response.request.key, response.num_response_tokens)
        if self._learned is not None:
            self._learned.reset_row(row, response)
        self._layouts.clear()

    # -- growth -------------------------------------------------------------------------------------------------

    def has_room(self, num_slots: int, in_flight: int) -> bool:
        """True if every live row can write ``num_slots`` positions from its last token on without a preemption.

        ``in_flight``: tokens that a row may have got in rounds that have not been read yet.
        """
        most = self.rows.num_live * (1 + self.num_pages_for(num_slots + in_flight))
        if most <= self.pool.num_free:  # each has the pages of its text
            return True
        lacking = (self._num_lacking(response, num_slots, in_flight) for response in self.rows.responses)
        return sum(lacking) <= self.pool.num_free

    def reserve_pages_or_preempt(self, num_slots: int, in_flight: int = 0) -> int:
        """Give every live row the pages for that many positions, if need be by preempting what arrived last.

        Returns how many sequences of the step's own were preempted.
        """
        row, size, reach, num_preempted = 0, self.cache.page_size, num_slots + in_flight - 1, 0
        while row < self.rows.num_live:
            response = self.rows.responses[row]
            if len(response.text) + reach <= len(response.pages) * size:
                row += 1
                continue
            lacking = self._num_lacking(response, num_slots, in_flight)
            if lacking > self.pool.num_free:
                victim = self._preempt()
                num_preempted += not victim.is_ahead
                self.enqueue(victim)
                row = 0  # rows have moved; those that have their pages take none again
                continue
            if lacking:
                response.pages += self.pool.take_pages(lacking)
                self.cache.set_table(row, response.pages)
                self._layouts.clear()
            row += 1
        return num_preempted

    def _num_lacking(self, response: Response, num_slots: int, in_flight: int) -> int:
        longest = min(len(response.text) + in_flight, response.longest)
        return max(0, self.num_pages_for(longest - 1 + num_slots) - len(response.pages))

    def _preempt(self) -> Response:
        """Take row and pages of the sequence that arrived last, whether it is being prefilled or has a row."""
        admitted = [*self.prefilling, *self.rows.responses]
        assert len(admitted) > 1, "a lone sequence always fits: submit has refused those that do not"
        victim = max(admitted, key=attrgetter("order"))
        if victim in self.prefilling:
            self.prefilling.remove(victim)
            self.release(victim)
        else:
            row = self.rows.responses.index(victim)
            victim.log_probs = self.rows.response_log_probs(row).numpy().copy()
            self.remove_row(row)
        return victim

    # -- order --------------------------------------------------------------------------------------------------

    @property
    def has_stored(self) -> bool:
        """True if any live row has a stored text."""
        return any(response.stored is not None for response in self.rows.responses)

    def follow_stored_texts(self) -> None:
        """Move the cursors of all stored texts, when all rounds have been read."""
        for response in self.rows.responses:
            if response.stored is None:
                continue
            response.stored.follow_response(response.text, response.prompt_length, response.num_tokens_left)
            if response.stored.is_spent:
                response.stored = None

    def stored_texts(self) -> dict[int, StoredText]:
        """By row, the stored texts that have drafts for the next round."""
        texts = enumerate(response.stored for response in self.rows.responses)
        return {row: text for row, text in texts if text is not None and text.num_drafts}

    def _swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        self.rows.swap(one, other)
        self._noise.swap_rows(one, other)
        for tensor in (self.cache.tables, *((self._learned.known,) if self._learned else ())):
            swap_rows_in_place(tensor, one, other)
        self._layouts.clear()

    # -- out ----------------------------------------------------------------------------------------------------

    def remove_row(self, row: int) -> None:
        """Take a sequence's row and pages away; the last row takes its place."""
        self.release(self.rows.responses[row])
        last = self.rows.num_live - 1
        if row != last:
            self._swap(row, last)
        self.rows.remove_last()
        self.cache.tables[last] = self.cache.num_pages
        self._layouts.clear()

    def release(self, response: Response) -> None:
        """Free a sequence's pages."""
        self.pool.release(response.pages)
        response.pages = []
        self._layouts.clear()

    def abort(self) -> list[Response]:
        """Drop all sequences; returns them, in the order of their arrival."""
        dropped = sorted([*self.waiting, *self.prefilling, *self.rows.responses], key=attrgetter("order"))
        self.waiting.clear()
        while self.prefilling:
            self.release(self.prefilling.pop())
        while self.rows.num_live:
            self.remove_row(self.rows.num_live - 1)
        return dropped

    def _compact_pages(self) -> None:
        """Move pages together, so that a pass reads few unused ones."""
        moves = self.pool.compact()
        self.cache.copy_pages(moves)
        for response in self.prefilling:
            response.pages = [moves.get(page, page) for page in response.pages]
        for row, response in enumerate(self.rows.responses):
            response.pages = [moves.get(page, page) for page in response.pages]
            self.cache.set_table(row, response.pages)
