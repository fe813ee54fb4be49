"""The reward server: limits depend on the answer alone, and no answer can stop the run."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.config import RewardSection, UserError
from tlt_hpc.rewards.answer import Answer, Failure, FrameBuffer, Verdict, encode_frame
from tlt_hpc.rewards.client import RewardClient, server_environment
from tlt_hpc.rewards.functions import load_functions

OWN = """
import os, signal, sys, time
import numpy
print("imported")

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    match solution_str:
        case "dict": return {"score": 0.25, "acc": True}
        case "arguments": return float([data_source, ground_truth, extra_info] == ["own", "truth", {"a": 1}])
        case "unscored": return {"acc": 1}
        case "raise": raise KeyError("planted")
        case "nan": return float("nan")
        case "end": os._exit(3)
        case "segv": os.kill(os.getpid(), signal.SIGSEGV)
        case "spin":
            while True: pass
        case "memory": return len(bytearray(2 * 10**9))
        case "sleep": time.sleep(10**6)
        case "slow": time.sleep(1.5); return 1
        case "equal": return numpy.isclose(0.1 + 0.2, 0.3)
        case "array": return {"score": numpy.array(0.5)}
        case "arrays": return numpy.zeros(2)
        case "child":
            if os.fork() == 0: time.sleep(10**6)
            return 1
        case "server": os.kill(os.getppid(), signal.SIGKILL); time.sleep(10)
        case "state":
            global seen
            seen = globals().get("seen", 0) + 1
            return seen
        case "order": return list({"a", "b", "c", "d", "e", "f"}).index("a")
        case "threads": return int(os.environ["OMP_NUM_THREADS"])
    return len(solution_str)
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return f"{path}:compute_score"


def make_client(**settings: Any) -> RewardClient:
    client = RewardClient(RewardSection.model_validate({"cpu_seconds": 1.0} | settings))
    client.wait_until_ready()
    return client


@pytest.fixture(scope="module")
def client(own: str) -> Iterator[RewardClient]:
    with closing(make_client(default=own)) as client:
        yield client


def ask(client: RewardClient, *texts: str, kind: str = "", truth: str = "truth") -> list[Verdict]:
    numbers = [
        client.submit(Answer(kind or client._settings.default, "own", text, truth, '{"extra_info": {"a": 1}}'))
        for text in texts
    ]
    verdicts = client.wait_for_verdicts(numbers)
    return [verdicts[number] for number in numbers]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# --- the user's function ---


def test_a_function_is_called_as_verl_calls_its(client: RewardClient) -> None:
    verdicts = ask(client, "dict", "arguments", "four", "threads", "equal", "array")
    assert [verdict.reward for verdict in verdicts] == [0.25, 1.0, 4.0, 1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("text", "failure", "detail"),
    [
        ("raise", Failure.ERROR, "KeyError: 'planted' (own.py, line 11)"),
        ("unscored", Failure.ERROR, "the function returned \"{'acc': 1}\", which is a dict without 'score'"),
        ("nan", Failure.ERROR, "the function returned 'nan', which is not a number between -1e+06 and 1e+06"),
        ("arrays", Failure.ERROR, "the function returned '[0. 0.]', which is not a number between -1e+06 and 1e+06"),
        ("end", Failure.CRASH, "its process ended with status 3"),
        ("segv", Failure.CRASH, "its process was killed by SIGSEGV"),
        ("spin", Failure.CPU, "more than 1.0 s of CPU time"),
        ("memory", Failure.MEMORY, "MemoryError (own.py, line 17)"),
        ("x" * 4_000_001, Failure.SIZE, "a response of 4000001 characters"),
    ],
)
def test_what_goes_wrong_costs_that_answer_alone(
    client: RewardClient, text: str, failure: Failure, detail: str
) -> None:
    first, between, last = ask(client, "one", text, "three")
    assert between == Verdict(0.0, failure, detail)
    assert (first.reward, last.reward) == (3, 5)
    assert client.num_restarts == 0


def test_a_child_that_an_answer_leaves_is_ended(client: RewardClient) -> None:
    assert ask(client, "child") == [Verdict(1.0)]
    wait_until(lambda: not any(map(alive, group_members(client._process.pid))))


