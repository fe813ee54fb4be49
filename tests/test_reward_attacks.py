"""Hostile programs: none gets out, outlasts its answer, harms the next one, or is paid for what it did not do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from attacks import ASSERTED, ATTACKS, CALLED, DOUBLE, FORGERIES, HONEST, Attack
from test_reward_server import alive, wait_until

from tlt_hpc.config import RewardSection
from tlt_hpc.rewards.answer import Verdict
from tlt_hpc.rewards.code import passes_tests
from tlt_hpc.rewards.sandbox.outside import ProgramLimits, Sandbox, SandboxError, Template, check, working_template

ROOT = Path(__file__).resolve().parent.parent
LIMITS = ProgramLimits(cpu_seconds=0.3, memory_bytes=2**28, output_bytes=10**6)
SETTINGS = RewardSection(default="code", cpu_seconds=2.0, memory_mb=256)
SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    try:
        template = working_template()
    except SandboxError as error:
        pytest.skip(str(error))
    yield template
    template.close()


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What a program must not find; and a place to be, where it must leave nothing."""
    path = tmp_path / "secret.txt"
    path.write_text("secret")
    monkeypatch.setenv("API_KEY", "secret")
    monkeypatch.chdir(tmp_path)
    yield path
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret.txt"], "no core, no file"


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack(attack: Attack, secret: Path, template: Template) -> None:
    """It is contained, and an honest program in the same sandbox still does its work."""
    code = attack.code.replace("{secret}", str(secret)).replace("{pid}", str(os.getpid()))
    with Sandbox(template) as sandbox:
        # a program that computes may have to wait for a core longer than the tests want to watch one that sleeps
        limits = replace(LIMITS, asleep_seconds=0.5) if attack.failure == "asleep" else LIMITS
        outcome = sandbox.run(code, "3", limits)
        honest = sandbox.run("print(int(input()) * 2)", "21", ProgramLimits(5.0, 2**28, 1000))
    assert "breached" not in outcome.output
    assert attack.says in outcome.output
    assert outcome.failure == attack.failure
    assert attack.status is None or outcome.status == attack.status
    assert (honest.output, honest.status, honest.failure) == ("42\n", 0, None)


def test_a_signal_to_the_process_group_reaches_no_other_sandbox(template: Template) -> None:
    with Sandbox(template) as one, Sandbox(template) as other:
        one.run("import os\nos.kill(0, 9)", "", LIMITS)
        assert other.run("print(1)", "", LIMITS).output == "1\n"


def test_there_are_enough_of_them() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 30


def test_nothing_outlives_its_answer(template: Template) -> None:
    """All is gone with the sandbox, threads and process 1 included."""
    before = children_of(os.getpid())
    assert before, "the template"
    with Sandbox(template) as sandbox:
        sandbox.run(
            "import threading, time\nthreading.Thread(target=time.sleep, args=[9], daemon=True).start()", "", LIMITS
        )
        check(template, "def f(): return 1", ["assert f() == 1"], LIMITS)
        inside = children_of(os.getpid()) - before
        assert len(inside) >= 2, "the one that waits and process 1"
    wait_until(lambda: not any(map(alive, inside)))  # the entries of processes that have ended


def test_a_judge_that_is_killed_takes_the_program_with_it() -> None:
    program = (
        "from tlt_hpc.rewards.sandbox.outside import *\n"
        "s = Sandbox(Template()); print('up', flush=True)\n"
        "s.run('while True: pass', '', ProgramLimits(60.0, 2**28, 1000))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    judge = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    assert judge.stdout is not None and judge.stdout.readline() == b"up\n"
    wait_until(lambda: len(children_of(judge.pid)) >= 3)
    below = children_of(judge.pid)
    judge.kill()
    judge.wait()
    judge.stdout.close()
    wait_until(lambda: not any(map(alive, below)))


def children_of(pid: int) -> set[int]:
    """All processes below one."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, new = set[int](), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def test_an_answer_finds_nothing_of_the_last_one(template: Template) -> None:
    with Sandbox(template) as sandbox:
        assert sandbox.run("open('left', 'w').write('x')\nprint('wrote')", "", LIMITS).output == "wrote\n"
    with Sandbox(template) as sandbox:
        assert sandbox.run("import os\nprint(os.listdir())", "", LIMITS).output == "[]\n"


# --- to be paid for nothing ---


@pytest.mark.parametrize("truth", [DOUBLE, CALLED, ASSERTED], ids=["script", "call", "assertions"])
def test_the_honest_program_is_paid(truth: str, template: Template) -> None:
    assert passes_tests(f"```python\n{HONEST[truth]}\n```", truth, SETTINGS, template) == Verdict(1.0)


@pytest.mark.parametrize("truth", [DOUBLE, CALLED, ASSERTED], ids=["script", "call", "assertions"])
@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_not_paid(name: str, truth: str, template: Template) -> None:
    assert passes_tests(f"```python\n{FORGERIES[name]}\n```", truth, SETTINGS, template).reward == 0.0


# --- where there is no sandbox ---


def sandbox_as(*prefix: str, python: str = SYSTEM_PYTHON) -> subprocess.CompletedProcess[str]:
    """Run an attack and an honest program in a sandbox that a process of other rights makes."""
    program = (
        "from tlt_hpc.rewards.sandbox.outside import *\n"
        "with Sandbox(working_template()) as s:\n"
        "    for code in ('import os; print(os.getuid(), os.listdir(\"/\"),'\n"
        "                 ' [os.statvfs(f).f_flag & 1 for f in (\"/\", os.__file__, \"/tmp\")])',\n"
        "                 'open(\"/etc/passwd\")',\n"
        "                 'print(int(input()) * 2)'):\n"
        "        print(s.run(code, '21', ProgramLimits(2.0, 2**28, 1000)))\n"
    )  # fmt: skip
    command = [*prefix, python, "-B", "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv") or not Path(SYSTEM_PYTHON).exists(),
    reason="takes root, setpriv and a Python that everybody can run",
)
AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"]
AS_WEAK_ROOT = ["setpriv", "--bounding-set=-sys_admin"]


@needs_root
@pytest.mark.parametrize("prefix", [[], AS_NOBODY, AS_WEAK_ROOT], ids=["root", "nobody", "root without rights"])
def test_the_walls_are_the_same_for_everybody(prefix: list[str]) -> None:
    done = sandbox_as(*prefix)
    assert done.returncode == 0, done.stderr
    who, blocked, honest = done.stdout.splitlines()
    assert "65534 ['tmp', 'usr'] [1, 1, 0]" in who, "read-only but for the scratch folder"
    assert "status=1" in blocked and "output='42\\n', status=0" in honest


@needs_root
def test_where_the_system_allows_no_sandbox_nothing_is_run() -> None:
    """A user namespace in which no further one may be made, and a process in it that is not its root."""
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --bounding-set=-all --inh-caps=-all "$@"'
    done = sandbox_as("unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh")
    assert done.returncode == 1 and done.stdout == ""
    assert "this machine allows none: unshare(user, mount, process, network and IPC namespaces): " in done.stderr
    assert done.stderr.rstrip().endswith("or use another kind: without a sandbox nothing is run")
