"""Requests of every kind, thrown at small engines in any order: no crash, no lost page, no byte over the budget, and
where a rule can be checked, the right text.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import CPU, EOS, NUM_TOKENS, embedded_decoder, embedded_tokenizer, gcd_requests, make_engine

from tlt_hpc.common.records import FinishReason, SampleKey, SamplingParams
from tlt_hpc.models.eagle import Eagle
from tlt_hpc.rollout.kv_cache import page_bytes
from tlt_hpc.rollout.strategy import OFF, Strategy

STRATEGIES = (
    OFF,
    Strategy("ngram", 3),
    Strategy("drafter", 1),
    Strategy("drafter", 4),
    Strategy("drafter", 3, 2, 5),
    Strategy("drafter", 2, 6, 9, 1.7),
)
LONGEST = 40


def random_params(source):
    most = source.choice([1, 2, source.randint(3, LONGEST), LONGEST])
    return SamplingParams(
        max_tokens=most,
        temperature=source.choice([0.0, 0.3, 1.0, 1.0, 1.0, 2.5]),
        top_k=source.choice([0, 0, 0, 1, 2, 7, 100]),
        top_p=source.choice([1.0, 1.0, 0.9, 0.3, 1e-6]),
        stop_strings=tuple(source.sample(["1", "12", ",", "8;", "think", "}", "zz", "</think>\\boxed"], k=1))
        if source.random() < 0.2
        else (),
    )


def random_request(source, number, prompts):
    tokens = source.choice(prompts)
    tokens = tokens[: source.randint(1, len(tokens))]
    key = SampleKey(source.randrange(2**40), 0, source.randrange(5), number, source.randrange(4))
    return replace(gcd_requests(1, 1)[0], key=key, prompt_tokens=tokens, params=random_params(source))


def random_engine(source):
    size = source.choice([4, 8, 64])
    drafter = Eagle(embedded_decoder().shape, source.randrange(99), torch.float32, CPU)
    least = -(-(16 + LONGEST + 34) // size)
    pages = least + source.randint(0, 3 * least)
    engine = make_engine(
        STRATEGIES,
        max_live=source.choice([1, 3, 12, 24]),
        max_new_tokens=LONGEST,
        drafter=drafter,
        drafter_is_trained=True,
        stored_texts=True,
        chooser="random",
        attention=source.choice(["pages", "pages", "paged-kernel"]),
        tie_guard=source.random() < 0.5,
        seed=source.randrange(99),
        page_size=size,
        kv_bytes=(pages + 1) * page_bytes(embedded_decoder().shape, size, torch.float32, 1),
        prefill_tokens=source.choice([2, 16, 4096]),
        detokenize=embedded_tokenizer().decode,
        eos_token_ids=(EOS, *source.sample(range(2, NUM_TOKENS), source.choice([0, 0, 1, 3]))),
    )
    return engine, pages


def check(engine, rollout, request, text):
    params, tokens = request.params, rollout.response_tokens.tolist()
    ends = set(engine.settings.eos_token_ids)
    assert len(tokens) <= params.max_tokens
    assert len(rollout.log_probs) == len(tokens)
    assert np.all(rollout.log_probs <= 1e-5)
    assert not ends & set(tokens[:-1]), "nothing follows an end token"
    shown = text(tokens)
    stopped = any(string in shown for string in params.stop_strings)
    if rollout.finish_reason == FinishReason.EOS:
        assert tokens[-1] in ends
    elif rollout.finish_reason == FinishReason.STOP:
        assert stopped
        assert not any(string in text(tokens[:-1]) for string in params.stop_strings)
    else:
        assert len(tokens) == params.max_tokens
        assert not stopped


def throw(num_requests, seed):
    """Submit, step, abort and generate ahead at random; every response is what its request asked for, and the text of
    one that comes again, where the tie guard is on.
    """
    source = random.Random(seed)
    prompts = [request.prompt_tokens for request in gcd_requests(12, 1, seed=seed)]
    engine, pages = random_engine(source)
    pool, text = engine._scheduler.pool, embedded_tokenizer().decode
    waiting, done, number, texts, known = {}, 0, 0, {}, {}
    while number < num_requests or engine.has_work:
        if number < num_requests and source.random() < 0.3:
            batch = [random_request(source, number + i, prompts) for i in range(source.randint(0, 8))]
            again = source.sample(sorted(known), min(len(known), 3))
            batch += [known[key][0] for key in again if key not in waiting]
            number += len(batch)
            waiting.update({request.key: request for request in batch})
            engine.set_stored_texts(texts)
            engine.submit(batch)
            ahead = [random_request(source, 10**6 + number, prompts) for _ in range(source.choice([0, 0, 3]))]
            engine.submit_ahead(ahead)
        engine.step()
        assert pool.num_used <= pages
        if waiting and source.random() < 0.02:
            done += engine.abort()
            finished = {rollout.key for rollout in engine.finished_rollouts}
            waiting = {key: request for key, request in waiting.items() if key in finished}
        for rollout in engine.take_finished_rollouts():
            request, tokens = waiting.pop(rollout.key), rollout.response_tokens
            check(engine, rollout, request, text)
            if engine.settings.tie_guard and rollout.key in known:
                assert tokens.tolist() == known[rollout.key][1]
            known[rollout.key] = request, tokens.tolist()
            texts[rollout.key] = np.where(source.random() < 0.5, tokens, np.roll(tokens, 2))
            done += 1
    engine.abort()
    engine.ahead.end_and_keep_texts()
    assert (pool.num_used, waiting, done) == (0, {}, number)
    assert all(0 < len(ahead) <= LONGEST for ahead in engine.ahead.take_finished_texts().values())


@pytest.mark.parametrize("seed", range(4))
def test_random_requests(seed):
    throw(40, seed)
