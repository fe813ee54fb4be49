"""The pages of the cache that are in use, and by how many sequences. Host integers only: knows no tensor."""

from __future__ import annotations

import heapq

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

    def take(self, count: int) -> list[int]:
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

    def pack(self) -> dict[int, int]:
        """Move the highest pages into the lowest holes; returns old -> new. Whoever holds pages relabels them."""
        moves = {}
        while (high := self.high_water) and self._free and self._free[0] < high - 1:
            source, target = high - 1, heapq.heappop(self._free)
            self._holders[target], self._holders[source] = self._holders[source], 0
            heapq.heappush(self._free, source)
            moves[source] = target
        return moves
