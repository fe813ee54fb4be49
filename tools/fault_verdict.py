"""What is wrong with how a struck start of a run ended: its status, its log, what it left. For ``faults.py``."""

from __future__ import annotations

import re
import signal

from fault_plan import Fault

STALLED = 71
"""The status with which the watch ends a job that hangs."""
MOST_SECONDS = {"place": 30.0, "kill": 30.0, "limit": 120.0, "cancel": 20.0, "disk": 60.0}
"""From the fault to the end of the job; more is a hang."""
KILL_AFTER_SECONDS = 10.0
"""From SIGTERM to SIGKILL."""

_CONNECTION = re.compile(r"(Connection (closed|reset) by peer|Broken pipe|Connection refused|Socket closed)")
"""What a rank says of another that is gone, in the moment before it is ended, too."""
_TRACEBACK = "Traceback (most recent call last)"


def statuses(fault: Fault, said_nothing: bool, has_stopped: bool, seconds: float) -> set[int]:
    """The exit statuses that a fault explains.

    Args:
        said_nothing: the start had written nothing yet: until Python has come to the program, signals do as ever.
        has_stopped: it had said that it has stopped early.
        seconds: from the fault to the end.
    """
    if fault.kind in ("place", "kill"):
        return {signal.SIGKILL}
    if fault.kind == "limit":
        return {75, signal.SIGUSR2} if said_nothing else {75}
    if fault.kind == "cancel":
        # under load Python alone may take as long to end, once the run has said its last word
        killed = {signal.SIGKILL} if seconds >= KILL_AFTER_SECONDS and (said_nothing or has_stopped) else set[int]()
        early = {signal.SIGTERM, 128 + signal.SIGTERM} if said_nothing else set[int]()
        return {75, *killed, *early}
    return {2}


def find_wrong(
    fault: Fault, struck: bool, status: int, seconds: float, log: str, steps: tuple[int, int], is_hung: bool
) -> list[str]:
    """What the fault does not explain, a few words each; empty where all is as it should be.

    Args:
        struck: whether the run was still there.
        log: what this start wrote.
        steps: committed before the start, and after its end.
        is_hung: it had to be ended.
    """
    wrong = []
    if is_hung or status == STALLED:
        wrong.append("hung")
    elif struck and seconds > MOST_SECONDS[fault.kind]:
        wrong.append(f"ended {seconds:.0f} s after the fault")
    said_nothing = not re.search(r"^\S*runs?\S* \(\w+\): \d+ steps|\d+ steps, going on", log, re.MULTILINE)
    wanted = statuses(fault, said_nothing, "stopped early (" in log, seconds) if struck else {0}
    if not is_hung and status not in wanted:
        wrong.append(f"status {status}, not {' or '.join(map(str, sorted(wanted)))}")
    wrong += wrong_tracebacks(log, by_loss=struck and fault.rank is not None)
    if struck and fault.rank is not None:
        wrong += wrong_names(fault.rank, log)
    if fault.kind == "disk" and struck and not re.search(r"^tlt: .*No space left on device", log, re.MULTILINE):
        wrong.append("the full disk is not named")
    return wrong + wrong_beginnings(log, *steps)


def wrong_tracebacks(log: str, by_loss: bool) -> list[str]:
    """Tracebacks, but for those of ranks that have lost another, where one was killed."""
    wrong = []
    for text in log.split(_TRACEBACK)[1:]:
        raised = next((line for line in text.splitlines()[1:] if line and not line.startswith((" ", "[rank"))), "")
        if not (by_loss and _CONNECTION.search(text)):
            wrong.append(f"traceback: {raised[:200]}")
    return wrong


def wrong_names(rank: int, log: str) -> list[str]:
    """Whether another rank was named than the one that was killed."""
    named = re.findall(r"^tlt: rank (\d+) on \S+ (.*?)(?:,|;|$)", log, re.MULTILINE)
    return [f"rank {name} {what}, where rank {rank} was killed" for name, what in named if int(name) != rank]


def wrong_beginnings(log: str, before: int, after: int) -> list[str]:
    """Whether a start went on from another step than the one it was left at."""
    began = [int(step) for step in re.findall(r"going on from step (\d+)", log)]
    if after > before > 0 and not began:
        return [f"did not say that it goes on from step {before}"]
    return [f"went on from step {step}, not {before}" for step in began if step != before]
