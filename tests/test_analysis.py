"""What the analyses find in logs that were made by hand, damaged ones among them, is what was put there."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from small_run import NAMES, START, line_of, small_record, small_run, spans_of

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.records import NO_SPANS, FinishReason, MicroStepRecord, PhaseSpan, RolloutTiming
from tlt_hpc.look.analysis.acceptance import analyse_acceptance
from tlt_hpc.look.analysis.comparison import analyse_comparison
from tlt_hpc.look.analysis.integrity import analyse_integrity, repair
from tlt_hpc.look.analysis.kinds import KINDS, Kind, Pieces, merged
from tlt_hpc.look.analysis.learning import analyse_learning, moving_mean
from tlt_hpc.look.analysis.lengths import analyse_lengths
from tlt_hpc.look.analysis.result import count, listed, plain, seconds, share
from tlt_hpc.look.analysis.run_log import RunLog
from tlt_hpc.look.analysis.throughput import analyse_throughput
from tlt_hpc.look.analysis.timeline import analyse_timeline
from tlt_hpc.look.analysis.trace import trace_events
from tlt_hpc.storage.environment_lines import Environment, Host, add_environment
from tlt_hpc.storage.folder import RunFolder, part_of
from tlt_hpc.storage.hdf5 import DamagedFile
from tlt_hpc.storage.log_columns import check_whole, read_columns
from tlt_hpc.storage.rollout_log import write_step

ALL = (analyse_timeline, analyse_lengths, analyse_acceptance, analyse_learning, analyse_throughput, analyse_integrity)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return small_run(tmp_path / "run")


def pieces(rows: list[tuple[Kind, float, float]]) -> Pieces:
    kinds = np.array([KINDS.index(kind) for kind, _, _ in rows], np.int8)
    return Pieces(kinds, np.array([r[1] for r in rows]), np.array([r[2] for r in rows]))


def rows_of(found: Pieces) -> list[tuple[Kind, float, float]]:
    times = zip(found.kinds, np.round(found.starts, 4).tolist(), np.round(found.ends, 4).tolist(), strict=True)
    return [(KINDS[kind], start, end) for kind, start, end in times]


# --- timeline ---


def test_the_timeline_of_two_ranks(folder: RunFolder) -> None:
    found = analyse_timeline(RunLog(folder.path))
    assert found.step == 2 and found.num_ranks == 2 and found.rollout_seconds == pytest.approx(6.5)
    assert rows_of(found.lanes[0].pieces) == [
        (Kind.SAVE, -1.0, -0.5),
        (Kind.PREFILL, 0.0, 0.5),
        (Kind.DECODE, 0.5, 1.0),
        (Kind.SPECULATE, 1.0, 2.0),
        (Kind.TRAIN, 2.0, 2.9),
        (Kind.IDLE, 2.9, 3.0),
        (Kind.TRAIN, 3.0, 3.9),
        (Kind.IDLE, 3.9, 6.5),
        (Kind.REWARD, 6.6, 7.0),
        (Kind.UPDATE, 7.0, 9.0),
        (Kind.REFRESH, 9.0, 9.5),
    ]
    assert [round(lane.idle_seconds, 6) for lane in found.lanes] == [4.5, 0.5]
    assert [lane.harvested_seconds for lane in found.lanes] == [1.8, 0.0]
    assert found.lanes[0].seconds[Kind.IDLE] == pytest.approx(2.7)
    assert np.allclose(found.tails, [(2.0, 6.5)])
    for words in (
        "The tail lasted 4.50 s: rank 0 was the first",
        "idle for 5.00 s together, 38 %",
        "1.80 s of that (36 %)",
    ):
        assert words in found.verdict


def test_live_sequences_of_all_ranks_over_time(folder: RunFolder) -> None:
    found = analyse_timeline(RunLog(folder.path), step=0)

    def at(second: float) -> int:
        return int(found.live[np.searchsorted(found.live_seconds, second)])

    assert [at(second) for second in (1.5, 3.0, 5.0, 6.2)] == [4, 2, 1, 0]


def test_a_refill_has_a_tail_of_its_own(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for rank, lasts in ((0, (1.0, 9.0)), (1, (3.0, 8.5))):
        first = RolloutTiming(START, START + lasts[0], START + 4)
        refill = RolloutTiming(START + 8, START + lasts[1], START + 10)
        changes = {"timing": first, "refills": (refill,), "micro_steps": (), "harvested_seconds": 0.0}
        write_step(folder.rollout_log(0, rank), small_record(0, rank, **changes, spans=NO_SPANS))
    found = analyse_timeline(RunLog(folder.path))
    assert np.allclose(found.tails, [(1.0, 4.0), (8.5, 10.0)]) and found.rollout_seconds == pytest.approx(6.0)
    assert found.lanes[0].idle_seconds == pytest.approx(3 + 1)
    assert "with 1 refill" in found.verdict and "none of it was harvested" in found.verdict


def test_serial_training_is_no_harvest(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    serial = PhaseSpan("drafter", START + 6.6, START + 8.0)
    update = MicroStepRecord(START + 6.7, START + 7.7, 10, 0.5)
    for rank in range(2):
        changes = {"micro_steps": (update,), "harvested_seconds": 0.0, "phases": (serial,)}
        write_step(folder.rollout_log(0, rank), small_record(0, rank, **changes))
    found = analyse_timeline(RunLog(folder.path))
    assert Kind.TRAIN not in found.lanes[0].seconds and found.lanes[0].seconds[Kind.SERIAL] == pytest.approx(1.4)
    assert "serial drafter training" in found.verdict
    for rank in range(2):  # and without phases
        changes = {"micro_steps": (update,), "harvested_seconds": 0.0, "phases": ()}
        write_step(folder.rollout_log(0, rank), small_record(0, rank, **changes))
    found = analyse_timeline(RunLog(folder.path))
    assert Kind.TRAIN not in found.lanes[0].seconds and found.lanes[0].seconds[Kind.SERIAL] == pytest.approx(1.0)


def test_no_tail_to_speak_of(tmp_path: Path) -> None:
    even = {"timing": RolloutTiming(START, START + 6.45, START + 6.5), "micro_steps": (), "harvested_seconds": 0.0}
    folder = small_run(tmp_path / "run", num_steps=1, **even)
    assert "There is no tail to speak of" in analyse_timeline(RunLog(folder.path)).verdict


def test_one_rank_waits_for_nobody(tmp_path: Path) -> None:
    run = RunLog(small_run(tmp_path / "run", num_ranks=1).path)
    assert "With one rank nobody waits" in analyse_timeline(run).verdict and analyse_timeline(run).tails == ()
    assert "With one rank nobody waits" in analyse_throughput(run).verdict


def test_a_long_step_stays_small_and_keeps_its_seconds() -> None:
    """30,000 rounds that change from one kind to the other: bins, each of what has most of it."""
    edges = np.arange(30_001) * 0.01
    kinds = np.tile([Kind.DECODE, Kind.SPECULATE, Kind.SPECULATE], 10_000)
    rounds = pieces([(Kind(k), a, b) for k, a, b in zip(kinds, edges, edges[1:], strict=False)])
    found = merged(rounds, tolerance=0.001)
    assert len(found) < 3000 and found.starts[0] == 0 and found.ends[-1] == pytest.approx(300)
    assert found.seconds()[Kind.SPECULATE] > 200
    one = merged(pieces([(Kind.DECODE, a, b) for a, b in itertools.pairwise(edges)]), tolerance=0.001)
    assert rows_of(one) == [(Kind.DECODE, 0.0, 300.0)]


def test_neighbours_are_joined_over_small_gaps_alone() -> None:
    rows = [(Kind.DECODE, 0.0, 1.0), (Kind.DECODE, 1.05, 2.0), (Kind.DECODE, 2.5, 3.0), (Kind.IDLE, 3.0, 4.0)]
    assert rows_of(merged(pieces(rows), 0.1)) == [
        (Kind.DECODE, 0.0, 2.0), (Kind.DECODE, 2.5, 3.0), (Kind.IDLE, 3.0, 4.0)
    ]  # fmt: skip


# --- lengths, acceptance, throughput, learning ---


def test_lengths(folder: RunFolder) -> None:
    found = analyse_lengths(RunLog(folder.path))
    assert found.steps.tolist() == [0, 1, 2] and found.cap == 8
    assert found.p50.tolist() == [4.5] * 3 and found.longest.tolist() == [8] * 3 and found.mean.tolist() == [5.25] * 3
    assert found.num_cut.tolist() == [1] * 3 and found.num_responses.tolist() == [4] * 3
    assert found.histogram.sum() == 12 and found.edges[0] <= 4 and found.edges[-1] > 8
    assert (
        "There is no long tail" in found.verdict and "3 responses (25 %) ended at the cap of 8 tokens" in found.verdict
    )


def test_a_long_tail_is_called_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    record = small_record(0, 0, 1)
    short = record.rollouts[0]
    many = [type(short)(**{**vars(short), "key": type(short.key)(0, 0, 0, 0, i)}) for i in range(9)]
    tokens = np.zeros(400, np.int32)
    long = {"response_tokens": tokens, "log_probs": tokens.astype(np.float32), "finish_reason": FinishReason.EOS}
    many.append(type(short)(**{**vars(short), "key": type(short.key)(0, 0, 0, 0, 9), **long}))
    ones = np.ones(10, np.float32)
    changes = {"rollouts": tuple(many), "rewards": ones, "advantages": ones}
    write_step(folder.rollout_log(0, 0), small_record(0, 0, 1, **changes))
    verdict = analyse_lengths(RunLog(folder.path)).verdict
    assert "The tail is long: a step's longest response has 100.0 times" in verdict and "None was cut" in verdict


def test_acceptance(folder: RunFolder) -> None:
    found = analyse_acceptance(RunLog(folder.path))
    assert found.strategies == NAMES and found.bucket_names() == ["1", "2"]
    assert found.accept_length == pytest.approx([21 / 11] * 3)
    off, drafter = found.by_bucket
    assert np.isnan(off[0]) and off[1] == 1.0 and drafter.tolist() == [5.0, 14 / 4]
    assert found.rounds.tolist() == [[0, 3], [3, 6]] and found.seconds[1].tolist() == [6.0, 12.0]
    assert found.step_tokens.tolist() == [[2, 19]] * 3
    assert found.by_strategy[1] == pytest.approx(57 / 15) and found.by_step[0, 1] == pytest.approx(19 / 5)
    assert found.own_accept_length == pytest.approx([2.0, 2.1, 2.2]) and found.drafter_version[-1] == 6
    assert "90 % of the tokens" in found.verdict and "5.00 with 1 live and 3.50 with 2" in found.verdict
    assert "from 2.00 to 2.20 after 6 updates" in found.verdict


def test_speculation_that_was_off_is_called_so(tmp_path: Path) -> None:
    plain_rounds = spans_of(((-1, 2, 20, 0.0, 0.5), (0, 2, 2, 0.5, 0.5)), START)
    one, none = np.array([1, 0]), np.array([2, 0])
    off = {"spans": plain_rounds, "strategy_rounds": one, "strategy_tokens": none, "micro_steps": ()}
    run = RunLog(small_run(tmp_path / "run", num_steps=1, **off).path)
    assert "Speculation was off" in analyse_acceptance(run).verdict
    assert "Speculation was off throughout" in analyse_timeline(run).verdict


def test_kinds_of_decoding_that_say_little_have_no_rate(folder: RunFolder) -> None:
    """A few plain rounds, mostly trials; and passes on a GPU, of which only the launch is timed."""
    host = Host("a", 2, "CPU", 2, 1, {"H200": 2})
    start = Environment("t", "0", "", "", "3", {}, "", "", (host,), "1", {}, "mpiexec", (), {})
    add_environment(folder.environment, start)
    found = analyse_throughput(RunLog(folder.path))
    assert set(found.rates) >= {"plain decoding", "speculative decoding"} and "prefill" not in found.rates
    assert "in prefill" not in found.verdict and "in plain decoding" in found.verdict
    few = replace(found, engine_tokens=found.engine_tokens * [1, 1, 100])
    assert "plain decoding" not in few.rates and "speculative decoding" in few.rates


def test_throughput(folder: RunFolder) -> None:
    found = analyse_throughput(RunLog(folder.path))
    step = dict(zip(found.kinds, found.seconds[1].tolist(), strict=True))
    expected = {
        Kind.PREFILL: 0.75, Kind.DECODE: 0.25, Kind.SPECULATE: 3.0, Kind.TRAIN: 0.9, Kind.IDLE: 1.6,
        Kind.REWARD: 0.4, Kind.UPDATE: 2.0, Kind.REFRESH: 0.5, Kind.SAVE: 0.5,
    }  # fmt: skip
    assert step == pytest.approx(expected)
    assert found.idle_rank_seconds == pytest.approx([5.0] * 3)
    assert found.harvested_rank_seconds == pytest.approx([1.8] * 3)
    assert found.rollout_seconds == pytest.approx([6.5] * 3)
    assert found.rates == pytest.approx({
        "prefill": 50 / 1.5, "plain decoding": 4.0, "speculative decoding": 19 / 6,
        "rollout, all ranks": 21 / 6.5, "step, all ranks": 21 / 9.6,
    })  # fmt: skip
    assert "Ranks waited for 38 % of their time" in found.verdict and "5.40 s of that (36 %)" in found.verdict


def test_learning_tells_a_trend_from_chance(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "run", num_steps=1)
    rng = np.random.default_rng(0)

    def verdict(slope: float) -> str:
        scores = 0.3 + slope * np.arange(40) + 0.02 * rng.standard_normal(40)
        lines = [line_of(step, **{"critic/score/mean": score}) for step, score in enumerate(scores)]
        lines[-1]["val-core/gsm8k/acc/greedy"] = 0.75
        folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return analyse_learning(RunLog(folder.path)).verdict

    assert "standard errors up" in verdict(0.01) and "standard errors down" in verdict(-0.005)
    flat = verdict(0.0)
    assert "within what steps vary by" in flat and "gsm8k greedy: 0.750 at step 39" in flat


def test_a_moving_mean_passes_over_what_is_missing() -> None:
    values = np.array([1.0, np.nan, 3.0, 5.0])
    assert moving_mean(values, 3).tolist() == [1.0, 2.0, 4.0, 4.0]
    assert np.array_equal(moving_mean(values, 1), values, equal_nan=True)


# --- several runs ---


def test_the_same_tokens_on_another_number_of_ranks(tmp_path: Path) -> None:
    a = small_run(tmp_path / "a")
    b = RunFolder(tmp_path / "b")
    for step in range(3):
        both = [small_record(step, rank) for rank in range(2)]
        rollouts = both[0].rollouts + both[1].rollouts
        ones = np.ones(4, np.float32)
        changes = {"rollouts": rollouts, "rewards": ones, "advantages": ones}
        write_step(b.rollout_log(step, 0), small_record(step, 0, 1, **changes))
    slower = [line_of(step, **{"rollout/seconds": 13.0}) for step in range(3)]
    b.metrics.write_text("".join(json.dumps(line) + "\n" for line in slower))
    found = analyse_comparison([RunLog(b.path), RunLog(a.path)])
    assert found.first_difference == {"a": None} and found.compared_steps.tolist() == [0, 1, 2]
    assert "The same tokens in all runs (3 steps compared, up to step 2)" in found.verdict
    assert "its rollouts are 2.00 times as fast." in found.verdict


def test_the_first_step_with_another_token_is_named(tmp_path: Path) -> None:
    runs = [small_run(tmp_path / name) for name in "abc"]
    record = small_record(1, 1)
    record.rollouts[0].response_tokens[3] += 1
    write_step(runs[2].rollout_log(1, 1), record)
    found = analyse_comparison([RunLog(run.path) for run in runs])
    assert found.first_difference == {"b": None, "c": 1}
    assert "b has the same tokens and c differs from step 1 on" in found.tokens_in_words
    few = analyse_comparison([RunLog(run.path) for run in runs], most_tokens=1)
    assert few.compared_steps.tolist() == [0] and "1 step compared, up to step 0" in few.tokens_in_words


def test_one_run_alone_is_not_compared(folder: RunFolder) -> None:
    with pytest.raises(UserError, match="two folders or more"):
        analyse_comparison([RunLog(folder.path)])


# --- damaged, missing, of an earlier version ---


def test_a_sound_run(folder: RunFolder) -> None:
    found = analyse_integrity(RunLog(folder.path))
    assert found.is_sound and found.num_files == 6 and found.num_lines == 3
    assert "6 logs" in found.verdict and "All of these are sound." in found.verdict


def flip_byte_of(path: Path, name: str) -> None:
    """One bit of an array's stored bytes."""
    with h5py.File(path) as file:
        place = file[name].id.get_chunk_info(0).byte_offset
    data = bytearray(path.read_bytes())
    data[place + 2] ^= 4
    path.write_bytes(data)


