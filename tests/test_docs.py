"""The pages: links have targets, commands parse, and options and keys exist."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tlt_hpc.cli.main import main, make_parser, parse
from tlt_hpc.config import Config, load_config
from tlt_hpc.rewards.functions import load_functions

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

SECTIONS = {name: field.annotation for name, field in Config.model_fields.items()}
HISTORIES = ("decisions.md", "performance.md")
"""Pages that name keys and options of earlier commits."""
KEYS = {f"{section}.{key}" for section, kind in SECTIONS.items() for key in kind.model_fields}  # type: ignore[union-attr]
ENDINGS = ("json", "jsonl", "toml", "py", "md", "sh", "h5", "parquet", "safetensors")
"""Endings of files whose names look like keys."""
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


# -- what a page holds ----------------------------------------------------------------------------------------------


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def prose_of(page: Path) -> str:
    """A page without its blocks of code and without files of earlier commits."""
    return re.sub(r"`[^`]+`\s+of\s+commit", "", _FENCE.sub("", text_of(page)))


def inline_code(page: Path) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose_of(page))]


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", prose_of(page), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in plain}


def links_of(page: Path) -> list[str]:
    """Targets of links and pictures inside the repository."""
    bare = re.sub(r"`[^`]*`", "", prose_of(page))
    found = re.findall(r"\]\(([^)\s]+)\)", bare) + re.findall(r'(?:src|srcset|href)="([^"]+)"', bare)
    return [target for target in found if not re.match(r"[a-z]+:", target)]


class Command(NamedTuple):
    page: Path
    words: list[str]

    def __str__(self) -> str:
        return f"{self.page.name}: {shlex.join(self.words)}"


def commands_of(page: Path) -> Iterator[Command]:
    """Simple commands in a page's shell blocks, and those in its text that begin in .venv, placeholders filled in."""
    blocks = [block for language, block in _FENCE.findall(text_of(page)) if language == "bash"]
    for block in [*blocks, *(code for code in inline_code(page) if re.match(r"([A-Z_]+=\S+ )*\.venv/bin/\w", code))]:
        filled = re.sub(r"\$\{?\w+\}?", "0", re.sub(r"<[^<>\n]+>", "x", block.replace("\\\n", " ")))
        for line in filled.splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
            lexer.whitespace_split = True
            words: list[str] = []
            for word in [*lexer, ";"]:
                if word.strip(";&|"):
                    words.append(word)
                elif words:
                    yield Command(page, without_assignments(words))
                    words = []


def without_assignments(words: list[str]) -> list[str]:
    """A command without the variables and the ``do`` before it."""
    while words and (re.match(r"[A-Z_]+=", words[0]) or words[0] == "do"):
        words = words[1:]
    return words


COMMANDS = [command for page in PAGES for command in commands_of(page)]


def after(words: list[str], pattern: str) -> list[str] | None:
    """The words from the first one that matches ``pattern``; None if none does."""
    at = next((i for i, word in enumerate(words) if re.fullmatch(pattern, word)), None)
    return None if at is None else words[at:]


def commands_with(pattern: str) -> list[Command]:
    found = ((command.page, after(command.words, pattern)) for command in COMMANDS)
    return [Command(page, words) for page, words in found if words]


# -- a job of one's own -----------------------------------------------------------------------------------------------


