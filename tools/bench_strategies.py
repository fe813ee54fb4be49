"""Tokens per second of a job's rollouts by batch size: plain, each strategy alone, and all of them (adaptive).

    python tools/bench_strategies.py jobs/tiny.toml --batches 1,8,32 [section.key=value ...]

With ``--sequences-per-row 1`` all sequences start together, so that the batch shrinks to one.

One rank. Each way has an engine that has learned on other prompts, and its part of rollout.kv_bytes. In each repetition
all answer the same new prompts in turn; a ratio is the median of those within a repetition.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import numpy as np

from tlt_hpc.common.records import Request, SampleKey, Stream
from tlt_hpc.config import UserError, load_config
from tlt_hpc.data.prompts import PromptSource
from tlt_hpc.models.drafter_file import serving_drafter
from tlt_hpc.mpi.world import World
from tlt_hpc.plan.inputs import Assets, read_assets_once
from tlt_hpc.plan.plan_options import at_least_one, at_least_one_each
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.strategy import OFF
from tlt_hpc.session import Session, load_folder, open_session, read_initial_drafter
from tlt_hpc.studies.compare import num_mismatched

SEQUENCES_PER_ROW, LEAST_SEQUENCES = 4, 16
"""By default so many that the end of the rollout, with few left, does not decide the rate."""
FIRST_STEP = 1_000_000
"""Of the draws, after those of any run."""


def requests_of(prompts: PromptSource, step: int, size: int) -> list[Request]:
    drawn = islice(chain.from_iterable(prompts.batch(i) for i in count(step)), size)
    return [Request(SampleKey(0, Stream.EVALUATION, step, i, 0), prompt.tokens) for i, prompt in enumerate(drawn)]


def generate(engine: RolloutEngine, requests: list[Request]) -> tuple[float, dict[SampleKey, np.ndarray]]:
    """Seconds, and the responses."""
    start = time.perf_counter()
    engine.submit(requests)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start, {r.key: r.response_tokens for r in engine.collect()}


def measure(session: Session, assets: Assets, batch: int, size: int, repeats: int) -> None:
    """Print a line for each way at one batch size."""
    others, settings = requests_of(assets.prompts, FIRST_STEP, size), session.settings()
    weights = None
    if any(strategy.has_drafter for strategy in settings.strategies):
        weights = read_initial_drafter(session.config, session.decoder.shape, session.world.node_group)
        if weights is None:
            raise UserError("the job has no drafter to measure: give drafter.init = PATH, or speculation.mode = ngram")
    engines, seconds, differ = dict[str, RolloutEngine](), dict[str, list[float]](), Counter[str]()
    ways = {"off": (OFF,), **{s.name: (s,) for s in settings.strategies if s != OFF}, "adaptive": settings.strategies}
    for way, strategies in ways.items():
        drafter = serving_drafter(weights, session.decoder) if weights else None
        own = replace(settings, max_live=batch, strategies=strategies, kv_bytes=settings.kv_bytes // len(ways))
        engine = session.make_engine(own, drafter, drafter_is_trained=drafter is not None)
        engines[way], seconds[way] = engine, []
        session.calibrate(engine, others)
        generate(engine, others)
        engine.take_counts()
    for number in range(repeats):
        requests = requests_of(assets.prompts, FIRST_STEP * (number + 2), size)
        reference = None
        for way, engine in engines.items():
            taken, texts = generate(engine, requests)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--batches", type=at_least_one_each, default=[1, 8, 32])
    parser.add_argument("--repeats", type=at_least_one, default=5)
    parser.add_argument("--sequences-per-row", type=at_least_one)
    given = parser.parse_intermixed_args()
    config, world = load_config(given.config, given.overrides), World.connect()
    assets = read_assets_once(config, 1, world.node_group)
    with closing(open_session(config, world, assets)) as session:
        load_folder(session)
        for batch in given.batches:
            usual = max(LEAST_SEQUENCES, SEQUENCES_PER_ROW * batch)
            measure(session, assets, batch, batch * (given.sequences_per_row or 0) or usual, given.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(ending("bench_strategies", main))
