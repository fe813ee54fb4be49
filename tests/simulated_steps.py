"""What stands for the parts of a job's steps that compute, and what must hold of a job.

A policy is the number of its updates, a drafter that of its merges, and a rollout log one number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from simulated_processes import RUNNING, ScheduleError
from simulated_rollout import Scorer, generate, same

from tlt_hpc import train
from tlt_hpc.checkpoint import save
from tlt_hpc.checkpoint.save import list_checkpoints
from tlt_hpc.cli import rank_commands
from tlt_hpc.cluster import stopping
from tlt_hpc.look.metrics import K3, PROBS_DIFF, SCORE, TRAINED_TOKENS
from tlt_hpc.models.piece import own_tensor_pieces
from tlt_hpc.rl.ahead_generation import AheadGeneration
from tlt_hpc.run import replay, saving
from tlt_hpc.storage.folder import writing_atomically
from tlt_hpc.storage.step_lines import STEP

NUM_WEIGHTS = 12


class Policy:
    """Knows how many updates it has had."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.updates = self.optimizer_step_count = 0

    def state_shard(self) -> dict[str, Any]:
        weights = torch.full((NUM_WEIGHTS,), float(self.updates))
        return dict(own_tensor_pieces([("weights", weights)], self._rank, self._size))

    def load_state(
        self,
        read: Callable[[list[str]], Iterator[tuple[str, torch.Tensor]]],
        read_span: Callable[[str, int, int, tuple[int, ...]], torch.Tensor],
        steps: int,
    ) -> None:
        weights = dict(read(["weights"]))["weights"].tolist()
        if weights != [float(steps)] * NUM_WEIGHTS:
            raise ScheduleError(f"the checkpoint of step {steps} holds {weights}")
        self.updates = self.optimizer_step_count = steps

    def update(self, step: int) -> None:
        if self.updates != step:
            raise ScheduleError(f"step {step} updates a policy of {self.updates} updates")
        random = RUNNING[-1].random
        RUNNING[-1].sleep(random.random() * (150.0 if random.random() < 0.02 else 2.0))
        self.updates = self.optimizer_step_count = step + 1

    def gather_weights_sha256(self) -> str:
        return "0"


class Spot:
    """Stands for the drafter and its trainer: a drafter is the step that it was last merged in."""

    num_steps = 0
    merge_report = None
    memory_table = dict

    def __init__(self) -> None:
        self.records: list[int] = []
        self.merged = 0
        self.trained = self

    def live_state(self) -> dict[str, torch.Tensor]:
        return {"draft": torch.full((5,), float(self.merged))}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        values = set(state["draft"].tolist())
        if len(values) != 1:
            raise ScheduleError(f"a drafter's checkpoint holds {values}")
        self.merged = int(values.pop())

    def begin_rollout(self, step: int) -> None: ...

    def end_rollout(self) -> None:
        self.merged += 1


# -- what stands for the parts of a step that compute ---------------------------------------------------------------


def roll_out(job: Any, step: int, reporter: Any) -> Any:
    random = RUNNING[-1].random
    key = (job.start, step)
    use, requests = SimpleNamespace(trains=False, ahead=False, why=""), [random.randint(1, 4)] * random.randint(0, 2)
    ahead = AheadGeneration(job.engine, job.replica, job.pulse, [])
    roster = generate(RUNNING[-1], job, key, requests, Scorer(RUNNING[-1]), use, ahead)
    job.engine.abort()
    scorer = SimpleNamespace(judge_and_wait_for_rewards=lambda rollouts: np.zeros(0, np.float32))
    return SimpleNamespace(stopped=roster.has_stop_vote, idle_work=use, scorer=scorer, rollouts=[])


def write_step(path: Path, record: dict[str, int]) -> None:
    with writing_atomically(path) as part:
        part.write_text(json.dumps(record))


def read_ranks(job: Any, step: int) -> Any:
    """What all ranks' logs of a step say; None if one is missing."""
    paths = job.world.run_first_and_broadcast(lambda: job.folder.rollout_logs(step))
    own = job.world.run_on_all_ranks(
        lambda: [json.loads(path.read_text()) for path in paths[job.world.rank :: job.world.size]]
    )
    records = [record for records in job.world.allgather(own) for record in records]
    if {record["step"] for record in records} != {step} or len(records) < records[0]["ranks"]:
        return None
    return [], np.array([step], np.float32), 0


