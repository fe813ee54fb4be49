"""The page: what was found, as one file of HTML that needs nothing but itself."""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import dataclass
from typing import TypeVar

import jinja2
import markupsafe
import numpy as np
from numpy.typing import NDArray

from tlt_hpc import __version__
from tlt_hpc.common.files import read_text, told
from tlt_hpc.common.printable import printable
from tlt_hpc.look.analysis.learning import window_of
from tlt_hpc.look.analysis.result import Analysis, count, share, span_of
from tlt_hpc.look.analysis.throughput import KEPT_TOKENS
from tlt_hpc.look.analysis.timeline import Timeline, thinned
from tlt_hpc.look.figures.page import Draw, PageFigure, draw_for_page, variables
from tlt_hpc.look.figures.steps import draw_acceptance, draw_comparison, draw_learning, draw_lengths, draw_throughput
from tlt_hpc.look.figures.timeline import draw_timeline
from tlt_hpc.look.report.advice import advise
from tlt_hpc.look.report.findings import Findings
from tlt_hpc.look.report.gain import Gain
from tlt_hpc.look.report.verdict import answers, cards
from tlt_hpc.storage.environment_lines import Host

Found = TypeVar("Found", bound=Analysis)

_MOST_ROWS = 60
"""Of the table of steps; of more steps, means of neighbours."""
_MOST_HOSTS, _MOST_STARTS = 64, 20
_OPTION = re.compile(r"(--[a-z][a-z-]*)")
_HOW = (
    "In a step every rank generates its share of the responses. A few are very long, so ranks that are done wait for "
    "the last one: they are idle. Meanwhile they train a small draft model on the responses just generated: that is "
    "harvested time. The draft model, as it began and as it was trained, proposes tokens, of which the policy verifies "
    "several at once: that is the gain."
)


@dataclass(frozen=True)
class Table:
    """Rows of cells, ready to print."""

    heading: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """A heading, what is to be said, and a picture with its tables."""

    heading: str
    words: str
    figure: PageFigure | None = None
    caption: str = ""
    tables: tuple[Table, ...] = ()


def render(found: Findings, gain: Gain | None, why_no_gain: str, made_at: float, is_typical: bool = True) -> str:
    """The whole page; ``made_at`` in seconds since the epoch, ``is_typical``: nobody chose the step that is drawn."""
    loader = jinja2.PackageLoader("tlt_hpc.look.report", ".")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=False, lstrip_blocks=True
    )
    environment.filters["options"] = _with_options
    page = environment.get_template("page.html.jinja").render(
        name=found.log.name,
        subtitle=_subtitle(found),
        light=variables("light"),
        dark=variables("dark"),
        cards=cards(found, gain),
        how=_HOW if found.harvested > 0 else "",
        problems=found.log.problems,
        answers=answers(found, gain, why_no_gain),
        advice=advise(found, gain),
        nothing_to_change="Nothing stands out." if found.is_begun else "Nothing can be said before the first step.",
        sections=list(filter(None, _sections(found, is_typical))),
        environment_words=found.environments.verdict,
        environment=_starts(found),
        config=_config(found),
        commands=_commands(found),
        against="" if found.other is None else str(found.other.folder.path.resolve()),
        footer=_footer(found, made_at),
    )
    return printable(page)


def _with_options(words: str) -> markupsafe.Markup:
    """Words in which a line does not end within ``--an-option``."""
    return markupsafe.Markup(_OPTION.sub(r'<span class="option">\1</span>', str(markupsafe.escape(words))))


def _sections(found: Findings, is_typical: bool) -> list[Section | None]:
    return [
        _step(found, is_typical),
        _drawn("seconds", "Where the seconds go", found.throughput, draw_throughput, (_steps_table(found),), words=""),
        _comparison(found),
        _drawn("lengths", "How long the responses are", found.lengths, draw_lengths),
        _drawn("speculation", "What speculation gives", found.acceptance, draw_acceptance, _strategies(found)),
        _drawn(
            "learning",
            "How the policy learns",
            found.learning,
            draw_learning,
            caption=_smoothing(found.learning.steps),
            words="",
        ),
        Section("What energy it took", found.energy.verdict) if found.is_begun else None,
    ]


def _drawn(
    name: str,
    heading: str,
    part: Found,
    draw: Draw[Found],
    tables: tuple[Table, ...] = (),
    caption: str = "",
    words: str | None = None,
) -> Section | None:
    """With the verdict above the picture, or other ``words``: nothing where the verdict stands at the page's top."""
    if not part.has_data:
        return None
    above = part.verdict if words is None else words
    return Section(heading, above, draw_for_page(name, part.verdict, draw, part), caption, tables)