def test_a_flipped_bit_is_found_by_who_reads_it(folder: RunFolder) -> None:
    path = folder.rollout_log(1, 0)
    flip_byte_of(path, "rollouts/response_tokens")
    assert analyse_integrity(RunLog(folder.path), read_whole=False).is_sound
    found = analyse_integrity(RunLog(folder.path))
    assert not found.is_sound and len(found.damaged) == 1 and str(path) in found.damaged[0]
    assert analyse_lengths(RunLog(folder.path)).problems == (), "no tokens are read where lengths do"
    with pytest.raises(DamagedFile):
        check_whole(path)


@pytest.mark.parametrize("analyse", ALL)
def test_damage_is_named_and_left_out(folder: RunFolder, analyse) -> None:
    path = folder.rollout_log(2, 1)
    path.write_bytes(path.read_bytes()[:-200])
    folder.rollout_log(1, 0).unlink()
    (folder.rollout_log(0, 0).parent / "rank-x.h5").write_text("")
    with folder.metrics.open("a") as file:
        file.write('{"training/global_step": 3.0, "critic/sc')
    folder.config.write_text("[rollout")
    found = analyse(RunLog(folder.path))
    json.dumps(found.to_json(), allow_nan=False)
    told = " ".join(found.problems)
    if analyse is not analyse_learning and analyse is not analyse_timeline:
        assert "rank-x.h5" in told
    if analyse is analyse_integrity:
        assert len(found.damaged) == len(found.missing) == 1 and not found.is_sound
        assert "step 1: no log of rank 0" in found.missing[0] and found.torn_tail.startswith('{"training')
    elif analyse is analyse_learning:
        assert "metrics.jsonl:4 is cut off" in told and found.steps.tolist() == [0, 1, 2]
    elif analyse is not analyse_timeline:
        assert str(path) in told and "step 1: no log of rank 0 (1 of 2 ranks)" in told
        assert found.steps.tolist() == [0, 1, 2]
    else:
        assert found.step == 2 and [lane.rank for lane in found.lanes] == [0] and "1 of 2 ranks" in found.verdict


