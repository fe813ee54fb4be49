"""Which responses an evaluation wants, and what each is called: pure functions of the data sets and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tlt_hpc.common.records import Prompt, Request, SampleKey, SamplingParams, Stream
from tlt_hpc.config import Config
from tlt_hpc.data.evaluation_sets import EvaluationSet, longest_response


@dataclass(frozen=True)
class Wanted:
    """One prompt and the requests for it: sample 0 is the greedy answer, those by sampling count from 1."""

    of_set: EvaluationSet
    prompt: Prompt
    requests: tuple[Request, ...]


def wanted_responses(config: Config, sets: Sequence[EvaluationSet]) -> list[Wanted]:
    """All requests, by prompt, in the order of the sets and their rows."""
    return [
        Wanted(each, prompt, _requests(config, each.number, row, prompt))
        for each in sets
        for row, prompt in zip(each.rows, each.prompts, strict=True)
    ]


def _requests(config: Config, step: int, row: int, prompt: Prompt) -> tuple[Request, ...]:
    """Keys of a stream of their own, which say nothing of the policy's step: every step is judged on the same noise."""
    params = [greedy_params(config), *[sampling_params(config)] * config.evaluation.samples]
    keys = (SampleKey(config.evaluation.seed, Stream.EVALUATION, step, row, sample) for sample in range(len(params)))
    return tuple(Request(key, prompt.tokens, each) for key, each in zip(keys, params, strict=True))


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
