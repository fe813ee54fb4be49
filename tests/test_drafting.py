"""The drafter's training: pairs aligned, packing without leaks, loss against a loop, merges, the update itself."""

import random
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_world import RanksInTurn, on_threads
from tiny import CPU, embedded_decoder, gcd_requests, generate, make_engine, random_document, texts

from tlt_hpc import train
from tlt_hpc.config import DrafterSection, UserError
from tlt_hpc.drafting import pool as pool_module
from tlt_hpc.drafting import spot_trainer
from tlt_hpc.drafting.loss import LossSettings, drafter_loss
from tlt_hpc.drafting.offline import update_on_all_ranks
from tlt_hpc.drafting.pool import TrainingPool, pack_excerpts, sampling_weights, whole_document_excerpt
from tlt_hpc.drafting.spot_trainer import AVERAGE_MERGES, SpotTrainer
from tlt_hpc.models.eagle import Eagle
from tlt_hpc.rollout.acceptance import DraftCounts
from tlt_hpc.rollout.strategy import OFF, Strategy
from tlt_hpc.run import rollout_loop as tail
from tlt_hpc.storage.feature_cache import FeatureCache
from tlt_hpc.storage.folder import RunFolder

WEIGHTS = LossSettings(1.0, 0.1)


@pytest.fixture(autouse=True)
def micro_steps_of_any_length(monkeypatch):
    monkeypatch.setattr(DrafterSection, "micro_step_seconds", 5.0)


def make_trainer(tmp_path, rank=0, average_merges=AVERAGE_MERGES, **settings):
    cache = FeatureCache(RunFolder(tmp_path), rank, 1, 128, 10**9, num_ranks=16)
    options = DrafterSection(**{"learning_rate": 2e-3, **settings})
    trainer = SpotTrainer(embedded_decoder(), cache, options, seed=0, rank=rank, average_merges=average_merges)
    return trainer, cache


def filled_trainer(tmp_path, num_prompts=2, **options):
    """A trainer in its first rollout, with that rollout's documents."""
    trainer, cache = make_trainer(tmp_path, **options)
    fill(cache, 0, num_prompts)
    trainer.begin_rollout(0)
    return trainer


def merge(trainers):
    """Each trainer's report of a merge of two ranks, which post one after another."""
    world = RanksInTurn()
    with ExitStack() as merges:
        for trainer in trainers:
            merges.enter_context(trainer.merging_drafters(world))
    return [trainer.merge_report for trainer in trainers]


def append(writer, *documents):
    for document in documents:
        writer.append(document.tokens, document.prompt_length, document.features)


def fill(cache, step, num_prompts=6, seed=0):
    """A rollout of the embedded model whose features land in the cache."""
    drafter = Eagle(embedded_decoder().shape, 0, torch.float32, CPU)
    engine = make_engine([OFF], drafter=drafter, max_live=32)
    engine.outbox.set_sink(cache.begin_step(step, 0).append)
    return generate(engine, gcd_requests(num_prompts, 4, step, seed))


@pytest.mark.ci
def test_training_from_the_cache_makes_drafts_that_are_accepted(tmp_path):
    trainer = filled_trainer(tmp_path, 16)
    for _ in range(45):
        assert trainer.take_micro_step()
    trainer.end_rollout()
    losses = [record.loss for record in trainer.records]
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])
    plain = texts(generate(make_engine(), gcd_requests(4, 4, 7)))

    def accept_length(drafter):
        engine = make_engine([Strategy("drafter", 3)], drafter=drafter, drafter_is_trained=True)
        assert texts(generate(engine, gcd_requests(4, 4, 7))) == plain
        counts = engine.take_counts()
        return counts.num_tokens / counts.num_row_passes

    untrained = accept_length(Eagle(embedded_decoder().shape, 0, torch.float32, CPU))
    assert accept_length(trainer.trained.drafter) > untrained + 0.2


