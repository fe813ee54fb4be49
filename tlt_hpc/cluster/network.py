"""Which network NCCL has chosen. It falls back silently to a slower one, and names its choice only in its log."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tlt_hpc.cluster.caches import FOLDER

_LOG_VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
_CHOSEN = re.compile(r"NCCL INFO (?:Using network|Assigned NET plugin) (.+?)(?: to comm)?\s*$", re.MULTILINE)
_CARDS = re.compile(r"NCCL INFO NET/\w+ ?: Using (\[\d.*)$", re.MULTILINE)
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w;]+).*?(?:\(found (\d+) nics\))?\s*$", re.MULTILINE)
_SOCKET = "Socket"


@dataclass(frozen=True)
class ChosenNetwork:
    """NCCL's network on one node."""

    name: str
    """NCCL's own: ``IB``, ``IBext_v8``, ``AWS Libfabric``, ``Libfabric``, ``Socket``; empty where its log has none."""
    cards: tuple[str, ...] = ()
    """Cards, interfaces, or libfabric's provider."""

    @property
    def description(self) -> str:
        """Name and cards for the user."""
        return (self.name or "unknown") + (f" ({', '.join(self.cards)})" if self.cards else "")

    @property
    def is_socket(self) -> bool:
        """True if NCCL communicates by TCP."""
        return self.name == _SOCKET


def enable_nccl_log(environment: MutableMapping[str, str]) -> Path | None:
    """Have NCCL write a log of its start, before this process uses NCCL; None where the user has NCCL write another."""
    if any(name in environment for name in _LOG_VARIABLES):
        return None
    handle, name = tempfile.mkstemp(prefix="nccl-", suffix=".log", dir=environment.get(FOLDER))
    os.close(handle)
    environment.update(zip(_LOG_VARIABLES, ("INFO", "INIT,NET", name), strict=True))
    return Path(name)


def read_and_remove_nccl_log(path: Path, environment: MutableMapping[str, str]) -> ChosenNetwork:
    """Read NCCL's choice, once the ranks have met; removes the log file and the variables of ``enable_nccl_log``."""
    for name in _LOG_VARIABLES:
        environment.pop(name, None)
    text = path.read_text(encoding="utf-8", errors="replace")
    path.unlink()  # NCCL keeps it open: what it writes later goes with the process
    return parse_log(text)


def parse_log(text: str) -> ChosenNetwork:
    """The choice that a log of NCCL names."""
    chosen = _CHOSEN.findall(text)
    if not chosen:
        return ChosenNetwork("")
    name = chosen[-1]
    if "libfabric" in name.lower():
        return ChosenNetwork(
            name, tuple(f"{number or 1} x {provider}" for provider, number in _PROVIDER.findall(text)[-1:])
        )
    # NCCL tries one network after another, and stops at the first that works
    return ChosenNetwork(name, tuple(re.findall(r"\[\d+\]([^:\s]+)", "".join(_CARDS.findall(text)[-1:]))))


def slow_network_warning(choices: Mapping[str, ChosenNetwork], cards: Sequence[str]) -> str:
    """A line on a network that is slower than it could be; empty if there is nothing to say.

    Args:
        cards: of the fast network, on the first node.
    """
    names = Counter(choice.name for choice in choices.values())
    if len(names) > 1:
        usual = names.most_common(1)[0][0]
        host, choice = next((host, choice) for host, choice in choices.items() if choice.name != usual)
        return (
            f"NCCL chose the network {choice.description} on {host}, where most nodes have {usual}; leave that node out"
        )
    if cards and all(choice.is_socket for choice in choices.values()):
        return (
            f"NCCL communicates by sockets, though there are {', '.join(cards)}: two to three times slower; load the "
            "site's module for NCCL (aws-ofi-nccl on Slingshot), and have NCCL_NET require it (IB, 'AWS Libfabric')"
        )
    return ""
