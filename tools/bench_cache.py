"""What the feature cache costs decoding, how fast it takes wide features, and which compression pays.

    python tools/bench_cache.py decode              # rollouts of the embedded model: no sink, synchronous, asynchronous
    python tools/bench_cache.py handover --hidden 3584 --layers 4
    python tools/bench_cache.py compression MODEL   # a model's folder, or embedded:tiny

Give every command one thread (OMP_NUM_THREADS=1), as a rank has it. Files go to --folder (default: a temporary one) and
are removed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import numpy as np
import torch
from numpy.typing import NDArray

from tlt_hpc.common.records import Stream
from tlt_hpc.config import EMBEDDED_MODEL
from tlt_hpc.models.documents import attend_documents
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.leaving import Leaving
from tlt_hpc.rollout.strategy import OFF, Strategy
from tlt_hpc.storage.feature_cache import FeatureCache, FeatureCacheReader, FeatureCacheWriter
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.studies.bench.subject import Limits, Subject, make_engine, open_subject, roll_out
from tlt_hpc.studies.bench.workload import Workload, built_in_prompts

CPU = torch.device("cpu")
SINKS = ("none", "synchronous", "asynchronous")
COMPRESSIONS = (
    "none",
    "lzf",
    "gzip",
    "zstd",
    "bitshuffle-lz4",
    "bitshuffle-zstd",
    "blosc2-lz4-byte",
    "blosc2-lz4-bit",
    "blosc2-zstd-byte",
    "blosc2-zstd-bit",
)
Arrays = tuple[NDArray[np.int32], int, NDArray[np.uint16]]


# -- what decoding pays ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """One rollout: seconds from submit to the last token, and to the closed file; what its threads computed."""

    decode_seconds: float
    close_seconds: float
    own_cpu_seconds: float
    capture_cpu_seconds: float
    """Of the decoding thread's, what copying features out of the pages and handing them over took."""
    other_cpu_seconds: float