def line_of(step: int) -> dict[str, float]:
    return {STEP: step + 1, SCORE: float(step), TRAINED_TOKENS: 1, PROBS_DIFF: 0.0, K3: 0.0}


def repeat_update(config: Any, policy: Policy, rollouts: Any, rewards: Any) -> Any:
    policy.update(int(rewards[0]))
    return SimpleNamespace(stats=SimpleNamespace(num_tokens=1, mismatch=SimpleNamespace(rollout_probs_diff_mean=0.0)))


def update(config: Any, policy: Policy, rollouts: Any, scores: Any) -> Any:
    policy.update(policy.updates)
    return SimpleNamespace(trained=[], advantages=[])


# -- what must hold -------------------------------------------------------------------------------------------------


def resume(job: Any, shown: Callable[[int], None]) -> tuple[int, int]:
    """Of a start: all ranks begin with one step, the first that is not committed, from the newest checkpoint."""
    cluster = RUNNING[-1]
    there = list_checkpoints(job.folder.checkpoints)
    saved, step = saving.resume(job, shown)
    same(cluster, ("resumed", job.start), (saved, step, job.drafting and job.drafting.spot.merged))
    if job.world.rank == 0 and saved != (there[-1][0] if there else 0):
        raise ScheduleError(f"start {job.start} resumes from step {saved}, where {there[-1][1]} exists")
    if step != job.policy.updates:
        raise ScheduleError(f"start {job.start} begins step {step} with a policy of {job.policy.updates} updates")
    if step == cluster.adding:  # the process was killed between the rename of the lines and its next line of code
        cluster.committed = step
    if step != cluster.committed and not (job.world.stop_requested and step < cluster.committed):
        raise ScheduleError(f"start {job.start} begins with step {step}, where {cluster.committed} are committed")
    return saved, step


def add_line(path: Path, line: Any, confirm: Callable[[], None]) -> None:
    cluster = RUNNING[-1]
    cluster.adding = line[STEP]
    train_add_line(path, line, confirm)
    if line[STEP] != cluster.committed + 1:
        raise ScheduleError(f"step {line[STEP]} is committed after {cluster.committed}")
    cluster.committed = line[STEP]


def drop_lines(path: Path, step: int) -> list[int]:
    dropped = saving_drop_lines(path, step)
    if dropped:
        raise ScheduleError(f"the committed steps {dropped} are dropped")
    return dropped


def queue_again(environment: Any, folder: Path, progress: str) -> str:
    cluster = RUNNING[-1]
    start = environment["START"]
    cluster.queued.append(start)
    if cluster.queued.count(start) > 1:
        raise ScheduleError(f"start {start} asks to be queued again twice")
    said = stopping_queue_again(environment, folder, progress)
    if "and will resume" in said and cluster.slurm.state != "PENDING":
        raise ScheduleError(f"{said!r} where Slurm has the job {cluster.slurm.state}")
    return said


train_add_line, saving_drop_lines, stopping_queue_again = (
    train.add_line,
    saving.drop_lines,
    stopping.requeue_job_if_progress,
)


@contextmanager
def parts() -> Iterator[None]:
    """Inside, steps compute nothing, and what must hold is checked."""
    nothing = lambda *_, **__: None  # noqa: E731
    with ExitStack() as stack:
        for module, changes in {
            train: {
                "read_exam_all_ranks": nothing, "reserve_copy": nothing, "check_responses_judged_all_ranks": nothing,
                "write_final_drafter": nothing,
                "roll_out": roll_out, "resume": resume, "sums_on_gpus": lambda: False, "update_policy": update,
                "gather_step_rollouts": lambda job, rollouts, rewards: (job.world.allgather(rollouts), rewards),
                "make_step_record": lambda job, step, *_: {
                    "step": step, "rank": job.world.rank, "ranks": job.world.size,
                },
                "gather_step_metrics": lambda *_: line_of(RUNNING[-1].committed), "write_step": write_step,
                "add_line": add_line,
            },
            replay: {"gather_logged_step": read_ranks, "update_policy": repeat_update},
            saving: {"StepDraws": lambda *_: SimpleNamespace(first_requests=list), "drop_lines": drop_lines},
            rank_commands: {"requeue_job_if_progress": queue_again}, stopping: {"requeue_job_if_progress": queue_again},
            save: {"CHUNK_BYTES": 64},
        }.items():  # fmt: skip
            for name, value in changes.items():
                stack.enter_context(patch.object(module, name, value))
        yield
