"""tlt warmup: its results, resuming after a kill, sharing of work between ranks, and refused settings."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fake_world import RanksInTurn
from launch_ranks import run_on_ranks
from logged import step_record
from safetensors.torch import load_file
from tiny import CPU, embedded_decoder, gcd_requests, generate, make_engine, random_document, to_floats

from tlt_hpc.cli.main import main
from tlt_hpc.cluster.stopping import Stop
from tlt_hpc.config import DrafterSection, UserError, WarmupSection, load_config
from tlt_hpc.drafting.offline import update_on_all_ranks
from tlt_hpc.drafting.pool import pack_excerpts, whole_document_excerpt
from tlt_hpc.drafting.spot_trainer import SpotTrainer
from tlt_hpc.models.drafter_file import DRAFTER_FILE, load_drafter, read_drafter
from tlt_hpc.models.tokenizer import package_asset_folder
from tlt_hpc.mpi.world import World
from tlt_hpc.rollout.strategy import Strategy
from tlt_hpc.run import session as job
from tlt_hpc.storage.feature_file import Document
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.records import read_facts
from tlt_hpc.storage.rollout_log import write_step
from tlt_hpc.studies.warmup import warm_up as warm_up_module
from tlt_hpc.studies.warmup.plan import warmup_config
from tlt_hpc.studies.warmup.warm_up import CapturedDocuments, WarmupResult, warm_up

ROOT = Path(__file__).parent.parent
TINY = ROOT / "jobs" / "tiny.toml"
SMALL = (
    "rollout.max_new_tokens=40",
    "rollout.max_live=8",
    "warmup.responses=36",
    "warmup.updates=9",
    "warmup.batch_tokens=128",
    "drafter.init=random",
    "drafter.learning_rate=3e-3",
)


class Killed(BaseException):
    """Stands for a kill: nothing catches it and nothing is saved."""


class Reporter:
    """Silent; raises ``Killed`` or asks to stop at one moment."""

    def __init__(self, moment: str = "", at: int = 0, world: World | None = None) -> None:
        self._moment, self._at, self._world = moment, at, world
        self.seen: dict[str, int] = {}

    def show_start(self, config, texts, progress):
        self._meet("started")

    def show_capture(self, num_done, num_texts):
        self._meet("capturing", num_done)

    def show_training(self, num_documents, num_tokens):
        self._meet("training")

    def show_update(self, progress):
        self._meet("learned", progress.updates)

    def show_validation(self, point, is_best):
        self._meet("validated", point.updates)

    def _meet(self, moment: str, number: int | None = None) -> None:
        self.seen[moment] = self.seen.get(moment, 0) + 1
        if moment == self._moment and (self.seen[moment] if number is None else number) >= self._at:
            if self._world is None:
                raise Killed
            self._world.flag.request(Stop.ASKED, "test")


def start(
    folder: Path, *overrides: str, reporter: Reporter | None = None, world: World | None = None, interval: int = 4
) -> WarmupResult:
    config = warmup_config(load_config(TINY, [f"run.folder={folder}", *SMALL, *overrides]))
    with (
        patch.object(WarmupSection, "validation_interval", interval),
        patch.object(WarmupSection, "validation_prompts", 6),
    ):
        return warm_up(config, world or World.connect(), reporter or Reporter())


def kept(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "tiny-warmup" / "drafter" / DRAFTER_FILE)


def curve(folder: Path) -> list[tuple]:
    facts = read_facts(folder / "tiny-warmup" / "drafter")
    assert facts is not None
    return [(p.updates, p.tokens, p.loss, p.accept_length) for p in facts.curve]


def assert_equal(folder: Path, other: Path) -> None:
    assert curve(folder) == curve(other)
    ours, theirs = kept(folder), kept(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def feature_files(folder: Path) -> list[Path]:
    return sorted((folder / "tiny-warmup" / "features").glob("part-*/cache/step-*/rank-*.h5"))


def documents(folder: Path) -> list[Document]:
    with closing(CapturedDocuments(feature_files(folder))) as captured:
        return [captured.read(i) for i in range(len(captured.lengths))]


@pytest.fixture(autouse=True)
def every_round_is_reported(monkeypatch) -> None:
    """A reporter sees the end of every response, however fast the machine is."""
    monkeypatch.setattr(job, "BUSY_SECONDS", 0.0)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """A small warm-up without a break."""
    folder = tmp_path_factory.mktemp("straight")
    assert start(folder).progress.is_finished
    return folder


# -- what it leaves -------------------------------------------------------------------------------------------------


def test_it_leaves_a_drafter_and_its_facts_that_train_and_export_take(straight):
    facts = read_facts(straight / "tiny-warmup" / "drafter")
    assert facts is not None
    assert [point.updates for point in facts.curve] == [4, 8, 9]
    best = max(facts.curve, key=lambda point: point.accept_length)
    assert (facts.num_updates, facts.accept_length) == (best.updates, best.accept_length)
    assert facts.num_validation_prompts == 6
    assert facts.num_responses <= 36
    assert facts.curve[-1].tokens > 0.7 * 9 * 128
    assert int(kept(straight)["num_steps"]) == facts.num_updates
    assert not [name for name in kept(straight) if "exp_avg" in name]
    assert main(["train", str(TINY), f"drafter.init={straight / 'tiny-warmup' / 'drafter'}", "--dry-run"]) == 0
    assert main(["export-drafter", str(straight / "tiny-warmup"), "--format", "sglang"]) == 0


def test_each_validation_is_of_the_drafter_as_it_is_then(tmp_path, monkeypatch):
    """One that knows the model takes the place of the one that has hardly learned, after the first validation."""
    take_update = warm_up_module.take_update

    def learned(warmup, captured, batch, progress):
        taken = take_update(warmup, captured, batch, progress)
        if taken[0].updates == 6:
            warmup.trainer.trained.copy_weights_from(load_file(package_asset_folder("tiny_drafter") / DRAFTER_FILE))
        return taken

    monkeypatch.setattr(warm_up_module, "take_update", learned)
    start(tmp_path)
    first, second, _ = (accept_length for *_, accept_length in curve(tmp_path))
    assert first < 1.3 < 1.8 < second


def test_patience_ends_it_and_the_best_is_kept(tmp_path, monkeypatch):
    # a rate at which the drafter gets worse, from one that is good
    monkeypatch.setattr(WarmupSection, "patience", 2)
    monkeypatch.setattr(WarmupSection, "ramp_updates", 0)
    result = start(tmp_path, "drafter.init=embedded:tiny", "drafter.learning_rate=0.3", interval=1)
    assert result.reason == "no new best in 2 validations"
    assert [point.updates for point in result.progress.curve] == [0, 1, 2]
    assert result.progress.best == result.progress.curve[0]
    asset = read_drafter("embedded:tiny", embedded_decoder().shape, "")
    assert all(torch.equal(kept(tmp_path)[name], tensor.float()) for name, tensor in asset.items())


# -- killed, stopped, and on other ranks ----------------------------------------------------------------------------


@pytest.mark.ci
def test_after_many_kills_the_result_has_the_same_bits(straight, tmp_path):
    for moment, number in [("capturing", 3), ("capturing", 34), ("learned", 1), ("validated", 4), ("learned", 7)]:
        with pytest.raises(Killed):
            start(tmp_path, reporter=Reporter(moment, number))
    assert start(tmp_path).progress.is_finished
    assert_equal(tmp_path, straight)


def test_after_requests_to_stop_the_result_has_the_same_bits(straight, tmp_path):
    for moment, number in [("capturing", 5), ("learned", 2)]:
        world = World.connect()
        result = start(tmp_path, reporter=Reporter(moment, number, world), world=world)
        assert not result.progress.is_finished and "test" in result.reason
    again = Reporter()
    assert start(tmp_path, reporter=again).progress.is_finished
    assert again.seen["learned"] == 9 - 3, "the current update is finished, and none is repeated"
    assert_equal(tmp_path, straight)


@pytest.mark.mpi
def test_two_ranks_share_the_work_and_learn_the_same(straight, tmp_path):
    """The features have the same bits; the updates differ only by the order of sums."""
    alone, results = on_one_and_two_ranks(tmp_path, 1e-4)
    assert abs(results[0][1] - results[1][1]) < 0.4 * alone[1], "each trains on its share"
    ours, theirs = documents(tmp_path / "one"), documents(tmp_path / "two")
    assert sorted(map(content, ours)) == sorted(map(content, theirs))


@pytest.mark.mpi
@pytest.mark.ci
def test_ranks_that_decode_together_warm_up_the_same_drafter(straight, tmp_path):
    """Texts are the same, features differ only by the order of sums; and a stopped replica continues."""
    assert run_on_ranks(2, stopped, str(tmp_path / "two"), "rollout.tensor_parallel=2") == [False, False]
    on_one_and_two_ranks(tmp_path, 1e-3, "rollout.tensor_parallel=2")
    ours, theirs = (sorted(documents(tmp_path / name), key=content) for name in ("one", "two"))
    assert [document.tokens.tobytes() for document in ours] == [document.tokens.tobytes() for document in theirs]
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(to_floats(own.features), to_floats(other.features), rtol=2**-7, atol=1e-3)


def on_one_and_two_ranks(folder: Path, loss_tolerance: float, *overrides: str) -> tuple[list, list]:
    """The results of a warm-up on one rank and on two, whose curves agree and which read the documents once."""
    together = run_on_ranks(2, warmed_up, str(folder / "two"), *overrides)
    alone = warmed_up(str(folder / "one"))
    assert together[0][0] == together[1][0] and together[0][1] + together[1][1] == alone[1]
    for (updates, loss, accept), (others, theirs, their_accept) in zip(alone[0], together[0][0], strict=True):
        assert updates == others
        assert loss == pytest.approx(theirs, abs=loss_tolerance)
        assert accept == pytest.approx(their_accept, rel=0.02)
    return alone, together


def stopped(folder: str, *overrides: str) -> bool:
    """Whether it finished although one of the ranks was asked to stop while it captured."""
    world = World.connect()
    reporter = Reporter("capturing", 2, world) if world.rank == 0 else Reporter()
    return start(Path(folder), *overrides, reporter=reporter, world=world).progress.is_finished


def warmed_up(folder: str, *overrides: str) -> list:
    """The curve, and the number of documents that this rank read to train on."""
    read, counted = CapturedDocuments.read, []
    CapturedDocuments.read = lambda captured, index: counted.append(index) or read(captured, index)
    result = start(Path(folder), *overrides)
    CapturedDocuments.read = read
    return [[[p.updates, p.loss, p.accept_length] for p in result.progress.curve], len(counted)]


def content(document: Document) -> tuple[bytes, bytes]:
    return document.tokens.tobytes(), document.features.tobytes()


# -- the update -----------------------------------------------------------------------------------------------------


def make_trainer() -> SpotTrainer:
    return SpotTrainer(embedded_decoder(), None, DrafterSection(learning_rate=1e-2), seed=0, rank=0)


def test_an_update_is_that_of_all_documents_in_one_pass():
    """Compares the posted gradients: Adam's first step would enlarge the rounding errors of the smallest ones."""
    found = [random_document(length, prompt, i) for i, (length, prompt) in enumerate([(40, 5), (9, 7), (25, 3)])]
    whole_batch, in_passes = RanksInTurn(1), RanksInTurn(1)
    loss = update_on_all_ranks(
        make_trainer(), [pack_excerpts([whole_document_excerpt(document) for document in found], CPU)], whole_batch
    )
    again = update_on_all_ranks(
        make_trainer(), [pack_excerpts([whole_document_excerpt(document)], CPU) for document in found], in_passes
    )
    assert again == pytest.approx(loss, abs=1e-5)
    np.testing.assert_allclose(in_passes.arrays[0] / 59, whole_batch.arrays[0] / 59, atol=1e-5, rtol=1e-4)
    assert whole_batch.arrays[0][-1] == 35 + 2 + 22