def _smoothing(steps: NDArray[np.int64]) -> str:
    window = window_of(len(steps))
    return f"Bold: mean of {window} neighbouring steps; faint: single steps." if window > 1 else ""


def _step(found: Findings, is_typical: bool) -> Section | None:
    if found.timeline is None:
        return None
    shown = thinned(found.timeline)
    figure = draw_for_page("timeline", found.timeline.verdict, draw_timeline, shown)
    caption = "Shaded: the tail, from the first rank's last token to the release of all."
    if is_typical:
        caption += " This step is a typical one: its share of waiting is the nearest to the run's."
    if len(shown.lanes) < len(found.timeline.lanes):
        order = "evenly through the order in which they finished"
        caption += f" {len(shown.lanes)} of {len(found.timeline.lanes)} ranks are drawn, {order}."
    heading = f"One step, as each rank spent it: step {found.timeline.step}"
    return Section(heading, found.timeline.verdict, figure, caption, (_ranks_table(found.timeline),))


def _comparison(found: Findings) -> Section | None:
    if found.comparison is None or found.other is None:
        return None
    heading = f"Against {found.comparison.runs[0].name}"
    both = found.comparison.on_common_steps()
    return _drawn("comparison", heading, both, draw_comparison, caption=_smoothing(both.common_steps))


# -- tables ---------------------------------------------------------------------------------------------------------


