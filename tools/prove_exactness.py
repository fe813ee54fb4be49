"""Generate the same responses in many ways and count those that differ from plain decoding.

Ways: strategies alone and switched at random, batch sizes, orders of submission, small pages with shared prompts,
preemption, chunked prefill, texts stored from other weights, generation ahead. None may differ.

    python tools/prove_exactness.py --tokens 1000000
    python tools/prove_exactness.py --tokens 1000000 --ways ahead   # of the ways, those with this in their names
    python tools/prove_exactness.py --tokens 200000 --device cuda   # a GPU's ways against the CPU's plain decoding
    python tools/prove_exactness.py --tokens 50000 --dtype bfloat16 # in batch-invariant mode, without the tie guard
    python tools/prove_exactness.py --tokens 100000 --family mistral # of a small random model of a family

In bfloat16 plain decoding runs on the same device; on a CPU the kernels' references in PyTorch do, which are slow.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import run_script

# isort: split
import numpy as np
import torch
from bench_shape import choose_device, run_all
from numpy.typing import NDArray

from tlt_hpc.common.records import Request, SampleKey, SamplingParams, Stream
from tlt_hpc.config import EMBEDDED_MODEL, UserError
from tlt_hpc.data.prompts import draw_from_split
from tlt_hpc.kernels.graphs import GraphPool
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.drafter_file import load_drafter
from tlt_hpc.models.eagle import Eagle
from tlt_hpc.models.folder import DTYPES, decoding_dtype, read_folder_weights
from tlt_hpc.models.shape import ModelShape, read_shape
from tlt_hpc.models.tokenizer import load_tokenizer, package_asset_folder
from tlt_hpc.models.weight_files import end_token_ids
from tlt_hpc.rollout.device_cache import AttentionKind
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.kv_cache import page_bytes
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.strategy import parse_strategy

Texts = dict[SampleKey, NDArray[np.int32]]
MOST_TOKENS, MOST_PROMPT = 512, 16
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Model:
    """A model's folder, and how many tokens it may sample; without a family it is the embedded one."""

    folder: Path
    num_tokens: int
    family: str = ""

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model."""
        return read_shape(self.folder)

    def drafter(self, decoder: Decoder) -> Drafter:
        """The embedded model's own; a random one for a random model, with which it agrees now and then."""
        if self.family:
            drafter = Eagle(decoder.shape, 0, decoder.dtype, decoder.device)
            drafter.requires_grad_(False)
            return drafter
        return load_drafter(EMBEDDED_MODEL, decoder, "the embedded drafter")


TINY = Model(package_asset_folder("tiny"), 20)


@dataclass(frozen=True)
class Way:
    """A way to generate: what may change the speed and must not change the text."""

    name: str
    strategies: tuple[str, ...] = ("off",)
    max_live: int = 32
    shuffled: bool = True
    page_size: int = 128
    num_pages: int = 0
    prefill_tokens: int = 4096
    chooser: Literal["goodput", "random"] = "goodput"
    attention: AttentionKind = "auto"
    ahead: float | None = None
    """Draft from texts of weights that differ by this share of their mean size, and generate some responses ahead."""


MIXED = ("off", "ngram-3", "drafter-2", "drafter-6", "drafter-4x2v8", "drafter-3x5v12a1.5")
WAYS = (
    Way("one row at a time", max_live=1, shuffled=False),
    Way("plain, 128 rows", max_live=128),
    Way("chains of 6", ("drafter-6",), 64),
    Way("trees", ("drafter-5x3v12",), 16, True),
    Way("trees and n-grams, small pages", ("drafter-4x2v8", "ngram-4"), 48, True, 8, chooser="random"),
    Way("all strategies, switched at random", MIXED, 24, True, 32, chooser="random"),
    Way("preempted, chunked prefill", MIXED, 64, True, 16, 60, 24, chooser="random"),
    Way("a GPU's rounds, run on the CPU", MIXED, 64, True, 32, chooser="random", attention="paged-kernel"),
    Way("ahead, chosen by speed", MIXED, 24, ahead=0.05),
    Way("ahead, switched at random", MIXED, 24, True, 32, chooser="random", ahead=0.05),
    Way("ahead, preempted, chunked prefill", MIXED, 64, True, 16, 60, 24, chooser="random", ahead=0.2),
    Way("ahead, a GPU's rounds, on the CPU", MIXED, 64, True, 32, 0, 64, "random", "paged-kernel", 0.1),
)