def add_to_lines(folder: RunFolder, **more: float) -> None:
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    folder.metrics.write_text("".join(json.dumps({**row, **more}) + "\n" for row in rows))


def test_logs_of_steps_that_were_taken_back_are_none_of_the_runs(folder: RunFolder) -> None:
    folder.metrics.write_text(folder.metrics.read_text().splitlines(keepends=True)[0])
    run = RunLog(folder.path)
    assert run.steps == (0,) and run.logged_steps == (0, 1, 2)
    assert analyse_lengths(run).steps.tolist() == analyse_throughput(run).steps.tolist() == [0]
    assert analyse_timeline(run).step == 0 and "left out: the logs of step 1, 2" in " ".join(run.problems)
    assert analyse_timeline(run, step=2).step == 2, "who asks for it gets it"


def test_a_part_of_the_ranks_says_nothing_of_waiting(folder: RunFolder) -> None:
    for step in range(3):
        folder.rollout_log(step, 1).unlink()
    found = analyse_throughput(RunLog(folder.path))
    assert "the logs of all ranks" in found.verdict and "nobody waits" not in found.verdict
    assert not any("all ranks" in name for name in found.rates)
    verdict = analyse_timeline(RunLog(folder.path), step=1).verdict
    assert "Of the others there is no log" in verdict and "nobody waits" not in verdict


