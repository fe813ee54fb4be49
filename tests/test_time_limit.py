"""Stops by urgency, Slurm's answers, and being queued again; without a Slurm."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from shell_slurm import program

from tlt_hpc.cluster import slurm, stopping
from tlt_hpc.cluster.slurm import allocation, parse_slurm_time
from tlt_hpc.cluster.stopping import (
    AGAIN,
    Stop,
    StopFlag,
    await_preemption,
    requeue_job_if_progress,
    start_time_limit_timers,
)

JOB = {"SLURM_JOB_ID": "17"}


@pytest.fixture(autouse=True)
def at_once(monkeypatch) -> None:
    monkeypatch.setattr(stopping, "TRY_AGAIN_SECONDS", 0.01)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that only the test moves on."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(stopping.time, "monotonic", lambda: clock.now)
    return clock


# -- the flag -------------------------------------------------------------------------------------------------------


def test_the_most_urgent_request_wins_and_of_equals_the_first():
    flag = StopFlag()
    assert (flag.kind, flag.reason, flag.is_late) == (Stop.NONE, "", False)
    for kind, reason, wins in (
        (Stop.TIME, "the limit", True), (Stop.TIME, "again", False), (Stop.ASKED, "Ctrl-C", False),
        (Stop.KILL, "scancel", True), (Stop.TIME, "later", False),
    ):  # fmt: skip
        before = flag.kind, flag.reason
        flag.request(kind, reason)
        assert (flag.kind, flag.reason) == ((kind, reason) if wins else before)


def test_a_kill_leaves_ten_seconds_and_a_known_end_the_time_until_then(clock):
    flag = StopFlag()
    assert flag.seconds_left == float("inf")
    flag.set_time_limit(3600, lambda: None)
    assert intervals_of(flag.timers) == [3600 - 7.5, 3600 - 120]
    clock.now += 3400
    flag.request(Stop.TIME, "SIGUSR2")  # 200 s ahead: Slurm is not exact
    clock.now += 200 - 15 - 1
    assert not flag.is_late
    clock.now += 2
    assert flag.is_late
    flag.request(Stop.KILL, "scancel")
    assert flag.seconds_left == 10 and not flag.is_late
    clock.now += 10
    assert flag.is_late


def intervals_of(timers) -> list[float]:
    """Of timers, which are cancelled."""
    for timer in timers:
        timer.cancel()
    return [timer.interval for timer in timers]


@pytest.fixture
def answering():
    """A flag that answers this process's signals."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    flag = StopFlag()
    flag.install_signal_handlers()
    flag.is_answered = True
    yield flag
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, Stop.KILL), (signal.SIGUSR2, Stop.TIME)])
def test_a_signal_requests_a_stop_and_nothing_else(number, kind, answering):
    signal.raise_signal(number)
    assert (answering.kind, answering.reason) == (kind, number.name)


def test_a_second_ctrl_c_interrupts_but_its_echo_does_not(answering, clock):
    """A terminal sends one, and the launcher forwards one."""
    signal.raise_signal(signal.SIGINT)
    clock.now += 0.9
    signal.raise_signal(signal.SIGINT)
    assert (answering.kind, answering.reason) == (Stop.ASKED, "SIGINT")
    clock.now += 0.2
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_signal_after_the_end_of_all_work_ends_nothing(answering):
    """Python gives up its handlers before the process is gone: the job would end as killed by the signal."""
    answering.ignore_time_limit_signal()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN, "what Python leaves as it is"


def test_work_that_lasts_beyond_the_end_is_queued_again_from_outside_of_it(command, tmp_path, capsys, monkeypatch):
    """Its ranks will be killed: the record says that this is in order, or the next start would warn of a fault."""
    endings = []
    monkeypatch.setattr(stopping.BEAT, "record_ending", endings.append)
    command("squeue", "echo 0:01")
    command("scontrol", f'echo "$@" >> {tmp_path}/asked')
    for is_left, progress, wanted in (
        (True, lambda: "step 1", False),  # else the main thread asks nobody
        (False, None, False),  # work that starts over is not
        (False, lambda: "step 1", True),
    ):
        flag = StopFlag()
        start_time_limit_timers(flag, JOB, 0, tmp_path, progress)
        flag.is_left = is_left
        for timer in flag.timers:
            timer.join(30)
        assert flag.kind is Stop.TIME
        assert (tmp_path / "asked").exists() is wanted
    assert (tmp_path / "asked").read_text() == "requeue 17\n" and endings == ["stopped early"]
    assert capsys.readouterr().out == "tlt: job 17 is queued again and will resume\n"