class Capture:
    """The decoding thread's CPU seconds in the two methods of ``Leaving`` that a rollout calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        take, deliver = Leaving.take, Leaving.deliver
        with patch.object(Leaving, "take", self._timed(take)), patch.object(Leaving, "deliver", self._timed(deliver)):
            yield

    def _timed(self, method: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object, **named: object) -> None:
            start = time.thread_time()
            method(*arguments, **named)
            self.seconds += time.thread_time() - start

        return call


def measure_decode(options: argparse.Namespace) -> None:
    """Interleaved rollouts with each sink; medians, and medians of the ratios within a repetition."""
    subject, workload = open_model(EMBEDDED_MODEL, options.max_new_tokens)
    engine = open_engine(subject, workload, options.max_live, [Strategy("drafter", 4)])
    costs: dict[str, list[Cost]] = {sink: [] for sink in SINKS}
    for repetition in range(options.repeats + 1):
        for sink in SINKS[repetition % 3 :] + SINKS[: repetition % 3]:
            cost = cost_of(engine, workload, sink, options, repetition)
            if repetition:  # the first warms up
                costs[sink].append(cost)
    print("| sink | decode s | over none | decoding thread's CPU s | over none | capture | other CPU s | end ms |")
    print("|---|---|---|---|---|---|---|---|")
    for sink in SINKS:
        print(decode_row(sink, costs))


def cost_of(engine: RolloutEngine, workload: Workload, sink: str, options: argparse.Namespace, repetition: int) -> Cost:
    with place(options.folder) as folder:
        cache = FeatureCache(RunFolder(folder), 0, 1, engine.decoder.shape.hidden_size, 1 << 34)
        writer = cache.begin_step(0, 0)

        def wait_for_disk(*document: object) -> None:
            writer.append(*document)  # type: ignore[arg-type]
            writer.flush()

        engine.feature_sink = {"none": None, "synchronous": wait_for_disk, "asynchronous": writer.append}[sink]
        requests = workload.requests(options.responses, repetition, Stream.EVALUATION)
        capture, own, process = Capture(), time.thread_time(), time.process_time()
        with capture.timed():
            run = roll_out(engine, requests)
        own, process = time.thread_time() - own, time.process_time() - process
        start = time.perf_counter()
        cache.end_step()
        return Cost(run.seconds, time.perf_counter() - start, own, capture.seconds, process - own)


def decode_row(sink: str, costs: dict[str, list[Cost]]) -> str:
    mine, plain = costs[sink], costs["none"]

    def median(value: Callable[[Cost], float]) -> float:
        return statistics.median(map(value, mine))

    def over(value: Callable[[Cost], float]) -> str:
        ratio = statistics.median(value(a) / value(b) for a, b in zip(mine, plain, strict=True))
        return f"{100 * (ratio - 1):+.1f} %"

    cells = [
        f"{median(lambda cost: cost.decode_seconds):.2f}",
        over(lambda cost: cost.decode_seconds),
        f"{median(lambda cost: cost.own_cpu_seconds):.2f}",
        over(lambda cost: cost.own_cpu_seconds),
        f"{100 * median(lambda cost: cost.capture_cpu_seconds / cost.own_cpu_seconds):.2f} %",
        f"{median(lambda cost: cost.other_cpu_seconds):.3f}",
        f"{1e3 * median(lambda cost: cost.close_seconds):.1f}",
    ]
    return f"| {sink} | {' | '.join(cells)} |"


# -- wide features -----------------------------------------------------------------------------------------------------


def measure_handover(options: argparse.Namespace) -> None:
    """Synthetic documents as fast as the thread takes them: what the caller pays, what reaches the disk."""
    features = np.random.default_rng(0).integers(0, 2**16, (options.tokens - 1, options.layers, options.hidden))
    document = (np.zeros(options.tokens, np.int32), 1, features.astype(np.uint16))
    num_bytes = document[2].nbytes
    print("| compression | MB a document | MB/s | caller ms a document | waits | waited s | read of 2,048 rows ms |")
    print("|---|---|---|---|---|---|---|")
    for compression in options.compressions:
        rows = [hand_over(document, options, compression) for _ in range(options.repeats)]
        rate, caller, waits, waited, read = (statistics.median(column) for column in zip(*rows, strict=True))
        print(
            f"| {compression} | {num_bytes / 1e6:.1f} | {rate:.0f} | {1e3 * caller:.2f} | {waits:.0f} | {waited:.2f} | "
            f"{1e3 * read:.1f} |",
            flush=True,
        )


def hand_over(document: Arrays, options: argparse.Namespace, compression: str) -> tuple[float, ...]:
    """MB/s, seconds of the caller a document without waits, waits, seconds of them, the longest read meanwhile."""
    with place(options.folder) as folder:
        writer = FeatureCacheWriter(folder / "a.h5", options.layers, options.hidden, 0, 0, compression=compression)
        start, spent, longest = time.perf_counter(), 0.0, 0.0
        for number in range(options.documents):
            before = time.perf_counter()
            writer.append(*document)
            spent += time.perf_counter() - before
            if number % 8 == 4:
                before = time.perf_counter()
                writer.documents().read(number // 4, 0, 2048)
                longest = max(longest, time.perf_counter() - before)
        waits, waited = writer.num_waits, writer.waited_seconds
        writer.close()
        seconds = time.perf_counter() - start
        rate = options.documents * document[2].nbytes / 1e6 / seconds
        return rate, (spent - waited) / options.documents, waits, waited, longest


# -- compression -------------------------------------------------------------------------------------------------------


def measure_compression(options: argparse.Namespace) -> None:
    """Real features of a model's own responses through each compression: ratio, and CPU-bound rates."""
    documents = real_documents(options)
    num_bytes = sum(features.nbytes for _, _, features in documents)
    repeats = max(1, round(options.megabytes * 1e6 / num_bytes))
    print(f"{len(documents)} documents, {num_bytes / 1e6:.1f} MB of features, {repeats} times over\n")
    print("| compression | ratio | write MB/s | read MB/s |")
    print("|---|---|---|---|")
    for compression in COMPRESSIONS:
        rows = [through_file(documents * repeats, options.folder, compression) for _ in range(options.repeats)]
        ratio, written, read = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {compression} | {ratio:.2f} | {written:.0f} | {read:.0f} |", flush=True)


