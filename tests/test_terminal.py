"""Terminal output: markup is printed literally, control characters are escaped, and closed pipes are no error."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from answers import TINY, python
from launch_ranks import ROOT
from logged import make_rollout, step_record
from small_run import line_of, small_record, small_run
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tlt_hpc.cli.display import Screen, StepReporter
from tlt_hpc.common.console import make_console
from tlt_hpc.common.records import SampleKey
from tlt_hpc.config import load_config
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.rollout_log import write_step

MARKUP = "[bold red]x[/nope] :smile:"
CONTROLS = "\x1b[31m\x1b]0;owned\x07 \x9b2J \x7f \u202e \u2066 \r"
SHOWN = r"\x1b[31m\x1b]0;owned\x07 \x9b2J \x7f \u202e \u2066 \r"


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", **more}


def a_run(folder: Path, name: str = "run", words: str = "word") -> RunFolder:
    """A run with one committed step, of which a response says ``words``."""
    run = small_run(folder, num_steps=0)
    model = folder / "model"
    model.mkdir()
    tokenizer = Tokenizer(WordLevel({words: 0, "?": 1}, "?"))
    (model / "config.json").write_text("{}", encoding="utf-8")
    (model / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    config = f"[run]\nname = {json.dumps(name)}\n[model]\npath = {json.dumps(str(model))}\n"
    run.config.write_text(config, encoding="utf-8")
    run.metrics.write_text(json.dumps(line_of(3)) + "\n", encoding="utf-8")
    rollout = make_rollout(SampleKey(0, 0, 3, 0, 0), [0], [0], pass_lengths=np.array([1], np.uint8))
    write_step(run.rollout_log(3, 0), step_record(3, [rollout], [1.0]))
    return run


def no_control(text: str) -> bool:
    """Whether a terminal shows all of the text and executes none of it."""
    return not [char for char in text if (char < " " and char not in "\n\t") or "\x7f" <= char <= "\x9f"] and not (
        set(text) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    )


# -- markup ---------------------------------------------------------------------------------------------------------


def test_markup_of_paths_and_data_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("runs[red]", "runs[/b]"):
        StepReporter(Screen(True)).show_start(load_config(TINY, [f"run.folder={tmp_path / name}"]), 0, {})
        assert name in capsys.readouterr().out.replace("\n", "")
    make_console().print(MARKUP)
    assert MARKUP in capsys.readouterr().out


# -- control characters ---------------------------------------------------------------------------------------------


def test_control_characters_of_model_text_and_errors_are_escaped(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", name=CONTROLS, words=CONTROLS)
    tlt = partial(python, "-m", "tlt_hpc", env=environment(), status=None)
    done = tlt("watch", run.path, "--sample", "1")
    assert done.returncode == 0 and done.stdout.count(SHOWN) == 2 and no_control(done.stdout)
    done = tlt("watch", run.path, "--once")
    assert SHOWN in done.stdout and no_control(done.stdout)
    done = tlt("train", tmp_path / f"{CONTROLS}.toml")
    assert SHOWN in done.stderr and no_control(done.stderr)


def test_a_traceback_and_a_warning_escape_control_characters(tmp_path: Path) -> None:
    says = f"logging.warning({CONTROLS!r}); warnings.warn({CONTROLS!r}); print({CONTROLS!r})"
    code = (
        "import sys, logging, warnings\nfrom tlt_hpc.cli import main as cli\n"
        f"def fails(options):\n    {says}; sys.stderr.write('\\udc1b'); raise RuntimeError({CONTROLS!r})\n"
        "import tlt_hpc.plan.memory.summary as module\nmodule.run = fails\nsys.exit(cli.main(['plan', 'x']))"
    )
    done = python("-c", code, env=environment(), status=1)
    assert no_control(done.stdout + done.stderr)
    assert done.stdout == SHOWN + "\n" and r"\udc1b" in done.stderr
    assert f"RuntimeError: {SHOWN}" in done.stderr and f"UserWarning: {SHOWN}" in done.stderr


# -- closed pipes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_command_ends_silently_when_the_reader_of_its_output_closes(tmp_path: Path, unbuffered: str) -> None:
    """Without a buffer the first line fails, with one the last flush."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "tlt_hpc", "watch", str(a_run(tmp_path / "run").path), "--once"],
        stdout=writer, stderr=subprocess.PIPE, check=False, cwd=ROOT, env=environment(PYTHONUNBUFFERED=unbuffered),
    )  # fmt: skip
    os.close(writer)
    assert done.stderr == b"" and done.returncode == 141


