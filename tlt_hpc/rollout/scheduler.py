"""Decides which sequences hold pages and rows: admission, sharing of prompts, chunked prefill, preemption.

A sequence waits without pages, then is prefilled, then has a row. If pages run out, the one that arrived last gives up
its pages and waits again; it is prefilled again from its tokens, so only time is lost.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from tlt_hpc.models.decoder import Decoder
from tlt_hpc.rollout.drafts import LearnedDrafts
from tlt_hpc.rollout.kv_cache import Layout, PagedCache
from tlt_hpc.rollout.noise import NoiseWindow
from tlt_hpc.rollout.pages import PagePool
from tlt_hpc.rollout.responses import Response
from tlt_hpc.rollout.rows import LiveRows
from tlt_hpc.rollout.transfer import exchange, upload


class Scheduler:
    """The waiting, the prefilling and the live sequences, and the pages between them."""

    def __init__(
        self,
        decoder: Decoder,
        rows: LiveRows,
        cache: PagedCache,
        noise: NoiseWindow,
        learned: LearnedDrafts | None,
        prefill_tokens: int,
    ) -> None:
        self.rows, self.cache = rows, cache
        self._decoder, self._noise, self._learned = decoder, noise, learned
        self.prefill_tokens = prefill_tokens
        """Positions that one chunk reads at most."""
        self.pool = PagePool(cache.num_pages)
        self.waiting: list[Response] = []
        """Sequences without pages, new ones and preempted ones, in the order of their arrival."""
        self.prefilling: list[Response] = []
        self.num_preempted = 0
        self._layout: Layout | None = None
        self._first_layout: tuple[int, Layout | None] = (0, None)

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.prefilling) + self.rows.num_live

    @property
    def layout(self) -> Layout | None:
        """Who reads which page among the live rows."""
        if self._layout is None:
            if self.cache.wants_packing and self.pool.is_loose:
                self._pack()
            tables = [response.pages for response in self.rows.responses]
            self._layout = self.cache.layout(tables, self.pool.high_water)
            self._first_layout = 0, None
        return self._layout

    def layout_of(self, count: int) -> Layout | None:
        """``layout``, of passes over the first ``count`` rows alone."""
        whole = self.layout
        if count == self.rows.num_live:
            return whole
        if self._first_layout[0] != count:
            tables = [response.pages for response in self.rows.responses[:count]]
            self._first_layout = count, self.cache.layout(tables, self.pool.high_water)
        return self._first_layout[1]

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.cache.page_size)

    def wait(self, response: Response) -> None:
        """Let a sequence wait for pages."""
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
            self.wait(response)

    def _prompt_is_prefilling(self, response: Response) -> bool:
        return any(other.prompt == response.prompt for other in self.prefilling)

    def _try_admit(self, response: Response) -> bool:
        sibling = next((other for other in self.rows.responses if other.prompt == response.prompt), None)
        num_shared = (response.prompt_length - 1) // self.cache.page_size if sibling else 0
        needed = self.pages_for(len(response.text)) - num_shared
        admitted = self.rows.num_live + len(self.prefilling)
        if self.pool.num_free < needed + (1 + admitted // 4 if admitted else 0):
            return False
        own = self.pool.take(needed)
        response.num_cached = 0
        if sibling is not None:
            shared = sibling.pages[:num_shared]
            self.pool.share(shared)
            response.pages = shared + own
            response.num_cached = response.prompt_length - 1
            left = response.num_cached - num_shared * self.cache.page_size
            if left:
                self.cache.copy_start(sibling.pages[num_shared], own[0], left)
        else:
            response.pages = own
        if response.num_cached >= len(response.text) - 1:
            self._give_row(response)
        else:
            self.prefilling.append(response)
        return True

    def prefill(self) -> int:
        """One chunk of the prefilling sequences: all positions but the last, which the first round feeds.

        Returns how many positions were read.
        """
        if not self.prefilling:
            return 0
        chosen = self.prefilling[: self.prefill_tokens]
        unread = [len(response.text) - 1 - response.num_cached for response in chosen]
        width = min(max(unread), max(1, self.prefill_tokens // len(chosen)))
        device = self._decoder.device
        # a sequence with less to do repeats its last position: the same values to the same place
        ends = [response.num_cached + min(left, width) for response, left in zip(chosen, unread, strict=True)]
        columns = [
            [min(response.num_cached + i, end - 1) for i in range(width)]
            for response, end in zip(chosen, ends, strict=True)
        ]
        tokens = [[s.text[i] for i in row] for s, row in zip(chosen, columns, strict=True)]
        positions = upload(columns, device)
        width_of_table = self.cache.tables.shape[1]
        tables = upload([s.pages + [self.cache.num_pages] * (width_of_table - len(s.pages)) for s in chosen], device)
        readable = [s.pages[: self.pages_for(end)] for s, end in zip(chosen, ends, strict=True)]
        layout = self.cache.layout(readable, self.pool.high_water)
        attend = self.cache.attend(layout, tables, positions)
        layers = self._learned.drafter.feature_layers if self._learned is not None else ()
        flat = upload(tokens, device).flatten(), positions.flatten()
        _, features = self._decoder.features(*flat, attend, layers)
        if self.cache.features is not None:
            self.cache.features[self.cache.slots(positions, tables).flatten()] = features
        num_read = sum(ends) - sum(response.num_cached for response in chosen)
        for response, end in zip(chosen, ends, strict=True):
            response.num_cached = end
        ready = [response for response in chosen if response.num_cached >= len(response.text) - 1]
        self.prefilling = [response for response in self.prefilling if response not in ready]
        for response in ready:
            self._give_row(response)
        return num_read

    def _give_row(self, response: Response) -> None:
        row = self.rows.add(response)
        self.cache.set_table(row, response.pages)
        self._noise.set_row(row, response.request.key, response.num_response)
        if self._learned is not None:
            self._learned.set_row(row, response)
        self._layout = None

    # -- growth -------------------------------------------------------------------------------------------------

    def has_room(self, num_slots: int, ahead: int = 0) -> bool:
        """Whether every live row can write ``num_slots`` positions from its last token on without a preemption.

        ``ahead``: tokens that a row may have got in rounds that have not been read yet.
        """
        most = self.rows.num_live * (1 + self.pages_for(num_slots + ahead))
        if most <= self.pool.num_free:  # each has the pages of its text
            return True
        return sum(self._lacking(response, num_slots, ahead) for response in self.rows.responses) <= self.pool.num_free

    def reserve(self, num_slots: int, ahead: int = 0) -> None:
        """Give every live row the pages for that many positions, if need be by preempting what arrived last."""
        row, size, reach = 0, self.cache.page_size, num_slots + ahead - 1
        while row < self.rows.num_live:
            response = self.rows.responses[row]
            if len(response.text) + reach <= len(response.pages) * size:
                row += 1
                continue
            lacking = self._lacking(response, num_slots, ahead)
            if lacking > self.pool.num_free:
                self.wait(self.preempt())
                row = 0  # rows have moved; those that have their pages take none again
                continue
            if lacking:
                response.pages += self.pool.take(lacking)
                self.cache.set_table(row, response.pages)
                self._layout = None
            row += 1

    def _lacking(self, response: Response, num_slots: int, ahead: int) -> int:
        longest = min(len(response.text) + ahead, response.longest)
        return max(0, self.pages_for(longest - 1 + num_slots) - len(response.pages))

    def preempt(self) -> Response:
        """Take row and pages of the sequence that arrived last, whether it is being prefilled or has a row."""
        admitted = [*self.prefilling, *self.rows.responses]
        assert len(admitted) > 1, "a lone sequence always fits: submit has refused those that do not"
        victim = max(admitted, key=attrgetter("order"))
        self.num_preempted += not victim.is_ahead
        if victim in self.prefilling:
            self.prefilling.remove(victim)
            self.release(victim)
        else:
            row = self.rows.responses.index(victim)
            victim.log_probs = self.rows.response_log_probs(row).numpy().copy()
            self.remove(row)
        return victim

    # -- out ----------------------------------------------------------------------------------------------------

    def remove(self, row: int) -> None:
        """Take a sequence's row and pages away."""
        self.release(self.rows.responses[row])
        moved = self.rows.remove(row)
        if moved is not None:
            self._noise.move_row(moved, row)
            self.cache.tables[row] = self.cache.tables[moved]
            if self._learned is not None:
                self._learned.move_row(moved, row)
        self.cache.tables[self.rows.num_live] = self.cache.num_pages
        self._layout = None

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        self.rows.swap(one, other)
        self._noise.swap_rows(one, other)
        for tensor in (self.cache.tables, *((self._learned.known,) if self._learned else ())):
            exchange(tensor, one, other)
        self._layout = None

    def release(self, response: Response) -> None:
        """Free a sequence's pages."""
        self.pool.release(response.pages)
        response.pages = []
        self._layout = None

    def abort(self) -> list[Response]:
        """Drop all sequences; returns them, in the order of their arrival."""
        dropped = sorted([*self.waiting, *self.prefilling, *self.rows.responses], key=attrgetter("order"))
        self.waiting.clear()
        while self.prefilling:
            self.release(self.prefilling.pop())
        while self.rows.num_live:
            self.remove(self.rows.num_live - 1)
        return dropped

    def _pack(self) -> None:
        """Move pages together, so that a pass reads few unused ones."""
        moves = self.pool.pack()
        self.cache.copy_pages(moves)
        for response in self.prefilling:
            response.pages = [moves.get(page, page) for page in response.pages]
        for row, response in enumerate(self.rows.responses):
            response.pages = [moves.get(page, page) for page in response.pages]
            self.cache.set_table(row, response.pages)
