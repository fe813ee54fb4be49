"""What was simulated, for people: tables of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tlt_hpc.plan.simulate import published
from tlt_hpc.plan.simulate.energy import Watts
from tlt_hpc.plan.simulate.paper import SOURCES, WITHIN, Assumptions, Prediction
from tlt_hpc.plan.simulate.search import Tried, pays_up_to
from tlt_hpc.plan.simulate.validate import Check
from tlt_hpc.plan.simulate.what_if import LEAST_GAIN, WhatIf
from tlt_hpc.plan.simulate.workload import Row, Workload


def show(
    name: str,
    work: Workload,
    table: Sequence[Row],
    found: Sequence[Tried],
    others: Sequence[WhatIf],
    watts: Watts | None,
    num_ranks: int,
    console: Console,
) -> None:
    """Print the table by nodes, the settings that were tried, and what might be."""
    _say(console, f"{name}: {work.prompts} x {work.group} responses a step, {work.num_steps} steps; simulated, not run")
    for line in work.origin:
        _say(console, f"  {line}")
    known = ", ".join(f"{key} {value:g}" for key, value in asdict(watts).items()) if watts else ""
    _say(console, f"  watts of a GPU (assumed): {known}" if known else "  energy: no watts are known; give --watts")
    console.print(_by_nodes(table))
    _say(
        console,
        "rank-h, kWh: of the run, a rank a GPU; idle: of all rank-seconds; harvested: of the idle ones; gain: "
        "plain step over this one. What training the drafter brings to accept lengths is not modelled.",
    )
    if work.speculates:
        most = pays_up_to(work)
        where = f"up to {most} live sequences a replica" if most else "nowhere"
        _say(console, f"Speculation pays {where} (of at most {work.setting.max_live}).")
    console.print(_tried(found, num_ranks))
    _say(console, "Whether more live sequences fit, tlt plan says. Prompts and group size change what is learned.")
    console.print(_what_if(others, num_ranks))
    paying = [f"{one.name} ({1 - 1 / one.gain:.0%})" for one in others if one.pays]
    _say(console, f"Would shorten a step by {LEAST_GAIN:.0%} or more: {', '.join(paying) or 'none'}.")


def show_checks(checks: Sequence[Check], console: Console) -> None:
    """Print how predictions of recorded runs came out."""
    table = _table("Recorded runs: half of the steps predicted from their lengths and the other half")
    for title in ("run", "mode", "ranks", "asked", "real", "sim.", "error", "step", "drift", "pace"):
        table.add_column(title, justify="left" if title in ("run", "mode", "asked") else "right")
    for one in checks:
        table.add_row(
            one.run,
            one.mode,
            str(one.num_ranks),
            one.split,
            f"{one.rollout_measured:.1f}",
            f"{one.rollout_predicted:.1f}",
            f"{one.rollout_error:+.0%}",
            f"{one.step_error:+.0%}",
            f"{one.machine_drift:.2f}",
            f"{one.model_error:+.0%}",
        )
    console.print(table)
    _say(
        console,
        "asked: the second half of the steps, or every other; real, sim., error: seconds of their rollouts; step: "
        "error of whole steps; drift: seconds of like rounds in the steps asked for over those in the others, which "
        "is the machine's; pace: the rollouts' error, had it kept one pace.",
    )


def show_paper(
    prediction: Prediction, assumed: Assumptions, turned: Sequence[dict[str, Any]], console: Console
) -> None:
    """Print the paper's gains against what one of them predicts."""
    table = _table("Gain over VeRL (arXiv 2511.16665), predicted from the 7B's on one node alone")
    for title in ("model", "nodes", "published", "predicted", "error", ""):
        table.add_column(title, justify="right")
    for model, nodes, gain, found, fitted in prediction.rows():
        table.add_row(
            model, str(nodes), f"{gain:.2f}", f"{found:.2f}", f"{found / gain - 1:+.1%}", "fitted" if fitted else ""
        )
    console.print(table)
    _say(
        console,
        f"Fitted: the median length, {prediction.median:,.0f} tokens. Farthest of the rest: {prediction.worst:.1%}.",
    )
    _say(console, f"Derating of the 32B's speed-ups for the 7B, from sizes alone: {prediction.derating:.2f}.")
    listing = _table("Assumptions")
    for title in ("name", "value", "what, and whose"):
        listing.add_column(title, overflow="fold")
    for name, value in vars(assumed).items():
        listing.add_row(name, _value(value), SOURCES[name])
    listing.add_row("speed-ups", "", f"32B by batch {published.SPEED_UP_BATCHES}, the paper's; beyond on their slope")
    listing.add_row("nodes of 1.83", "4", "that figure came without a number of nodes; 2.12 is the paper's at 8")
    console.print(listing)
    console.print(_sensitivity(turned))
    _say(console, "The median is fitted anew in each row; * over 10 % off somewhere.")
    failing = dict.fromkeys(f"{row['assumption']} {_value(row['value'])}" for row in turned if _misses(row))
    _say(console, f"Fails with: {', '.join(failing) or 'none of these'}.")


