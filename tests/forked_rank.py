"""Stands for ``python -m mpi4py`` in a command of mpiexec: hands its place to a fork, and ends as the fork does.

``python -IS forked_rank.py FOLDER PROGRAM...``, where the sockets of ``rank_forks.py`` are; starts within 50 ms.
"""

import marshal
import os
import socket
import sys
from pathlib import Path


def main(folder: Path, arguments: list[str]) -> None:
    """Have ``python -m mpi4py ARGUMENTS`` run in a fork with this process's files, environment and working folder."""
    listed = list(Path("/proc/self/fd").iterdir())
    files = [int(file.name) for file in listed if file.exists()]  # all but the listing's own
    rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    addresses = sorted(folder.iterdir())
    fork = socket.socket(socket.AF_UNIX)
    fork.connect(str(addresses[rank % len(addresses)]))
    payload = marshal.dumps((files, arguments, str(Path.cwd()), dict(os.environ)))
    socket.send_fds(fork, [len(payload).to_bytes(8, "little")], files)
    fork.sendall(payload)
    for number in set(files) - {2}:
        os.close(number)  # they end with the fork, as their readers must see
    answer = fork.recv(4)
    assert answer, "the process that ranks are forked from has died"
    status = int.from_bytes(answer, "little")
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
