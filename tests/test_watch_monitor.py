"""The monitor of a host: which rank's death it names, of what, and when it is silent."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from uuid import uuid4

import pytest
from launch_ranks import ROOT
from test_watch_verdict import record

from tlt_hpc.cluster.watch import monitor as module
from tlt_hpc.cluster.watch.beat import Member
from tlt_hpc.cluster.watch.monitor import Liveness, ProcessMonitor, RankReport, address_of
from tlt_hpc.cluster.watch.record import claim_verdict, read_verdict, write_record

# A rank: reports what it reads, line by line; at "close" it closes its connection, as the system does when it begins to
# end; when its input ends, so does it.
RANK = """
import os, sys
from tlt_hpc.cluster.watch.monitor import Liveness
liveness = Liveness(False)
liveness._connect(bytes.fromhex(sys.argv[1]))
print("connected" if liveness.descriptor else "not connected", flush=True)
for line in sys.stdin:
    if line == "close\\n":
        os.close(liveness.descriptor)
    else:
        os.write(liveness.descriptor, line.encode())
    print("done", flush=True)
os._exit(3)
"""


class Host:
    """A monitor, and the ranks of its host as processes."""

    def __init__(self, folder: Path | None, num_ranks: int = 3) -> None:
        self.start, self.folder = uuid4().hex, folder
        self.control, mine = os.pipe()
        os.close(mine)
        self.monitor = ProcessMonitor(address_of(self.start, "node1"), self.control)
        self.processes = [process_of_rank(address_of(self.start, "node1")) for _ in range(num_ranks)]
        for rank, process in enumerate(self.processes):
            assert process.stdout.readline() == b"connected\n"
            self.report(rank)
            if folder is not None:
                write_record(folder, self.record(rank))
        self.until(lambda: len(self.monitor._reports) == num_ranks)
        self.monitor.look(0)  # epoll still lists the sockets that have just been read

    def record(self, rank: int, **changes: object):
        return record(rank, **{"part": "7 sequences left", "host": "node1", "start": self.start, **changes})

    def report(self, rank: int, ending: str = "") -> None:
        """Have a rank report itself."""
        folder = None if self.folder is None else str(self.folder)
        pid = self.processes[rank].pid
        self.tell(rank, json.dumps(asdict(RankReport(self.start, rank, "node1", pid, 4, 3, folder, ending))))

    def begin_to_end(self, rank: int) -> None:
        self.tell(rank, "close")

    def tell(self, rank: int, line: str) -> None:
        process = self.processes[rank]
        process.stdin.write(line.encode() + b"\n"), process.stdin.flush()
        assert process.stdout.readline() == b"done\n"

    def kill(self, *ranks: int, by: signal.Signals = signal.SIGKILL) -> None:
        """Kill one after the other, as a launcher does, without asking how they ended."""
        for rank in ranks:
            self.processes[rank].send_signal(by)
            os.waitid(os.P_PID, self.processes[rank].pid, os.WEXITED | os.WNOWAIT)

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, "it never came"
            self.monitor.look(0.05)

    def watch_to_the_end(self) -> None:
        self.until(lambda: self.monitor.is_over)

    def close(self) -> None:
        os.close(self.control)
        self.monitor._listener.close()
        for process in self.processes:
            process.kill(), process.wait()


def process_of_rank(address: bytes, **options: object) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RANK, address.hex()]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, **options)


@pytest.fixture
def host(tmp_path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.close()


def test_of_several_that_were_killed_while_it_had_no_core_the_first_is_named(host, tmp_path, capfd):
    host.kill(1, 0, 2)
    host.watch_to_the_end()
    line = "rank 1 on node1 was killed by signal 9 (SIGKILL), last seen in rollout of step 12 (7 sequences left)"
    assert read_verdict(tmp_path) == (host.start, line)
    assert capfd.readouterr().err == f"tlt: {line}; the same command goes on from the last committed step\n"


def test_a_cause_that_only_the_launcher_knows(host, capfd):
    host.processes[2].kill(), host.processes[2].wait()
    host.kill(0, 1)
    host.watch_to_the_end()
    assert "rank 2 on node1 has died (the launcher may say of what)" in capfd.readouterr().err


def test_the_rank_that_began_to_end_first_is_named_though_another_was_over_before(host, capfd):
    """A launcher learns of an end when files are closed, and may have killed the others before that process is over."""
    host.begin_to_end(2)
    host.kill(1, 0)
    host.processes[2].stdin.close()
    host.watch_to_the_end()
    assert "rank 2 on node1 ended with status 3 and no word" in capfd.readouterr().err


def test_a_rank_that_has_said_why_it_ends_is_not_named(host, tmp_path, capfd):
    host.report(2, "failed: WriteError: read-only")
    host.kill(2, 1, 0)
    host.watch_to_the_end()
    assert capfd.readouterr().err == "" and read_verdict(tmp_path) is None


def test_a_rank_that_fails_because_another_began_to_end_does_not_silence_it(host, tmp_path, capfd):
    """Its connection to the other breaks at once, and it says so, here and in its folder, before the other is over."""
    host.begin_to_end(1)
    failure = "failed: RuntimeError: Connection closed by peer"
    host.report(2, failure)
    write_record(tmp_path, host.record(2, ending=failure))
    host.kill(2, 1, 0)
    host.watch_to_the_end()
    assert "rank 1 on node1 was killed by signal 9" in capfd.readouterr().err


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_failure_on_another_host_counts_if_it_came_first(host, tmp_path, capfd, monkeypatch, comes_first):
    def fail() -> None:
        write_record(tmp_path, host.record(3, host="node2", ending="failed: RuntimeError: Connection closed by peer"))

    def exit_code(pid: int) -> int:
        fail()
        return 9

    monkeypatch.setattr(module, "_exit_code", exit_code)
    if comes_first:
        fail()
    host.kill(1, 0, 2)
    host.watch_to_the_end()
    said = capfd.readouterr().err
    assert ("rank 1 on node1 was killed by signal 9" in said) is not comes_first
    assert comes_first or said.count("\n") == 1


def test_nobody_is_named_while_a_rank_of_the_host_has_not_connected(tmp_path, capfd):
    """It may have died first, before it could."""
    host = Host(tmp_path, num_ranks=2)
    host.kill(1, 0)
    host.watch_to_the_end()
    host.close()
    assert capfd.readouterr().err == ""


def test_memory_kills_are_told_if_the_system_counted_any(host, tmp_path, capfd, monkeypatch):
    before = module.count_memory_kills()
    monkeypatch.setattr(module, "count_memory_kills", lambda: before + 1)
    host.kill(0, 1, 2)
    host.watch_to_the_end()
    told = "the system has killed 1 for want of memory on this host since the start"
    assert told in capfd.readouterr().err and told in read_verdict(tmp_path)[1]


def test_what_another_host_has_said_is_not_said_again(host, tmp_path, capfd):
    """Its ranks were killed for the death of another host's, by the launcher."""
    claim_verdict(tmp_path, host.start, "rank 3 on node2 was killed")
    host.kill(0, 1, 2)
    host.watch_to_the_end()
    assert capfd.readouterr().err == ""
    assert read_verdict(tmp_path)[1] == "rank 3 on node2 was killed"