def test_the_pool_holds_own_documents_and_all_ranks_of_the_previous_step(tmp_path):
    documents = [random_document(40 + i, 9, i) for i in range(9)]
    for rank in (0, 1):
        _, other = make_trainer(tmp_path, rank)
        writer = other.begin_step(0, 0)
        append(writer, *documents[rank * 4 : rank * 4 + 4])
        other.end_step()
    _, cache = make_trainer(tmp_path)
    append(cache.begin_step(1, 1), documents[8])
    pool = TrainingPool(cache, random.Random(0))
    pool.refresh()
    assert len(pool) == 9
    by_tokens, seen = {d.tokens.tobytes(): d for d in documents}, {}
    for _ in range(60):
        drawn = pool.draw_excerpts(200)
        by_name = {excerpt.document.tokens.tobytes(): excerpt for excerpt in drawn}
        assert 1 < len(by_name) == len(drawn), "no document twice in a batch"
        assert sum(e.num_pairs for e in drawn) <= 200
        assert all(e.start == 0 and e.num_pairs == len(e.document.tokens) - 2 for e in drawn)
        seen.update(by_name)
    assert seen.keys() == by_tokens.keys()
    for name, excerpt in seen.items():
        np.testing.assert_array_equal(excerpt.document.features, by_tokens[name].features)
    windows = [pool.draw_excerpts(10) for _ in range(30)]
    assert all(len(drawn) == 1 and drawn[0].num_pairs == 10 for drawn in windows), "a longer document is cut"
    assert all(7 <= drawn[0].start <= len(drawn[0].document.tokens) - 12 for drawn in windows)
    assert len({drawn[0].start for drawn in windows}) > 5
    pool.close()


def drawn_tokens(pool, num_draws, num_tokens=100):
    """How many of ``num_draws`` micro-steps each document was in, by its tokens."""
    return Counter(e.document.tokens.tobytes() for _ in range(num_draws) for e in pool.draw_excerpts(num_tokens))


def test_chances_prefer_earlier_responses_longer_than_what_has_finished():
    own, previous = np.array([10, 40]), [np.array([5, 40, 41, 400]), np.array([], np.int64), np.array([39])]
    first, others = sampling_weights(own, previous)
    assert first.tolist() == [10, 40], "in proportion to length"
    assert [weights.tolist() for weights in others] == [[1.25, 10, 41, 400], [], [9.75]]
    _, (nothing_finished,) = sampling_weights(np.array([], np.int64), [np.array([5, 40])])
    assert nothing_finished.tolist() == [5, 40]


def test_the_pool_draws_by_these_chances(tmp_path):
    _, cache = make_trainer(tmp_path)
    long, short = random_document(90, 9, 1), random_document(39, 9, 2)
    append(cache.begin_step(0, 0), long, short)
    cache.end_step()
    own = random_document(59, 9, 3)
    append(cache.begin_step(1, 1), own)
    pool = TrainingPool(cache, random.Random(0))
    pool.refresh()
    assert len(pool) == 3
    first = Counter(pool.draw_excerpts(60)[0].document.tokens.tobytes() for _ in range(4000))
    weights = [(long, 81.0), (short, 30 * 0.25), (own, 50.0)]
    for document, weight in weights:
        expected = 4000 * weight / sum(weight for _, weight in weights)
        assert abs(first[document.tokens.tobytes()] - expected) < 4 * expected**0.5


def test_the_pool_takes_in_what_comes_later(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "_LISTING_SECONDS", 0.0)
    (_, cache), (_, slow) = make_trainer(tmp_path), make_trainer(tmp_path, 1)
    cache.begin_step(0, 0)
    cache.end_step()
    writer, late = cache.begin_step(1, 1), slow.begin_step(0, 0)
    pool = TrainingPool(cache, random.Random(0))
    assert len(pool) == 0 and pool.draw_excerpts(100) == []
    own, other = random_document(40, 9, 1), random_document(60, 9, 2)
    append(writer, own)
    pool.refresh()
    assert len(pool) == 1 and set(drawn_tokens(pool, 5)) == {own.tokens.tobytes()}
    append(late, other)
    slow.end_step()
    pool.refresh()
    assert len(pool) == 2 and set(drawn_tokens(pool, 50)) == {own.tokens.tobytes(), other.tokens.tobytes()}
    pool.close()


