"""The witness of a host: which rank's death it tells, of what, when it is silent, and whom it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_ranks import ROOT
from test_watch_verdict import record

from tlt_hpc.cluster.watch import process as processes
from tlt_hpc.cluster.watch import witness as module
from tlt_hpc.cluster.watch.record import claim_verdict, read_verdict, write_record
from tlt_hpc.cluster.watch.tie import Knot, address_of
from tlt_hpc.cluster.watch.witness import Ranks, Vigil, Witness, may_be_first

Children = list["subprocess.Popen[bytes]"]


@pytest.fixture(autouse=True)
def quickly(monkeypatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.2)


@pytest.fixture(params=["pidfd", "an older kernel"])
def system(request, monkeypatch) -> None:
    if request.param != "pidfd":
        monkeypatch.setattr(processes, "_PIDFD_OPEN", 1 << 20)  # as where there is no such call: ENOSYS


@pytest.fixture
def ranks() -> Iterator[Children]:
    """Two processes that stand for a host's ranks."""
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def host_of(ranks: Children, folder: Path | None) -> Ranks:
    pids = {rank: process.pid for rank, process in enumerate(ranks)}
    return Ranks("start", "node1", 4, pids, None if folder is None else str(folder))


def keep(vigil: Vigil, seconds: float = 60.0) -> None:
    """What the program does, until all ranks have ended."""
    last = time.monotonic() + seconds
    while vigil.descriptors:
        assert time.monotonic() < last, "ranks are left"
        vigil.look()


def watch(ranks: Children, folder: Path | None) -> Vigil:
    vigil = Vigil()
    vigil.hear(host_of(ranks, folder))
    for rank in range(2):
        if folder is not None:
            write_record(folder, record(rank, part="7 sequences left", host="node1"))
    return vigil


def test_a_killed_rank_is_told_and_the_others_are_ended(system, ranks, tmp_path, capfd):
    vigil = watch(ranks, tmp_path)
    ranks[1].send_signal(signal.SIGKILL)
    keep(vigil)
    line = "rank 1 on node1 was killed by signal 9 (SIGKILL), last seen in rollout of step 12 (7 sequences left)"
    assert read_verdict(tmp_path) == ("start", line)
    assert capfd.readouterr().err == f"tlt: {line}; the same command goes on from the last committed step\n"
    assert ranks[0].wait() == -signal.SIGKILL


def test_of_several_that_ended_while_it_had_no_core_the_first_is_told(ranks, tmp_path, capfd):
    vigil = watch(ranks, tmp_path)
    for rank in (1, 0):  # the launcher's doing, within milliseconds
        ranks[rank].send_signal(signal.SIGKILL)
        ranks[rank].wait()
    keep(vigil)
    assert "rank 1 on node1 has died" in read_verdict(tmp_path)[1]
    assert capfd.readouterr().err.count("\n") == 1


# A rank that ties itself, breaks the tie when told what to say, and is gone once its input has ended.
TIED = """
import os, sys
from tlt_hpc.cluster.watch.tie import Tie
tie = Tie()
tie.fasten(bytes.fromhex(sys.argv[1]))
print("tied" if tie.descriptor else "not tied", flush=True)
word = sys.stdin.readline().strip()
tie.say(word)
os.close(tie.descriptor)
sys.stdin.read()
os._exit(0 if word == "finished" else 3)
"""


def tied(address: bytes, **options: object) -> subprocess.Popen[bytes]:
    """Such a rank, before it is tied: the witness must be listening by then."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", TIED, address.hex()]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, **options)


@pytest.fixture
def three(tmp_path) -> Iterator[tuple[Vigil, Children]]:
    """A witness, and a host's ranks, of which those after the first are tied."""
    first = subprocess.Popen(["sleep", "60"])
    name = address_of("start", "node1", first.pid)
    started = [first, tied(name), tied(name)]
    vigil = Vigil()
    vigil.hear(host_of(started, tmp_path))
    vigil.look(), vigil.look()
    assert [process.stdout.readline() for process in started[1:]] == [b"tied\n"] * 2
    yield vigil, started
    for process in started:
        process.kill(), process.wait()


def begin_to_end(vigil: Vigil, processes: Children, rank: int, word: bytes = b"") -> None:
    """Have a tied rank break its tie, after a last word; it ends only when its input does."""
    processes[rank].stdin.write(word + b"\n"), processes[rank].stdin.flush()
    while rank not in vigil._order:
        vigil.look()


def test_whoever_begins_to_end_first_is_told_though_another_has_ended_before(three, capfd, monkeypatch):
    monkeypatch.setattr(module, "LOOK_SECONDS", 60.0)
    vigil, processes = three
    begin_to_end(vigil, processes, 2)
    processes[1].kill()
    assert processes[1].wait() == -signal.SIGKILL and processes[2].poll() is None, "the other way round"
    processes[2].stdin.close()
    keep(vigil)
    assert "rank 2 on node1 ended with status 3 and no word" in capfd.readouterr().err


