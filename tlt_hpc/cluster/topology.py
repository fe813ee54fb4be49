"""What a node has and how it hangs together, read from the system's files: cores, NUMA nodes, GPUs, network cards.

Files that are missing, as in a container or a virtual machine, count as nothing known. No program is started and no
library is loaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = "TLT_SYSTEM_ROOT"
"""A folder whose sys, proc and dev are read instead of the system's own; for tests."""
UNKNOWN = -1
"""Stands for a NUMA node where the system gives none."""
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_CARDS = ("class/infiniband/*", "class/net/hsn*")
"""InfiniBand, RoCE and Omni-Path; Slingshot."""
_SHARED = (
    "nfs", "lustre", "gpfs", "beegfs", "ceph", "panfs", "cifs", "smb", "fuse.", "afs", "9p", "orangefs", "wekafs"
)  # fmt: skip
"""Prefixes of file systems that several machines share; those on FUSE may be shared or not."""


@dataclass(frozen=True)
class Device:
    """A GPU or a network card."""

    name: str
    """A GPU's PCI address; a card's name, such as ``mlx5_0``."""
    numa: int
    bus: tuple[str, ...]
    """The bridges above it, from the processor down."""
    uuid: str = ""


@dataclass(frozen=True)
class Mount:
    """The file system that a path is on."""

    point: str
    kind: str
    """Such as ``tmpfs``."""

    @property
    def is_shared(self) -> bool:
        """True if several machines may have it."""
        return self.kind.startswith(_SHARED)

    @property
    def is_memory(self) -> bool:
        """True if its files take memory."""
        return self.kind in ("tmpfs", "ramfs")


@dataclass(frozen=True)
class System:
    """The system's files below ``root``."""

    root: Path = Path("/")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> System:
        """Return the system that the environment names, else this machine's own."""
        return cls(Path(environment.get(ROOT, "/")))

    def numa_cores(self) -> dict[int, frozenset[int]]:
        """NUMA node -> its cores; empty where the system does not say."""
        folders = (self.root / "sys/devices/system/node").glob("node[0-9]*")
        found = {int(folder.name[4:]): parse_cores(_read_text_or_empty(folder / "cpulist")) for folder in folders}
        return {node: cores for node, cores in sorted(found.items()) if cores}

    def online_cores(self) -> frozenset[int]:
        """All cores of the node."""
        return parse_cores(_read_text_or_empty(self.root / "sys/devices/system/cpu/online"))

    def hardware_threads_of_core(self, core: int) -> frozenset[int]:
        """The hardware threads of a core's physical core, itself among them."""
        found = _read_text_or_empty(self.root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        return parse_cores(found) | {core}

    def gpus(self) -> list[Device]:
        """The GPUs that this process may open, in the order of their addresses, which is that of their numbers."""
        found = self._find_nvidia_gpus() or self._find_amd_gpus()
        # the driver lists all of the node's, and a job may have been given a few
        allowed = [gpu for gpu, file in found if os.access(file, os.R_OK | os.W_OK)]
        return allowed or [gpu for gpu, _ in found]

    def _find_nvidia_gpus(self) -> list[tuple[Device, Path]]:
        found = []
        for file in sorted((self.root / "proc/driver/nvidia/gpus").glob("*/information")):
            facts = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", _read_text_or_empty(file), re.MULTILINE))
            place = self.root / "sys/bus/pci/devices" / file.parent.name
            gpu = _read_device(file.parent.name, place, facts.get("GPU UUID", ""))
            found.append((gpu, self.root / f"dev/nvidia{facts.get('Device Minor', '')}"))
        return found

    def _find_amd_gpus(self) -> list[tuple[Device, Path]]:
        places = sorted((self.root / "sys/bus/pci/drivers/amdgpu").glob("*:*"))
        found = []
        for place in places:
            if _ADDRESS.fullmatch(place.name):
                nodes = sorted(path.name for path in (place / "drm").glob("renderD*"))
                found.append((_read_device(place.name, place), self.root / "dev/dri" / "".join(nodes[:1])))
        return found

    def network_cards(self) -> list[Device]:
        """The cards of the fast network that are up."""
        places = [place for pattern in _CARDS for place in sorted((self.root / "sys").glob(pattern))]
        return [_read_device(place.name, place / "device") for place in places if _is_up(place)]

    def find_mount(self, path: Path) -> Mount:
        """The mount that a path is on; ``/`` of kind ``unknown`` where the system does not say."""
        path, best = path.resolve(), Mount("/", "unknown")
        for line in _read_text_or_empty(self.root / "proc/mounts").splitlines():
            _, point, kind, *_ = [*line.split(), "", "", ""]
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point)  # a blank is \040
            if path.is_relative_to(point) and len(point) >= len(best.point):  # a later mount hides an earlier one
                best = Mount(point, kind)
        return best


def own_gpu(gpus: Sequence[Device], environment: Mapping[str, str]) -> Device | None:
    """The GPU that the launcher lets this rank see; None where it names none or several, or a MIG instance.

    Args:
        gpus: those that the rank may open.
    """
    named = next((environment[name] for name in _VISIBLE if name in environment), "").strip()
    if named.startswith("GPU-"):
        return next((gpu for gpu in gpus if gpu.uuid.startswith(named)), None)
    number = int(named) if named.isdecimal() else UNKNOWN
    return gpus[number] if 0 <= number < len(gpus) else None


def nearest_card(cards: Iterable[Device], numa: int, bus: tuple[str, ...] = ()) -> Device | None:
    """The card that shares most bridges with a GPU (``bus``), else one of the NUMA node; None where none does."""

    def closeness(card: Device) -> tuple[int, bool]:
        common = [one == other for one, other in zip(card.bus, bus, strict=False)]
        return (common.index(False) if False in common else len(common)), numa in (card.numa, UNKNOWN)

    best = max(cards, key=closeness, default=None)  # of equal ones the first
    return best if best is not None and any(closeness(best)) else None


def parse_cores(text: str) -> frozenset[int]:
    """The numbers of a list as the kernel writes it, ``0-3,8``; empty if it is none."""
    spans = [part.split("-") for part in text.strip().split(",")]
    if not all(len(span) <= 2 and all(end.isdecimal() for end in span) for span in spans):
        return frozenset()
    return frozenset(core for span in spans for core in range(int(span[0]), int(span[-1]) + 1))


def format_cores(cores: Iterable[int]) -> str:
    """The list as the kernel writes it; of other numbers, too."""
    spans: list[list[int]] = []
    for core in sorted(cores):
        if spans and core == spans[-1][1] + 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


def _read_device(name: str, place: Path, uuid: str = "") -> Device:
    text, real = _read_text_or_empty(place / "numa_node").strip(), place.resolve()
    bus = tuple(part for part in real.parts[:-1] if part.startswith("pci") or _ADDRESS.fullmatch(part))
    return Device(name, int(text) if re.fullmatch("-?[0-9]+", text) else UNKNOWN, bus, uuid)


def _is_up(place: Path) -> bool:
    states = [_read_text_or_empty(file) for file in (place / "ports").glob("*/state")]
    return not states or any("ACTIVE" in state for state in states)


def _read_text_or_empty(path: Path) -> str:
    """A file's text; empty where it is not there or may not be read: nothing is known then."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
