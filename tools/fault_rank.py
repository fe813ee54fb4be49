"""A rank of ``tlt`` with a fault in it: ``python -m mpi4py tools/fault_rank.py train ...``.

``TLT_FAULT`` is PLACE:RANK:COUNT: the rank kills itself at a call of a function, and makes the file ``TLT_FAULT_MARK``
in that moment. ``TLT_SYSTEM_CALL`` has one of its system calls fail, or all of them recorded
(``fault_kinds/interception.py``).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

PLACES = {
    "rollout": "tlt_hpc.rollout.engine RolloutEngine.step",
    "spot training": "tlt_hpc.drafting.spot_trainer SpotTrainer.take_micro_step",
    "merge": "tlt_hpc.drafting.merge Merge.wait_and_assign_mean",
    "append": "tlt_hpc.storage.feature_writer FeatureCacheWriter.append",
    "keep": "tlt_hpc.run.kept_responses write_kept_responses",
    "log": "tlt_hpc.train write_step",
    "commit": "tlt_hpc.train add_line",
    "committed": "tlt_hpc.train remove_kept_responses",
    "checkpoint": "tlt_hpc.checkpoint.save write_safetensors_file",
    "update": "tlt_hpc.rl.policy Policy.update",
    "replay": "tlt_hpc.run.replay update_policy",
    "resume": "tlt_hpc.run.rollout_loop open_keeper_all_ranks",
    "ahead": "tlt_hpc.rl.ahead_generation AheadGeneration.generate_ahead_slice",
    "gather": "tlt_hpc.train gather_rollouts",
}
"""Functions before or after whose call a rank ends."""
OF_AHEAD = "ahead"
"""Reached by a run that generates ahead alone; there a rank ends before a call or in the middle of it."""
_IN_THE_MIDDLE = 0.01
"""Seconds from the start of the call: half of it."""
OF_RANK_0 = ("commit", "committed")
"""Places that only rank 0 reaches."""


def owner_of(place: str) -> tuple[Any, str]:
    """The module or class of a place's function, and its name."""
    module, _, path = PLACES[place].partition(" ")
    owner, _, name = path.rpartition(".")
    found = import_module(module)
    return getattr(found, owner) if owner else found, name


def strike(place: str, count: int) -> None:
    """Have this process kill itself before the ``count // 2``-th call of the place's function, or after it."""
    owner, name = owner_of(place)
    true, left = getattr(owner, name), [count // 2]

    def call(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] < 0 and count % 2 == 0:
            die()
        if left[0] < 0 and place == OF_AHEAD:
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
    from tlt_hpc.cli.main import main
    from tlt_hpc.cluster.launcher import launched_rank

    own = launched_rank(os.environ) or 0
    if "TLT_SYSTEM_CALL" in os.environ:
        from fault_kinds.interception import begin

        begin(own)
    else:
        from tlt_hpc.run import kept_responses

        kept_responses.EVERY_SECONDS = 0.2
    if "TLT_FAULT" in os.environ:
        where, rank, number = os.environ["TLT_FAULT"].split(":")
        if own == int(rank):
            strike(where, int(number))
    sys.exit(main())
