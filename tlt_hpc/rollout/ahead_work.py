"""What an engine keeps of responses that it generates ahead, for their texts alone. Host data only."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import SampleKey
from tlt_hpc.rollout.responses import Response


@dataclass
class AheadWork:
    """Responses of the next step that are generated under the weights before it."""

    is_running: bool = False
    waiting: list[Response] = field(default_factory=list)
    """Begun or not, while the engine does something else."""
    texts: dict[SampleKey, NDArray[np.int32]] = field(default_factory=dict)
    """Of those that are complete."""

    @property
    def is_left(self) -> bool:
        """Whether there is anything to continue with."""
        return self.is_running or bool(self.waiting)

    def take(self) -> dict[SampleKey, NDArray[np.int32]]:
        """All texts so far, complete or not; there is nothing left."""
        assert not self.is_running
        begun = {one.request.key: _text(one) for one in self.waiting if one.num_response}
        taken = self.texts | begun
        self.texts, self.waiting = {}, []
        return taken

    def keep(self, response: Response) -> None:
        """A response that is complete."""
        self.texts[response.request.key] = _text(response)


def _text(response: Response) -> NDArray[np.int32]:
    return np.array(response.text[response.prompt_length :], np.int32)
