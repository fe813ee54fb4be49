"""A rank of ``tlt`` that kills itself where ``TLT_FAULT`` says: ``PLACE:RANK:COUNT``, at a given call of a function.

It makes the file ``TLT_FAULT_MARK`` in that moment. Started by ``faults.py`` as
``python -m mpi4py tools/fault_rank.py train ...``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tlt_hpc import rollout_loop as tail
from tlt_hpc import train as run
from tlt_hpc.checkpoint import save
from tlt_hpc.cli.main import main
from tlt_hpc.cluster.local import launched_rank
from tlt_hpc.drafting.merge import Merge
from tlt_hpc.drafting.spot import SpotTrainer
from tlt_hpc.resume import kept, replay
from tlt_hpc.rl.ahead import AheadTail
from tlt_hpc.rl.policy import Policy
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.storage import feature_writer

PLACES: dict[str, tuple[Any, str]] = {
    "rollout": (RolloutEngine, "step"),
    "spot training": (SpotTrainer, "micro_step"),
    "merge": (Merge, "finish"),
    "append": (feature_writer.FeatureCacheWriter, "append"),
    "keep": (kept, "write_kept"),
    "log": (run, "write_step"),
    "commit": (run, "add_line"),
    "committed": (run, "drop_kept"),
    "checkpoint": (save, "write_file"),
    "update": (Policy, "update"),
    "replay": (replay, "update_policy"),
    "resume": (tail, "open_keeper"),
    "ahead": (AheadTail, "work"),
    "gather": (run, "gather"),
}
"""Functions before or after whose call a rank ends."""
OF_AHEAD = ("ahead",)
"""Places that only a run that generates ahead reaches; at the first, a rank ends before or in the middle of a call."""
_IN_THE_MIDDLE = 0.01
"""Seconds from the start of the call: half of it."""
OF_RANK_0 = ("commit", "committed")
"""Places that only rank 0 reaches."""


def strike(place: str, count: int) -> None:
    """Have this process kill itself before the ``count // 2``-th call of the place's function, or after it."""
    owner, name = PLACES[place]
    true, left = getattr(owner, name), [count // 2]

    def call(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] < 0 and count % 2 == 0:
            die()
        if left[0] < 0 and owner is AheadTail:
            threading.Timer(_IN_THE_MIDDLE, die).start()
        result = true(*arguments, **named)
        if left[0] < 0:
            die()
        return result

    set_call: Callable[[Any, str, Any], None] = setattr
    set_call(owner, name, call)


def die() -> None:
    """Kill this process, and mark when that was."""
    Path(os.environ["TLT_FAULT_MARK"]).touch()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    where, rank, number = os.environ["TLT_FAULT"].split(":")
    if launched_rank(os.environ) == int(rank):
        strike(where, int(number))
    sys.exit(main())
