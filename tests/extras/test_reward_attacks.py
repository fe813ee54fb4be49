"""Hostile programs: none gets out, outlasts its answer, harms the next one, or is paid for what it did not do."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from answers import python
from attacks import ASSERTED, ATTACKS, CALLED, DOUBLE, FORGERIES, HONEST, Attack
from launch_ranks import ROOT
from test_reward_server import alive, wait_until

from tlt_hpc.config import RewardSection
from tlt_hpc.extras.code_rewards.code import judge_program
from tlt_hpc.extras.code_rewards.sandbox.isolation import KINDS
from tlt_hpc.extras.code_rewards.sandbox.outside import ProgramLimits, Sandbox, SandboxError, Template, run_python_tests
from tlt_hpc.rewards.answer import Verdict

LIMITS = ProgramLimits(cpu_seconds=0.3, memory_bytes=2**28, output_bytes=10**6)
SETTINGS = RewardSection(default="code", cpu_seconds=2.0)
SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module", params=KINDS)
def template(request: pytest.FixtureRequest) -> Iterator[Template]:
    template = Template(request.param)
    try:
        Sandbox(template).close()
        yield template
    except SandboxError as error:
        pytest.skip(str(error))
    finally:
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


@pytest.mark.parametrize("has_numpy", [False, pytest.param(True, marks=pytest.mark.ci)], ids=["", "numpy"])
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack(attack: Attack, has_numpy: bool, secret: Path, template: Template) -> None:
    """It is contained, also with numpy, and an honest program in the same sandbox still does its work."""
    code = attack.code(secret, os.getpid())
    with Sandbox(template, has_numpy=has_numpy) as sandbox:
        # a program that computes may have to wait for a core longer than the tests want to watch one that sleeps
        limits = replace(LIMITS, asleep_seconds=0.5) if attack.failure == "asleep" else LIMITS
        outcome = sandbox.run(f"import numpy\n{code}" if has_numpy else code, "3", limits)
        honest = sandbox.run("print(int(input()) * 2)", "21", ProgramLimits(5.0, 2**28, 1000))
    assert "breached" not in outcome.output
    assert re.search(rf"({attack.says})\b", outcome.output) or not attack.says, outcome
    assert outcome.failure == attack.failure
    assert attack.status is None or has_numpy or outcome.status == attack.status
    assert (honest.output, honest.status, honest.failure) == ("42\n", 0, None)


def test_a_signal_to_the_process_group_reaches_no_other_sandbox(template: Template) -> None:
    with Sandbox(template) as one, Sandbox(template) as other:
        one.run("import os\nos.kill(0, 9)", "", LIMITS)
        assert other.run("print(1)", "", LIMITS).output == "1\n"


def test_nothing_outlives_its_answer(template: Template) -> None:
    """All is gone with the sandbox, threads and process 1 included."""
    before = children_of(os.getpid())
    assert before, "the template"
    with Sandbox(template) as sandbox:
        sandbox.run(
            "import threading, time\nthreading.Thread(target=time.sleep, args=[9], daemon=True).start()", "", LIMITS
        )
        run_python_tests(template, "def f(): return 1", ["assert f() == 1"], LIMITS)
        inside = children_of(os.getpid()) - before
        assert inside, "the supervisor, and one that waits for it"
    wait_until(lambda: not any(map(alive, inside)))  # the entries of processes that have ended


@pytest.mark.parametrize("who", ["the judge", "the supervisor"])
def test_a_program_ends_with(who: str, template: Template) -> None:
    """Killed by force, so that it can do nothing more itself."""
    program = (
        "from tlt_hpc.extras.code_rewards.sandbox.outside import *\n"
        f"s = Sandbox(Template({template.kind!r})); print('up', flush=True)\n"
        "s.run('while True: pass', '', ProgramLimits(60.0, 2**28, 1000))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    judge = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    assert judge.stdout is not None and judge.stdout.readline() == b"up\n"
    wait_until(lambda: len(children_of(judge.pid)) >= (4 if template.kind == "namespaces" else 3))
    below = children_of(judge.pid)
    program_pid = next(pid for pid in below if not children_of(pid))
    ended = [program_pid, *below] if who == "the judge" else [program_pid]
    supervisor = next(pid for pid in below if children_of(pid) == {program_pid})
    os.kill(judge.pid if who == "the judge" else supervisor, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, ended)))
    judge.kill()
    judge.wait()
    judge.stdout.close()


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
        wrote = sandbox.run("open('left', 'w').write('x')\nprint('wrote')", "", LIMITS).output == "wrote\n"
    assert wrote == (template.kind == "namespaces"), "with Landlock no file can be written"
    with Sandbox(template) as sandbox:
        assert sandbox.run("import os\nprint(os.path.exists('left'))", "", LIMITS).output == "False\n"


# --- to be paid for nothing ---


@pytest.mark.parametrize("truth", [DOUBLE, CALLED, ASSERTED], ids=["script", "call", "assertions"])
def test_only_the_honest_program_is_paid(truth: str, template: Template) -> None:
    programs = {"the honest program": HONEST[truth], **FORGERIES}
    found = {
        name: judge_program(f"```python\n{code}\n```", truth, SETTINGS, template) for name, code in programs.items()
    }
    assert [name for name, verdict in found.items() if verdict.reward] == ["the honest program"]
    assert found["the honest program"] == Verdict(1.0)


# --- one layer alone: what the filter of system calls refuses is refused by Landlock or the supervisor too ---


def behind_landlock(program: str) -> str:
    """What a program says that has the walls of Landlock and no filter; ``outside``: the process before."""
    start = (
        "import os, signal, time\n"
        "from tlt_hpc.extras.code_rewards.sandbox.landlock import Landlock\n"
        "walls, outside = Landlock(), os.getpid()\n"
        "if pid := os.fork():\n    os.waitpid(pid, 0)\n    raise SystemExit\n"
        "walls.become_supervisor([], [])\n"
        "said, says = os.pipe()\n"
        "def trial(name, call):\n"
        "    try:\n        call()\n        os.write(says, f'{name} breached\\n'.encode())\n"
        "    except OSError:\n        os.write(says, f'{name} refused\\n'.encode())\n"
        "if os.fork() == 0:\n    walls.isolate_program()\n"
    )
    end = "    os._exit(0)\nos.wait()\nwalls.kill_remaining_processes()\nos.close(says)\nprint(open(said).read())\n"
    lines = "".join(f"    {line}\n" for line in program.splitlines())
    done = python("-c", start + lines + end, status=None, timeout=60)
    if "landlock_create_ruleset" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_landlock_alone_closes_files_and_other_processes(secret: Path) -> None:
    said = behind_landlock(
        f"trial('read', lambda: open({str(secret)!r}).read())\n"
        f"trial('list', lambda: os.listdir({str(secret.parent)!r}))\n"
        f"trial('write', lambda: open({str(secret)!r} + '.x', 'w'))\n"
        "trial('shared memory', lambda: open('/dev/shm/x', 'w'))\n"
        "trial('temporary', lambda: os.open('/tmp', os.O_TMPFILE | os.O_RDWR))\n"
        "trial('environment', lambda: open(f'/proc/{os.getppid()}/environ').read())\n"
        "trial('memory', lambda: open(f'/proc/{outside}/mem'))\n"
        "trial('pipe', lambda: os.open(f'/proc/{os.getppid()}/fd/{said}', os.O_RDONLY))\n"
        "trial('identity', lambda: os.setresuid(12345, 12345, 12345))\n"
        "trial('own', lambda: os.kill(os.getpid(), 0))\n"
    )
    refused = ["read", "list", "write", "shared memory", "temporary", "environment", "memory", "pipe", "identity"]
    assert said.split("\n")[:-2] == [*(f"{name} refused" for name in refused), "own breached"]


def test_what_a_program_leaves_is_ended() -> None:
    """By a double fork with a session of its own, which the filter would refuse."""
    said = behind_landlock(
        "if os.fork() == 0:\n    os.setsid()\n    if left := os.fork():\n        os.write(says, b'%d' % left)\n"
        "    else:\n        time.sleep(1000)\n    os._exit(0)\nos.wait()\n"
    )
    assert not alive(int(said))


# --- where the system allows less ---

NO_LANDLOCK = (
    "from tlt_hpc.extras.code_rewards.sandbox import seccomp\n"
    "refuse = [(0x20, 0, 0, 0), (0x15, 0, 1, 444), seccomp._return_error(38), seccomp._PASS]\n"
    "seccomp._filter_instructions = lambda _: refuse\n"
    "seccomp.install()\n"
)


def sandbox_as(*prefix: str, before: str = "", kind: str = "") -> subprocess.CompletedProcess[str]:
    """Run an attack and an honest program in a sandbox that a process of other rights makes."""
    program = (
        before + "from tlt_hpc.extras.code_rewards.sandbox.outside import *\n"
        f"template = Template({kind!r}) if {kind!r} else start_working_template()\n"
        "print(template.kind)\n"
        "with Sandbox(template) as s:\n"
        "    for code in ('import os; print(os.getuid(), os.listdir(\"/\"),'\n"
        "                 ' [os.statvfs(f).f_flag & 1 for f in (\"/\", os.__file__, \"/tmp\")])',\n"
        "                 'open(\"/etc/passwd\")',\n"
        "                 'import resource as r\\nr.setrlimit(r.RLIMIT_CPU, (10**6, 10**6))',\n"
        "                 'print(int(input()) * 2)'):\n"
        "        print(s.run(code, '21', ProgramLimits(2.0, 2**28, 1000)))\n"
    )  # fmt: skip
    command = [*prefix, SYSTEM_PYTHON, "-B", "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv") or not Path(SYSTEM_PYTHON).exists(),
    reason="takes root, setpriv and a Python that everybody can run",
)
AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"]
AS_WEAK_ROOT = ["setpriv", "--bounding-set=-sys_admin"]
FORBID = 'echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --bounding-set=-all --inh-caps=-all "$@"'
WITHOUT_NAMESPACES = ["unshare", "--user", "--map-root-user", "sh", "-c", FORBID, "sh"]
"""A user namespace in which no further one may be made, and a process in it that is not its root."""


@needs_root
@pytest.mark.parametrize("kind", ["", "Landlock"])
@pytest.mark.parametrize("prefix", [[], AS_NOBODY, AS_WEAK_ROOT], ids=["root", "nobody", "root without rights"])
def test_the_walls_are_the_same_for_everybody(prefix: list[str], kind: str) -> None:
    done = sandbox_as(*prefix, kind=kind)
    assert done.returncode == 0, done.stderr
    found, who, blocked, limited, honest = done.stdout.splitlines()
    assert found == (kind or "namespaces")
    if kind:
        assert "output='', status=1" in who
    else:
        assert "65534 ['tmp', 'usr'] [1, 1, 0]" in who, "read-only but for the scratch folder"
    assert all("status=1" in refused for refused in (blocked, limited)) and "output='42\\n', status=0" in honest


@needs_root
def test_landlock_is_used_where_there_are_no_namespaces_and_without_it_nothing_is_run() -> None:
    done = sandbox_as(*WITHOUT_NAMESPACES)
    assert done.returncode == 0 and done.stdout.startswith("Landlock\n"), done.stderr
    done = sandbox_as(*WITHOUT_NAMESPACES, before=NO_LANDLOCK)
    assert done.returncode == 1 and done.stdout == ""
    assert "this machine allows none (no sandbox by namespaces: unshare(user, mount, process, " in done.stderr
    assert "; no sandbox by Landlock: landlock_create_ruleset: Function not implemented); ask your site " in done.stderr
    assert done.stderr.rstrip().endswith("or use another kind of reward: without a sandbox nothing is run")


def test_a_program_may_wait_while_its_tests_compute(template: Template) -> None:
    computing = (
        "import time\nassert f(1) == 1\nuntil = time.process_time() + 0.4\n"
        "while time.process_time() < until: pass\nassert f(2) == 2"
    )
    limits = replace(LIMITS, cpu_seconds=0.8, asleep_seconds=0.1)
    for code, failure in (("def f(n): return n", None), ("import time\ndef f(n): time.sleep(10**6)", "asleep")):
        program, checked = run_python_tests(template, code, [computing], limits)
        assert (program.failure, checked.failure) == (failure, None)
        assert ('"trouble": ""' in checked.output) == (failure is None)