def through_file(documents: list[Arrays], folder: Path | None, compression: str) -> tuple[float, float, float]:
    """Ratio of the file to its features, MB/s of the process's CPU writing them, and reading them back."""
    layers, hidden = documents[0][2].shape[1:]
    num_bytes = sum(features.nbytes for _, _, features in documents)
    with place(folder) as at:
        start = time.process_time()
        writer = FeatureCacheWriter(at / "a.h5", layers, hidden, 0, 0, compression=compression)
        for number, (tokens, prompt_length, features) in enumerate(documents):
            tokens = tokens.copy()
            tokens[0] = number  # each with a prompt of its own
            writer.append(tokens, prompt_length, features)
        writer.close()
        written = time.process_time()
        size = (at / "a.h5").stat().st_size
        with FeatureCacheReader(at / "a.h5") as reader:
            for index in range(len(reader)):
                reader.read(index)
        read = time.process_time()
    return num_bytes / size, num_bytes / 1e6 / (written - start), num_bytes / 1e6 / (read - written)


def real_documents(options: argparse.Namespace) -> list[Arrays]:
    """Responses of the model with its last hidden states, in bfloat16."""
    subject, workload = open_model(options.model, options.max_new_tokens)
    engine = open_engine(subject, workload, options.max_live, [OFF])
    run = roll_out(engine, workload.requests(options.responses, 0, Stream.EVALUATION))
    documents = []
    for rollout in run.rollouts:
        tokens = np.concatenate([rollout.prompt_tokens, rollout.response_tokens]).astype(np.int32)
        fed = torch.from_numpy(tokens[:-1]).long()
        attend = attend_documents(None)
        hidden = subject.decoder.hidden(fed, torch.arange(len(fed)), attend).unsqueeze(1)
        bits = hidden.to(torch.bfloat16).view(torch.uint16).numpy()
        documents.append((tokens, len(rollout.prompt_tokens), bits))
    return documents


# -- common ----------------------------------------------------------------------------------------------------------


def open_model(model: str, max_new_tokens: int) -> tuple[Subject, Workload]:
    """A model and what to ask it.

    Raises:
        ValueError: no such model.
    """
    subject = open_subject(model, None, "float32", CPU)
    prompts = None if model == EMBEDDED_MODEL else built_in_prompts(subject.tokenizer)
    return subject, Workload(prompts, subject.tokenizer, "own", max_new_tokens, 1.0, seed=0)


def open_engine(subject: Subject, workload: Workload, max_live: int, strategies: list[Strategy]) -> RolloutEngine:
    limits = Limits(max_live, workload.max_prompt_tokens, workload.max_new_tokens)
    return make_engine(subject, limits, 1.0, strategies, workload.requests(4, 0, Stream.CALIBRATION))


@contextmanager
def place(folder: Path | None) -> Iterator[Path]:
    """A folder that is removed afterwards."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as path:
        yield Path(path)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    decode = commands.add_parser("decode", help="what a rollout of the embedded model pays")
    decode.set_defaults(run=measure_decode, max_new_tokens=480)
    decode.add_argument("--responses", type=int, default=128)
    handover = commands.add_parser("handover", help="synthetic documents with wide features")
    handover.set_defaults(run=measure_handover)
    handover.add_argument("--hidden", type=int, default=3584)
    handover.add_argument("--layers", type=int, default=1)
    handover.add_argument("--tokens", type=int, default=2048, help="of a document")
    handover.add_argument("--documents", type=int, default=64)
    handover.add_argument("--compressions", type=lambda text: text.split(","), default=["none"])
    compression = commands.add_parser("compression", help="each compression on real features")
    compression.set_defaults(run=measure_compression)
    compression.add_argument("model", metavar="MODEL", help=f"a Hugging Face folder, or {EMBEDDED_MODEL}")
    compression.add_argument("--responses", type=int, default=64)
    compression.add_argument("--max-new-tokens", type=int, default=128)
    compression.add_argument("--megabytes", type=float, default=64.0, help="of features through each; repeated to that")
    for command in (decode, compression):
        command.add_argument("--max-live", type=int, default=32)
    for command in (decode, handover, compression):
        command.add_argument("--repeats", type=int, default=5)
        command.add_argument("--folder", type=Path, help="where the files are written meanwhile")
    return parser


def main() -> int:
    options = make_parser().parse_args()
    try:
        options.run(options)
    except ValueError as error:
        print(f"bench_cache: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(ending("bench_cache", main))
