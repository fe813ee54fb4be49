"""A replica: consecutive ranks that compute every forward pass of the rollout together (tensor parallelism).

Its ranks take the same steps over the same texts. Whatever depends on a clock or on the arrival of a message, and could
differ between them, is decided by the first rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tlt_hpc.config import ConfigError
from tlt_hpc.mpi.library import MPI
from tlt_hpc.mpi.progress import wait_for_request
from tlt_hpc.mpi.pulse import BUSY_SECONDS, Pulse
from tlt_hpc.mpi.roster import Roster, State, Status
from tlt_hpc.mpi.world import World


class Replica:
    """This rank's place ``index`` among the ``size`` of replica ``number`` of ``count``; made collectively.

    A step's responses are sharded by unit, which is a group or a sample: first over the replicas, which generate them,
    then over the ranks of each replica, which score, log and train on them.

    ``mark``, which each rollout sets, returns a checksum of the text that the ranks have in common. ``is_over`` is the
    first rank's news for its next agreement, ``heard`` what the last one said, until the pulse has taken it.
    """

    def __init__(self, world: World, size: int) -> None:
        self.size, self.count = size, world.size // size
        self.mark: Callable[[], int] = lambda: 0
        self.is_over = False
        self.heard: bool | None = None
        self.number, self.index = divmod(world.rank, size)
        self._comm: MPI.Comm | None = None
        if size > 1:
            everyone = world.duplicate_comm_all_ranks()
            self._comm = everyone.Split(self.number, self.index)
            everyone.Free()

    def generates_unit(self, unit: int) -> bool:
        """True if this replica generates the responses of a unit."""
        return unit % self.count == self.number

    def trains_on_unit(self, unit: int) -> bool:
        """True if this rank scores, logs and trains on the responses that its replica generates for a unit."""
        return unit // self.count % self.size == self.index

    def broadcast_from_first_rank(self, number: int) -> int:
        """The first rank's ``number``; collective over the replica.

        Raises:
            RuntimeError: this rank's text differs from the first rank's.
        """
        if self._comm is None:
            return number
        mark = self.mark()
        told = np.array([number, mark, self.is_over], np.int64)
        wait_for_request(self._comm.Ibcast(told, 0), "agreement of a replica", scope="replica")
        self.heard = bool(told[2])
        if int(told[1]) != mark:
            raise RuntimeError(
                f"rank {self.index} of replica {self.number} has decoded another text than its first rank: their "
                "devices do not compute alike; use nodes of one kind, or rollout.tensor_parallel = 1"
            )
        return int(told[0])


class ReplicaPulse(Pulse):
    """A pulse whose ranks, while they decode together, leave the rollout before the same step.

    A rank that saw a stop vote earlier than the others would leave them waiting in the middle of a forward pass. The
    news travels with the replica's agreement on the strategy of a round, and alone only where there was none. Only the
    first rank of a replica reports the tokens that the replica generates.
    """

    def __init__(self, comm: MPI.Comm, replica: Replica, busy_seconds: float = BUSY_SECONDS) -> None:
        super().__init__(comm, busy_seconds)
        self._replica = replica
        self._seen: Roster | None = None
        self._last_running: Roster | None = None

    def begin_rollout(self, epoch: int) -> None:
        """Start the rollout ``epoch``, as ``Pulse.begin_rollout``, with no news of an earlier one."""
        super().begin_rollout(epoch)
        self._seen = self._last_running = Roster.before_first_round(epoch, self._num_ranks)
        self._replica.is_over, self._replica.heard = False, None

    def poll(self, status: Status) -> Roster:
        """As ``Pulse.poll``; collective over the replica while it is BUSY or AHEAD."""
        assert self._seen is not None and self._last_running is not None, (
            "poll outside a rollout: call begin_rollout first"
        )
        roster = self._seen if self._seen.is_over else super().poll(status)
        is_leaving = self._replica.is_over = roster.is_over
        if status.state in (State.BUSY, State.AHEAD):
            if self._replica.heard is None:
                self._replica.broadcast_from_first_rank(0)
            is_leaving = bool(self._replica.heard)
            while is_leaving and not roster.is_over:  # the first rank's roster is on its way to this one
                self.back_off()
                roster = self.poll_now(status)
        self._replica.heard = None
        self._seen = roster
        if not roster.is_over:
            self._last_running = roster
        return roster if is_leaving else self._last_running

    def _post(self, roster: Roster, status: Status) -> None:
        alone = status if self._replica.index == 0 else status._replace(sequences_left=0, tokens=0)
        super()._post(roster, alone)


def check_replicas_per_node(hostnames: Sequence[str], size: int) -> None:
    """Refuse replicas of ``size`` ranks over several nodes, given every rank's host: each pass would cross the network.

    Raises:
        ConfigError: with the hosts and the remedy.
    """
    for first in range(0, len(hostnames), size):
        hosts = dict.fromkeys(hostnames[first : first + size])
        if len(hosts) > 1:
            raise ConfigError(
                f"rollout.tensor_parallel = {size}: ranks {first} to {first + size - 1} decode together and are on "
                f"{', '.join(hosts)}; start a multiple of {size} ranks on each node, one node after another (srun "
                "--distribution=block)"
            )
