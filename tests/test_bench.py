"""``tlt bench rollout``: every way decodes the same text, the figures are sums over ranks, mistakes are one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch_ranks import tlt

from tlt_hpc.cli.main import main
from tlt_hpc.config import load_config
from tlt_hpc.data.prompts import open_prompts
from tlt_hpc.models.folder import embedded
from tlt_hpc.models.tokenizer import load_tokenizer, read_chat_format
from tlt_hpc.studies.bench import requests_of

ROOT = Path(__file__).resolve().parent.parent
TINY = str(ROOT / "jobs" / "tiny.toml")
SMALL = [
    "rollout.max_new_tokens=24", 'speculation.strategies=["ngram-4", "drafter-3"]',
    "--batches", "2", "--sequences", "3", "--repeats", "1",
]  # fmt: skip


@pytest.mark.mpi
def test_every_way_decodes_the_same_text(tmp_path: Path) -> None:
    ranks = 2
    path = tmp_path / "out.json"
    done = tlt(ranks, "bench", "rollout", TINY, *SMALL, "--json", str(path), f"run.folder={tmp_path}", "run.ranks=2")
    tree = json.loads(path.read_text())
    assert tree["num_ranks"] == ranks
    ways = tree["batch"].pop("2")
    assert list(ways) == ["plain", "ngram-4", "drafter-3", "adaptive"] and not tree["batch"]
    assert {way["tokens"] for way in ways.values()} == {ways["plain"]["tokens"]}
    assert [way["mismatched_tokens"] for way in ways.values()] == [0] * 4
    assert ways["plain"]["accept_length"] == ways["plain"]["speedup"] == 1 and ways["drafter-3"]["accept_length"] > 1.5
    assert ranks * 3 < ways["plain"]["tokens"] <= ranks * 3 * 24
    assert done.stdout.count("adaptive") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"], "a run's folder is not made"


def test_replicas_share_the_prompts() -> None:
    config = load_config(TINY)
    folder = embedded("tiny")
    prompts = open_prompts(config, load_tokenizer(folder), read_chat_format(folder))

    def requests(count: int, number: int):
        replica = SimpleNamespace(count=count, takes=lambda unit: unit % count == number)
        return requests_of(SimpleNamespace(config=config, replica=replica), prompts, 2_000_000, 12 // count)

    def named(found):
        return [(request.key, request.prompt_tokens.tobytes()) for request in found]

    alone, shared = named(requests(1, 0)), sorted(named(requests(2, 0)) + named(requests(2, 1)))
    assert len(alone) == 12 and sorted(alone) == shared


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--batches", "1,0"], "--batches"),
        (["--json", "nowhere/out.json"], "its folder does not exist"),
    ],
)
def test_options_that_make_no_sense_end_with_the_usage(arguments, named, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "rollout", TINY, *arguments])
    assert end.value.code == 2 and named in capsys.readouterr().err


def test_a_shape_is_benched_without_weights(tmp_path) -> None:
    command = [
        sys.executable,
        str(ROOT / "tools" / "bench_shape.py"),
        "--config",
        str(embedded("tiny") / "config.json"),
    ]
    sizes = ["--batches", "1,3", "--new-tokens", "12", "--prompt-tokens", "5", "--repeats", "1", "--dtype", "float32"]
    out = tmp_path / "out.json"
    done = subprocess.run([*command, *sizes, "--json", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert set(report["batch"]) == {"1", "3"}
    for batch, found in report["batch"].items():
        share = found["rounds_per_second"] * report["bytes_per_round"] / report["bandwidth"]
        assert found["bandwidth_fraction"] == pytest.approx(share)
        assert found["tokens_per_second"] == pytest.approx(found["rounds_per_second"] * int(batch))
