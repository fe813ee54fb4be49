"""What it costs to decode with a replica of ranks instead of whole models: the same rollout both ways, in turn.

    python tools/bench_replica.py --ranks 2 --pairs 5

Starts its ranks with mpiexec. Of every pair both rollouts have the same requests and text, which is checked; a
replica's ranks generate all of it together, ranks with whole models half of it each. Prints the medians.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import numpy as np
import torch

from tlt_hpc.cluster.local import find_mpiexec
from tlt_hpc.common.records import Request, SampleKey, SamplingParams, Stream
from tlt_hpc.config import EMBEDDED_MODEL
from tlt_hpc.data.gcd import draw_from_split
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.folder import find_model, folder_weights, load_tokenizer
from tlt_hpc.models.shape import read_shape
from tlt_hpc.models.sharding import WHOLE, Sharding
from tlt_hpc.mpi.replica import Replica
from tlt_hpc.mpi.world import World
from tlt_hpc.rl.distributed import join_process_group, leave_process_group, replica_sum
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.settings import EngineSettings

_RANK = "TLT_BENCH_REPLICA_RANK"
_MOST_TOKENS = 200


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="of the replica, and of whole models")
    parser.add_argument("--prompts", type=int, default=16, help="each with four samples")
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    if _RANK in os.environ:
        measure(arguments.ranks, arguments.prompts, arguments.pairs)
        return
    environment = {**os.environ, _RANK: "1", "TLT_RANKS": str(arguments.ranks)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    ranks = [find_mpiexec(), "-n", str(arguments.ranks), sys.executable, "-m", "mpi4py", *sys.argv]
    sys.exit(subprocess.run(ranks, env=environment, check=False).returncode)


def measure(num_ranks: int, num_prompts: int, num_pairs: int) -> None:
    """All pairs, on this rank."""
    world = World.connect()
    join_process_group(world, "cpu")
    replica = Replica(world, num_ranks)
    split = make_engine(Sharding(replica.index, replica.size, replica_sum(world, num_ranks)), replica)
    whole = make_engine(WHOLE, None)
    seconds: dict[str, list[float]] = {"whole": [], "split": []}
    for pair in range(-1, num_pairs):  # the first warms up
        requests = requests_of(num_prompts, pair + 1)
        own = [request for request in requests if request.key.draw % world.size == world.rank]
        texts = {}
        for name, engine, given in (("whole", whole, own), ("split", split, requests)):
            world.barrier()
            start = time.perf_counter()
            engine.submit(given)
            while engine.has_work:
                engine.step()
            texts[name] = {r.key: r.response_tokens.tobytes() for r in engine.collect()}
            world.barrier()
            if pair >= 0:
                seconds[name].append(time.perf_counter() - start)
        assert all(texts["split"][key] == text for key, text in texts["whole"].items()), "texts differ"
    if world.rank == 0:
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        ratio = statistics.median(s / w for s, w in zip(seconds["split"], seconds["whole"], strict=True))
        print(
            f"{num_ranks} ranks, {4 * num_prompts} responses: whole models {medians['whole']:.2f} s, one replica "
            f"{medians['split']:.2f} s; {ratio:.2f} times as long (median of {num_pairs} pairs); weights of a rank "
            f"{whole.decoder.weight_bytes / 1e6:.2f} and {split.decoder.weight_bytes / 1e6:.2f} MB; texts equal"
        )
    leave_process_group()


def make_engine(sharding: Sharding, replica: Replica | None) -> RolloutEngine:
    """An engine of the embedded model without speculation, ready."""
    folder = find_model(EMBEDDED_MODEL)
    decoder = Decoder(read_shape(folder), torch.float32, torch.device("cpu"), sharding)
    settings = EngineSettings(
        params=SamplingParams(_MOST_TOKENS),
        num_tokens=20,
        eos_token_ids=(1,),
        max_live=64,
        max_prompt_tokens=16,
        tie_guard=True,
    )
    engine = RolloutEngine(decoder, settings, None, replica.agree if replica else None)
    engine.load_policy(folder_weights(Path(folder)), 0)
    engine.calibrate(requests_of(1, 10_000))
    return engine


def requests_of(num_prompts: int, step: int) -> list[Request]:
    """Four samples each of that many problems."""
    source, tokenizer = random.Random(f"replica/{step}"), load_tokenizer(find_model(EMBEDDED_MODEL))
    prompts = [tokenizer.encode(draw_from_split(source, "train").prompt).ids for _ in range(num_prompts)]
    return [
        Request(SampleKey(0, Stream.TRAIN, step, draw, sample), np.array(tokens, np.int32))
        for draw, tokens in enumerate(prompts)
        for sample in range(4)
    ]


if __name__ == "__main__":
    sys.exit(ending("bench_replica", main))