def test_a_damaged_cache_file_is_left_out(tmp_path, caplog):
    _, other = make_trainer(tmp_path, 1)
    append(other.begin_step(0, 0), *(random_document(400, 9, i) for i in range(12)))
    other.end_step()
    path = RunFolder(tmp_path).feature_cache(0, 1)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    _, cache = make_trainer(tmp_path)
    own = random_document(40, 9, 99)
    append(cache.begin_step(1, 1), own)
    pool = TrainingPool(cache, random.Random(0))
    pool.refresh()
    drawn = [excerpt.document.tokens.tobytes() for _ in range(40) for excerpt in pool.draw_excerpts(1000)]
    assert own.tokens.tobytes() in drawn
    assert "left out of the drafter's training" in caplog.text


@pytest.mark.parametrize("refused", ["opening", "writing"])
def test_a_rollout_goes_through_without_the_cache(tmp_path, caplog, refused):
    trainer, cache = make_trainer(tmp_path)
    engine = make_engine(drafter=trainer.trained.drafter)
    drafting: Any = SimpleNamespace(cache=cache, spot=trainer)
    if refused == "opening":
        (tmp_path / "cache").write_text("in the way of the steps' folders")
    tail.open_feature_cache(drafting, engine, 1)
    if refused == "writing":
        cache._writer._file._bytes.error = OSError(28, "No space left on device")
    generate(engine, gcd_requests(2, 2, 1))
    assert trainer.take_micro_step() == (refused == "writing"), "what is in memory still serves"
    tail.close_feature_cache(drafting, stopped=False)
    assert len(caplog.messages) == 1 and "drafter.cache_folder" in caplog.messages[0]


def test_a_release_inside_a_micro_step_leaves_no_trace(tmp_path):
    """At each of the moments in which it is asked: before drawing, packing, forward, backward and update."""
    trainer, twin = filled_trainer(tmp_path), filled_trainer(tmp_path / "twin")
    before = trainer.trained.fingerprint()
    for moment in range(5):
        trainer.begin_rollout(0)
        trainer._update_seconds = 1e9  # an update that is not worth a rank's waiting for it
        answers = iter([False] * moment + [True])
        assert trainer.take_micro_step(lambda: next(answers))  # noqa: B023
        assert next(answers, None) is None, "the micro-step continued"
        assert (trainer.trained.fingerprint(), trainer.trained.num_steps, trainer.records) == (before, 0, [])
        assert trainer.cut_seconds > 0 and not trainer.trained.has_learned
        trainer.end_rollout()
    for each in (trainer, twin):
        each.begin_rollout(1)
        each._update_seconds = 0.0
        answers = iter([False] * 4)
        assert each.take_micro_step(lambda: next(answers, True)), "a cheap update is carried out"  # noqa: B023
    assert trainer.trained.fingerprint() == twin.trained.fingerprint()
    assert (trainer.cut_seconds, len(trainer.records), trainer.trained.num_steps) == (0, 1, 1)


def test_only_the_passes_of_a_micro_step_round_their_products(tmp_path, monkeypatch):
    """On a GPU; whatever a micro-step does not finish, nothing after it is rounded."""
    trainer, allowed, seen = filled_trainer(tmp_path), torch.backends.cuda.matmul, []
    update = trainer._update

    def observed(*arguments):
        seen.append(allowed.allow_tf32)
        return drafter_loss(*arguments)

    monkeypatch.setattr(spot_trainer, "drafter_loss", observed)
    monkeypatch.setattr(trainer, "_update", lambda loss: (seen.append(allowed.allow_tf32), update(loss))[1])
    assert trainer.take_micro_step() and seen == [True, False] and not allowed.allow_tf32
    answers = iter([False] * 3 + [True])
    assert trainer.take_micro_step(lambda: next(answers)) and seen[2:] == [True] and not allowed.allow_tf32


