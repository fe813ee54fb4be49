"""``tlt data inspect``: what a data set holds, as a table. One process, without MPI and without torch."""

from __future__ import annotations

import argparse
import sys
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table

from tlt_hpc.cli import prepare_data
from tlt_hpc.cli.prepare_data import config_of
from tlt_hpc.common.console import TextConsole
from tlt_hpc.common.words import count
from tlt_hpc.config import EMBEDDED_TASK, Config, ConfigError, load_config
from tlt_hpc.data.inspect import Inspection, SourceCounts, inspect
from tlt_hpc.data.reader import PromptReader
from tlt_hpc.models.tokenizer import find_model, load_tokenizer, read_chat_format
from tlt_hpc.rewards.judge import check_answer

_SHOWN_ROWS = 20
_COLUMNS = ("data_source", "rows", "tokens min", "median", "p95", "max", "over limit", "repeated", "no answer")


def run(options: argparse.Namespace) -> int:
    """Read every row of a file and print what there is, or prepare it; returns the exit status, 1 if rows are broken.

    Raises:
        ValueError: no such file, no such column, no such model.
    """
    if options.data == "prepare":
        prepare_data.run(options)
        return 0
    file, model, overrides = options.file, options.model, options.overrides
    is_job = file.endswith(".toml")
    config = load_config(file, overrides) if is_job else config_of(file, overrides)
    if config.data.source == EMBEDDED_TASK:
        raise ConfigError(f"{EMBEDDED_TASK!r} makes its problems again at every step; give a file, folder or task")
    folder = find_model(model or config.model.path) if model or is_job else None
    tokenizer = load_tokenizer(folder) if folder else None
    chat, check = read_chat_format(folder) if folder else None, partial(check_answer, config.reward)
    reader = PromptReader(config.data, config.run.seed, tokenizer, chat, check)
    found = inspect(reader, config.data.max_prompt_tokens)
    console = TextConsole(width=None if sys.stdout.isatty() else 140)
    _print(console, config, found, tokenizer is not None)
    return 1 if found.broken else 0


def _print(console: Console, config: Config, found: Inspection, has_tokens: bool) -> None:
    table = Table(title=f"{config.data.source_name}: {count(found.num_rows, 'row')}, {len(found.broken):,} broken")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "data_source" else "right")
    for counts in found.sources:
        table.add_row(*_cells(counts, has_tokens))
    console.print(table)
    if has_tokens:
        num_overlong = sum(counts.num_overlong for counts in found.sources)
        console.print(f"prompts over data.max_prompt_tokens = {config.data.max_prompt_tokens}: {num_overlong:,}")
        if num_unknown := sum(counts.num_unknown for counts in found.sources):
            words = f"prompts with characters that the model's tokenizer does not know: {num_unknown:,}"
            console.print(f"{words}; the model does not see them, so take another model or data set", style="yellow")
    else:
        console.print("no tokens counted: give --model FOLDER")
    for error in found.broken[:_SHOWN_ROWS]:
        console.print(str(error), style="red", soft_wrap=True)
    if len(found.broken) > _SHOWN_ROWS:
        console.print(f"... and {len(found.broken) - _SHOWN_ROWS:,} more broken rows")


def _cells(counts: SourceCounts, has_tokens: bool) -> tuple[str, ...]:
    lengths = np.quantile(counts.lengths, (0, 0.5, 0.95, 1), method="nearest") if has_tokens else ()
    tokens = (*(f"{length:.0f}" for length in lengths), f"{counts.num_overlong:,}") if has_tokens else ("-",) * 5
    return (
        counts.source,
        f"{len(counts.lengths):,}",
        *tokens,
        f"{counts.num_repeated:,}",
        f"{counts.num_unanswered:,}",
    )
