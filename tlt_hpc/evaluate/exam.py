"""What a policy is evaluated on: the data sets, all requests to their prompts, and the judge of the answers."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from tlt_hpc.common.records import Prompt, Request, SampleKey, SamplingParams, Stream
from tlt_hpc.config import Config, ConfigError
from tlt_hpc.data.evaluation_sets import EvaluationSet, longest_response
from tlt_hpc.mpi.world import World
from tlt_hpc.rewards.scorer import Judge


@dataclass(frozen=True)
class Wanted:
    """One prompt and the requests for it: sample 0 is the greedy answer, those by sampling count from 1."""

    of_set: EvaluationSet
    prompt: Prompt
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Exam:
    """The data sets, requests and judge of an evaluation, the same on all ranks and at each evaluation of a run."""

    sets: tuple[EvaluationSet, ...]
    wanted: list[Wanted]
    judge: Judge

    def missing(self, done: Container[SampleKey]) -> list[tuple[Prompt, Request]]:
        """The requests that have no response yet, by prompt."""
        return [(each.prompt, r) for each in self.wanted for r in each.requests if r.key not in done]


def open_exam(config: Config, sets: tuple[EvaluationSet, ...], judge: Judge, world: World) -> Exam:
    """The exam of these data sets; collective.

    Raises:
        ConfigError: on all ranks, where the data sets are not the same on all nodes.
    """
    seen = world.allgather((world.hostname, {each.name: each.prompts_digest() for each in sets}))
    for rank, (hostname, marks) in enumerate(seen):
        for name, mark in marks.items():
            if mark != seen[0][1].get(name):
                raise ConfigError(
                    f"evaluation.sources: rank {rank} on {hostname} reads another {name!r} than rank 0 on "
                    f"{seen[0][0]}; give all nodes the same files"
                )
    return Exam(sets, wanted_responses(config, sets), judge)


def wanted_responses(config: Config, sets: Sequence[EvaluationSet]) -> list[Wanted]:
    """All requests, by prompt, in the order of the sets and their rows.

    Their keys do not depend on the policy's step: every step is judged on the same noise.
    """
    sampled = sampling_params(config)
    params = [replace(sampled, temperature=0.0, top_p=1.0), *[sampled] * config.evaluation.samples]

    def key(each: EvaluationSet, row: int, sample: int) -> SampleKey:
        return SampleKey(config.evaluation.seed, Stream.EVALUATION, each.number, row, sample)

    return [
        Wanted(each, prompt, tuple(Request(key(each, row, i), prompt.tokens, own) for i, own in enumerate(params)))
        for each in sets
        for row, prompt in zip(each.rows, each.prompts, strict=True)
    ]


def sampling_params(config: Config) -> SamplingParams:
    """The parameters of answers by sampling: the evaluation's temperature and nucleus, the rollout's ends."""
    return SamplingParams(
        max_tokens=longest_response(config),
        temperature=config.evaluation.temperature,
        top_p=config.evaluation.top_p,
        stop_strings=config.rollout.stop_strings,
    )
