"""What an engine keeps of responses that it generates ahead, for their texts alone. Host data only."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tlt_hpc.common.records import SampleKey
from tlt_hpc.rollout.responses import Response

Texts = dict[SampleKey, NDArray[np.int32]]


@dataclass
class AheadWork:
    """Responses of the next step that are generated under the weights before it."""

    waiting: list[Response] = field(default_factory=list)
    """Begun or not, without a row."""
    texts: Texts = field(default_factory=dict)
    """Of those that are complete or were ended."""

    def end(self) -> None:
        """Continue none of them: the weights change. The texts are kept, complete or not."""
        for response in self.waiting:
            if response.num_response:
                self.keep(response)
        self.waiting = []

    def take(self) -> Texts:
        """All texts, which are forgotten here."""
        taken, self.texts = self.texts, {}
        return taken

    def keep(self, response: Response) -> None:
        """Keep the text of a response."""
        self.texts[response.request.key] = _text(response)


def _text(response: Response) -> NDArray[np.int32]:
    return np.array(response.text[response.prompt_length :], np.int32)