def group_members(server: int) -> list[int]:
    """Other processes of the server's session."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(path.name)) == server != int(path.name):
                found.append(int(path.name))
        except ProcessLookupError:
            continue
    return found


# --- several functions ---


PARTS = """
from elsewhere import fails
runs = []

def score(solution_str, ground_truth, **given):
    runs.append("score")
    return float(solution_str.startswith(ground_truth))

def brevity(data_source, solution_str, ground_truth, extra_info=None):
    match solution_str:
        case "raise": raise KeyError("planted")
        case "nan": return float("nan")
    return -len(solution_str) / 10

def is_second(**given): return runs == ["score"]
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with several functions, one of them from another file."""
    folder = tmp_path_factory.mktemp("parts")
    (folder / "elsewhere.py").write_text("def fails(solution_str, **given): return 1 / len(solution_str)\n")
    (folder / "parts.py").write_text(PARTS)
    return str(folder / "parts.py")


def test_a_reward_is_the_weighted_sum_of_its_parts(parts: str) -> None:
    weights = {"answer": 2, "format": 0.25, f"{parts}:brevity": 0.5, f"{parts}:is_second": 0}
    with closing(make_client(default=f"{parts}:score", format_tags=["a"], weights=weights)) as client:
        (found,) = ask(client, "<a>1</a>", truth="<a>1")
    assert found == Verdict(2 + 0.25 - 0.4) and found.seconds > 0
    assert found.parts == {"answer": 1.0, "format": 1.0, "brevity": -0.8, "is_second": 1.0}


def test_what_a_part_fails_on_is_not_judged(parts: str) -> None:
    """As for the only function; also where the function is another file's, so that no line of the named file raises."""
    failures = {
        "raise": (Failure.ERROR, "KeyError: 'planted' (parts.py, line 11)"),
        "nan": (Failure.ERROR, "brevity: the function returned 'nan', which is not a number between -1e+06 and 1e+06"),
        "": (Failure.ERROR, "ZeroDivisionError: division by zero"),
    }
    weights = {f"{parts}:brevity": 0.5, f"{parts}:fails": 1}
    with closing(make_client(default="choice", weights=weights)) as client:
        right, *failed = ask(client, "answer: A", *failures, kind="choice", truth="A")
    assert right.parts == {"answer": 1.0, "brevity": -0.9, "fails": 1 / 9}
    assert failed == [Verdict(0.0, *each) for each in failures.values()]
    assert [each.parts for each in failed] == [{}] * 3


FAILING = """
import os, signal
from tlt_hpc.rewards import judge

def fail(answer, *_):
    match answer.text:
        case "end": os._exit(3)
        case "segv": os.kill(os.getpid(), signal.SIGSEGV)
        case "raise": raise ValueError
        case "memory": raise MemoryError
        case "spin":
            while True: pass

judge._compare_with_truth = fail
def penalty(**given): return 1
"""


def test_what_a_response_fails_on_costs_no_more_than_a_wrong_answer_and_no_less(tmp_path: Path) -> None:
    """Its other parts count, although the process that judged it is gone."""
    (tmp_path / "own.py").write_text(FAILING)
    wanted = {
        **dict.fromkeys(("end", "segv", "raise"), Failure.CRASH), "memory": Failure.MEMORY, "spin": Failure.CPU,
        "x" * 4_000_001: Failure.SIZE,
    }  # fmt: skip
    with closing(make_client(default="boxed", weights={f"{tmp_path}/own.py:penalty": -0.5})) as client:
        found = ask(client, *wanted, kind="boxed")
    assert [each.failure for each in found] == list(wanted.values())
    assert all((each.reward, each.parts) == (-0.5, {"answer": 0.0, "penalty": 1.0}) for each in found)
    assert found[4].seconds > 0.9 and all(each.seconds > 0 for each in found)


# --- the server ---


def test_a_server_that_dies_is_started_again_and_loses_nothing(own: str) -> None:
    """Except an answer that ends it twice."""
    client = make_client(default=own)
    numbers = [client.submit(Answer(own, "own", "x" * length, "")) for length in range(300)]
    os.kill(client._process.pid, signal.SIGKILL)
    verdicts = client.wait_for_verdicts(numbers)
    assert [verdicts[number].reward for number in numbers] == list(range(300))
    assert client.num_restarts == 1
    given = ask(client, "a", "server", "abc")
    assert given == [Verdict(1.0), Verdict(0.0, Failure.SERVER, "the server ended with status -9"), Verdict(3.0)]
    assert client.num_restarts == 3 and ask(client, "four") == [Verdict(4.0)]
    client.close()


