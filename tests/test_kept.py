"""Finished responses of a step that is cut short are not generated again, and the step ends as it would have."""

from __future__ import annotations

import errno
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_world import OneRank
from launch_ranks import ROOT, run_on_ranks
from logged import make_rollout
from small_run import small_record
from test_resume import Silent
from test_rollout_log import same

from tlt_hpc import train as run
from tlt_hpc.cluster.stopping import Stop
from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.common.records import Request, Rollout, SampleKey
from tlt_hpc.config import UserError, load_config
from tlt_hpc.mpi.owner import claim_owner
from tlt_hpc.mpi.world import World
from tlt_hpc.rl.distributed import leave_process_group
from tlt_hpc.run import kept_responses as kept_module
from tlt_hpc.run import saving, session
from tlt_hpc.run.kept_responses import (
    Keeper,
    describe_progress,
    digest_folder_weights,
    open_keeper_all_ranks,
    remove_kept_responses,
    weights_origin_of_line,
)
from tlt_hpc.run.rollout_loop import requests_without_kept
from tlt_hpc.storage.folder import RunFolder, WriteError, make_folder, part_path
from tlt_hpc.storage.rollout_log import read_kept_responses, read_step, write_kept_responses, write_step
from tlt_hpc.storage.step_lines import STEP, add_line, read_lines

OVERRIDES = [
    "rollout.prompts_per_step=8", "rollout.group_size=4", "rollout.max_new_tokens=200", "rollout.max_live=2",
]  # fmt: skip


def response(draw: int, sample: int = 0, length: int = 3) -> Rollout:
    given = {"weight_version": 5, "num_target_passes": 2, "finished_seconds": 12.5}
    given["log_probs"] = np.linspace(-1, 0, length, dtype=np.float32)
    given["pass_lengths"] = np.array([1, length % 30], np.uint8)
    return make_rollout(SampleKey(7, 0, 5, draw, sample), range(2), range(draw, draw + length), **given)


# -- files ----------------------------------------------------------------------------------------------------------


def test_what_was_kept_comes_back(tmp_path):
    rollouts = [response(draw, length=25 * draw) for draw in range(3)]
    write_kept_responses(tmp_path / "k.h5", "here", rollouts, True)
    origin, found = read_kept_responses(tmp_path / "k.h5")
    assert origin == "here" and len(found) == 3 and all(map(same, rollouts, found))


def test_weights_are_named_by_their_step_or_their_files(tmp_path):
    line = {"training/global_step": 3, "critic/score/mean": 0.5, "actor/num_tokens": 12, "timing_s/gen": 1.25}
    assert weights_origin_of_line(line) == weights_origin_of_line({**line, "val-core/x": 1}), (
        "an evaluation is added to the line later"
    )
    assert weights_origin_of_line(line) != weights_origin_of_line({**line, "timing_s/gen": 1.26}), (
        "the same step, generated again"
    )
    assert weights_origin_of_line(line) != weights_origin_of_line({**line, "critic/score/mean": 0.25})
    (tmp_path / "model.safetensors").write_bytes(b"one")
    first = digest_folder_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert digest_folder_weights(tmp_path) != first


# -- the keeper -----------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=50.0)
    monkeypatch.setattr(kept_module.time, "monotonic", lambda: clock.now)
    return clock


def test_new_responses_are_written_every_so_often_each_once(tmp_path, clock):
    folder = RunFolder(tmp_path)
    keeper = Keeper(folder, 5, 2, "here")
    finished = [response(9), response(4)]
    keeper.count_as_written(1)  # the first was kept by an earlier start
    assert not keeper.is_due(finished)
    clock.now += kept_module.EVERY_SECONDS
    assert keeper.is_due(finished) and not keeper.is_due(finished[:1]), "nothing new is nothing to write"
    keeper.write_new_responses(finished)
    assert not keeper.is_due([*finished, response(5)])
    clock.now += kept_module.EVERY_SECONDS
    assert keeper.is_due([*finished, response(5)])
    keeper.write_new_responses([*finished, response(5), response(3)])
    keeper.write_new_responses([*finished, response(5), response(3)])
    paths = folder.kept_responses_paths(5)
    assert [path.name for path in paths] == ["rank-0002-000000.h5", "rank-0002-000001.h5"]
    assert [[r.key.draw for r in read_kept_responses(path)[1]] for path in paths] == [[4], [3, 5]]
    remove_kept_responses(folder)
    assert folder.kept_responses_paths(5) == [] and not folder.kept.exists()
    remove_kept_responses(folder)