@pytest.mark.parametrize(
    ("number", "slurm_job", "status"),
    [
        (signal.SIGINT, False, 130),
        (signal.SIGTERM, False, 143),
        (signal.SIGTERM, True, None),  # a preempted job that leaves by itself is not queued again
        (signal.SIGUSR2, False, None),
    ],
)
def test_before_anything_has_begun_a_signal_ends_the_process_but_the_limits_can_wait(
    number, slurm_job, status, answering, monkeypatch
):
    answering.is_answered = False
    monkeypatch.setattr(stopping, "os", SimpleNamespace(environ=JOB if slurm_job else {}, _exit=sys.exit))
    if status is None:
        signal.raise_signal(number)
        assert answering.kind > Stop.ASKED
    else:
        with pytest.raises(SystemExit, match=str(status)):
            signal.raise_signal(number)


# -- Slurm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5:00", 300), ("0:07", 7), ("1:02:03", 3723), ("2-03:04:05", 183845), ("90", 5400), ("2-0", 172800),
     ("90:30", 5430), ("1-12:30", 131400), ("1-0:0:5", 86405),
     ("UNLIMITED", float("inf"))],
)  # fmt: skip
def test_times_in_slurms_format(text, seconds):
    assert parse_slurm_time(text) == seconds


def test_the_allocation_is_the_environments():
    assert allocation({}) is None
    member = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    assert allocation(member) == slurm.Allocation("7_3", 0), "by 7 alone Slurm takes the whole array"
    assert allocation({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}) == slurm.Allocation("7", 2)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Makes a command on the path, of a line of shell; without it there is none of Slurm's."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return lambda name, line: program(tmp_path / "bin" / name, line)


def test_one_rank_knows_when_the_allocation_ends_and_votes_for_all(command, tmp_path, caplog):
    first, second = StopFlag(), StopFlag()
    start_time_limit_timers(first, JOB, 0, tmp_path, None)
    assert "the time limit is not known, only its signal will tell: there is no squeue on PATH" in caplog.text
    command("squeue", "echo 1:00:00")
    start_time_limit_timers(first, JOB, 0, tmp_path, None)
    assert intervals_of(first.timers) == [3600 - 7.5, 3600 - 120]
    start_time_limit_timers(second, JOB, 1, tmp_path, None)
    start_time_limit_timers(second, {}, 0, tmp_path, None)  # not under Slurm
    assert second.timers == []


# -- queued again ---------------------------------------------------------------------------------------------------


def test_a_job_that_comes_no_further_is_not_queued_for_ever(command, tmp_path):
    command("scontrol", f'echo "$@" >> {tmp_path}/asked')
    (tmp_path / "requeues.jsonl").write_text('{"job": "17", "restarts": 0, "prog')  # as a full disk leaves it
    requeue_job_if_progress(JOB, tmp_path, "step 1")
    for _ in range(2):
        assert "is queued again" in requeue_job_if_progress(JOB, tmp_path, "step 2")
    assert requeue_job_if_progress({"SLURM_JOB_ID": "18"}, tmp_path, "step 2").startswith("job 18 is queued again"), (
        "another job"
    )
    assert requeue_job_if_progress(JOB, tmp_path, "step 2") == (
        "job 17 is not queued again: 3 starts in a row came no further than step 2; give it more time (sbatch --time), "
        "or make a step shorter"
    )
    assert "is queued again" in requeue_job_if_progress(JOB, tmp_path, "step 3")
    assert len((tmp_path / "asked").read_text().splitlines()) == 5


