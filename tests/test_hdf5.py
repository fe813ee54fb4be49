"""No file locks, a full disk, and foreign files: the parts of tlt_hpc/storage/hdf5.py and folder.py."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from tlt_hpc.storage import hdf5
from tlt_hpc.storage.folder import RunFolder, WriteError, part_path, rank_of, writing_atomically

KIND = hdf5.FileKind("test file", schema=3, remedy="delete it")


def write_file(path: Path, num_rows: int = 3, kind: hdf5.FileKind = KIND) -> None:
    file = hdf5.NewFile(path, kind)
    hdf5.put_array(file.root, "rows", np.arange(num_rows, dtype=np.int32))
    file.commit(num_rows)


@pytest.mark.parametrize("before", ["", "import h5py; "])
def test_a_locked_file_is_read_and_written(tmp_path: Path, before: str) -> None:
    """Whatever the user's setting, and even where h5py was imported first."""
    write_file(tmp_path / "a.h5")
    program = (
        f"{before}import os, sys; from pathlib import Path; from tlt_hpc.storage import hdf5\n"
        "assert os.environ['HDF5_USE_FILE_LOCKING'] == 'FALSE'\n"
        "kind = hdf5.FileKind('test file', 3, 'delete it')\n"
        "with hdf5.CommittedFile(Path(sys.argv[1]), kind) as file: assert file.committed == 3\n"
        "hdf5.NewFile(Path(sys.argv[1]), kind).commit(0)\n"
    )
    with (tmp_path / "a.h5").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        environment = os.environ | {"HDF5_USE_FILE_LOCKING": "TRUE"}
        subprocess.run([sys.executable, "-c", program, str(tmp_path / "a.h5")], env=environment, check=True)
    with hdf5.CommittedFile(tmp_path / "a.h5", KIND) as file:
        assert file.committed == 0, "it was written again"


def test_what_is_not_a_committed_file_of_the_kind_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    for content in (b"", b"\x89HDF\r\n\x1a\n", b"step,reward\n" * 500):
        path.write_bytes(content)
        with pytest.raises(hdf5.DamagedFile, match=r"a\.h5: damaged test file: .*; delete it$"):
            hdf5.CommittedFile(path, KIND)
    for kind, message in (
        (hdf5.FileKind("other", 3, ""), "does not say that it is a test file"),
        (hdf5.FileKind("test file", 4, ""), "schema 4 and this version reads schema 3"),
    ):
        write_file(path, kind=kind)
        with pytest.raises(hdf5.DamagedFile, match=message):
            hdf5.CommittedFile(path, KIND)
    file = hdf5.NewFile(path, KIND)
    file.root.flush()
    file.close()
    with pytest.raises(hdf5.DamagedFile, match=rf"{path}.*never committed \(its writer was killed\); delete it$"):
        hdf5.CommittedFile(path, KIND)


FULL_DISK = """
import resource, sys
from pathlib import Path
import h5py
import numpy as np
from tlt_hpc.storage import hdf5
from tlt_hpc.storage.folder import WriteError, writing_atomically
path, kind = Path(sys.argv[1]), hdf5.FileKind("test file", 3, "delete it")
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for limit in [0, 10, 1000, 2000, 3000, 500_000, 2**20, 2**20 + 3000, *range(1_540_000, 1_590_000, 5000), hard]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with writing_atomically(path) as part:
            file = hdf5.NewFile(part, kind)
            rows = hdf5.create_growing_array(file.root, "rows", np.dtype("u2"), (256,), 10**6)
            for block in range(3):
                hdf5.write_rows(rows, len(rows), np.full((1000, 256), block, "u2"))
            file.commit(3000)
        print("published", path.stat().st_size <= limit or limit == hard)
    except WriteError as error:
        text = str(error)
        assert "File too large" in text and "run.folder" in text and chr(10) not in text, text
        assert not list(path.parent.iterdir())
        print("refused")
    path.unlink(missing_ok=True)
"""


def test_a_full_disk_is_one_error_and_no_crash(tmp_path: Path) -> None:
    """HDF5's own driver ends such a process with a segmentation fault at exit."""
    command = [sys.executable, "-B", "-c", FULL_DISK, str(tmp_path / "a.h5")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = done.stdout.split("\n")[:-1]
    assert lines[0] == "refused" and lines[-1] == "published True" and "published False" not in lines
    assert lines.count("refused") >= 8


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "make room there"), (errno.EROFS, "make sure that you can write there")],
)
def test_an_error_in_the_body_keeps_what_was_there(tmp_path: Path, number: int, remedy: str) -> None:
    path = tmp_path / "deep" / "a.h5"
    with writing_atomically(path) as part:
        part.write_text("old")
    with pytest.raises(KeyError), writing_atomically(path) as part:
        part.write_text("new")
        raise KeyError
    said = rf"a\.h5: {os.strerror(number)}; nothing was changed: {remedy} or set run.folder to another"
    with pytest.raises(WriteError, match=said), writing_atomically(path) as part:
        part.write_text("new")
        raise OSError(number, os.strerror(number))
    assert path.read_text() == "old" and list(path.parent.iterdir()) == [path]


def test_a_file_gets_the_permissions_of_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``os.umask`` reads it only by changing it, for the whole process."""
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patched, writing_atomically(tmp_path / "file") as part:
            patched.setattr(os, "umask", None)
            part.touch(0o600)
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_files_are_listed_by_number_not_by_letters(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    paths = [folder.rollout_log(step, rank) for step in (999_998, 999_999) for rank in (9_999, 10_000)]
    assert paths[0] == tmp_path / "rollouts" / "step-999999" / "rank-9999.h5" and folder.rollout_steps() == []
    for path in [*paths, part_path(folder.rollout_log(999_999, 7))]:
        assert rank_of(path) in (7, 9_999, 10_000)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert folder.rollout_steps() == [999_998, 999_999]
    assert folder.rollout_logs(999_999) == paths[2:]


@pytest.mark.parametrize(
    "kind", ["external link", "other file's bytes", "virtual", "no checksum", "own member", "a bomb"]
)
def test_what_leads_out_of_a_file_is_not_followed(tmp_path: Path, kind: str) -> None:
    path, secret = tmp_path / "a.h5", tmp_path / "secret"
    secret.write_bytes(bytes(range(16)))
    file = hdf5.NewFile(path, KIND)
    hdf5.put_array(file.root, "a", np.arange(4, dtype=np.int32))
    file.commit(1)
    with hdf5.CommittedFile(path, KIND) as whole:
        assert whole.read_array("a").tolist() == [0, 1, 2, 3]
    with h5py.File(path, "r+") as struck:
        del struck["a"]
        if kind == "external link":
            struck["a"] = h5py.ExternalLink(str(secret), "/a")
        elif kind == "other file's bytes":
            struck.create_dataset("a", (4,), "i4", external=[(str(secret), 0, 16)])
        elif kind == "virtual":
            layout = h5py.VirtualLayout((4,), "i4")
            layout[:] = h5py.VirtualSource(str(secret), "a", (4,))
            struck.create_virtual_dataset("a", layout)
        elif kind == "no checksum":
            struck["a"] = np.arange(4, dtype=np.int32)
        elif kind == "a bomb":
            struck.create_dataset("a", (2**36,), "i4", chunks=(2**20,), fletcher32=True)
        else:
            struck["a"] = struck["/"]
    with (
        pytest.raises(hdf5.DamagedFile, match=r"a.h5: damaged .*(is a link|not stored as|would have)"),
        hdf5.CommittedFile(path, KIND) as file,
        file.raising_damaged_file(),
    ):
        file.read_array("a")