def test_a_rank_without_a_document_takes_the_others_update():
    found = [random_document(40, 5, 0)]
    busy, idle, ranks = make_trainer(), make_trainer(), RanksInTurn()
    alone = make_trainer()
    update_on_all_ranks(alone, [pack_excerpts([whole_document_excerpt(found[0])], CPU)], RanksInTurn(1))
    update_on_all_ranks(busy, [pack_excerpts([whole_document_excerpt(found[0])], CPU)], ranks)
    loss = update_on_all_ranks(idle, [], ranks)
    assert busy.trained.fingerprint() == idle.trained.fingerprint() == alone.trained.fingerprint()
    assert idle.trained.num_steps == 1 and loss > 0


# -- from logs ------------------------------------------------------------------------------------------------------


def write_log(folder: Path, rollouts, step: int = 0) -> None:
    in_order = sorted(rollouts, key=lambda rollout: rollout.key)
    record = step_record(step, in_order, np.zeros(len(rollouts)))
    write_step(RunFolder(folder).rollout_log(step, 0), record)


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A run's log, its rollouts, and the features captured while they were decoded, with speculation."""
    drafter = load_drafter("embedded:tiny", embedded_decoder(), "")
    engine = make_engine([Strategy("drafter", 4)], max_new_tokens=40, drafter=drafter, drafter_is_trained=True)
    captured, prompts = {}, {}

    def sink(tokens, prompt_length, features, first):
        prompt = tokens[:prompt_length].tobytes()
        if first:  # the prompt's came with the first of its responses
            features = np.concatenate([prompts[prompt], features])
        prompts[prompt] = features[: prompt_length - 1]
        captured.setdefault(tokens[:-1].tobytes(), (prompt_length, features))

    engine.outbox.set_sink(sink)
    # the model never reads the last token: another one shows that the logged token is kept
    rollouts = [with_response(r, [*r.response_tokens[:-1], 7]) for r in generate(engine, gcd_requests(12, 2))]
    folder = tmp_path_factory.mktemp("logged") / "run"
    write_log(folder, rollouts)
    return folder, rollouts, captured