def test_a_busy_controller_is_asked_again(command, tmp_path):
    asked = tmp_path / "asked"
    command("scontrol", f"printf x >> {asked}; read times < {asked}; test $times = xxx")
    assert "is queued again" in requeue_job_if_progress(JOB, tmp_path, "step 1")
    assert asked.read_text() == "xxx"


@pytest.mark.parametrize("state", ["PENDING Restarts=0", "COMPLETING Restarts=1"])
def test_a_requeue_whose_answer_was_lost_is_one(command, tmp_path, state):
    """Slurm refuses the second request, because the job is already pending."""
    command("scontrol", f'[ $1 = requeue ] && exit 1; echo "JobId=17 JobState={state} Requeue=1"')
    assert requeue_job_if_progress(JOB, tmp_path, "step 1") == "job 17 is queued again and will resume"


def test_where_slurm_refuses_the_user_is_told_what_to_do(command, tmp_path):
    command("scontrol", "echo 'Requested operation is disabled for job 17' >&2; exit 1")
    assert requeue_job_if_progress(JOB, tmp_path, "step 1") == (
        "job 17 is not queued again (`scontrol requeue 17` failed: Requested operation is disabled for job 17): "
        "submit the same script, which resumes"
    )
    assert requeue_job_if_progress({}, tmp_path, "step 1").startswith("not in a Slurm job")
    again = {AGAIN: "python jobs/submit.py resubmit sub"}
    assert requeue_job_if_progress({**JOB, **again}, tmp_path, "step 1").endswith(
        ": `python jobs/submit.py resubmit sub` resumes"
    )


PREEMPTED = "JobId=17 JobState=RUNNING Requeue=1 PreemptTime=2026-11-22T03:33:48 Partition=main QOS=long"


def test_a_preempted_job_waits_to_be_ended_and_another_does_not(command, monkeypatch, tmp_path, capsys, caplog):
    monkeypatch.setattr(stopping, "PREEMPTION_POLL_SECONDS", 0.01)
    other = PREEMPTED.replace("2026-11-22T03:33:48", "None")
    command("scontrol", f'echo "$@" >> {tmp_path}/asked; echo "{other}"')
    await_preemption(JOB)
    assert capsys.readouterr().out == ""
    assert (tmp_path / "asked").read_text() == "--oneliner show job 17\n", "an answer is enough"
    (tmp_path / "asked").unlink()
    count = counting(tmp_path)
    command("scontrol", f'{count}; case $n in 9) echo "{other}";; 1|4) exit 1;; *) echo "{PREEMPTED}";; esac')
    await_preemption(JOB)
    assert (tmp_path / "asked").read_text() == "9\n", "as long as it is preempted; an answer may fail to come"
    assert capsys.readouterr().out.startswith("tlt: job 17 is preempted: it waits for Slurm to end it")
    await_preemption({})
    command("scontrol", "echo no such job >&2; exit 1")
    await_preemption(JOB)
    assert "whether this job is preempted is not known, so it ends: " in caplog.text
    assert "if not queued, submit the same script, which resumes" in caplog.text


def counting(folder: Path) -> str:
    """Shell for $n, how often a command was called; builtins alone, for there is nothing else on the path."""
    asked = folder / "asked"
    return f"n=0; [ -e {asked} ] && read n < {asked}; n=$((n + 1)); echo $n > {asked}"


@pytest.mark.parametrize(
    ("answer", "kind", "intervals"),
    [
        ("echo 2:00:00", Stop.NONE, [7200 - 7.5, 7200 - 120]),
        ("echo UNLIMITED", Stop.NONE, []),
        ("exit 1", Stop.TIME, []),
        ("echo 0:30", Stop.TIME, []),
    ],
)
def test_a_time_limit_that_was_raised_meanwhile_counts(command, tmp_path, answer, kind, intervals):
    command("squeue", f"{counting(tmp_path)}; [ $n = 1 ] && echo 0:01 || {{ {answer}; }}")
    flag = StopFlag()
    start_time_limit_timers(flag, JOB, 0, tmp_path, None)
    for timer in list(flag.timers):
        timer.join(30)
    assert (flag.kind, intervals_of(flag.timers[2:])) == (kind, intervals)