def test_the_job_of_the_training_page_fits_and_its_files_can_be_used(tmp_path, monkeypatch, capsys) -> None:
    page = text_of(ROOT / "docs" / "train.md")
    blocks = dict(_FENCE.findall(page[: page.index("## Configuration")]))
    files = {"data/own.jsonl": blocks["json"], "judge.py": blocks["python"], "own.toml": blocks["toml"]}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "own.toml", "--gpus-per-node", "4", "--gpu-memory", "h100-80"]) == 0
    predicted = re.search(r"Fits. Peak ([\d.]+ GB) a GPU", capsys.readouterr().out)
    assert predicted and f"`tlt plan` predicts {predicted[1]} of each GPU" in page
    tiny = ["model.path=embedded:tiny", "model.dtype=float32", "data.text_prompts=raw", "rollout.max_new_tokens=100"]
    limits = ["data.max_prompt_tokens=200", "drafter.init=random"]
    assert main(["train", "own.toml", "--dry-run", *tiny, *limits]) == 0
    judged = load_functions(["judge.py:score"])["judge.py:score"]
    assert [judged("own", text, "42") for text in ("It is 42.", "It is 142.", "It is 43.", "")] == [1.0, 0.0, 0.0, 0.0]


# -- links ----------------------------------------------------------------------------------------------------------