def test_a_rank_that_was_stopped_early_may_be_killed(host, tmp_path, capfd):
    host.report(0, "stopped early")
    host.kill(0, 1, 2)  # the others by the launcher, before they could say the same
    host.watch_to_the_end()
    assert capfd.readouterr().err == "" and read_verdict(tmp_path) is None


@pytest.mark.parametrize("has_finished", [True, False])
def test_a_rank_that_is_killed_when_another_has_finished_is_named(host, capfd, has_finished):
    for rank in (1, 2)[: 1 + has_finished]:
        host.report(rank, "finished")
    host.processes[1].kill(), host.processes[1].wait()  # the launcher knows its status, which may be 0
    host.kill(2, 0)
    host.watch_to_the_end()
    where = "after it had finished" if has_finished else "last seen in rollout of step 12"
    assert f"rank 2 on node1 was killed by signal 9 (SIGKILL), {where}" in capfd.readouterr().err


def test_before_the_run_begins_there_is_no_folder(capfd):
    host = Host(None)
    host.kill(1, by=signal.SIGSEGV)
    host.kill(0, 2)
    host.watch_to_the_end()
    host.close()
    assert "rank 1 on node1 was killed by signal 11 (SIGSEGV) before the run began" in capfd.readouterr().err


def test_a_folder_that_is_gone_does_not_silence_it(tmp_path, capfd):
    folder = tmp_path / "status"
    folder.mkdir()
    host = Host(folder)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    host.kill(0, 1, 2)
    host.watch_to_the_end()
    host.close()
    assert "rank 0 on node1 was killed by signal 9 (SIGKILL); the same command" in capfd.readouterr().err


