"""The filter of system calls of a program: it allows what Python needs within one process, and nothing else.

It is a list of what may be called, so what a future kernel adds is refused too. A program cannot start processes
(threads it can), replace itself by another program, open a socket, mount, trace, signal another process or reach its
memory, nor change a file that it has only the right to read. Both kinds of sandbox have this filter.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence

# name -> number on x86_64 and on aarch64, which lacks the older calls; the commonest first, for the filter is a list
_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "futex": (202, 98), "mmap": (9, 222), "munmap": (11, 215), "brk": (12, 214),
    "madvise": (28, 233), "mremap": (25, 216), "mprotect": (10, 226), "lseek": (8, 62), "fstat": (5, 80),
    "newfstatat": (262, 79), "close": (3, 57), "stat": (4, None), "lstat": (6, None), "statx": (332, 291),
    "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68), "poll": (7, None),
    "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "pipe": (22, None), "pipe2": (293, 59),
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "sched_yield": (24, 124), "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115), "restart_syscall": (219, 128), "pause": (34, None),
    "getitimer": (36, 102), "setitimer": (38, 103), "alarm": (37, None), "getpid": (39, 172), "gettid": (186, 178),
    "getppid": (110, 173), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getpgrp": (111, None), "getpgid": (121, 155), "getsid": (124, 156), "uname": (63, 160), "sysinfo": (99, 179),
    "times": (100, 153), "time": (201, None), "gettimeofday": (96, 169), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "getrusage": (98, 165), "getrlimit": (97, 163), "getrandom": (318, 278),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "umask": (95, 166), "getdents": (78, None),
    "getdents64": (217, 61), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None),
    "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35),
    "symlink": (88, None), "symlinkat": (266, 36), "link": (86, None), "linkat": (265, 37), "ftruncate": (77, 46),
    "fsync": (74, 82), "fdatasync": (75, 83), "statfs": (137, 43), "fstatfs": (138, 44), "fadvise64": (221, 223),
    "exit": (60, 93), "exit_group": (231, 94), "rt_sigsuspend": (130, 133), "rt_sigtimedwait": (128, 137),
    "rt_sigpending": (127, 136), "wait4": (61, 260), "set_tid_address": (218, 96), "set_robust_list": (273, 99),
    "rseq": (334, 293), "membarrier": (324, 283), "sched_getaffinity": (204, 123), "getcpu": (309, 168),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "eventfd2": (290, 19),
}  # fmt: skip
_CLONE, _CLONE3, _OPEN, _OPENAT, _IOCTL, _FCNTL, _KILL_ONE, _KILL_THREAD, _PRLIMIT = (
    (56, 220), (435, 435), (2, None), (257, 56), (16, 29), (72, 25), (62, 129), (234, 131), (302, 261),
)  # fmt: skip
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32_BIT = 0x40000000

_THREAD = 0x00010000
_NAMESPACES = 0x7E020000  # CLONE_NEW*
_DESCRIPTOR_IOCTLS = (0x5450, 0x5451)  # FIONCLEX, FIOCLEX
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030)  # copies, flags and locks; not F_SETOWN and F_SETSIG, which signal
_ACCESS_MODE, _TRUNCATE = 0o3, 0o1000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2

Instruction = tuple[int, int, int, int]
_PASS: Instruction = (_RETURN, 0, 0, _ALLOW)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def install() -> None:
    """Install the filter for this thread and all that it starts; it cannot be removed.

    Raises:
        OSError: the kernel has no such filters, or this processor's calls are not known here.
    """
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in _filter_instructions(platform.machine()))
    program = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program))):
        if libc.prctl(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"prctl(PR_SET_SECCOMP): {os.strerror(number)}")


def _filter_instructions(machine: str) -> list[Instruction]:
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no filter of system calls for processors of the kind {machine!r}")
    column, architecture = _ARCHITECTURES[machine]
    lines: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
    ]
    if machine == "x86_64":  # the same calls under other numbers
        lines += [(_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]
    for numbers in _ALLOWED.values():
        number = numbers[column]
        if number is not None:
            lines += [(_EQUAL, 0, 1, number), _PASS]
    for call, then in (
        (_OPENAT, _refuse_unsafe_open(2)),
        (_OPEN, _refuse_unsafe_open(1)),
        (_CLONE3, [_return_error(errno.ENOSYS)]),  # libc then takes clone, whose flags can be looked at
        (
            _CLONE,
            [
                _load_argument(0),
                (_ANY_BIT, 1, 0, _NAMESPACES),
                (_ANY_BIT, 1, 0, _THREAD),
                _return_error(errno.EPERM),
                _PASS,
            ],
        ),
        (_IOCTL, _allow_argument_values(1, _DESCRIPTOR_IOCTLS, errno.ENOTTY)),
        (_FCNTL, _allow_argument_values(1, _FCNTLS, errno.EPERM)),
        (_KILL_ONE, _allow_argument_values(0, (0, os.getpid()), errno.ESRCH)),  # 0: its process group
        (_KILL_THREAD, _allow_argument_values(0, (os.getpid(),), errno.ESRCH)),
        (_PRLIMIT, _allow_argument_values(0, (0,), errno.EPERM)),  # 0: itself
    ):
        number = call[column]
        if number is not None:  # all instructions for a call end in a return
            lines += [(_EQUAL, 0, len(then), number), *then]
    return [*lines, _return_error(errno.EPERM)]


def _allow_argument_values(index: int, values: Sequence[int], error: int) -> list[Instruction]:
    """Allow the call if an argument has one of these values."""
    looked = [(_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
    return [_load_argument(index), *looked, _return_error(error), _PASS]


def _refuse_unsafe_open(index: int) -> list[Instruction]:
    """Refuse to open a file so that its content can be cut off, or its device controlled, without the right to write.

    Landlock checks what is opened for reading or writing, and truncation only since its third version.
    """
    return [
        _load_argument(index),
        (_AND, 0, 0, _ACCESS_MODE | _TRUNCATE),
        (_EQUAL, 2, 0, _TRUNCATE),
        (_AND, 0, 0, _ACCESS_MODE),
        (_EQUAL, 0, 1, _ACCESS_MODE),
        _return_error(errno.EPERM),
        _PASS,
    ]


def _load_argument(index: int) -> Instruction:
    """Load the lower half of a call's argument."""
    return (_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8 * index)


def _return_error(number: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | number)
