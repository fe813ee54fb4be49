"""What a fault does not explain in the end of a run: its status, its time, its log. For ``faults.py``."""

from __future__ import annotations

import re
import signal

from fault_plan import Fault

HANG_STATUS = 71
"""The status with which the watch ends a job that hangs."""
MAX_SECONDS = {"place": 30.0, "kill": 30.0, "limit": 120.0, "cancel": 20.0, "disk": 60.0}
"""From the fault to the end of the job; more is a hang."""
KILL_AFTER_SECONDS = 10.0
"""From SIGTERM to SIGKILL."""
_TRACEBACK = "Traceback (most recent call last)"
_CONNECTION = re.compile(r"(Connection (closed|reset) by peer|Broken pipe|Connection refused|Socket closed)")
"""What a rank reports of another that is gone, in the moment before it is ended, too."""
_STEPS = re.compile(r"^\S*runs?\S* \(\w+\): \d+ steps|\d+ steps, \w+(?: \w+)? from step", re.MULTILINE)
_FROM = re.compile(r"\d+ steps, \w+(?: \w+)? from step (\d+)")


def statuses(fault: Fault, has_begun: bool, has_stopped: bool, seconds: float) -> set[int]:
    """Return the exit statuses that a fault explains.

    Args:
        has_begun: the log has its first line; until then Python handles signals as it does by default.
        has_stopped: the log says that the run stopped early.
        seconds: from the fault to the end.
    """
    if fault.kind in ("place", "kill"):
        return {signal.SIGKILL}
    if fault.kind == "limit":
        return {75} if has_begun else {75, signal.SIGUSR2}
    if fault.kind == "cancel":
        early = set() if has_begun else {signal.SIGTERM, 128 + signal.SIGTERM}
        # on a busy machine Python alone may take so long to end, after the run's last line
        killed = {signal.SIGKILL} if seconds >= KILL_AFTER_SECONDS and (has_stopped or not has_begun) else set()
        return {75, *early, *killed}
    return {2}


def find_wrong(
    fault: Fault, struck: bool, status: int, seconds: float, log: str, steps: tuple[int, int], is_hung: bool
) -> list[str]:
    """Return what the fault does not explain, a few words each.

    Args:
        struck: the run was still there when the fault came.
        log: what this start wrote.
        steps: committed before the start, and after its end.
        is_hung: it had to be ended.
    """
    wrong = []
    if is_hung or status == HANG_STATUS:
        wrong.append("hung")
    elif struck and seconds > MAX_SECONDS[fault.kind]:
        wrong.append(f"ended {seconds:.0f} s after the fault")
    wanted = statuses(fault, _STEPS.search(log) is not None, "stopped early (" in log, seconds) if struck else {0}
    if not is_hung and status not in wanted:
        wrong.append(f"status {status}, not {' or '.join(map(str, sorted(wanted)))}")
    killed_rank = fault.rank if struck else None
    wrong += wrong_tracebacks(log, killed_rank is not None)
    if killed_rank is not None:
        named = re.findall(r"^tlt: rank (\d+) on \S+ (.*?)(?:,|;|$)", log, re.MULTILINE)
        wrong += [f"rank {name} {what}, not rank {killed_rank}" for name, what in named if int(name) != killed_rank]
    if fault.kind == "disk" and struck and not re.search(r"^tlt: .*No space left on device", log, re.MULTILINE):
        wrong.append("the full disk is not named")
    began = [int(step) for step in _FROM.findall(log)]
    if steps[1] > steps[0] > 0 and not began:
        wrong.append(f"did not say that it resumes from step {steps[0]}")
    return wrong + [f"resumed from step {step}, not {steps[0]}" for step in began if step != steps[0]]


def wrong_tracebacks(log: str, has_lost_rank: bool) -> list[str]:
    """Return the tracebacks, without those of ranks that lost another if one was killed."""
    wrong = []
    for text in log.split(_TRACEBACK)[1:]:
        raised = next((line for line in text.splitlines()[1:] if line and not line.startswith((" ", "[rank"))), "")
        if not (has_lost_rank and _CONNECTION.search(text)):
            wrong.append(f"traceback: {raised[:200]}")
    return wrong