def _steps_table(found: Findings) -> Table:
    series, throughput = found.learning.series, found.throughput
    place = {step: i for i, step in enumerate(throughput.steps.tolist())}
    heads = ("step", "score", "tokens, mean", "longest", "accept length", "rollout s", "step s", "idle rank-s",
             "harvested rank-s", "drafter updates")  # fmt: skip
    none = np.full(len(throughput.steps), np.nan)
    partial = ~throughput.is_whole
    told = (
        found.acceptance.accept_length,
        throughput.rollout_seconds,
        throughput.step_seconds,
        np.where(partial, np.nan, throughput.idle_rank_seconds),
        np.where(partial, np.nan, throughput.harvested_rank_seconds),
        found.acceptance.drafter_version,
    )
    logged = [each if len(each) == len(none) else none for each in told]
    steps = found.learning.steps.tolist()
    rows = []
    for i, step in enumerate(steps):
        at = place.get(step)
        own = [series[name][i] for name in ("score", "length", "longest")]
        rows.append([*own, *(each[at] if at is not None else np.nan for each in logged)])
    values = np.array(rows, np.float64).reshape(-1, len(heads) - 1)
    size = max(1, -(-len(steps) // _MOST_ROWS))
    cut = found.log.metric(KEPT_TOKENS) > 0
    forms = (".3f", ",.0f", ",.0f", ".2f", ".2f", ".2f", ".2f", ".2f", ",.0f")
    lines = []
    for start in range(0, len(steps), size):
        some = values[start : start + size]
        means = [_mean(some[:, column]) for column in range(some.shape[1])]
        is_cut = cut[start : start + size].any()
        name = str(steps[start]) if len(some) == 1 else f"{steps[start]}\u2013{steps[start + len(some) - 1]}"
        lines.append(
            (name + ("*" if is_cut else ""), *(_cell(mean, form) for mean, form in zip(means, forms, strict=True)))
        )
    heading = "By step" if size == 1 else f"By step, means of {size} neighbours"
    heading += " (*: an earlier start had generated a part of it)" if cut.any() else ""
    return Table(heading, heads, tuple(lines))


def _ranks_table(found: Timeline) -> Table:
    heads = ("rank", "last token at s", "idle s", "harvested s", "of it", "drafter updates")
    lanes = sorted(found.lanes, key=lambda lane: lane.rollouts[-1].last_token_seconds)
    rows: list[tuple[str, ...]] = []
    for lane in lanes:
        last = lane.rollouts[-1].last_token_seconds
        used = share(lane.harvested_seconds, lane.idle_seconds) if lane.idle_seconds > 0 else "\u2013"
        cells = (f"{last:.2f}", f"{lane.idle_seconds:.2f}", f"{lane.harvested_seconds:.2f}", used)
        rows.append((str(lane.rank), *cells, f"{lane.num_micro_steps:,}"))
    if len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        rows = [*rows[:half], ("...", *[""] * (len(heads) - 1)), *rows[-half:]]
    return Table("Ranks of this step, as they finished", heads, tuple(rows))


def _starts(found: Findings) -> list[Table]:
    """A table for each start of the run, the last one first."""
    tables = []
    for number, start in reversed(list(enumerate(found.environments.starts, 1))):
        rows = [
            ("started", start.time),
            ("command", shlex.join(start.command)),
            ("tlt_hpc", " ".join(filter(None, [start.version, start.commit and f"commit {start.commit}"]))),
            ("Python", start.python),
            *((name, version) for name, version in start.packages.items()),
            ("CUDA", start.cuda or "none: torch is a build for CPUs"),
            ("MPI", " ".join(start.mpi.split())),
            *((host.name, _host(host)) for host in start.hosts[:_MOST_HOSTS]),
            ("threads a rank", start.threads or "not set"),
            ("started by", start.launcher),
            *((f"Slurm {name}", value) for name, value in start.slurm.items()),
        ]
        if len(start.hosts) > _MOST_HOSTS:
            rows.append(("", f"and {len(start.hosts) - _MOST_HOSTS} more nodes"))
        heading = f"Start {number} of {len(found.environments.starts)}"
        tables.append(Table(heading, (), tuple(rows)))
    return tables[:_MOST_STARTS]


def _host(host: Host) -> str:
    gpus = [f"{number} x {name}" for name, number in sorted(host.gpus.items())]
    parts = [count(host.num_ranks, "rank"), f"{count(host.num_cores, 'core')} of {host.processor}"]
    return ", ".join([*parts, f"{host.memory_bytes / 1e9:,.0f} GB", *gpus])


def _strategies(found: Findings) -> tuple[Table, ...]:
    part = found.acceptance
    if not len(part.strategies):
        return ()
    tokens, rounds, taken = part.step_tokens.sum(0), part.step_rounds.sum(0), part.seconds.sum(1)
    heads = ("strategy", "rounds", "tokens", "of all", "tokens per pass", "seconds, all ranks")
    rows = []
    for i in np.argsort(-tokens, kind="stable"):
        by_pass = _cell(float(part.by_strategy[i]), ".2f")
        told = (f"{rounds[i]:,}", f"{tokens[i]:,}", share(float(tokens[i]), float(tokens.sum())), by_pass)
        rows.append((part.strategies[i], *told, f"{taken[i]:.1f}"))
    return (Table("Strategies", heads, tuple(rows)),)


def _mean(values: np.ndarray) -> float:
    told = values[np.isfinite(values)]
    return float(told.mean()) if len(told) else float("nan")


def _cell(value: float, form: str) -> str:
    return f"{value:{form}}" if np.isfinite(value) else "\u2013"


# -- words around them ----------------------------------------------------------------------------------------------


def _subtitle(found: Findings) -> str:
    if not found.is_begun:
        return "no step is committed yet"
    parts = [f"{span_of(found.learning.steps)} (counted from 0)"]
    if found.num_ranks:
        parts.append(found.ranks_in_words)
    if found.mode:
        named = {"plain": "no speculation", "ngram": "n-gram speculation", "full": "full speculation"}
        parts.append(named.get(found.mode, found.mode))
    if found.timeline is not None:
        parts.append(time.strftime("%Y-%m-%d", time.gmtime(found.timeline.start_seconds)))
    return ", ".join(parts)


def _config(found: Findings) -> str:
    try:
        return read_text(found.log.folder.config)
    except OSError as error:
        return f"not here: {told(error)}"


def _commands(found: Findings) -> list[str]:
    run = shlex.quote(str(found.log.folder.path))
    told = [
        f".venv/bin/python tools/{name}.py {run}"
        for name in ("timeline", "throughput", "acceptance", "lengths", "learning")
    ]
    told.append(f".venv/bin/python tools/export_run.py {run}    # tables, and a trace for ui.perfetto.dev")
    told.append(f".venv/bin/tlt watch {run} --sample 3    # responses, with the tokens that came as accepted drafts")
    if found.mode != "plain":
        told.append(
            f".venv/bin/tlt simulate --from {run} --nodes 1,2,4,8    # what more ranks or other settings would bring"
        )
    return told


def _footer(found: Findings, made_at: float) -> str:
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(made_at))
    return f"Made {when} by tlt_hpc {__version__} from the run's own files. The page loads nothing."