@pytest.mark.ci
def test_micro_steps_are_sized_by_the_slowest_of_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(DrafterSection, "micro_step_seconds", 0.5)
    trainer = filled_trainer(tmp_path, 48, micro_step_tokens=4000)
    rates, sizes = iter([4000.0, 1000.0, 6000.0, 6000.0, 6000.0, 6000.0, 6000.0, 6000.0, 6000.0]), []
    clock = [0.0]
    monkeypatch.setattr(spot_trainer.time, "time", lambda: clock[0])

    def loss_that_takes(drafter, batch, *rest):
        sizes.append(batch.num_tokens)
        clock[0] += batch.num_tokens / next(rates)
        return sum(parameter.sum() for parameter in drafter.parameters())

    monkeypatch.setattr(spot_trainer, "drafter_loss", loss_that_takes)
    for _ in range(9):
        assert trainer.take_micro_step()
    bounds = [256, 2000, 500, 500, 500, 500, 500, 500, 3000]
    assert all(0.4 * bound <= size <= bound for size, bound in zip(sizes, bounds, strict=True)), sizes


def test_a_micro_step_without_a_finite_gradient_is_skipped_and_counted(tmp_path, monkeypatch, caplog):
    trainer = filled_trainer(tmp_path)
    assert trainer.take_micro_step()
    before = trainer.trained.fingerprint()
    with monkeypatch.context() as patch:
        patch.setattr(spot_trainer, "drafter_loss", lambda *given: drafter_loss(*given) * torch.inf)
        assert trainer.take_micro_step() and trainer.take_micro_step(), "there is something to train on all the same"
    assert trainer.trained.fingerprint() == before
    assert (trainer.num_skipped, len(trainer.records), trainer.trained.num_steps) == (2, 1, 1)
    (warning,) = caplog.messages
    assert "the gradient of a micro-step of the drafter is not finite" in warning and "skipped" in warning
    assert trainer.take_micro_step() and trainer.trained.num_steps == 2
    assert all(bool(tensor.isfinite().all()) for tensor in trainer.trained.weights_and_moments())
    trainer.begin_rollout(1)
    assert trainer.num_skipped == 0


def test_an_update_of_all_ranks_without_a_finite_gradient_is_an_error(tmp_path, monkeypatch):
    trainer, _ = make_trainer(tmp_path)
    before = trainer.trained.fingerprint()
    monkeypatch.setattr(spot_trainer, "drafter_loss", lambda *given: drafter_loss(*given) * torch.inf)
    with pytest.raises(UserError, match="not finite: use a lower learning rate than"):
        update_on_all_ranks(
            trainer, [pack_excerpts([whole_document_excerpt(random_document(40, 5, 0))], CPU)], RanksInTurn()
        )
    assert trainer.trained.fingerprint() == before


def test_a_replica_that_is_not_finite_has_no_part_in_the_merge(tmp_path, caplog):
    """And where no replica at all is finite, the run says what to do."""
    trainers = [filled_trainer(tmp_path / str(rank), rank=rank, average_merges=1) for rank in range(2)]
    assert all(trainer.take_micro_step() for trainer in trainers)
    trainers[1].trained._moments["down"][1].view(-1)[7] = torch.nan
    sound, reports = trainers[0].trained.host_state_copy()["fc.weight"], merge(trainers)
    assert [report.is_dropped for report in reports] == [False, True] and reports[1].num_steps == 0
    assert trainers[0].trained.fingerprint() == trainers[1].trained.fingerprint() and trainers[1].trained.has_learned
    torch.testing.assert_close(trainers[1].trained.host_state_copy()["fc.weight"], sound, atol=1e-6, rtol=0)
    assert caplog.messages == ["drafters of 1 of 2 ranks are not finite: left out of the merge"]
    trainers[1].trained._moments["down"][1].view(-1)[7] = torch.nan
    with pytest.raises(UserError, match=r"finite weights and moments: resume .* drafter\.learning_rate than 0\.002"):
        merge(trainers[1:])