def test_logged_responses_get_the_features_they_were_decoded_with(logged, tmp_path):
    folder, rollouts, captured = logged
    assert start(tmp_path, f'warmup.sources=["{folder}"]', "warmup.updates=2").progress.is_finished
    found = documents(tmp_path)
    prompts = {rollout.prompt_tokens.tobytes() for rollout in rollouts}
    assert len({d.tokens[: d.prompt_length].tobytes() for d in found}) == len(prompts) - 2, "a fifth is held out"
    assert len(found) >= 18
    for document in found:
        prompt_length, features = captured[document.tokens[:-1].tobytes()]
        assert (document.tokens[-1], document.prompt_length) == (7, prompt_length)
        assert document.features.shape == features.shape
        torch.testing.assert_close(to_floats(document.features), to_floats(features), atol=0.05, rtol=0.02)


def test_the_newest_logged_responses_are_taken_first(logged, tmp_path):
    _, rollouts, _ = logged
    for step in range(3):
        logged_then = [replace(r, key=replace(r.key, step=step)) for r in rollouts[step * 8 :][:8]]
        write_log(tmp_path / "run", logged_then, step)
    override = f'warmup.sources=["{tmp_path / "run"}"]'
    start(tmp_path, override, "warmup.updates=1", "warmup.responses=8")
    last = {r.prompt_tokens.tobytes() for r in rollouts[16:24]}
    assert {d.tokens[: d.prompt_length].tobytes() for d in documents(tmp_path)} <= last


