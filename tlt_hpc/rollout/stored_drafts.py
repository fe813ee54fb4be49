"""Which live rows have drafts from texts that were generated ahead, and those drafts. Host data only."""

from __future__ import annotations

from tlt_hpc.rollout.scheduler import Scheduler
from tlt_hpc.rollout.stored_text import StoredRow


class StoredDrafts:
    """The stored texts of the live rows."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def exist(self) -> bool:
        """Whether any live row has a stored text."""
        return any(response.stored is not None for response in self._scheduler.rows.responses)

    def arrange(self) -> list[StoredRow]:
        """Follow all texts, which must be up to date, and move the rows that have drafts behind the others; returns
        what those have, in the order of their rows.
        """
        rows = self._scheduler.rows
        for response in rows.responses:
            if response.stored is not None:
                response.stored.look(response.text, response.prompt_length, response.room)
                if response.stored.is_spent:
                    response.stored = None
        count = self.num_rest
        late = [row for row in range(count) if rows.responses[row].num_stored]
        early = [row for row in range(count, rows.num_live) if not rows.responses[row].num_stored]
        for pair in zip(late, early, strict=True):
            self._scheduler.swap(*pair)
        texts = [response.stored for response in rows.responses[count:]]
        return [StoredRow(text.num_drafts, text.is_sure) for text in texts if text is not None]

    @property
    def num_rest(self) -> int:
        """Rows without drafts from stored texts: the first ones, once arranged."""
        return sum(not response.num_stored for response in self._scheduler.rows.responses)

    def nodes(self, most: int) -> list[list[int]]:
        """The last token of each row that has drafts, and at most so many of them, by row."""
        responses = self._scheduler.rows.responses
        return [[one.text[-1], *one.stored.drafts(most)] for one in responses if one.stored and one.num_stored]