def test_where_no_trained_replica_is_finite_the_drafter_of_an_untrained_rank_stays(tmp_path):
    trainers = [filled_trainer(tmp_path, average_merges=1), make_trainer(tmp_path, 1, average_merges=1)[0]]
    before = trainers[1].trained.fingerprint()
    trainers[1].begin_rollout(0)
    assert trainers[0].take_micro_step()
    trainers[0].trained._moments["down"][1].view(-1)[7] = torch.nan

    def merge_rank(world):
        with trainers[world.rank].merging_drafters(world):
            pass
        return trainers[world.rank].merge_report

    reports = on_threads(2, merge_rank)
    assert [report.is_dropped for report in reports] == [True, False]
    assert [(report.num_tokens, report.num_steps) for report in reports] == [(0, 0)] * 2
    assert [trainer.trained.fingerprint() for trainer in trainers] == [before] * 2
    assert not any(trainer.trained.has_learned for trainer in trainers)


def test_ranks_that_join_late_or_have_nothing_long_merge_by_the_response_tokens_they_trained_on(tmp_path):
    """One rank trained three micro-steps, one had time for one of a long prompt's response, the last has only stubs."""
    trainers = [make_trainer(tmp_path / str(rank), rank)[0] for rank in range(3)]
    long_prompt = random_document(60, 50, 0)
    for rank, trainer in enumerate(trainers):
        if rank == 0:
            fill(trainer._cache, 0, num_prompts=3)
        else:
            append(trainer._cache.begin_step(0, 0), long_prompt if rank == 1 else random_document(10, 9, 0))
        trainer.begin_rollout(0)
        for _ in range((3, 1, 2)[rank]):
            assert trainer.take_micro_step() == (rank < 2)
    start = {name: tensor.clone() for name, tensor in trainers[2].trained.host_state_copy().items()}
    states, tokens = (
        [t.trained.host_state_copy() for t in trainers],
        [sum(r.num_tokens for r in t.records) for t in trainers],
    )
    assert (
        tokens[0]
        > 10
        >= tokens[1]
        == int(pack_excerpts([whole_document_excerpt(long_prompt)], CPU).counts.sum())
        > tokens[2]
        == 0
    )
    assert torch.equal(start["fc.weight"], make_trainer(tmp_path / "new")[0].trained.host_state_copy()["fc.weight"])
    reports = merge(trainers)
    assert len({report.fingerprint for report in reports}) == 1
    assert reports[0].num_tokens == sum(tokens)
    for name in ("fc.weight", "fc.exp_avg", "fc.exp_avg_sq"):
        wanted = (states[0][name] * tokens[0] + states[1][name] * tokens[1]) / sum(tokens)
        torch.testing.assert_close(trainers[2].trained.host_state_copy()[name], wanted, atol=1e-6, rtol=1e-5)


def test_replicas_that_differ_in_a_bit_after_a_merge_are_caught(tmp_path):
    trainer, _ = make_trainer(tmp_path)
    trainer.begin_rollout(0)
    weights = trainer.trained.parameters["down"].data.flatten()
    with trainer.merging_drafters(world := RanksInTurn()):
        pass

    def differs(change):
        before, kept = trainer.trained.fingerprint(), weights.clone()
        change(weights.view(torch.int32))
        found = trainer.trained.fingerprint() != before
        weights.copy_(kept)
        assert trainer.trained.fingerprint() == before
        return found

    def an_ulp_up_and_one_down(bits):
        bits[3] += 1
        bits[4] -= 1

    assert differs(lambda bits: bits[-1:].add_(1)) and differs(lambda bits: bits[:1].bitwise_xor_(-(2**31)))
    assert differs(an_ulp_up_and_one_down)
    world.allgather = lambda item: [item, (item[0], "another")]
    with pytest.raises(AssertionError, match="drafters differ after the merge"), trainer.merging_drafters(world):
        pass