def test_kept_responses_are_nobodys_speed(folder: RunFolder, tmp_path: Path) -> None:
    whole = analyse_throughput(RunLog(folder.path)).rates
    add_to_lines(folder, **{"rollout/kept_tokens": 14.0})
    assert analyse_throughput(RunLog(folder.path)).rates["rollout, all ranks"] == pytest.approx(7 / 6.5)
    assert whole["rollout, all ranks"] == pytest.approx(21 / 6.5)
    other = small_run(tmp_path / "other")
    add_to_lines(other, **{"rollout/seconds": 1.0})
    assert "times as fast" not in analyse_comparison([RunLog(folder.path), RunLog(other.path)]).verdict


def test_a_replicas_rounds_count_once(folder: RunFolder) -> None:
    alone = analyse_acceptance(RunLog(folder.path)), analyse_throughput(RunLog(folder.path))
    folder.config.write_text("[rollout]\nmax_new_tokens = 8\ntensor_parallel = 2\n")
    run = RunLog(folder.path)
    assert run.speaks_for(0) and not run.speaks_for(1)
    assert analyse_acceptance(run).tokens.sum() == 3 * 8 < alone[0].tokens.sum(), "rank 0's rounds alone"
    assert analyse_throughput(run).engine_tokens[:, 1:].sum() == 3 * 8 < alone[1].engine_tokens[:, 1:].sum()
    assert analyse_timeline(run).live.max() == 2


