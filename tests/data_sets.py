"""What the tests of data share: small data sets on disk, and the prompts that a configuration makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from answers import TINY
from tiny import embedded_tokenizer

from tlt_hpc.common.records import ChatFormat, Prompt
from tlt_hpc.config import Config, load_config
from tlt_hpc.data.prompts import FilePrompts, open_prompts
from tlt_hpc.data.reader import PromptReader

# what the embedded tokenizer can read: messages one after another, and a mark where the answer begins
PLAIN = ChatFormat("{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}")
RAW = ChatFormat("{% for m in messages %}{{ m['content'] }}{% endfor %}")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any] | str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_arrow(path: Path, rows: list[dict[str, Any]]) -> Path:
    """As ``datasets`` writes it: a stream, not a file in Arrow's file format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return path


def gcd_row(number: int, **more: Any) -> dict[str, Any]:
    return {"prompt": f"gcd({number},{2 * number + 1})=", "answer": str(number), **more}


def gcd_rows(count: int) -> list[dict[str, Any]]:
    return [gcd_row(number) for number in range(1, count + 1)]


def verl_row(number: int, source: str = "mine", **extra: Any) -> dict[str, Any]:
    """verl's schema."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"gcd({number},4)="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"index": number, "split": "train", **extra},
    }


def config_of(source: Any, *overrides: str, count: int = 1, seed: int = 0) -> Config:
    settings = [f"data.source={json.dumps(source if isinstance(source, list) else str(source))}"]
    return load_config(TINY, [*settings, f"rollout.prompts_per_step={count}", f"run.seed={seed}", *overrides])


def open_data(source: Any, *overrides: str, chat: ChatFormat = RAW, count: int = 4, seed: int = 0) -> FilePrompts:
    prompts = open_prompts(config_of(source, *overrides, count=count, seed=seed), embedded_tokenizer(), chat)
    assert isinstance(prompts, FilePrompts)
    return prompts


def reader_of(source: Any, *overrides: str, chat: ChatFormat = RAW) -> PromptReader:
    return PromptReader(config_of(source, *overrides).data, embedded_tokenizer(), chat)


def all_prompts(source: Any, *overrides: str, chat: ChatFormat = RAW) -> list[Prompt]:
    """Every row, in the order of the files."""
    reader = reader_of(source, *overrides, chat=chat)
    return [reader.read(index) for index in range(len(reader))]


def texts(prompts: Iterable[Prompt]) -> list[str]:
    return [prompt.text for prompt in prompts]