@pytest.mark.parametrize("on_gpus", [False, True])
def test_the_merge_lasts_as_long_as_the_update_or_on_gpus_precedes_it(tmp_path, monkeypatch, on_gpus):
    for module in (spot_trainer, train):
        monkeypatch.setattr(module, "sums_on_gpus", lambda: on_gpus)
    trainer = filled_trainer(tmp_path)
    assert trainer.take_micro_step()
    done = []
    job: Any = SimpleNamespace(
        drafting=SimpleNamespace(spot=trainer), world=RanksInTurn(1), load_engine_drafter=lambda: done.append("served"),
        engine=SimpleNamespace(release_pages=lambda: done.append("pages released")),
    )  # fmt: skip
    with pytest.raises(ZeroDivisionError), train.merging_drafters(job, True):
        raise ZeroDivisionError
    assert "served" not in done
    trainer.begin_rollout(1)
    assert trainer.take_micro_step()
    done.clear()
    job.world = RanksInTurn(1)
    with train.merging_drafters(job, True):
        done.append("merged" if trainer.merge_report.fingerprint else "posted")
    assert done == (["pages released", "merged", "served"] if on_gpus else ["posted", "served"])
    assert trainer.merge_report.num_tokens == trainer.records[0].num_tokens
    with train.merging_drafters(job, False):
        pass
    assert done[-1] == "served" and done.count("served") == 1, "a step that trains no drafter merges none"


def averaged_fc(trainer):
    return trainer.trained.averaged_weights()["fc"]


def train_and_merge(trainer, step):
    trainer.begin_rollout(step)
    assert trainer.take_micro_step()
    trainer.end_rollout()
    merge([trainer])
    return trainer.trained.drafter.state_dict()["fc"].clone()


@pytest.mark.parametrize("span", [1, 3])
def test_what_is_served_is_the_mean_over_the_last_merges(tmp_path, span):
    trainer = filled_trainer(tmp_path, average_merges=span)
    weights = [train_and_merge(trainer, step) for step in range(4)]
    served = averaged_fc(trainer).clone()
    mean = (weights[0] + weights[1] + weights[2]) / 3
    torch.testing.assert_close(served, weights[3] if span == 1 else mean + (weights[3] - mean) / 3)
    has_mean = [
        "its average" in trainer.memory_table(),
        any(n.endswith(".trained") for n in trainer.trained.host_state_copy()),
    ]
    assert has_mean == [span > 1] * 2, "without a mean nothing more is held"
    trainer.begin_rollout(4)
    merge([trainer])
    assert torch.equal(averaged_fc(trainer), served), "a step in which nobody trained is no merge"


def test_a_warm_drafters_own_weights_are_the_first_of_the_mean(tmp_path):
    trainer = filled_trainer(tmp_path, average_merges=3)
    warm = Eagle(embedded_decoder().shape, 7, torch.float32, CPU).state_dict()
    trainer.trained.copy_weights_from({f"{name}.weight": tensor for name, tensor in warm.items()})
    assert torch.equal(averaged_fc(trainer), warm["fc"])
    after = train_and_merge(trainer, 0)
    torch.testing.assert_close(averaged_fc(trainer), (warm["fc"] + after) / 2, atol=1e-6, rtol=1e-5)