def test_a_drafter_that_was_not_asked_has_not_become_worse(folder: RunFolder) -> None:
    add_to_lines(folder, **{"drafter/own_accept_length": 1.0, "drafter/own_sequences": 0.0})
    found = analyse_acceptance(RunLog(folder.path))
    assert np.isnan(found.own_accept_length).all() and "own drafts" not in found.verdict


def test_a_gradient_that_is_no_number_is_shouted(folder: RunFolder) -> None:
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    rows[1]["actor/grad_norm"] = float("nan")
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "NOT FINITE: grad_norm from step 1 on" in analyse_learning(RunLog(folder.path)).verdict


def test_a_log_that_is_missing_is_no_other_text(folder: RunFolder, tmp_path: Path) -> None:
    other = small_run(tmp_path / "other")
    other.rollout_log(0, 1).unlink()
    other.rollout_log(1, 0).write_bytes(other.rollout_log(1, 0).read_bytes()[:-200])
    found = analyse_comparison([RunLog(folder.path), RunLog(other.path)])
    assert found.compared_steps.tolist() == [2] and list(found.first_difference.values()) == [None]


@pytest.mark.parametrize("analyse", ALL[1:])
def test_a_run_that_has_just_begun(tmp_path: Path, analyse) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    found = analyse(RunLog(folder.path))
    json.dumps(found.to_json(), allow_nan=False)
    assert found.verdict
    with pytest.raises(UserError, match="no step in its rollout log yet"):
        analyse_timeline(RunLog(folder.path))


