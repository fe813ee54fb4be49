"""What a sandbox of either kind takes from its processes: capabilities, tracing, and a life beyond its parent's."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_CAPABILITY_VERSION, _LAST_CAPABILITY = 0x20080522, 63
_NOBODY = 65534

libc = ctypes.CDLL(None, use_errno=True)


def drop_privileges(is_nobody: bool) -> None:
    """Keep no capability, and become nobody if asked to; nothing gives any of it back.

    Raises:
        OSError: that is refused.
    """
    for capability in range(_LAST_CAPABILITY + 1):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # beyond the kernel's last one it refuses
    if is_nobody:
        become_nobody()
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    check_libc_result(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    set_process(_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")
    set_process(_PR_SET_DUMPABLE, 0, "PR_SET_DUMPABLE")


def become_nobody() -> None:
    """Change all identities.

    Raises:
        OSError: that is refused.
    """
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    # a change of identity hides /proc/self from its own process, which has to write its maps there
    set_process(_PR_SET_DUMPABLE, 1, "PR_SET_DUMPABLE")


def die_with_parent() -> None:
    """Have this process killed when its parent ends; after any change of identity, which would undo it.

    Raises:
        OSError: the kernel refuses it.
    """
    set_process(_PR_SET_PDEATHSIG, signal.SIGKILL, "PR_SET_PDEATHSIG")


def set_process(option: int, value: int, name: str) -> None:
    """Set an attribute of this process.

    Raises:
        OSError: the kernel refuses it; names the option.
    """
    check_libc_result(libc.prctl(option, value, 0, 0, 0), f"prctl({name})")


def check_libc_result(result: int, what: str) -> int:
    """The result of a call of libc.

    Raises:
        OSError: it is negative; says what was refused.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