@pytest.mark.ci
def test_an_answer_that_never_ends_meets_the_limit_of_the_clock_and_a_stopped_server_is_replaced(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that had nothing to judge for long, as after an update, is not taken for stopped."""
    limit = Verdict(0.0, Failure.WALL, "no verdict in 3.0 s of the clock")
    with closing(make_client(default=own, cpu_seconds=0.05)) as client:
        client._heard_at -= 3600.0
        assert ask(client, "slow", "sleep", "a") == [Verdict(1.0), limit, Verdict(1.0)] and client.num_restarts == 0
        monkeypatch.setattr("tlt_hpc.rewards.client._STALLED_SECONDS", 3.0)
        os.kill(client._process.pid, signal.SIGSTOP)
        assert ask(client, "four") == [Verdict(4.0)] and client.num_restarts == 1


def test_to_wait_for_a_server_that_does_not_start_again_is_no_progress(tmp_path: Path) -> None:
    """Then the watch ends the job, which would hang until its time limit."""
    mark, path = tmp_path / "imported", tmp_path / "once.py"
    path.write_text(
        f"import pathlib, time\nmark = pathlib.Path({str(mark)!r})\nif mark.exists(): time.sleep(10**6)\nmark.touch()\n"
        "def score(data_source, solution_str, ground_truth, extra_info=None): return 1\n"
    )
    client = make_client(default=f"{path}:score")
    assert ask(client, "a") == [Verdict(1.0)]
    os.kill(client._process.pid, signal.SIGKILL)
    ended = list[bool]()

    def wait() -> None:
        with pytest.raises(UserError, match="the server of rewards ended with status -9 before it was ready"):
            ask(client, "b")
        ended.append(True)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(4.0)
    assert waiting.is_alive() and client.num_restarts == 1
    before = BEAT.progress
    waiting.join(2.5)
    assert BEAT.progress == before
    os.kill(client._process.pid, signal.SIGKILL)
    waiting.join(30.0)
    assert ended


def test_a_rank_with_a_thousand_connections_waits_for_its_server(own: str) -> None:
    """Those to other ranks are open when a server is started again, whose socket then has a high number."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] <= 1100:
        pytest.skip(f"a process may have {limits[1]} descriptors here")
    with closing(make_client(default=own)) as client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 1200), limits[1]))
        try:
            with client._socket as low:
                client._socket = socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1100))
            client._socket.setblocking(False)
            assert ask(client, "four") == [Verdict(4.0)]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_server_and_its_workers_end_with_the_rank(own: str) -> None:
    program = (
        "import sys, time\n"
        "from tlt_hpc.config import RewardSection\n"
        "from tlt_hpc.rewards.answer import Answer\n"
        "from tlt_hpc.rewards.scorer import open_process_judge\n"
        f"client = open_process_judge(RewardSection(default={own!r})).client\n"
        "client.wait_until_ready()\n"
        f"client.submit(Answer({own!r}, 'own', 'sleep', ''))\n"
        "print(client._process.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    server = int(rank.stdout.readline())
    wait_until(lambda: bool(group_members(server)))
    processes = [server, *group_members(server)]
    rank.kill()
    rank.wait()
    rank.stdout.close()
    wait_until(lambda: not any(map(alive, processes)))


def test_what_is_forgotten_is_ended_and_its_verdicts_never_come(client: RewardClient, own: str) -> None:
    for _ in range(3):
        client.submit(Answer(own, "own", "sleep", ""))
    wait_until(lambda: len(group_members(client._process.pid)) == 2)
    client.drop_all_answers()
    assert ask(client, "four") == [Verdict(4.0)], "no worker is held up"
    assert client.num_judged == 0


def test_handing_over_never_waits(client: RewardClient, own: str) -> None:
    """Far more than a socket holds, while the server is stopped."""
    os.kill(client._process.pid, signal.SIGSTOP)
    numbers = [client.submit(Answer(own, "own", "x" * 100_000, "")) for _ in range(100)]
    client.send_and_receive()  # a call that waits does so for ever: only this thread lets the server continue
    os.kill(client._process.pid, signal.SIGCONT)
    assert {verdict.reward for verdict in client.wait_for_verdicts(numbers).values()} == {100_000.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero; fix the file"),
        ("compute_score = 3", "TypeError: {path} has no function 'compute_score' at its top level"),
        ("def compute_score(text): ...", "TypeError: compute_score is called with data_source, solution_str, "),
        ("raise SystemExit(3)", "RuntimeError: it calls sys.exit(3); fix the file"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(content)
    spec = f"{path}:compute_score"
    for settings, key in (({"default": spec}, "reward.default = "), ({"weights": {spec: 1}}, "reward.weights: ")):
        with pytest.raises(UserError) as caught:
            make_client(**settings)
        assert str(caught.value).startswith(f"{key}{spec!r} cannot be loaded: ") and "\n" not in str(caught.value)
        assert message.format(spec=spec, path=path) in str(caught.value)


def test_an_adapter_and_a_compiled_function_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    adapter = "import functools\ndef inner(text): ...\n@functools.wraps(inner)\ndef adapter(**given): ...\n"
    (tmp_path / "own.py").write_text(f"{adapter}compiled = max  # has no signature")
    assert all(
        map(callable, load_functions([f"{tmp_path}/own.py:{name}" for name in ("adapter", "compiled")]).values())
    )


SECRETS = dict.fromkeys(("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "https_proxy", "MY_KEY"), "swordfish")


def test_the_server_gets_the_variables_that_python_needs_and_no_other(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launchers = {"PMI_RANK": "0", "PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "0", "TLT_RANKS": "2"}
    passed = {"PATH": "/bin", "HF_HOME": "/data", "LC_ALL": "C", "PYTHONPATH": "/clone", "LD_LIBRARY_PATH": "/lib"}
    kept = server_environment({**launchers, **SECRETS, **passed, "OMP_NUM_THREADS": "12"})
    assert kept == {**passed, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    with closing(make_client(default=own)) as client:
        assert "swordfish" not in Path(f"/proc/{client._process.pid}/environ").read_text()


# --- verdicts are a function of the answer ---


def test_verdicts_depend_on_neither_the_number_of_workers_nor_the_order(client: RewardClient, own: str) -> None:
    texts = ["raise", "spin", "memory", "dict", "order", "state", "segv", "a", "bb"]
    with closing(make_client(default=own, workers=4)) as other:
        assert ask(client, *texts) == ask(other, *texts[::-1])[::-1]


# --- the sandbox as the server has it ---


def test_mathematics_and_programs_are_judged_in_the_server() -> None:
    cases = [("\\boxed{2/4}", "1/2"), ("no idea", "3"), ("\\boxed{9^{9^{9^{9}}}}", "3"), ("\\boxed{3}", "$$")]
    texts = ["def f(n): return n + 1", "def f(n): return n", "import os\nos.abort()", "x = [0] * 10**9"]
    truth = json.dumps({"inputs": [[1]], "outputs": [2], "fn_name": "f"})
    crash = Verdict(0.0, Failure.CRASH, "the program was killed by signal 6")
    with closing(make_client(default="code", cpu_seconds=2.0)) as client:
        found = [ask(client, text, kind="math", truth=answer)[0] for text, answer in cases]
        verdicts = ask(client, *texts, kind="code", truth=truth)
    assert [each.reward for each in found] == [1, 0, 0, 0] and found[3].failure == Failure.UNREADABLE
    wrong = Verdict(0.0, detail="test 1: gave '1', expected '2'")
    assert verdicts == [Verdict(1.0), wrong, crash, Verdict(0.0, Failure.MEMORY)]
    assert verdicts[0].read == "def f(n): return n + 1"


# --- frames ---


def test_frames_come_out_whole_however_they_come_in() -> None:
    trees = [{"a": [1, "\ud800\u00e9"]}, [], "x" * 1000]
    data, buffer = b"".join(map(encode_frame, trees)), FrameBuffer()
    assert [tree for byte in data for tree in buffer.feed(bytes([byte]))] == trees
    assert list(FrameBuffer().feed(data)) == trees