@pytest.mark.parametrize("analyse", ALL)
def test_files_of_an_earlier_version(folder: RunFolder, analyse) -> None:
    for step in range(3):
        for rank in range(2):
            with h5py.File(folder.rollout_log(step, rank), "r+") as file:
                del file["spans"], file["phases"], file["timing/refills"]
    found = analyse(RunLog(folder.path))
    assert found.problems == ()
    if analyse is analyse_timeline:
        assert "does not tell of single rounds" in found.verdict
        assert found.lanes[0].seconds[Kind.GENERATE] == pytest.approx(2.0) and len(found.live) == 0
    if analyse is analyse_throughput:
        assert Kind.GENERATE in found.kinds and found.idle_rank_seconds == pytest.approx([5.0] * 3)
    if analyse is analyse_acceptance:
        assert "not tell of single rounds" in found.verdict and found.step_tokens.tolist() == [[2, 19]] * 3


def test_columns_come_from_this_projects_own_arrays_alone(folder: RunFolder) -> None:
    path = folder.rollout_log(0, 0)
    with h5py.File(path, "r+") as file:
        del file["rollouts/rewards"]
        file["rollouts/rewards"] = h5py.SoftLink("/rollouts/advantages")
        file["rollouts"].create_dataset("extra", data=np.ones(2))
    for name in ("rollouts/rewards", "rollouts/extra", "rollouts/nothing"):
        with pytest.raises(DamagedFile, match=r"link|not stored|exist|nothing"):
            read_columns(path, (name,))
    with h5py.File(path, "r+") as file:
        file.attrs["committed"] = 3
    with pytest.raises(DamagedFile, match="3 rollouts were committed"):
        read_columns(path, ("rollouts/response_ends",))


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give a run's folder"):
        RunLog(tmp_path)


# --- repair ---


def test_repair_takes_off_a_torn_tail_and_nothing_else(folder: RunFolder) -> None:
    before = folder.metrics.read_bytes()
    folder.metrics.write_bytes(before + b'{"training/glob')
    part = part_of(folder.rollout_log(2, 0))
    part.write_bytes(b"half")
    found = analyse_integrity(RunLog(folder.path))
    assert not found.is_sound and len(found.parts) == 1 and "1 file half written" in found.verdict
    said: list[str] = []
    assert repair(RunLog(folder.path), said.append)
    assert "last 15 bytes" in said[0] and "3 committed steps before it stay" in said[0]
    assert folder.metrics.read_bytes() == before and part.exists()
    assert folder.metrics.with_suffix(".torn").read_bytes() == b'{"training/glob\n'
    assert analyse_integrity(RunLog(folder.path)).is_sound
    assert not repair(RunLog(folder.path), said.append) and "nothing to repair" in said[-1]


