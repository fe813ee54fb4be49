"""What the reference model takes on each rank: whole below ZeRO stage 3, dealt out at stage 3. Counts alone."""

from __future__ import annotations

from tlt_hpc.plan.memory.parts import Part, Situation, some
from tlt_hpc.plan.memory.zero import small_parameters

REFERENCE = "reference"
_PREFETCHED = 50_000_000
"""Parameters of the next layers that are gathered ahead (DeepSpeed's stage3_prefetch_bucket_size)."""


def reference_parts(situation: Situation) -> tuple[Part, ...]:
    """What stays on the device; at stage 3 that is the rank's share, and beside it small tensors whole once read."""
    if not situation.has_reference:
        return ()
    count = situation.shape.num_parameters
    if _is_dealt(situation):
        count = _small(situation) + (0 if situation.offloads_parameters else _own(situation))
    return some((Part(REFERENCE, situation.item * count),))


def gathered_reference(situation: Situation) -> tuple[Part, ...]:
    """What the pass of a reference that is dealt out has whole at once: a table, and what is gathered ahead."""
    if not situation.has_reference or not _is_dealt(situation) or situation.num_ranks == 1:
        return ()
    s = situation.shape
    most = s.vocab_size * s.hidden_size + _PREFETCHED + s.intermediate_size * s.hidden_size
    count = min(s.num_parameters - small_parameters(situation), most)
    return some((Part("gathered reference", situation.item * count),))


def reference_in_host_memory(situation: Situation) -> int:
    """Bytes of a rank's share, where parameters are offloaded."""
    return situation.item * _own(situation) if situation.has_reference and situation.offloads_parameters else 0


def _is_dealt(situation: Situation) -> bool:
    return situation.config.optimizer.zero_stage == 3


def _own(situation: Situation) -> int:
    return -(-situation.shape.num_parameters // situation.num_ranks)


def _small(situation: Situation) -> int:
    return small_parameters(situation) if situation.num_ranks > 1 else 0