RANKS = """
import os, sys
from tlt_hpc.cluster import launcher
script = "for i in 1 2 3 4 5 6; do echo line $i || exit 7; echo error $i >&2 || exit 8; sleep 0.1; done; touch done"
launcher.launch_command = lambda num_ranks, arguments: ["/bin/sh", "-c", script]
launcher.exec_mpiexec(2, [], "")
"""


def test_ranks_outlive_the_reader_of_their_output(tmp_path: Path) -> None:
    """If mpiexec itself could not write, it would end with an error and end its ranks."""
    command, pipe = [sys.executable, "-c", RANKS], subprocess.PIPE
    started = subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd=tmp_path, env=environment())
    assert started.stdout is not None and started.stdout.readline() == b"line 1\n"
    started.stdout.close()
    assert started.stderr is not None and started.stderr.read().count(b"error") == 6
    assert started.wait(30) == 0 and (tmp_path / "done").exists()


# -- a start --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["tools/look.py", "jobs/submit.py", "-m tlt_hpc"])
def test_a_python_without_the_libraries_ends_with_one_line(script: str, tmp_path: Path) -> None:
    done = python("-S", *script.split(), status=1)
    assert done.stderr.count("\n") == 1, done.stderr
    name = "tlt" if script == "-m tlt_hpc" else Path(script).stem
    assert re.match(rf"{name}: no \w+ in /\S+: use this project's environment", done.stderr)


# -- progress -------------------------------------------------------------------------------------------------------


def test_progress_of_long_work_is_printed_less_and_less_often(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    screen = Screen(True)
    for clock[0] in np.arange(200.0):
        screen.print_progress_if_due(f"{clock[0]:.0f}")
    assert capsys.readouterr().out.split() == ["4", "12", "28", "60", "120", "180"]


# -- pages ----------------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_pages_and_figures_escape_control_characters(tmp_path: Path) -> None:
    run = small_run(tmp_path / "a\x1b[31m$x$\u202e")
    strategy = {"strategy_names": ("off", "drafter\x1b[31m\x01$x$")}
    for step in range(3):
        for rank in range(2):
            write_step(run.rollout_log(step, rank), small_record(step, rank, **strategy))
    for words in (["-m", "tlt_hpc", "report"], ["tools/look.py", "acceptance"], ["tools/look.py", "timeline"]):
        python(*words, run.path, env=environment())
    pages = [run.path / "report.html", *sorted((run.path / "figures").glob("*.svg"))]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    assert len(pages) == 3 and all(map(no_control, texts))
    for text in texts[1:]:
        ElementTree.fromstring(text)
    assert r"a\x1b[31m$x$\u202e" in texts[0] and any(r"\x1b[31m\x01$x$" in text for text in texts[1:])


def test_a_locale_without_utf_8_ends_nothing() -> None:
    """What its encoding lacks is shown escaped, by prints and by rich."""
    program = (
        "from tlt_hpc.common.printable import escape_streams; escape_streams()\n"
        "from tlt_hpc.common.console import TextConsole\n"
        "print('0.74 \u2192 0.92'); TextConsole(width=80).print('\u00b1')"
    )
    done = python("-c", program, env=environment(PYTHONUTF8="0", PYTHONIOENCODING="ascii"))
    assert done.stdout == "0.74 \\u2192 0.92\n\\xb1\n"