def test_a_whole_line_without_its_line_feed_is_a_committed_step(folder: RunFolder) -> None:
    folder.metrics.write_bytes(folder.metrics.read_bytes()[:-1])
    before = folder.metrics.read_bytes()
    assert not repair(RunLog(folder.path), lambda _: None) and folder.metrics.read_bytes() == before


def test_a_line_damaged_in_the_middle_is_named_and_not_repaired(folder: RunFolder) -> None:
    lines = folder.metrics.read_bytes().splitlines(keepends=True)
    folder.metrics.write_bytes(lines[0] + b"{broken\n" + lines[2])
    before = folder.metrics.read_bytes()
    run = RunLog(folder.path)
    assert not repair(run, lambda _: None) and folder.metrics.read_bytes() == before
    assert list(run.lines) == [0, 2] and "metrics.jsonl:2 is no line" in run.problems[0]


def test_repair_leaves_a_run_at_work_alone(folder: RunFolder) -> None:
    folder.metrics.write_bytes(folder.metrics.read_bytes() + b"{torn")
    run = RunLog(folder.path)
    assert run.lines
    changed = folder.metrics.read_bytes() + b" and more"
    folder.metrics.write_bytes(changed)
    with pytest.raises(UserError, match="a run is at work there"):
        repair(run, lambda _: None)
    assert folder.metrics.read_bytes() == changed


# --- the trace, and words ---


def test_the_trace_has_all_ranks_and_arrows_that_meet(folder: RunFolder) -> None:
    events = list(trace_events(RunLog(folder.path), [1]))
    json.dumps(events, allow_nan=False)
    assert {event["pid"] for event in events} == {0, 1}
    arrows = [(event["id"], event["ph"]) for event in events if event["ph"] in "sf"]
    assert sorted({name for name, _ in arrows}) == sorted(name for name, kind in arrows if kind == "s")
    assert len(arrows) == 2 * 2 * 4, "five phases of two ranks"
    rounds = [e for e in events if e["ph"] == "X" and e["tid"] == 1 and e["pid"] == 1]
    assert [(e["name"], e["dur"]) for e in rounds] == [("prefill", 1e6), ("drafter-4", 3e6), ("drafter-4", 2e6)]
    assert min(e["ts"] for e in events if "ts" in e) >= 0


def test_words() -> None:
    assert [seconds(v) for v in (0.0123, 4.2, 42.0, 725.0, 12_000.0)] == [
        "12 ms", "4.20 s", "42.0 s", "12 min 5 s", "3 h 20 min"
    ]  # fmt: skip
    assert [share(1, 0), share(1, 3), share(1, 30), share(0, 5)] == ["0 %", "33 %", "3.3 %", "0 %"]
    assert listed([]) == "" and listed(["a"]) == "a" and listed(["a", "b", "c"]) == "a, b and c"
    assert count(1, "step") == "1 step" and count(2000, "step") == "2,000 steps"
    assert plain({"a": np.array([1.0, np.nan]), "b": Kind.IDLE}) == {"a": [1.0, None], "b": "idle"}


@pytest.mark.parametrize("kind", ("external link", "soft link", "virtual", "no checksum", "own member", "no group"))
def test_a_whole_check_refuses_what_this_project_does_not_write(folder: RunFolder, tmp_path: Path, kind: str) -> None:
    path = folder.rollout_log(0, 0)
    assert check_whole(path) > 0
    with h5py.File(path, "r+") as struck:
        group = struck["rollouts"]
        if kind == "external link":
            group["more"] = h5py.ExternalLink(str(tmp_path / "secret"), "/a")
        elif kind == "soft link":
            group["more"] = h5py.SoftLink("/rollouts/seed")
        elif kind == "virtual":
            group.create_virtual_dataset("more", h5py.VirtualLayout((0,), "i4"))
        elif kind == "no checksum":
            group["more"] = np.arange(2)
        elif kind == "own member":
            group["more"] = group
        else:
            struck["more"] = np.empty(0)
    with pytest.raises(DamagedFile, match=r"damaged rollout log: .*more.*(a link to|not stored as|no array|no group)"):
        check_whole(path)