def test_what_a_rank_says_of_its_end_need_not_be_in_its_folder(three, capfd):
    vigil, processes = three
    processes[2].stdin.write(b"failed: WriteError: read-only"), processes[2].stdin.close()
    keep(vigil)
    assert capfd.readouterr().err == "" and processes[1].wait() == -signal.SIGKILL, "the job ends all the same"


def test_one_that_fails_because_another_began_to_end_does_not_silence_it(three, tmp_path, capfd, monkeypatch):
    """Its connection breaks at once, and it says so, here and in its folder, before the other one is over."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 60.0)
    vigil, processes = three
    begin_to_end(vigil, processes, 1)
    failure = "failed: RuntimeError: Connection closed by peer"
    processes[2].stdin.write(failure.encode()), processes[2].stdin.close()
    write_record(tmp_path, record(2, pid=processes[2].pid, ending=failure))
    processes[1].stdin.close()
    keep(vigil)
    assert "rank 1 on node1 ended with status 3 and no word" in capfd.readouterr().err


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_failure_on_another_host_counts_where_it_came_first(three, tmp_path, capfd, monkeypatch, comes_first):
    """Of two hosts none hears the other's ties: what was in the folder as a rank was killed tells which was first."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 60.0)
    vigil, processes = three
    failed = record(3, host="node2", ending="failed: RuntimeError: Connection closed by peer")
    if comes_first:
        write_record(tmp_path, failed)
    begin_to_end(vigil, processes, 1)
    write_record(tmp_path, failed)
    processes[1].stdin.close()
    keep(vigil)
    said = capfd.readouterr().err
    assert ("rank 1 on node1 ended with status 3 and no word" in said) is not comes_first
    assert comes_first or said.count("\n") == 1


def test_a_word_that_is_heard_after_the_end_counts(three, capfd):
    vigil, processes = three
    (descriptor,) = [descriptor for descriptor, rank in vigil.descriptors.items() if rank == 2]
    processes[2].stdin.write(b"failed: WriteError: read-only"), processes[2].stdin.close(), processes[2].wait()
    vigil.ended(descriptor)
    keep(vigil)
    assert capfd.readouterr().err == ""


def test_one_that_has_begun_to_end_and_does_not_is_not_waited_for(three, capfd):
    vigil, processes = three
    vigil._order.append(2)
    processes[1].kill()
    keep(vigil)
    assert "rank 1 on node1 was killed by signal 9" in capfd.readouterr().err


def test_a_tie_breaks_before_what_a_launcher_holds(tmp_path):
    name = address_of("start", "node1", os.getpid())
    for _ in range(5):
        knot, epoll = Knot(name), select.epoll()
        reader, writer = os.pipe()
        child = tied(name, pass_fds=[writer])
        os.close(writer)
        assert child.stdout.readline() == b"tied\n"
        tie = knot.accept()
        epoll.register(reader, select.EPOLLIN), epoll.register(tie, select.EPOLLIN)
        child.kill(), child.wait()
        assert [descriptor for descriptor, _ in epoll.poll(5)] == [tie, reader]
        assert knot.hear(tie) == (child.pid, None) and not knot.ties
        os.close(reader), knot._socket.close()


