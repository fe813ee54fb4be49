"""Tokens per second of a job's rollouts by batch size: plain, with each strategy alone, and with all of them.

    OMP_NUM_THREADS=1 python tools/bench_strategies.py JOB [section.key=value ...]

One rank. Each way has an engine that has learned on other prompts, and its part of rollout.kv_bytes. In each repetition
all answer the same new prompts in turn. A ratio is the median of those of each turn.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from itertools import chain, count, islice
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import run_script

# isort: split
from bench_shape import requests_of, run_all

from tlt_hpc.common.errors import UserError
from tlt_hpc.common.records import Request, SampleKey, Stream
from tlt_hpc.plan.plan_options import parse_positive_integer, parse_positive_integers

SEQUENCES_PER_ROW, LEAST_SEQUENCES = 4, 16
"""By default so many that the end of the rollout, with few left, does not decide the rate."""
FIRST_STEP = 1_000_000
"""Of the draws, after those of any run."""


def bench_strategies(options: argparse.Namespace) -> None:
    """Print the rates of a job's rollouts, by batch size."""
    from tlt_hpc.config import load_config
    from tlt_hpc.mpi.world import World
    from tlt_hpc.plan.inputs import read_and_broadcast_assets
    from tlt_hpc.run.session import load_model_weights, open_session

    config, world = load_config(options.config, options.overrides), World.connect()
    assets = read_and_broadcast_assets(config, 1, world.node_group)
    with closing(open_session(config, world, assets)) as session:
        load_model_weights(session)
        for batch in options.batches:
            usual = max(LEAST_SEQUENCES, SEQUENCES_PER_ROW * batch)
            size = batch * (options.sequences_per_row or 0) or usual

            def draw(step: int, size: int = size) -> list[Request]:
                prompts = chain.from_iterable(assets.prompts.draw_step_prompts(i) for i in count(step))
                return requests_of((prompt.tokens for prompt in islice(prompts, size)), step, Stream.EVALUATION)

            compare_strategies(session, batch, [draw(FIRST_STEP * (turn + 1)) for turn in range(options.repeats + 1)])


def compare_strategies(session: Any, batch: int, turns: list[list[Request]]) -> None:
    """Print a line for each way at one batch size; the first turn is for learning."""
    from tlt_hpc.models.drafter_file import inference_drafter
    from tlt_hpc.rollout.strategy import OFF
    from tlt_hpc.run.job import read_initial_drafter
    from tlt_hpc.studies.compare import num_mismatched

    settings, weights = session.engine_settings(), None
    if any(strategy.has_drafter for strategy in settings.strategies):
        weights = read_initial_drafter(session.config, session.decoder.shape, session.world.node_group)
        if weights is None:
            raise UserError("the job has no drafter to measure: give drafter.init = PATH, or speculation.mode = ngram")
    ways = {"off": (OFF,), **{s.name: (s,) for s in settings.strategies if s != OFF}, "adaptive": settings.strategies}
    engines, differ = dict[str, Any](), Counter[str]()
    for way, strategies in ways.items():
        drafter = inference_drafter(weights, session.decoder) if weights else None
        own = replace(settings, max_live=batch, strategies=strategies, kv_bytes=settings.kv_bytes // len(ways))
        engine = engines[way] = session.make_engine(own, drafter, drafter_is_trained=drafter is not None)
        session.calibrate(engine, turns[0])
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn, requests in enumerate(turns):
        reference: dict[SampleKey, Any] = {}
        for way, engine in engines.items():
            start = time.perf_counter()
            engine.submit(requests)
            run_all(engine)
            taken = time.perf_counter() - start
            texts = {response.key: response.response_tokens for response in engine.take_finished_rollouts()}
            if not turn:
                engine.take_counts()
                continue
            reference = reference or texts
            differ[way] += num_mismatched(reference, texts)
            seconds[way].append(taken)
    best = min((way for way in ways if way != "adaptive"), key=lambda way: median(seconds[way]))
    for way, engine in engines.items():
        counts = engine.take_counts()
        ratio = median(a / b for a, b in zip(seconds[best], seconds[way], strict=True))
        print(
            f"batch {batch:3}  {way:12} {counts.num_tokens / sum(seconds[way]):9,.0f} tokens/s  {ratio:.3f} of "
            f"{best}  accept length {counts.num_tokens / counts.num_row_passes:.2f}  {differ[way]} tokens differ",
            flush=True,
        )


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--batches", type=parse_positive_integers, default=[1, 8, 32])
    parser.add_argument("--repeats", type=parse_positive_integer, default=5)
    parser.add_argument(
        "--sequences-per-row", type=parse_positive_integer, help="1: all start together, the batch shrinks"
    )
    bench_strategies(parser.parse_args())


if __name__ == "__main__":
    sys.exit(run_script("bench_strategies", main))