def test_the_memory_plan_of_the_questions_is_what_the_command_prints(monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    page = text_of(ROOT / "docs" / "faq.md")
    (command,) = (line for line in page.splitlines() if line.startswith("tlt plan "))
    assert main(shlex.split(command)[1:]) == 0
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    (block,) = (text for _, text in _FENCE.findall(page) if " together " in text and "Host memory" in text)
    for line in filter(None, (" ".join(line.split()) for line in block.splitlines())):
        begin, _, end = line.partition("...")
        assert any(each.startswith(begin) and each.endswith(end) for each in printed), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in links_of(page):
        place, _, anchor = target.partition("#")
        path = (page.parent / place).resolve() if place else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors_of(path), f"{page.name}: {target}; {path.name} has {sorted(anchors_of(path))}"


def test_pages_are_linked_from_the_readme() -> None:
    linked = {(ROOT / target.partition("#")[0]).resolve() for target in links_of(ROOT / "README.md")}
    assert set(PAGES[1:]) <= linked


def test_files_that_are_named_exist() -> None:
    """Names in inline code of files in the clone."""
    pattern = r"(?<![\w/.-])((?:tlt_hpc|tools|sbatch|jobs|tests|docs)/[\w./-]+\.(?:py|sh|toml|md))"
    named = {(page.name, name) for page in PAGES for code in inline_code(page) for name in re.findall(pattern, code)}
    assert not [(page, name) for page, name in named if not (ROOT / name).exists()]


def test_functions_that_are_named_are_in_their_files() -> None:
    """``FILE`` (``function``, ...) on the page about the code."""
    text = text_of(ROOT / "docs" / "code.md")
    named = [
        (path, name)
        for path, names in re.findall(r"`(tlt_hpc/[\w/]+\.py)` \(([^)]+)\)", text)
        for name in re.findall(r"`(\w+)`", names)
    ]
    assert len(named) > 40
    missing = [x for x in named if not re.search(rf"(def|class) {x[1]}\b", (ROOT / x[0]).read_text())]
    assert not missing


def test_every_part_of_the_package_is_on_the_page_about_the_code() -> None:
    table = re.findall(r"^\|(?: \d)? \| (.+?) \|", text_of(ROOT / "docs" / "code.md"), re.MULTILINE)
    named = {name for cell in table for name in re.findall(r"`([^`]+)`", cell)}
    entries = {path.name for path in (ROOT / "tlt_hpc").iterdir()}
    assert named == entries - {"__init__.py", "__pycache__", "py.typed"}


# -- commands -------------------------------------------------------------------------------------------------------


def check_keys(config: str | None, overrides: list[str], where: object) -> None:
    """Overrides of an existing job make a configuration; the keys of other overrides exist."""
    overrides = [override for override in overrides if not override.startswith("section.key=")]
    job = None if config is None else re.sub(r"^0/", "", config)  # "$PROJECT/jobs/qwen7b.toml"
    if job is not None and (ROOT / job).is_file():
        load_config(ROOT / job, overrides)
    for override in overrides:
        assert override.partition("=")[0] in KEYS, f"{where}: {override}"


def check_tlt(words: list[str], where: object) -> None:
    """The words after ``tlt`` satisfy its own parser."""
    try:
        options = parse(words)
    except SystemExit as error:
        pytest.fail(f"{where}: status {error.code}")
    check_keys(getattr(options, "config", None), getattr(options, "overrides", []), where)


@pytest.mark.parametrize("command", commands_with(r"(.*/)?tlt"), ids=str)
def test_commands_of_tlt_parse(command: Command) -> None:
    check_tlt(command.words[1:], command)


@pytest.mark.parametrize("command", commands_with("sbatch"), ids=str)
def test_batch_scripts_take_what_they_are_given(command: Command) -> None:
    given = after(command.words, r"sbatch/[\w.]+\.sh")
    assert given, f"{command}: names no script in sbatch/"
    script, arguments = text_of(ROOT / given[0]), given[1:]
    if given[0].endswith("smoke_gpu.sh"):
        assert "tools/gpu_first.py" in script and not arguments
        return
    (what,), job = re.findall(r"-m tlt_hpc (\w+)", script)[:1], re.findall(r"jobs/\w+\.toml", script)[:1]
    if what == "train" or (what == "warmup" and not arguments):
        arguments = [*job, *arguments]
    check_tlt([what, *arguments], command)


def test_targets_of_make_exist() -> None:
    targets = set(" ".join(re.findall(r"^(\w[\w -]*):", text_of(ROOT / "Makefile"), re.MULTILINE)).split())
    named = {word for command in commands_with("make") for word in command.words[1:] if "=" not in word}
    named |= {code.split()[1] for page in PAGES for code in inline_code(page) if re.match(r"make [\w-]+", code)}
    assert named and named <= targets


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Options of a parser and of its commands."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {name for each in action.choices.values() for name in options_of(each)}
    return found


def test_commands_in_the_text_are_known() -> None:
    """``tlt plan --shape X`` within a sentence may be incomplete, but its options must exist."""
    commands = make_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    assert isinstance(commands, dict)
    pattern = r"(?:\.venv/bin/)?tlt ([a-z][a-z-]*)(.*)"
    pages = [page for page in PAGES if page.name not in HISTORIES]
    found = [match for page in pages for code in inline_code(page) if (match := re.match(pattern, code))]
    assert len(found) > 30
    for match in found:
        named = set(re.findall(r"(?<=\s)--[a-z][a-z-]*", match[2]))
        assert match[1] in commands and named <= options_of(commands[match[1]]), match[0]


def test_tools_have_the_options_that_pages_give_them() -> None:
    """A tool's file or its parts name every option that a page gives it, or ``look.py`` does, which tools share."""
    pattern = r"(?:tools|jobs)/\w+\.py"
    in_blocks = [(command.words[0], command.words[1:]) for command in commands_with(pattern)]
    in_text = [code.split() for page in PAGES for code in inline_code(page)]
    found = in_blocks + [(words[at], words[at + 1 :]) for words in in_text for at in (0, 1)
                         if len(words) > at and re.fullmatch(pattern, words[at])]  # fmt: skip
    assert len(found) > 10
    for tool, words in found:
        parts = (ROOT / "tools").glob(f"{Path(tool).stem}_*.py")
        source = "".join(map(text_of, (ROOT / tool, ROOT / "tools" / "look.py", *parts)))
        own = words[: words.index("--")] if "--" in words else words
        options = {word.partition("=")[0] for word in own if re.match(r"--[a-z]", word)}
        assert all(f'"{option}"' in source for option in options), f"{tool} {' '.join(words)}"


# -- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORIES], ids=lambda page: page.name)
def test_keys_in_the_text_exist(page: Path) -> None:
    for code in inline_code(page):
        for word in code.split():
            key = re.match(r"([a-z_]+\.[a-z_0-9]+)(?![\w.(/*<])", word)
            if key and key[1].partition(".")[0] in SECTIONS and key[1].rpartition(".")[2] not in ENDINGS:
                assert key[1] in KEYS, f"{page.name}: {code}"