def requests(num_responses: int, model: Model = TINY) -> list[Request]:
    """Groups of eight responses to problems of the embedded task; of a family, to random prompts."""
    source, tokenizer = random.Random("exactness"), load_tokenizer(package_asset_folder("tiny"))
    made = []
    for draw in range(-(-num_responses // 8)):
        if model.family:
            ids = [source.randrange(3, model.num_tokens) for _ in range(source.randint(1, MOST_PROMPT))]
        else:
            ids = tokenizer.encode(draw_from_split(source, "train").prompt).ids
        tokens = np.array(ids, dtype=np.int32)
        made += [Request(SampleKey(1, Stream.TRAIN, 0, draw, sample), tokens) for sample in range(8)]
    return made


def make_engine(way: Way, device: torch.device, dtype: torch.dtype, model: Model) -> RolloutEngine:
    """An engine of a model and its drafter; in bfloat16 a batch-invariant one, without the tie guard."""
    half, shape = dtype == torch.bfloat16, model.shape
    dtype = dtype if half else decoding_dtype("float32", device, shape)
    decoder, drafter = Decoder(shape, dtype, device, is_invariant=half), Eagle(shape, 0, dtype, device)
    # a random model's responses are longer: the longest must fit alone
    num_pages = max(way.num_pages, (MOST_TOKENS + MOST_PROMPT) // way.page_size + 4) if way.num_pages else 0
    settings = EngineSettings(
        params=SamplingParams(MOST_TOKENS),
        num_tokens=model.num_tokens,
        eos_token_ids=end_token_ids(model.folder, shape),
        max_live=way.max_live,
        max_prompt_tokens=MOST_PROMPT,
        tie_guard=not half,
        kv_bytes=(num_pages + 1) * page_bytes(shape, way.page_size, dtype, 1) if num_pages else 0,
        page_size=way.page_size,
        prefill_tokens=way.prefill_tokens,
        strategies=tuple(map(parse_strategy, way.strategies)),
        stored_texts=way.ahead is not None,
        chooser=way.chooser,
        attention="paged-kernel" if half else way.attention,
    )
    engine = RolloutEngine(decoder, settings, drafter)
    engine.load_policy(read_folder_weights(model.folder), 0)
    engine.load_drafter(model.drafter(decoder).state_dict())
    return engine


def generate(
    way: Way, wanted: list[Request], device: torch.device, dtype: torch.dtype, model: Model = TINY
) -> tuple[dict[SampleKey, list[NDArray[np.int32]]], Any, float]:
    """The texts of each response, of which some are generated twice, what the engine counted, and seconds."""
    engine = make_engine(way, device, dtype, model)
    engine.calibrate([replace(r, key=replace(r.key, stream=Stream.CALIBRATION)) for r in wanted[:8]])
    ordered = list(wanted)
    if way.shuffled:
        random.Random(way.name).shuffle(ordered)
    stored = {} if way.ahead is None else texts_ahead(engine, ordered, way.ahead, model)
    engine.take_counts()
    start = time.perf_counter()
    ahead = {} if way.ahead is None else generate_ahead(engine, ordered, stored)
    engine.submit([] if way.ahead is not None else ordered)
    run_all(engine)
    seconds = time.perf_counter() - start
    counts = engine.take_counts()
    found = {rollout.key: [rollout.response_tokens] for rollout in engine.take_finished_rollouts()}
    for key, text in ahead.items():
        found[key].append(text)
    engine.close()
    return found, counts, seconds


def texts_ahead(engine: RolloutEngine, wanted: list[Request], change: float, model: Model) -> Texts:
    """Texts that most of the responses have under changed weights, some of them cut short."""
    source = torch.Generator().manual_seed(0)
    weights = dict(read_folder_weights(model.folder))
    moved = {n: w + change * w.abs().mean() * torch.randn(w.shape, generator=source) for n, w in weights.items()}
    engine.load_policy(moved.items(), 1)
    engine.submit_ahead(wanted)
    while len(engine.ahead.waiting) > len(wanted) // 10:
        engine.step()
    engine.abort()
    engine.ahead.end_and_keep_texts()
    engine.load_policy(weights.items(), 2)
    return engine.ahead.take_finished_texts()


def generate_ahead(engine: RolloutEngine, wanted: list[Request], stored: Texts) -> Texts:
    """Generate the responses in parts, and in each some of the next one's ahead; returns the texts generated ahead.

    At random, drafts come from the texts of other weights, from those generated ahead or from neither, and what is
    generated ahead is interrupted and continued.
    """
    source, complete, size = random.Random(len(wanted)), dict[SampleKey, Any](), 96
    for start in range(0, len(wanted), size):
        engine.set_stored_texts(source.choice([stored, {**stored, **complete}, {**stored, **complete}, {}]))
        engine.submit(wanted[start : start + size])
        following = [one for one in wanted[start + size : start + 2 * size] if one.key not in complete]
        engine.submit_ahead(source.sample(following, min(len(following), size // 2)))
        run_all(engine)
        while engine.has_ahead_work and source.random() < 0.98:
            if source.random() < 0.02:
                engine.abort()
            engine.step()
        engine.abort()
        if source.random() < 0.3:
            unfinished = {response.request.key for response in engine.ahead.waiting}
            engine.ahead.end_and_keep_texts()
            taken = engine.ahead.take_finished_texts()
            complete |= {key: text for key, text in taken.items() if key not in unfinished}
    return complete | engine.ahead.take_finished_texts()


def compare(
    wanted: list[Request], ways: list[Way], device: torch.device, dtype: torch.dtype, model: Model
) -> tuple[int, int]:
    """Every way, on a device, against plain decoding of 32 rows, in float32 on the CPU.

    Returns:
        tokens that were compared, and responses that differ.
    """
    on, num_tokens, num_different = CPU if dtype == torch.float32 else device, 0, 0
    plain, *_ = generate(Way("plain, 32 rows"), wanted, on, dtype, model)
    for way in ways:
        found, counts, seconds = generate(way, wanted, device, dtype, model)
        pairs = [(text, other) for key, (text,) in plain.items() for other in found[key]]
        compared, different = sum(len(b) for _, b in pairs), sum(not np.array_equal(a, b) for a, b in pairs)
        num_tokens, num_different = num_tokens + compared, num_different + different
        print(
            f"{way.name:40} {compared:8} tokens, accept {counts.num_tokens / counts.num_row_passes:.2f}, "
            f"guarded {counts.num_guarded:4}, preempted {counts.num_preempted:4}, {seconds:6.1f} s: "
            f"{different} responses differ",
            flush=True,
        )
    return num_tokens, num_different


def main() -> int:
    """Compare the texts; returns 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens to compare")
    parser.add_argument("--ways", default="", metavar="TEXT", help="only those with this text in their names")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the ways")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--family", help="of a random model (random_models.py); default: the embedded model")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    GraphPool.checks_inputs = True
    ways = [way for way in WAYS if arguments.ways in way.name]
    with tempfile.TemporaryDirectory() as folder:
        model, length = TINY, 42  # tokens of a response, on average
        if arguments.family:
            import random_models  # in a clone alone

            if arguments.family not in random_models.FAMILIES:
                raise UserError(f"--family {arguments.family}: take one of {', '.join(random_models.FAMILIES)}")
            model, length = Model(Path(folder), random_models.NUM_TOKENS, arguments.family), 140
            random_models.random_model(arguments.family).save_pretrained(folder)
        wanted = requests(max(8, arguments.tokens // len(ways) // length), model)
        num_tokens, wrong = compare(wanted, ways, choose_device(arguments.device), DTYPES[arguments.dtype], model)
    print(f"{num_tokens} tokens compared: {wrong or 'no'} responses differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run_script("prove_exactness", main))
