"""``tlt data inspect``: what a data set holds, as a table. One process, without MPI and without torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from tlt_hpc.common.console import make_console, print_row_errors
from tlt_hpc.common.formatting import format_count
from tlt_hpc.common.records import Prompt
from tlt_hpc.config import EMBEDDED_TASK, Config, ConfigError, load_config
from tlt_hpc.data.evaluation_sets import open_reader
from tlt_hpc.data.files import config_for_data
from tlt_hpc.data.inspect import Inspection, SourceCounts, inspect_data_set
from tlt_hpc.data.reader import PromptReader
from tlt_hpc.models.shape import read_shape
from tlt_hpc.models.tokenizer import find_model, load_tokenizer
from tlt_hpc.plan.inputs import check_tokens, read_chat_format_with_stops
from tlt_hpc.rewards.judge import find_prompt_problem

_COLUMNS = ("data_source", "rows", "tokens min", "median", "p95", "max", "over limit", "repeated", "no answer")


def run(options: argparse.Namespace) -> int:
    """Read every row of a file, or of what a job trains on and is evaluated on, and print what there is.

    Returns the exit status: 1 if rows are broken, or no response can be right.

    Raises:
        ValueError: no such file, no such column, no such model.
    """
    file, model, overrides = options.file, options.model, options.overrides
    is_job = file.endswith(".toml")
    config = load_config(file, overrides) if is_job else config_for_data(file, overrides)
    folder = find_model(model or config.model.path) if model or is_job else None
    console, all_of_use = make_console(140), True
    for reader in _open_data_readers(config, folder, is_judged=is_job or bool(config.reward.model_fields_set)):
        found = inspect_data_set(reader, config.data.max_prompt_tokens)
        _print(console, reader, found, folder is not None)
        all_of_use &= found.is_of_use
    return 0 if all_of_use else 1


def _open_data_readers(config: Config, folder: Path | None, is_judged: bool) -> Iterator[PromptReader]:
    """Yield the readers of the data sets for training and evaluation; ``is_judged``: answers are checked, too."""
    sources = [source for source in config.evaluation.sources if source != EMBEDDED_TASK]
    if config.data.source == EMBEDDED_TASK and not sources:
        raise ConfigError(f"{EMBEDDED_TASK!r} makes its problems again at every step; give a file or folder")
    tokenizer = chat = shape = None
    if folder is not None:
        tokenizer, shape = load_tokenizer(folder), read_shape(folder)
        chat = read_chat_format_with_stops(config.rollout, folder, shape, tokenizer)

    def check(prompt: Prompt) -> str:
        if shape is not None:
            check_tokens(shape, prompt)
        return find_prompt_problem(config.reward, prompt) if is_judged else ""

    if config.data.source != EMBEDDED_TASK:
        yield PromptReader(config.data, tokenizer, chat, check)
    for source in sources:
        yield open_reader(config, source, tokenizer, chat, check)


def _print(console: Console, reader: PromptReader, found: Inspection, has_tokens: bool) -> None:
    data = reader.data
    table = Table(title=f"{data.source_name}: {format_count(found.num_rows, 'row')}, {len(found.broken):,} broken")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "data_source" else "right")
    for counts in found.sources:
        table.add_row(*_cells(counts, has_tokens))
    console.print(table)
    if has_tokens:
        num_overlong = sum(counts.num_overlong for counts in found.sources)
        console.print(f"prompts over data.max_prompt_tokens = {data.max_prompt_tokens}: {num_overlong:,}")
        if num_unknown := sum(counts.num_unknown for counts in found.sources):
            words = f"prompts with characters that the model's tokenizer does not know: {num_unknown:,}"
            console.print(f"{words}; the model does not see them, so take another model or data set", style="yellow")
        if reader.warning:
            console.print(reader.warning, style="yellow", soft_wrap=True)
    else:
        console.print("no tokens counted: give --model FOLDER")
    for counts in found.sources:
        if counts.never_right:
            words = f"{counts.source}: no response can be right for {len(counts.never_right):,} of "
            words += f"{format_count(len(counts.lengths), 'row')}, the first {counts.never_right[0]}"
            console.print(words, style="red", soft_wrap=True)
    print_row_errors(console, found.broken)


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
