"""The watch's records, the rank that it names as holding up a job, and how it reports the end of the last start."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_hpc.cluster.watch import exit_monitor
from tlt_hpc.cluster.watch.diagnosis import (
    StatusReading,
    describe_blocking_rank,
    describe_lone_stalled_rank,
    describe_process_state,
)
from tlt_hpc.cluster.watch.rank_progress import Beat, Member, Phase
from tlt_hpc.cluster.watch.record import (
    SIZE,
    Record,
    decode,
    encode,
    read_and_clear_last_end,
    read_record,
    read_verdict,
    status_file,
    write_record,
    write_verdict_if_first,
)
from tlt_hpc.cluster.watch.watch import ProgressCounter
from tlt_hpc.common.files import DamagedText

GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:3482: Connection "
    "reset by peer. This is typically caused by a remote worker hanging or bugs in the application."
)
MEMBER = Member(0, 2, "node1", "start", {0: 1})


def record(rank: int, **changes: object) -> Record:
    """The record of a rank that decodes and has just made progress, with these changes."""
    plain = Record(
        start="start", rank=rank, host=f"node{rank + 1}", pid=100 + rank, heartbeat=400, phase="rollout", step=13,
        part="", part_number=0, waiting="", number=0, progress=7, still=0, limit=300, seconds=0.0,
    )  # fmt: skip
    return replace(plain, **changes)


def stuck(rank: int, **changes: object) -> Record:
    return record(rank, **{"still": 301, "seconds": 301.0, **changes})


def waits(rank: int, name: str = "allgather", number: int = 17, **changes: object) -> Record:
    return stuck(rank, waiting=name, number=number, **changes)


def line_of(*records: Record, silent: tuple[int, ...] = (), lost: tuple[int, ...] = ()) -> str | None:
    seen = [StatusReading(r.rank, r, silent=r.rank in silent) for r in records]
    return describe_blocking_rank([*seen, *(StatusReading(rank, None, "there is no file") for rank in lost)])


ENGINE = {"part": "7 sequences left", "where": "step (rollout/engine.py:88)"}
LAST_PART = {"phase": "update", "part": "micro-batch 8 of 8", "part_number": 8}
SECOND_PART = {"phase": "update", "part": "micro-batch 2 of 8", "part_number": 2}

NAMED = {
    "of a rank at work and those that wait, the one at work": (
        [waits(0), stuck(1, **ENGINE), waits(2), waits(3)],
        "rank 1 on node2 is stuck in rollout of step 13 (7 sequences left) for 301 s, at step "
        "(rollout/engine.py:88); ranks 0, 2-3 wait in allgather (rollout of step 13)",
    ),
    "those in different collectives apart": (
        [waits(0), waits(1), waits(2, "broadcast", 18)],
        "the ranks have parted: ranks 0-1 wait in allgather number 17 (rollout of step 13), "
        "rank 2 waits in broadcast number 18 (rollout of step 13)",
    ),
    "the library, if all are in one": (
        [waits(0), waits(1)],
        "ranks 0-1 wait in allgather number 17 (rollout of step 13), which does not end though all are there: ask the "
        "MPI library or the network",
    ),
    # the watch does not see that a rank waits in a collective of torch; the part of the work tells who is late
    "of several at work the least far": (
        [stuck(0, **LAST_PART), stuck(1, **SECOND_PART), stuck(2, **LAST_PART)],
        "rank 1 on node2 is stuck in update of step 13 (micro-batch 2 of 8) for 301 s",
    ),
    "one that is a step behind": (
        [stuck(0, **LAST_PART), stuck(1, step=12, **LAST_PART)],
        "rank 1 on node2 is stuck in update of step 12 (micro-batch 8 of 8) for 301 s",
    ),
    "nobody while a rank may still come": ([waits(0), record(1, still=299)], None),
    "nobody where one has come only now": ([waits(0), replace(waits(1), still=2)], None),
    "nobody if all make progress": ([record(0), record(1)], None),
    "nobody whose limit is off": ([waits(0), record(1, limit=0, still=9999)], None),
}


@pytest.mark.parametrize("who", NAMED)
def test_who_is_named(who):
    records, line = NAMED[who]
    assert line_of(*records) == line


def test_ranks_without_a_sign_of_life_are_named_after_one_that_hangs_and_files_that_cannot_be_read():
    silent = line_of(waits(0), record(1), record(2), silent=(1,))
    assert "rank 1 on node2 shows no sign of life (dead, stopped, or cut off from the run's folder)" in str(silent)
    assert str(line_of(stuck(0), record(1), silent=(1,))).startswith("rank 0")
    assert line_of(waits(0), lost=(1,)) == (
        "rank 1 cannot be seen, while rank 0 waits in allgather (rollout of step 13); "
        "the status of rank 1 cannot be read: there is no file"
    )
    assert line_of(waits(0), record(2), lost=(1,)) is None, "rank 2 is at work"
    assert describe_lone_stalled_rank(waits(1), "x").endswith("step 13); what the other ranks do cannot be seen: x")


@given(st.lists(st.tuples(st.sampled_from(["", "allgather", "pulse"]), st.integers(0, 400)), min_size=1, max_size=6))
def test_no_rank_that_makes_progress_is_named(ranks):
    records = [record(i, waiting=name, still=still) for i, (name, still) in enumerate(ranks)]
    line = line_of(*records)
    if line is not None:
        assert any(r.stalled for r in records) and "\n" not in line
        assert not any(f"{r.name} is stuck" in line for r in records if not r.stalled)


# -- records ----------------------------------------------------------------------------------------------------------


def test_a_record_comes_back_as_it_was_and_a_start_has_one_verdict(tmp_path):
    told = stuck(3, where="x" * 50, ending="finished", part="micro-batch 1 of 2")
    for each in (told, record(3)):  # the second is written in place
        write_record(tmp_path, each)
        assert read_record(status_file(tmp_path, 3)) == each
    assert status_file(tmp_path, 3).stat().st_size == SIZE and read_verdict(tmp_path) is None
    assert write_verdict_if_first(tmp_path, "a", "rank 1 is stuck") and not write_verdict_if_first(
        tmp_path, "a", "rank 2 is stuck"
    )
    assert read_verdict(tmp_path) == ("a", "rank 1 is stuck") and len(list(tmp_path.iterdir())) == 2


@given(st.integers(0, SIZE - 1), st.integers(1, 255))
def test_a_damaged_record_is_refused(index, change):
    data = bytearray(encode(record(0)))
    data[index] ^= change
    with suppress(DamagedText):
        assert decode(bytes(data)) == record(0), "only blanks at its end may change nothing"


# -- counting ---------------------------------------------------------------------------------------------------------


def looks(counter: ProgressCounter, count: int) -> Record:
    for _ in range(count):
        counter.update_counters()
    return counter.make_status_record(MEMBER)


def test_looks_are_counted_not_seconds():
    beat = Beat()
    counter = ProgressCounter(beat, 0.01, 1.0)
    beat.phase = Phase.ROLLOUT  # 3 looks
    assert not looks(counter, 3).stalled
    assert looks(counter, 1).stalled
    beat.tick()
    assert looks(counter, 1).still == 0
    assert not looks(ProgressCounter(beat, 0.0, 1.0), 1000).stalled, "switched off"


def test_a_rank_that_trains_the_drafter_and_hears_of_no_other_rank_waits_in_the_pulse():
    """It trains as long as the tail lasts, so its own progress does not show that it waits."""
    beat = Beat()
    counter = ProgressCounter(beat, 0.02, 1.0)  # 6 looks
    with beat.in_phase(Phase.ROLLOUT, 3):
        beat.begin_pulse()
        beat.record_pulse_poll(4, 0, over=False)
        for _ in range(7):
            beat.tick()
            counter.update_counters()
        told = counter.make_status_record(MEMBER)
        assert (told.waiting, told.number, told.stalled) == ("pulse", 5, True)
        beat.mark_waiting_for_pulse()
        beat.record_pulse_poll(4, 0, over=False)
        assert (beat.waiting, counter.make_status_record(MEMBER).stalled) == (("pulse", 5), True), "that is no progress"
        beat.record_pulse_poll(5, 0, over=False)
        counter.update_counters()
        assert beat.waiting is None and not counter.make_status_record(MEMBER).stalled


def test_bytes_that_a_save_has_written_are_progress_but_asking_for_their_number_is_not():
    beat = Beat()
    counter = ProgressCounter(beat, 0.001, 1.0)  # 4 looks
    beat.phase = Phase.SAVING
    with beat.in_save_polling():
        for _ in range(6):
            beat.mark_waiting_in("allgather", "world")
            beat.mark_working()
            counter.update_counters()
        assert counter.make_status_record(MEMBER).stalled
        beat.written += 1
        counter.update_counters()
        assert counter.make_status_record(MEMBER).still == 0


def test_phases_nest_and_a_failure_leaves_the_one_it_happened_in():
    beat = Beat()
    beat.enter_step(4)
    with beat.in_phase(Phase.SAVING):
        assert (beat.phase, beat.step) == (Phase.SAVING, 4)
    assert (beat.phase, beat.step) == (Phase.COMMIT, 4)
    with pytest.raises(ZeroDivisionError), beat.in_phase(Phase.UPDATE, 7):
        beat.enter_part("micro-batch", 2, 8)
        raise ZeroDivisionError
    told = ProgressCounter(beat, 1.0, 1.0).make_status_record(MEMBER)
    assert told.phase_and_step_text == "update of step 8 (micro-batch 2 of 8)"


# -- the last start ---------------------------------------------------------------------------------------------------


def test_how_the_last_start_ended(tmp_path):
    for rank in (0, 1):
        write_record(tmp_path, record(rank))
    assert read_and_clear_last_end(tmp_path, "") == (
        "all 2 ranks on node1, node2 ended without a word, rank 0 last seen in rollout of step 13"
    )
    assert read_and_clear_last_end(tmp_path, "start") == "", "it is this one"
    write_record(tmp_path, record(1, ending="failed: OSError: no room"))
    assert read_and_clear_last_end(tmp_path, "") == "rank 1 on node2 failed: OSError: no room (in rollout of step 13)"
    write_verdict_if_first(tmp_path, "start", "rank 1 on node2 was killed")
    assert read_and_clear_last_end(tmp_path, "") == "rank 1 on node2 was killed"
    assert read_verdict(tmp_path) is None, "it is given once"


LAST_SEEN = "rank 1 on b was killed or crashed, last seen in rollout of step 13"


@pytest.mark.parametrize(
    ("hosts", "ending", "verdict"),
    [
        ("bb", "", LAST_SEEN),
        ("ab", "", f"{LAST_SEEN}; the cause may also be a node that was lost"),
        ("ab", "failed: OSError: no room", None),  # on another node, and this one's ranks were ended for that
        ("bb", "finished", None),
        ("bb", f"failed: RuntimeError: {GLOO}", LAST_SEEN),
        ("b", "", "rank 1 on b was killed or crashed, not seen yet"),
    ],
)
def test_a_rank_that_ends_without_a_word_is_named_unless_another_has_said_why(
    hosts, ending, verdict, tmp_path, monkeypatch
):
    monkeypatch.setattr(exit_monitor, "_OTHER_NODES_SECONDS", 0.2)
    write_record(tmp_path, record(2, host="c", start="another", ending="failed: earlier"))
    (tmp_path / "rank-0000.stacks").touch()
    for rank, host in enumerate(hosts):
        write_record(tmp_path, record(rank, host=host, ending=ending * (not rank)))
    exit_monitor._report_exit("start", "b", tmp_path, 1, {1})
    assert read_verdict(tmp_path) == (verdict and ("start", verdict))


def test_a_member_knows_the_processes_on_its_host():
    told = [("a", 11, "x"), ("a", 12, "y"), ("b", 11, "z")]
    assert Member.from_ranks(1, told) == Member(1, 3, "a", "x", {0: 11, 1: 12}, "x")
    assert (Member.from_ranks(2, told).neighbours, Member.from_ranks(2, told).monitor) == ({2: 11}, "z")
    assert describe_process_state(2**22 + 1) == "its process is gone"
