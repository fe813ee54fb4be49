"""``tlt reward``: judges the responses of a file by the rules of a job. One process, without MPI, torch or a model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from itertools import islice
from pathlib import Path

from tlt_hpc.common.formatting import format_count
from tlt_hpc.common.printable import one_line
from tlt_hpc.config import RewardSection, UserError, load_config
from tlt_hpc.data.rows import RowError
from tlt_hpc.extras.judge_responses.responses import Given, GivenResponses
from tlt_hpc.extras.judge_responses.verdicts import Judged, Summary, print_rows, print_summary
from tlt_hpc.plan.plan_options import parse_non_negative_integer
from tlt_hpc.rewards.answer import Verdict
from tlt_hpc.rewards.client import RewardClient
from tlt_hpc.rewards.functions import check_functions
from tlt_hpc.rewards.judge import judge, needs_server
from tlt_hpc.rewards.scorer import Judge
from tlt_hpc.storage.folder import GIVE_OUTPUT, WriteError, writing_atomically

_BATCH = 256
"""Responses that are in memory at a time."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``tlt reward``."""
    add = command.add_argument
    add("config", metavar="CONFIG.toml", help="the job whose [reward] and data.answer_key count, e.g. jobs/tiny.toml")
    add("file", metavar="FILE", help=".jsonl, .parquet or .arrow with responses, and the answers as in training data")
    add("overrides", nargs="*", metavar="section.key=value", help="e.g. reward.default=math")
    words = "column of the response (default: response, responses, completion, solution_str or output)"
    add("--response", default="", metavar="COLUMN", help=words)
    words = "column of the expected reward, or true for right (default: expected, reward, score or label)"
    add("--expected", default="", metavar="COLUMN", help=words)
    add(
        "--rows",
        type=parse_non_negative_integer,
        default=20,
        metavar="N",
        help="show the first N (default 20); the sums are of all",
    )
    add("--wrong", action="store_true", help="show only responses that are not right")
    add("--output", type=Path, metavar="FILE.jsonl", help="write all verdicts there as well, a line each")


def run(options: argparse.Namespace) -> int:
    """Judge every response and print what was found; returns the exit status, 1 if something is not as it should be.

    Raises:
        ValueError: no such file, or it cannot be read; no such function; the server of rewards cannot start.
    """
    config = load_config(options.config, options.overrides)
    check_functions(config.reward)
    given = GivenResponses(config, options.file, options.response, options.expected)
    if options.output and options.output.resolve() in map(Path.resolve, given.files):
        raise UserError(f"--output {options.output} is the file of the responses; give another")
    if options.output and options.output.is_dir():
        raise UserError(f"cannot write {options.output}: it is a folder; {GIVE_OUTPUT}")
    if sys.stderr.isatty():
        print(f"judging {format_count(len(given.rows), 'row')}", file=sys.stderr, flush=True)
    summary, shown = Summary(), list[Judged]()
    with _open_output(options.output) as write:
        for each in judge_all(config.reward, given):
            summary.add(each)
            if isinstance(each, RowError):
                continue
            write(json.dumps(each.to_record(), ensure_ascii=False) + "\n")
            if len(shown) < options.rows and not (options.wrong and each.is_right):
                shown.append(each)
    print_rows(shown, options.file)
    print_summary(summary, options.file)
    if ignored := given.not_compared:
        verb = "expects" if len(ignored) == 1 else "expect"
        print(f"{format_count(len(ignored), 'row')} {verb} nothing that can be compared ({one_line(ignored[0])})")
    return int(summary.has_trouble)


@contextmanager
def _open_output(path: Path | None) -> Iterator[Callable[[str], object]]:
    """Yield a function that writes to the file, which appears once all is written; without a file it does nothing."""
    if path is None:
        yield lambda _: None
        return
    try:
        with writing_atomically(path) as part, part.open("w", encoding="utf-8", errors="backslashreplace") as output:
            yield output.write
    except WriteError as error:
        raise UserError(f"{error.fact}; {GIVE_OUTPUT}") from None


def judge_all(section: RewardSection, given: GivenResponses) -> Iterator[Judged | RowError]:
    """The verdicts in the order of the rows, among them the rows that cannot be used.

    Raises:
        UserError: the server of rewards cannot start.
    """
    with closing(RewardClient(section)) if needs_server(section) else nullcontext() as client:
        if client:
            client.wait_until_ready()
        rules, rows = Judge(section, client), iter(given)
        while batch := list(islice(rows, _BATCH)):
            yield from _judge_batch(rules, batch)


def _judge_batch(rules: Judge, batch: list[Given | RowError]) -> list[Judged | RowError]:
    numbers, verdicts = dict[int, int](), dict[int, Verdict]()
    for place, each in enumerate(batch):
        if isinstance(each, RowError):
            continue
        answer = rules.make_answer(each.prompt, each.text, each.is_finished)
        if rules.client and rules.needs_worker(each.prompt):
            numbers[place] = rules.client.submit(answer)
        else:
            verdicts[place] = judge(answer, rules.settings)
    if rules.client:
        found = rules.client.wait_for_verdicts(numbers.values())
        verdicts |= {place: found[number] for place, number in numbers.items()}
    return [
        each if isinstance(each, RowError) else Judged(each, rules.kind_of(each.prompt), verdicts[place])
        for place, each in enumerate(batch)
    ]
