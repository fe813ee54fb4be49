"""Warm up the embedded default's drafter on the embedded model's own responses, before any reinforcement learning.

    python tools/make_tiny_drafter.py --output tlt_hpc/assets/tiny_drafter --log docs/tiny_drafter.md

Responses to problems of the ``supervised`` split, at temperature 1; the loss and the update are those of the spot
trainer. Seeded; about five minutes on one core.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tlt_hpc.config import EMBEDDED_MODEL, DrafterSection
from tlt_hpc.data.gcd import draw_from_split
from tlt_hpc.drafting.spot import SpotTrainer
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.folder import find_model, folder_weights, load_tokenizer
from tlt_hpc.models.shape import read_shape
from tlt_hpc.records import Request, SampleKey, SamplingParams, Stream
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.strategy import OFF, Strategy
from tlt_hpc.storage.feature_cache import FeatureCache
from tlt_hpc.storage.folder import RunFolder

CPU = torch.device("cpu")


def make_requests(num: int, step: int) -> list[Request]:
    """Requests for supervised problems, one response each."""
    tokenizer = load_tokenizer(find_model(EMBEDDED_MODEL))
    source = random.Random(f"drafter/{step}")
    prompts = [tokenizer.encode(draw_from_split(source, "supervised").prompt).ids for _ in range(num)]
    return [
        Request(SampleKey(0, Stream.TRAIN, step, draw, 0), np.array(prompt, dtype=np.int32))
        for draw, prompt in enumerate(prompts)
    ]


def make_engine(decoder: Decoder, strategy: Strategy, drafter: Drafter) -> RolloutEngine:
    """An engine of one strategy."""
    settings = EngineSettings(SamplingParams(512), 20, (1,), 64, 16, tie_guard=False, strategies=(strategy,))
    engine = RolloutEngine(decoder, settings, drafter)
    engine.drafter_ready = True
    return engine


def roll_out(engine: RolloutEngine, requests: list[Request]) -> float:
    """Generate; returns the accept length."""
    engine.submit(requests)
    while engine.has_work:
        engine.step()
    engine.collect()
    counts = engine.take_counts()
    return counts.num_tokens / counts.num_row_passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--responses", type=int, default=3000)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    folder = find_model(EMBEDDED_MODEL)
    decoder = Decoder(read_shape(folder), torch.float32, CPU)
    decoder.load(folder_weights(folder), 0)
    lines = [
        "# How the embedded drafter was warmed up",
        "",
        f"`python tools/make_tiny_drafter.py --output tlt_hpc/assets/tiny_drafter --log {arguments.log}"
        f" --steps {arguments.steps} --responses {arguments.responses} --learning-rate {arguments.learning_rate}`,"
        f" {time.strftime('%Y-%m-%d')}.",
        "",
        "Accept length: tokens per target pass and sequence on fresh problems, temperature 1, chains of 2 and 4.",
        "",
        "| updates | tokens seen | loss | chain of 2 | chain of 4 | seconds |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as place:
        cache = FeatureCache(RunFolder(Path(place)), 0, 1, decoder.shape.hidden_size, 1 << 34)
        settings = DrafterSection(micro_step_seconds=60.0, micro_step_tokens=2048)
        trainer = SpotTrainer(decoder, cache, settings, seed=0, rank=0)
        collector = make_engine(decoder, OFF, trainer.drafter)
        collector.feature_sink = cache.begin_step(0, 0).append
        roll_out(collector, make_requests(arguments.responses, 0))
        judges = [make_engine(decoder, Strategy("drafter", depth), trainer.drafter) for depth in (2, 4)]
        trainer.begin(0)
        seconds = 0.0
        for step in range(1, arguments.steps + 1):
            trainer.learning_rate = arguments.learning_rate * min(1.0, 2.5 * (1 - (step - 1) / arguments.steps))
            start = time.monotonic()
            trainer.micro_step()
            seconds += time.monotonic() - start
            if step % (arguments.steps // 6) == 0:
                accept = [roll_out(judge, make_requests(128, 1)) for judge in judges]
                seen = sum(record.num_tokens for record in trainer.records)
                loss = np.mean([record.loss for record in trainer.records[-20:]])
                lines.append(f"| {step} | {seen:,} | {loss:.3f} | {accept[0]:.2f} | {accept[1]:.2f} | {seconds:.0f} |")
                print(lines[-1], flush=True)
        trainer.end()
    weights = {name: w.half() for name, w in trainer.state().items() if name.endswith(".weight")}
    save_file(weights, arguments.output / "drafter.safetensors")
    arguments.log.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