def test_responses_of_a_step_are_kept_until_its_line_is_there(tmp_path):
    """A start that ends at the line generates only what is missing."""
    folder = RunFolder(tmp_path)
    write_step(folder.rollout_log(5, 0), small_record(5, 0))
    Keeper(folder, 5, 0, "here").write_new_responses([response(1)])
    make_folder(folder.status)
    claim_owner(folder.status, BEAT.start_name)
    blocked = part_path(folder.metrics)
    blocked.mkdir()
    with pytest.raises(WriteError):
        run.commit_step(folder, 1, 5, {STEP: 6})
    assert len(folder.kept_responses_paths(5)) == 1
    blocked.rmdir()
    run.commit_step(folder, 1, 5, {STEP: 6})
    assert not folder.kept.exists() and list(read_lines(folder.metrics)) == [5]
    add_line(folder.metrics, {STEP: 7})
    run.write_evaluation_figures(folder, {STEP: 6, "val": 0.5})  # as where run.num_steps was lowered
    assert list(read_lines(folder.metrics).values()) == [{STEP: 6, "val": 0.5}, {STEP: 7}]


def test_a_full_disk_costs_the_keeping_and_not_the_run(tmp_path, clock, monkeypatch, caplog):
    keeper = Keeper(RunFolder(tmp_path), 5, 0, "here")

    def full(path: Path, *_: object) -> None:
        raise WriteError(path, OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr(kept_module, "write_kept_responses", full)
    keeper.write_new_responses([response(1)])
    assert "step 6: finished responses are not kept until it ends: cannot write" in caplog.text
    assert "No space left on device" in caplog.text
    clock.now += 600
    assert not keeper.is_due([response(1), response(2)])


def test_a_kept_response_to_another_prompt_or_with_an_excluded_token_ends_the_run():
    kept = {response(1).key: response(1)}
    same_prompt = Request(response(1).key, np.arange(2, dtype=np.int32))
    other = Request(response(2).key, np.arange(2, dtype=np.int32))
    assert [request.key for request in requests_without_kept([same_prompt, other], kept, "d.jsonl", ())] == [other.key]
    foreign = Request(response(1).key, np.arange(3, dtype=np.int32))
    with pytest.raises(UserError, match=r"a response of step 6 .* data.source = 'd.jsonl' gives; .*remove .* kept/"):
        requests_without_kept([foreign], kept, "d.jsonl", ())
    # a token that is never sampled now, as of a version that sampled all ids, unless the step asks for it no more
    old = replace(response(1), response_tokens=np.array([3, 22, 1], np.int32))
    request = Request(old.key, old.prompt_tokens)
    told = (
        "an earlier start has kept a response of step 6 with the token id 22, which is never sampled now; remove the "
        "run's folder kept/ to generate it again"
    )
    with pytest.raises(UserError, match=f"^{re.escape(told)}$"):
        requests_without_kept([request], {old.key: old}, "d.jsonl", (0, 20, 21, 22))
    assert requests_without_kept([request], {old.key: old}, "d.jsonl", (0, 20, 21)) == []
    assert requests_without_kept([], {old.key: old}, "d.jsonl", (0, 20, 21, 22)) == []


# -- how far a run has come ------------------------------------------------------------------------------------------


def test_progress_is_the_steps_and_what_is_kept_of_the_next(tmp_path):
    config = load_config(ROOT / "jobs" / "tiny.toml", [f"run.folder={tmp_path}"])
    folder = RunFolder(tmp_path / "tiny")
    assert describe_progress(config) == "step 0 and 0 bytes of the next one's responses"
    for step in range(2):
        add_line(folder.metrics, {"training/global_step": step + 1})
    for step in (1, 2):
        write_kept_responses(folder.kept_responses_path(step, 0, 0), "here", [response(1)], False)
    size = folder.kept_responses_path(2, 0, 0).stat().st_size
    assert describe_progress(config) == f"step 2 and {size} bytes of the next one's responses"


def test_the_next_start_takes_responses_of_its_own_weights_from_whole_files(tmp_path, caplog):
    config, folder = load_config(ROOT / "jobs" / "tiny.toml", [f"run.folder={tmp_path}"]), RunFolder(tmp_path)
    add_line(folder.metrics, {"training/global_step": 2, "timing_s/gen": 2.5})
    own = weights_origin_of_line(read_lines(folder.metrics)[1])
    for number, (origin, draws) in enumerate([(own, (3, 1)), ("another", (2,)), (own, (1, 4)), (own, (5,))]):
        write_kept_responses(folder.kept_responses_path(2, 0, number), origin, list(map(response, draws)), False)
    folder.kept_responses_path(2, 0, 3).write_bytes(b"cut off")
    keeper, kept = open_keeper_all_ranks(config, folder, OneRank(), 2)
    assert sorted(key.draw for key in kept) == [1, 3, 4]
    assert "its responses are generated again" in caplog.text
    keeper.write_new_responses([response(9)])
    assert read_kept_responses(folder.kept_responses_path(2, 0, 4))[0] == own, "behind those that are there"


# -- a run ----------------------------------------------------------------------------------------------------------


NEVER = 10**6


def stop_after(num_finished: int, world: Any) -> None:
    """A rank asks to be killed once it has finished so many responses, and finishes no more while the others see it."""
    true_decode = session.decode_one_round

    def decode(engine: Any, pulse: Any) -> None:
        if len(engine.finished_rollouts) < num_finished:
            true_decode(engine, pulse)
        else:
            world.flag.request(Stop.KILL, "test")
            pulse.back_off()

    session.decode_one_round = decode


def take_one_step(folder: str, stop_at: int) -> dict[str, Any]:
    """Step 0, or what a stop lets be done of it, which comes once a rank has finished ``stop_at`` responses."""
    world = World.connect()
    config = load_config(ROOT / "jobs" / "tiny.toml", [*OVERRIDES, f"run.folder={folder}"])
    job = run.build_job(config, world)
    saving.resume(job, lambda step: None)
    stop_after(stop_at, world)
    was_whole = run.take_step(job, 0, Silent())
    world.barrier()
    tokens = {}
    for path in job.folder.rollout_logs(0):
        tokens |= {str(r.key): r.response_tokens.tolist() for r in read_step(path).rollouts}
    found = {
        "was whole": was_whole,
        "kept": [
            r.key.draw * 4 + r.key.sample
            for path in job.folder.kept_responses_paths(0)
            for r in read_kept_responses(path)[1]
        ],
        "policy": job.policy.gather_weights_sha256(),
        "tokens": tokens,
        "generated": job.engine.num_tokens if not was_whole else None,
    }
    job.close()
    leave_process_group()
    return found


@pytest.mark.mpi
@pytest.mark.ci
def test_a_step_that_was_cut_short_twice_generates_no_response_twice(tmp_path):
    straight = run_on_ranks(2, take_one_step, str(tmp_path / "straight"), NEVER)[0]
    assert straight["was whole"] and straight["kept"] == [] and len(straight["tokens"]) == 32
    folder = str(tmp_path / "cut")
    first = run_on_ranks(2, take_one_step, folder, 5)[0]
    # of one rank or both, each with two responses under way at a time
    assert not first["was whole"] and 5 <= len(first["kept"]) <= 12 and first["tokens"] == {}
    second = run_on_ranks(1, take_one_step, folder, 26)[0]  # on another number of ranks
    assert not second["was whole"] and len(second["kept"]) in (26, 27)
    assert set(first["kept"]) <= set(second["kept"]) and len(set(second["kept"])) == len(second["kept"])
    last = run_on_ranks(2, take_one_step, folder, NEVER)[0]
    assert last["was whole"] and last["kept"] == [], "the step is committed"
    assert last["tokens"] == straight["tokens"] and last["policy"] == straight["policy"]
    line = json.loads((tmp_path / "cut" / "tiny" / "metrics.jsonl").read_text())
    assert line["rollout/kept"] == len(second["kept"]) < line["rollout/kept_tokens"] < line["perf/total_num_tokens"]
