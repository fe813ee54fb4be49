"""The options of ``tlt bench``: what may be asked for, and what makes no sense. Knows nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from tlt_hpc.config import EMBEDDED_MODEL, UserError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What both benches take."""

    model: str
    prompts: Path | None
    drafter: str | None
    max_new_tokens: int
    dtype: str
    device: str
    seed: int
    json: Path | None

    @property
    def is_embedded(self) -> bool:
        return self.model == EMBEDDED_MODEL


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(BenchOptions):
    """``tlt bench rollout``."""

    batches: tuple[int, ...]
    sequences: int
    max_live: int
    temperature: float
    lengths: Literal["own", "long-tail"]
    strategies: tuple[str, ...]
    """Names; none: the default ones."""
    each_strategy: bool
    profile_seconds: float
    assistant: Path | None
    repeats: int
    plots: Path | None


@dataclass(frozen=True, kw_only=True)
class AcceptOptions(BenchOptions):
    """``tlt bench accept``."""

    temperatures: tuple[float, ...]
    responses: int


def add_bench_parsers(parser: argparse.ArgumentParser) -> None:
    """The two benches, under the parser of ``tlt bench``."""
    kinds = parser.add_subparsers(dest="bench", required=True)
    rollout = kinds.add_parser(
        "rollout", help="tokens per second of plain and adaptive decoding against transformers' generate"
    )
    accept = kinds.add_parser(
        "accept", help="accept length of shared noise, multi-round rejection and top-K sample-match"
    )
    for command in (rollout, accept):
        _add_common(command)
    _add_rollout(rollout)
    accept.add_argument(
        "--temperatures", type=list_of(float), default=(0.0, 0.6, 1.0), metavar="T,...", help="0,0.6,1.0"
    )
    accept.add_argument("--responses", type=int, metavar="N", help="at each temperature (default 128 embedded, else 8)")


def read_options(given: argparse.Namespace) -> RolloutOptions | AcceptOptions:
    """The options, completed and checked.

    Raises:
        UserError: an option that makes no sense.
    """
    embedded = given.model == EMBEDDED_MODEL
    values = {name: value for name, value in vars(given).items() if name not in ("command", "bench", "overrides")}
    _complete(values, max_new_tokens=512 if embedded else 128)
    if given.bench == "accept":
        _complete(values, responses=128 if embedded else 8)
        accept = AcceptOptions(**values)
        _check_accept(accept)
        return accept
    _complete(
        values,
        sequences=128 if embedded else 64,
        max_live=max(given.batches),
        lengths="own" if embedded else "long-tail",
    )
    rollout = RolloutOptions(**values)
    _check_rollout(rollout)
    return rollout


def list_of(kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """A parser of values that commas separate; argparse names ``kind`` in its error."""

    def parse(text: str) -> tuple[T, ...]:
        return tuple(kind(part) for part in text.split(","))

    parse.__name__ = f"list of {kind.__name__}"
    return parse


def _add_common(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("model", metavar="MODEL", help="a Hugging Face folder, or embedded:tiny")
    add("--prompts", type=Path, metavar="FILE.jsonl", help="rows with a 'prompt', fed as they stand")
    add("--drafter", metavar="FOLDER", help="the drafter folder of a run; embedded:tiny has its own")
    add("--max-new-tokens", type=int, metavar="N", help="longest response (default 512 for embedded:tiny, else 128)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--seed", type=int, default=0, metavar="N")
    add("--json", type=Path, metavar="OUT", help="write the figures there as well")


def _add_rollout(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--batches", type=list_of(int), default=(1, 8, 32), metavar="N,...", help="sequences at a time (1,8,32)")
    add("--sequences", type=int, metavar="N", help="of the rollout (default 128 for embedded:tiny, else 64)")
    add("--max-live", type=int, metavar="N", help="at a time in the rollout (default the largest batch)")
    add("--temperature", type=float, default=1.0, metavar="T")
    add(
        "--lengths",
        choices=("own", "long-tail"),
        help="own: until the model ends a response; long-tail: drawn from a log-normal, no end before "
        "(default own for embedded:tiny, else long-tail)",
    )
    add("--strategies", type=list_of(str), default=(), metavar="NAME,...", help="e.g. off,ngram-4,drafter-4x2v8a1.5")
    add("--no-each-strategy", dest="each_strategy", action="store_false", help="do not run every strategy alone, too")
    add("--profile-seconds", type=float, default=3.0, metavar="S", help="most to measure the cost of rounds; 0: off")
    add("--assistant", type=Path, metavar="FOLDER", help="a smaller model for assisted generate")
    add("--repeats", type=int, default=3, metavar="N", help="repetitions of every measurement (default 3)")
    add("--plots", type=Path, metavar="FOLDER", help="write PNG plots there")


def _complete(values: dict[str, object], **defaults: object) -> None:
    """Defaults that depend on other options, where nothing was given."""
    for name, default in defaults.items():
        if values[name] is None:
            values[name] = default


def _check_common(options: BenchOptions) -> None:
    _at_least_one("--max-new-tokens", options.max_new_tokens)
    _check(options.seed >= 0, f"--seed {options.seed} is negative; use 0 or more")
    if options.json is not None:
        _check(options.json.parent.is_dir(), f"--json {options.json}: its folder does not exist; make it first")


def _check_rollout(options: RolloutOptions) -> None:
    _check_common(options)
    for size in options.batches:
        _at_least_one("--batches", size)
    for name in ("sequences", "max_live", "repeats"):
        _at_least_one(f"--{name.replace('_', '-')}", vars(options)[name])
    most = max(*options.batches, options.max_live)
    _check(
        most <= options.sequences,
        f"--sequences {options.sequences} never fill {most} rows; give --sequences {most} or more, or smaller batches",
    )
    _check_temperature("--temperature", options.temperature)
    seconds = options.profile_seconds
    _check(0 <= seconds < float("inf"), f"--profile-seconds {seconds:g} is no time; use 0 (off) or more")
    if options.plots is not None:
        _check(not options.plots.is_file(), f"--plots {options.plots} is a file; give a folder")
    if options.assistant is not None:
        place = options.assistant
        _check((place / "config.json").is_file(), f"--assistant {place}: no config.json there; give a model folder")


def _check_accept(options: AcceptOptions) -> None:
    _check_common(options)
    _check(
        options.drafter is not None or options.is_embedded,
        f"bench accept compares samplings of a drafter's proposals, and model {options.model} comes without a drafter; "
        "add --drafter FOLDER, the drafter folder of a run with this model",
    )
    _at_least_one("--responses", options.responses)
    for temperature in options.temperatures:
        _check_temperature("--temperatures", temperature)


def _check_temperature(name: str, value: float) -> None:
    _check(0 <= value < 100, f"{name} {value:g} is no temperature; use 0 (greedy) or more")


def _at_least_one(name: str, value: int) -> None:
    _check(value >= 1, f"{name} {value} measures nothing; use 1 or more")


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise UserError(otherwise)