def test_a_mean_goes_on_where_it_was_saved(tmp_path):
    trainer = filled_trainer(tmp_path, average_merges=3)
    for step in range(2):
        train_and_merge(trainer, step)
    state = trainer.trained.host_state_copy()
    assert torch.equal(state["fc.weight"], averaged_fc(trainer)), "what is served is the file's drafter"
    again, old = (
        SpotTrainer(embedded_decoder(), trainer._cache, trainer._settings, seed=0, rank=0, average_merges=3)
        for _ in range(2)
    )
    again.trained.load_state(state)
    assert (again.trained.fingerprint(), again.trained.num_steps) == (trainer.trained.fingerprint(), 2)
    with pytest.raises(ValueError, match=r"'fc\.weight': \[2, 2\], this model needs \[128, 256\]"):
        again.trained.load_state({**state, "fc.weight": torch.zeros(2, 2)})
    for one in (trainer, again):
        one._rates.extend([1e9] * 6)  # micro-steps of one size
        train_and_merge(one, 2)
    assert torch.equal(averaged_fc(again), averaged_fc(trainer))

    # continues with a run without a mean
    is_new = {name: name.endswith(".trained") or name == "num_averaged" for name in state}
    old.trained.load_state({name: tensor for name, tensor in state.items() if not is_new[name]})
    assert torch.equal(averaged_fc(old), state["fc.weight"])
    assert torch.equal(old.trained.drafter.state_dict()["fc"], state["fc.weight"])
    after = train_and_merge(old, 2)
    torch.testing.assert_close(averaged_fc(old), (state["fc.weight"] + after) / 2, atol=1e-6, rtol=1e-5)


def test_the_update_is_adam():
    """Three updates against torch's Adam on the same gradients."""
    decoder = embedded_decoder()
    trainer = SpotTrainer(decoder, None, DrafterSection(learning_rate=1e-3), seed=0, rank=0)
    twin = Eagle(decoder.shape, 0, torch.float32, CPU)
    optimizer = torch.optim.Adam(twin.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    for i in range(3):
        batch = pack_excerpts([whole_document_excerpt(random_document(40, 5, i))], CPU)
        for drafter in (trainer.trained.drafter, twin):
            drafter_loss(drafter, batch, decoder.embedding, decoder.head, WEIGHTS).backward()
        trainer.trained._take_adam_step()
        optimizer.step()
        optimizer.zero_grad()
    for mine, reference in zip(trainer.trained.drafter.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-6, rtol=1e-5)


def test_the_accept_length_is_the_same_whichever_depths_were_chosen():
    source, chance = random.Random(0), (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)

    def accepted(reach):
        return next((j for j in range(reach) if source.random() > chance[j]), reach)

    def judged(depths):
        counts = DraftCounts()
        for depth in depths:
            counts.add(depth, [accepted(depth) for _ in range(64)])
        return counts

    true = 1 + 0.9 + 0.9 * 0.8 + 0.9 * 0.8 * 0.7 + 0.9 * 0.8 * 0.7 * 0.6
    for depths in ([4] * 300, [8] * 300, [2] * 500 + [4] * 150, [2, 8] * 200):
        assert judged(depths).accept_length == pytest.approx(true, abs=0.05), depths
    assert judged([2] * 300).accept_length > true, "beyond what was drafted the last chance is taken"
    few, none = (DraftCounts([90.0, 60.0, n, n], [60.0, 40.0, 0.0, 0.0]) for n in (1.0, 0.0))
    assert none.accept_length == pytest.approx(sum((2 / 3) ** i for i in range(5)))
    assert few.accept_length == pytest.approx(none.accept_length, rel=0.1), "a single draft tells little"
    assert DraftCounts().accept_length == 1.0


def test_counts_of_drafts_are_summed_and_read_from_a_line_of_the_log():
    one, other = DraftCounts([8.0, 4.0, 2.0, 1.0], [4.0, 2.0, 1.0, 0.0]), DraftCounts([2.0, 0, 0, 0], [1.0, 0, 0, 0])
    assert DraftCounts.from_metrics(one.to_summable_metrics()) == DraftCounts.total([one])
    assert DraftCounts.from_metrics({}) == DraftCounts()
    assert (
        one.to_summable_metrics()["drafter/own_verified/1"] == 8.0
        and one.to_summable_metrics()["drafter/own_accepted/3"] == 1.0
    )
    both = DraftCounts.total([one, other])
    assert (both.reached[:5], both.accepted[:5]) == ([10, 4, 2, 1, 0], [5, 2, 1, 0, 0])
    assert both.accept_length == pytest.approx(1 + 0.5 + 0.25 + 0.125 + 0.125 * 2 * 0.5 / (1 + 2))
