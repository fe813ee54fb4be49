"""Which responses an evaluation wants, and what each is called: pure functions of the data sets and settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tlt_hpc.common.records import Prompt, Request, SampleKey, SamplingParams, Stream
from tlt_hpc.config import Config
from tlt_hpc.data.evaluation_sets import EvaluationSets, longest_response


@dataclass(frozen=True)
class Wanted:
    """One prompt and the requests for it: sample 0 is the greedy answer, those by sampling count from 1."""

    set_index: int
    prompt: Prompt
    requests: tuple[Request, ...]


def wanted_responses(config: Config, sets: EvaluationSets) -> list[Wanted]:
    """All requests, by prompt, in the order of the sets and their rows."""
    return [
        Wanted(index, prompt, _requests(config, each.number, row, prompt))
        for index, each in enumerate(sets.sets)
        for row, prompt in zip(each.rows, each.prompts, strict=True)
    ]


def _requests(config: Config, step: int, row: int, prompt: Prompt) -> tuple[Request, ...]:
    params = {True: greedy_params(config), False: sampling_params(config)}
    return tuple(Request(key, prompt.tokens, params[key.sample == 0]) for key in _keys(config, step, row))


def _keys(config: Config, step: int, row: int) -> Iterator[SampleKey]:
    """Keys of a stream of their own, which say nothing of the policy's step: every step is judged on the same noise."""
    evaluation = config.evaluation
    for sample in range(evaluation.samples + 1):
        yield SampleKey(evaluation.seed, Stream.EVALUATION, step, row, sample)


def sampling_params(config: Config) -> SamplingParams:
    """Of the answers by sampling: the evaluation's temperature and nucleus, the rollout's ends."""
    return SamplingParams(
        max_tokens=longest_response(config),
        temperature=config.evaluation.temperature,
        top_p=config.evaluation.top_p,
        stop_strings=config.rollout.stop_strings,
    )


def greedy_params(config: Config) -> SamplingParams:
    """Of the greedy answers."""
    return SamplingParams(longest_response(config), temperature=0.0, stop_strings=config.rollout.stop_strings)