def with_response(rollout, tokens: list[int]):
    return replace(rollout, response_tokens=np.array(tokens, np.int32), log_probs=rollout.log_probs[: len(tokens)])


# -- bounds and refusals --------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_after_the_bytes_ran_out_it_resumes_to_the_same_bits(tmp_path_factory, tmp_path):
    """The bytes suffice for two of its three parts."""
    folder, bounds = tmp_path_factory.mktemp("bounded"), ("warmup.responses=96", "drafter.cache_bytes=800_000")
    assert start(folder, *bounds).progress.is_finished
    assert len(feature_files(folder)) == 2
    assert sum(path.stat().st_size for path in feature_files(folder)) <= 800_000
    for moment, number in [("capturing", 40), ("learned", 6)]:
        with pytest.raises(Killed):
            start(tmp_path, *bounds, reporter=Reporter(moment, number))
    lost = feature_files(tmp_path)[0]
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(UserError, match=r"features has \d+ of the \d+ responses .*; delete .*training to train again"):
        start(tmp_path, *bounds)
    lost.write_bytes(content)
    assert start(tmp_path, *bounds).progress.is_finished
    assert_equal(tmp_path, folder)


def test_sources_that_cannot_be_used_are_named(capsys, tmp_path, logged):
    _, rollouts, _ = logged
    (tmp_path / "empty").mkdir()
    write_log(tmp_path / "foreign", [with_response(rollouts[0], [5, 77]), *rollouts[1:]])
    write_log(tmp_path / "single", rollouts[:2])
    for name, words in (
        ("empty", "no readable response there"),
        ("foreign", "have token 77 and"),
        ("single", "no prompt is left for validation"),
    ):
        source = ["--from", str(tmp_path / name), f"run.folder={tmp_path / 'out'}", "run.ranks=1"]
        assert main(["warmup", str(TINY), *source]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "nothing was written"


def test_what_may_change_and_what_may_not(straight, tmp_path):
    with pytest.raises(ValueError, match=r"warmup\.responses = 36, now 49; use the old value or give another"):
        start(straight, "warmup.responses=49")
    with pytest.raises(ValueError, match=r"drafter\.learning_rate = 0\.003, now 0\.1; .* delete .*training to train"):
        start(straight, "drafter.learning_rate=0.1")
    reporter = Reporter()
    result = start(straight, reporter=reporter)
    assert result.was_finished and reporter.seen == {} and result.reason == "warmup.updates = 9"
    with pytest.raises(Killed):
        start(tmp_path, reporter=Reporter("training", 1))
    assert start(tmp_path, "warmup.updates=5").progress.is_finished, "no update was made yet"


def test_an_eagle3_drafter_drafts_among_the_tokens_of_the_responses(tmp_path):
    start(tmp_path, "drafter.form=eagle3", "drafter.vocabulary=12", "warmup.updates=1")
    counts = np.zeros(24, np.int64)
    for document in documents(tmp_path):
        assert document.features.shape[1:] == (4, 128)
        counts += np.bincount(document.tokens[document.prompt_length :], minlength=24)
    least = np.sort(counts)[-12]
    ids = kept(tmp_path)["token_ids"].tolist()
    assert len(ids) == 12
    assert set(np.flatnonzero(counts > least).tolist()) | {1} <= set(ids)
    served = load_drafter(str(tmp_path / "tiny-warmup" / "drafter"), embedded_decoder(), "test")
    assert served.form == "eagle3"
