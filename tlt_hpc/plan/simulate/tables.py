"""What was simulated, as tables of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table

from tlt_hpc.plan.simulate.alternatives import MIN_GAIN, Tried, WhatIf, pays_up_to
from tlt_hpc.plan.simulate.validate import Check
from tlt_hpc.plan.simulate.workload import NodesRow, SimulatedJob, Watts


def show(
    name: str,
    job: SimulatedJob,
    rows: Sequence[NodesRow],
    tried: Sequence[Tried],
    what_ifs: Sequence[WhatIf],
    watts: Watts | None,
    num_ranks: int,
    console: Console,
) -> None:
    """Print the table by nodes, the settings that were tried, and the changes that might be made."""
    say(console, f"{name}: {job.prompts} x {job.group} responses a step, {job.num_steps} steps; simulated, not run")
    for line in job.origin:
        say(console, f"  {line}")
    known = ", ".join(f"{key} {value:g}" for key, value in asdict(watts).items()) if watts else ""
    say(console, f"  watts of a GPU (assumed): {known}" if known else "  energy: no watts are known; give --watts")
    console.print(_by_nodes(rows))
    say(
        console,
        "rank-h, kWh: of the run, a rank a GPU; idle: of all rank-seconds; harvested: of the idle ones; gain: "
        "plain step over this one. What training the drafter brings to accept lengths is not modelled.",
    )
    if job.speculates:
        most = pays_up_to(job)
        where = f"up to {most} live sequences a replica" if most else "nowhere"
        say(console, f"Speculation pays {where} (of at most {job.setting.max_live}).")
    console.print(_tried(tried, num_ranks))
    say(console, "tlt plan says whether more live sequences fit. Prompts and group size change what is learned.")
    changes = ((one.name, seconds(one.rollout_seconds), seconds(one.step_seconds), f"{one.gain:.2f}", one.note)
            for one in what_ifs)  # fmt: skip
    columns = ("change", ">rollout s", ">step s", ">gain", "assumes")
    console.print(table(f"What if, at {num_ranks} ranks", columns, changes, folds=True))
    paying = [f"{one.name} ({1 - 1 / one.gain:.0%})" for one in what_ifs if one.pays]
    say(console, f"Would shorten a step by {MIN_GAIN:.0%} or more: {', '.join(paying) or 'none'}.")


def show_checks(checks: Sequence[Check], console: Console) -> None:
    """Print how predictions of recorded runs compare with what the runs took."""
    rows = (
        (one.run, one.mode, str(one.num_ranks), one.split, f"{one.rollout_measured:.1f}",
         f"{one.rollout_predicted:.1f}", f"{one.rollout_error:+.0%}", f"{one.step_error:+.0%}",
         f"{one.machine_drift:.2f}", f"{one.model_error:+.0%}")
        for one in checks
    )  # fmt: skip
    columns = ("run", "mode", ">ranks", "asked", ">real", ">sim.", ">error", ">step", ">drift", ">pace")
    console.print(
        table("Recorded runs: half of the steps predicted from their lengths and the other half", columns, rows)
    )
    say(
        console,
        "asked: the second half of the steps, or every other; real, sim., error: seconds of their rollouts; step: "
        "error of whole steps; drift: seconds of like rounds in the steps asked for over those in the others, which "
        "is the machine's; pace: the rollouts' error if the machine had kept one pace.",
    )


def _by_nodes(rows: Sequence[NodesRow]) -> Table:
    columns = (">nodes", ">ranks", ">rollout s", ">step s", ">rank-h", ">kWh", ">idle", ">harvested", ">gain")
    cells = (
        (str(row.nodes), str(row.ranks), seconds(row.rollout_seconds), seconds(row.step_seconds), _few(row.gpu_hours),
         _few(row.kilowatt_hours), f"{row.idle_share:.0%}", f"{row.harvested_share:.0%}", f"{row.gain:.2f}")
        for row in rows
    )  # fmt: skip
    return table("By number of nodes", columns, cells)


def _tried(found: Sequence[Tried], num_ranks: int) -> Table:
    columns = ("setting", ">value", ">", ">step s", ">responses/s", ">harvested")
    shown = table(f"Settings, one at a time, at {num_ranks} ranks (+ best, = the job's)", columns, ())
    last = ""
    for one in found:
        mark = ("+" if one.is_best else "") + ("=" if one.is_own else "")
        if last and one.setting != last:
            shown.add_section()
        shown.add_row(
            one.setting if one.setting != last else "",
            str(one.value),
            mark,
            seconds(one.step_seconds),
            f"{one.responses_per_second:.2f}",
            f"{one.harvested_share:.0%}",
        )
        last = one.setting
    return shown


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], folds: bool = False) -> Table:
    """A table; columns whose title begins with ``>`` are aligned right. ``folds``: the last column breaks its lines."""
    shown = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        shown.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    if folds:
        shown.columns[-1].overflow = "fold"
    for row in rows:
        shown.add_row(*row)
    return shown


def seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _few(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False)
