"""An ablation as a table: the arms side by side, in a terminal or in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tlt_hpc.studies.ablate.figures import ArmFigures, Figures, verdict

_NONE = "-"


def cells_of(figures: Figures) -> list[list[str]]:
    """The table's rows: the arms' names, then a row a figure."""
    rows = [["", *(arm.arm for arm in figures.arms)]]
    for name, cell in _rows(figures).items():
        rows.append([name, *(cell(arm) for arm in figures.arms)])
    return rows


def to_markdown(figures: Figures) -> str:
    """The table with the verdict below it."""
    head, *rows = cells_of(figures)
    lines = [head, ["---", *["--:"] * len(figures.arms)], *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n{verdict(figures)}\n"


def _rows(figures: Figures) -> Mapping[str, Callable[[ArmFigures], str]]:
    window = figures.window

    def total(name: str, digits: int = 2) -> Callable[[ArmFigures], str]:
        return lambda arm: f"{arm.total(name):,.{digits}f}"

    unlike: dict[str, Callable[[ArmFigures], str]] = {
        "tokens unlike the first arm's": lambda arm: f"{arm.num_mismatched:,}"
    }
    return {
        "held-out accept length": lambda arm: _number(arm.held_out.accept_length if arm.held_out else None, 3),
        f"own accept length, first {window}": lambda arm: _number(figures.first(arm), 3),
        f"own accept length, last {window}": lambda arm: _number(figures.last(arm), 3),
        "accept length, all rounds": lambda arm: _number(arm.accept_length, 3),
        "rollout seconds": total("rollout_seconds"),
        "step seconds": total("step_seconds"),
        "policy update seconds": total("update_seconds"),
        "idle rank-seconds": total("idle_rank_seconds"),
        "harvested rank-seconds": total("harvested_rank_seconds"),
        "serial training seconds": total("serial_seconds"),
        "drafter updates": total("num_updates", 0),
        "tokens trained on": lambda arm: f"{arm.num_trained_tokens:,}",
        "rollout speed, plain = 1": lambda arm: _number(figures.speedup(arm), 2),
        "rollout + serial speed": lambda arm: _number(figures.speedup(arm, with_serial=True), 2),
        **({} if figures.tokens_equal else unlike),
    }


def _number(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"