def test_a_connection_closes_before_what_a_launcher_holds():
    """The order in which the system closes the files of a process that dies."""
    address = address_of(uuid4().hex, "node1")
    for _ in range(5):
        listener, epoll = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), select.epoll()
        listener.bind(address), listener.listen()
        reader, writer = os.pipe()
        child = process_of_rank(address, pass_fds=[writer])
        os.close(writer)
        assert child.stdout.readline() == b"connected\n"
        connection, _ = listener.accept()
        epoll.register(reader, select.EPOLLIN), epoll.register(connection, select.EPOLLIN)
        child.kill(), child.wait()
        assert [descriptor for descriptor, _ in epoll.poll(5)] == [connection.fileno(), reader]
        os.close(reader), connection.close(), listener.close()


def test_the_program_hears_of_the_ranks_and_ends_after_them(tmp_path, capfd):
    member = Member(0, 2, "node1", uuid4().hex, {0: os.getpid(), 1: 1})
    liveness = Liveness(starts_monitor=True)
    end = time.monotonic() + 60
    while liveness.descriptor is None:
        assert time.monotonic() < end, "it never listens"
        liveness.report(member, tmp_path, "")
        time.sleep(0.05)
    other = process_of_rank(address_of(member.start, "node1"))
    report = RankReport(member.start, 1, "node1", other.pid, 2, 2, str(tmp_path), "")
    assert other.stdout.readline() == b"connected\n"
    other.stdin.write(json.dumps(asdict(report)).encode() + b"\n"), other.stdin.flush()
    assert other.stdout.readline() == b"done\n"
    other.kill()
    while "rank 1 on node1 was killed by signal 9" not in (err := capfd.readouterr().err):
        assert time.monotonic() < end, err
        time.sleep(0.05)
    monitor = liveness._monitor
    monitor.send_signal(signal.SIGTERM)  # meant for ranks
    time.sleep(0.1)
    assert monitor.poll() is None, "this process is one of its ranks"
    liveness.close()
    os.close(liveness.descriptor)
    assert monitor.wait(60) == 0
    other.wait()


def test_a_rank_continues_after_its_monitor_was_killed(tmp_path):
    member = Member(0, 1, "node1", uuid4().hex, {0: os.getpid()})
    liveness = Liveness(starts_monitor=True)
    while liveness.descriptor is None:
        liveness.report(member, None, "")
        time.sleep(0.05)
    liveness._monitor.kill(), liveness._monitor.wait()
    liveness.report(member, tmp_path, "")
    liveness.close()
    os.close(liveness.descriptor)


def test_a_second_rank_of_a_host_lets_its_monitor_end():
    liveness = Liveness(starts_monitor=True)
    monitor = liveness._monitor
    liveness.report(Member(1, 2, "node1", uuid4().hex, {0: 1, 1: os.getpid()}), None, "")
    assert monitor.wait(60) == 0