def test_want_of_memory_is_told_where_the_system_counted_it(ranks, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(module, "count_memory_kills", lambda: 3)
    vigil = watch(ranks, tmp_path)
    monkeypatch.setattr(module, "count_memory_kills", lambda: 4)
    ranks[0].send_signal(signal.SIGKILL)
    keep(vigil)
    told = "the system has killed 1 for want of memory on this host since the start"
    assert told in capfd.readouterr().err and told in read_verdict(tmp_path)[1]


def test_what_another_host_has_told_is_not_told_again(ranks, tmp_path, capfd):
    """Its ranks were killed for the death of another's: the launcher's doing, or this witness's own."""
    vigil = watch(ranks, tmp_path)
    claim_verdict(tmp_path, "start", "rank 3 on node2 was killed")
    keep(vigil)
    assert [process.wait() for process in ranks] == [-signal.SIGKILL] * 2
    assert capfd.readouterr().err == ""
    assert read_verdict(tmp_path)[1] == "rank 3 on node2 was killed"


def test_an_earlier_starts_verdict_ends_nobody(ranks, tmp_path):
    vigil = watch(ranks, tmp_path)
    claim_verdict(tmp_path, "earlier", "rank 3 on node2 was killed")
    with pytest.raises(AssertionError, match="ranks are left"):
        keep(vigil, 0.5)


def test_a_rank_that_was_stopped_early_may_be_killed_and_the_rest_is_waited_for(ranks, tmp_path, capfd):
    vigil = watch(ranks, tmp_path)
    write_record(tmp_path, record(0, ending="stopped early"))
    ranks[0].kill()
    with pytest.raises(AssertionError, match="ranks are left"):
        keep(vigil, 0.5)
    ranks[1].kill()  # by the launcher, before it could say the same
    keep(vigil)
    assert capfd.readouterr().err == "" and read_verdict(tmp_path) is None


@pytest.mark.parametrize("has_finished", [True, False])
def test_a_rank_that_is_killed_when_another_has_finished_is_told(three, tmp_path, capfd, has_finished):
    """No launcher kills a rank because another has finished."""
    vigil, processes = three
    write_record(tmp_path, record(2, pid=processes[2].pid))
    for rank in (1, 2)[: 1 + has_finished]:
        begin_to_end(vigil, processes, rank, b"finished")
    processes[2].kill()
    while 2 in vigil.descriptors.values():
        vigil.look()
    processes[1].stdin.close(), processes[0].kill()
    keep(vigil)
    where = "after it had finished" if has_finished else "last seen in rollout of step 12"
    assert f"rank 2 on node1 was killed by signal 9 (SIGKILL), {where}" in capfd.readouterr().err


def test_a_rank_that_finished_and_whose_status_only_the_launcher_knows_is_no_news(ranks, tmp_path, capfd):
    vigil = watch(ranks, tmp_path)
    write_record(tmp_path, record(0, ending="finished"))
    ranks[0].kill(), ranks[0].wait()
    vigil.look()
    assert capfd.readouterr().err == "" and read_verdict(tmp_path) is None
    ranks[1].kill()
    keep(vigil)
    assert "rank 1 on node1 was killed by signal 9" in capfd.readouterr().err, "the end of the job was not told before"


def test_after_a_failure_that_was_told_what_is_left_is_ended(ranks, tmp_path, capfd):
    vigil = watch(ranks, tmp_path)
    write_record(tmp_path, record(3, ending="failed: OSError: no room"))
    ranks[0].kill()
    keep(vigil)
    assert ranks[1].wait() == -signal.SIGKILL and capfd.readouterr().err == ""


def test_before_the_run_begins_only_a_signal_is_news(ranks, capfd):
    quiet = subprocess.Popen(["sh", "-c", "exit 2"])  # a mistake of the user's, which the rank has told
    watch([quiet], None)
    keep(vigil := watch([quiet], None))
    assert not vigil.descriptors and capfd.readouterr().err == ""
    vigil = watch(ranks, None)
    ranks[1].send_signal(signal.SIGSEGV)
    keep(vigil)
    assert "rank 1 on node1 was killed by signal 11 (SIGSEGV) before the run began" in capfd.readouterr().err
    quiet.wait()


def test_a_folder_that_is_gone_does_not_silence_it(ranks, tmp_path, capfd):
    folder = tmp_path / "status"
    folder.mkdir()
    vigil = watch(ranks, folder)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    ranks[0].kill()
    keep(vigil)
    assert "rank 0 on node1 was killed by signal 9 (SIGKILL); the same command" in capfd.readouterr().err


def test_the_program_hears_of_the_ranks_and_ends_after_them(ranks, tmp_path, capfd):
    own = {0: os.getpid(), 1: ranks[1].pid}
    witness = Witness()
    write_record(tmp_path, record(1))
    witness.tell(Ranks("start", "node1", 2, own, None))
    witness.tell(Ranks("start", "node1", 2, own, str(tmp_path)))
    ranks[1].kill()
    last = time.monotonic() + 60
    while "was killed by signal 9" not in (err := capfd.readouterr().err):
        assert time.monotonic() < last, err
        time.sleep(0.05)
    process = witness._process
    assert process.poll() is None, "this process is one of its ranks"
    process.send_signal(signal.SIGTERM)  # meant for ranks
    time.sleep(0.1)
    assert process.poll() is None
    process.kill(), process.wait()
    witness.tell(Ranks("start", "node1", 2, own, str(tmp_path / "other")))  # to nobody: the rank goes on
    witness.close()


def test_a_second_rank_of_a_host_lets_its_witness_go(ranks):
    witness = Witness()
    process = witness._process
    witness.tell(Ranks("start", "node1", 2, {0: ranks[0].pid, 1: os.getpid()}, None))
    assert process.wait(60) == 0


def test_who_may_be_the_first_of_a_host():
    assert may_be_first({}) and may_be_first({"SLURM_LOCALID": "0"}) and may_be_first({"MPI_LOCALRANKID": "0"})
    assert not may_be_first({"SLURM_LOCALID": "1"}) and not may_be_first({"OMPI_COMM_WORLD_LOCAL_RANK": "3"})