def _misses(row: dict[str, Any]) -> bool:
    return row["gains"] is None or row["worst"] > WITHIN


def _sensitivity(turned: Sequence[dict[str, Any]]) -> Table:
    table = _table("Each assumption a quarter down and up (or the other way round)")
    table.add_column("assumption")
    table.add_column("value", justify="right")
    for nodes in (2, 4, 8):
        table.add_column(f"7B x{nodes}", justify="right")
    for nodes in (4, 8):
        table.add_column(f"32B x{nodes}", justify="right")
    table.add_column("worst", justify="right")
    for row in turned:
        if row["gains"] is None:
            table.add_row(row["assumption"], _value(row["value"]), *["-"] * 5, "no fit *")
            continue
        small, large = row["gains"]["7B"], row["gains"]["32B"]
        cells = [f"{small[nodes]:.2f}" for nodes in (2, 4, 8)] + [f"{large[nodes]:.2f}" for nodes in (4, 8)]
        table.add_row(
            row["assumption"], _value(row["value"]), *cells, f"{row['worst']:.0%}{' *' if _misses(row) else ''}"
        )
    return table


def _by_nodes(rows: Sequence[Row]) -> Table:
    table = _table("By number of nodes")
    for title in ("nodes", "ranks", "rollout s", "step s", "rank-h", "kWh", "idle", "harvested", "gain"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            str(row.nodes),
            str(row.ranks),
            _seconds(row.rollout_seconds),
            _seconds(row.step_seconds),
            _few(row.gpu_hours),
            _few(row.kilowatt_hours),
            f"{row.idle_share:.0%}",
            f"{row.harvested_share:.0%}",
            f"{row.gain:.2f}",
        )
    return table


def _tried(found: Sequence[Tried], num_ranks: int) -> Table:
    table = _table(f"Settings, one at a time, at {num_ranks} ranks (+ best, = the job's)")
    table.add_column("setting")
    for title in ("value", "", "step s", "responses/s", "harvested"):
        table.add_column(title, justify="right")
    last = ""
    for one in found:
        mark = ("+" if one.is_best else "") + ("=" if one.is_own else "")
        if last and one.setting != last:
            table.add_section()
        table.add_row(
            one.setting if one.setting != last else "",
            str(one.value),
            mark,
            _seconds(one.step_seconds),
            f"{one.responses_per_second:.2f}",
            f"{one.harvested_share:.0%}",
        )
        last = one.setting
    return table


def _what_if(others: Sequence[WhatIf], num_ranks: int) -> Table:
    table = _table(f"What if, at {num_ranks} ranks")
    table.add_column("change")
    for title in ("rollout s", "step s", "gain"):
        table.add_column(title, justify="right")
    table.add_column("taken for granted", overflow="fold")
    for one in others:
        table.add_row(one.name, _seconds(one.rollout_seconds), _seconds(one.step_seconds), f"{one.gain:.2f}", one.note)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _few(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False)
