"""The torch process group that DeepSpeed communicates through, made from the MPI world, and DeepSpeed's engines.

DeepSpeed is imported where it is used: it takes seconds, and commands that train no policy do without.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tlt_hpc.cluster.network import enable_nccl_log, read_and_remove_nccl_log, slow_network_warning
from tlt_hpc.cluster.topology import System
from tlt_hpc.cluster.watch.rank_progress import BEAT, Phase
from tlt_hpc.common.host_memory import without_garbage_collection
from tlt_hpc.config import Config, OptimizerSection
from tlt_hpc.config.recipes import scheduled_rate
from tlt_hpc.models.sharding import SequenceGroup

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Longer than any job. Ranks are skewed by the rollout's tail, and a watchdog that takes one for a hang kills a healthy
run; a dead rank ends the job through MPI, at once."""
LOOPBACK = "127.0.0.1"


@BEAT.in_phase(Phase.CONNECTING)
def join_process_group(world: World, device_type: Literal["cpu", "cuda"]) -> None:
    """Make the process group of all ranks, of the backend that ``choose_backend`` gives; collective.

    Does nothing where this process has joined already.
    """
    if torch.distributed.is_initialized():
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (world.rank, world.size)
        return
    _set_deepspeed_device(world.local_rank, device_type)
    backend = choose_backend(world.allgather((world.hostname, _gpu_id() if device_type == "cuda" else None)))
    if backend == "gloo" and device_type == "cuda" and world.rank == 0:
        logger.warning("ranks share a GPU: they communicate by gloo, through host memory, as NCCL refuses them")
    has_network = backend == "nccl" and len(set(world.allgather(world.hostname))) > 1
    log = world.run_on_all_ranks(partial(_enable_nccl_log_on_node, world)) if has_network else None
    torch.distributed.init_process_group(
        backend,
        store=_open_store(world),
        rank=world.rank,
        world_size=world.size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    _connect_by_all_reduce(device_type)
    if has_network:
        gather_and_print_network(world, log)
    _initialise_deepspeed()


def choose_backend(gpus: Sequence[tuple[str, str | None]]) -> Literal["nccl", "gloo"]:
    """The backend for ranks on these hosts and GPUs: nccl, or gloo on CPUs and where ranks share a GPU.

    gloo takes CUDA tensors in all collectives that are used here: all-reduce, broadcast, all-gather and reduce-scatter
    into one tensor, all-to-all and barrier (ZeRO's at every stage too; torch 2.13, DeepSpeed 0.19).
    """
    is_shared = len(set(gpus)) < len(gpus)
    return "gloo" if is_shared or any(gpu is None for _, gpu in gpus) else "nccl"


def _gpu_id() -> str:
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _connect_by_all_reduce(device_type: str) -> None:
    """Have the ranks meet once: nccl connects them at the first call only, in the midst of other work."""
    met = torch.ones(1, device=device_type)
    torch.distributed.all_reduce(met)
    assert met.item() == torch.distributed.get_world_size(), f"{met.item()} ranks have met"


def _enable_nccl_log_on_node(world: World) -> Path | None:
    return None if world.local_rank else enable_nccl_log(os.environ)


def gather_and_print_network(world: World, log: Path | None) -> None:
    """Have rank 0 say which network NCCL has chosen; collective.

    Args:
        log: NCCL's, on each node's first rank; None on the others, or where the user has NCCL write another.
    """
    own = None if log is None else read_and_remove_nccl_log(log, os.environ)
    choices = {host: choice for host, choice in world.allgather((world.hostname, own)) if choice is not None}
    if choices and world.rank == 0:
        world.print_once(f"network     {next(iter(choices.values())).description}")
        if slow := slow_network_warning(
            choices, [card.name for card in System.from_environment(os.environ).network_cards()]
        ):
            logger.warning("%s", slow)


@BEAT.in_phase(Phase.CONNECTING)
def make_replica_all_reduce(world: World, size: int, in_order: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that sums contiguous tensors of one shape over the ``size`` ranks of this rank's replica; collective.

    It may change the tensor. All ranks get the same bits: each part of the tensor is summed by one rank, which hands it
    to the others; or, ``in_order``, each rank gets all tensors and adds them up in the order of ranks, in float32, so
    that a number does not depend on where it stands. A rank that waits sleeps, or on CUDA leaves it to the device.
    """
    assert torch.distributed.is_initialized(), "join_process_group comes first"
    own = None
    for first in range(0, world.size, size):
        ranks = list(range(first, first + size))
        group = torch.distributed.new_group(ranks, timeout=COLLECTIVE_TIMEOUT)
        own = group if world.rank in ranks else own

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        if not in_order:
            torch.distributed.all_reduce(x, group=own)
            return x
        gathered = x.new_empty(size * len(x), *x.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, x, group=own)
        parts = gathered.view(size, *x.shape)
        total = parts[0].to(torch.promote_types(x.dtype, torch.float32))
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)

    # the first call connects the ranks, which no graph could hold; replicas on GPUs have nccl
    all_reduce(torch.zeros(1, device="cuda" if torch.distributed.get_backend() == "nccl" else "cpu"))
    return all_reduce


def leave_process_group() -> None:
    """Destroy the group; every rank calls it before MPI is finalised, which otherwise may crash at exit."""
    if not torch.distributed.is_initialized():
        return
    import deepspeed.comm.comm as deepspeed_comm

    gc.collect()  # engines are full of cycles; a group that outlives this call has threads that Python's exit kills
    deepspeed_comm.destroy_process_group()
    deepspeed_comm.cdb = None  # else the next join would take the destroyed group for a live one
    gc.collect()


def join_sequence_group(world: World, size: int) -> SequenceGroup | None:
    """The ``size`` neighbouring ranks that share each micro-batch with this one; None where it is alone; collective."""
    if size == 1:
        return None
    assert world.size % size == 0, f"{world.size} ranks in groups of {size}"
    firsts = range(0, world.size, size)
    groups = [torch.distributed.new_group(list(range(first, first + size))) for first in firsts]
    own = groups[world.rank // size]
    lengthen_timeouts(own)
    return SequenceGroup(own, world.rank % size, size)


def lengthen_timeouts(*groups: torch.distributed.ProcessGroup) -> None:
    """Give groups that DeepSpeed made the long timeout: torch gives new groups its default, not their parent's."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    for group in groups:
        _set_pg_timeout(COLLECTIVE_TIMEOUT, group)


def _set_deepspeed_device(local_rank: int, device_type: str) -> None:
    """Tell DeepSpeed, which reads the environment, which accelerator and which device of it this rank uses."""
    os.environ["DS_ACCELERATOR"] = device_type
    index = local_rank
    if device_type == "cuda":
        index %= torch.cuda.device_count()  # a launcher may show each rank its own device only
        torch.cuda.set_device(index)
    os.environ["LOCAL_RANK"] = str(index)
    os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)  # DeepSpeed insists that it equals LOCAL_RANK


def _open_store(world: World) -> TCPStore:
    """A store served by rank 0 on a port that the system chose, so that jobs on one node never collide."""
    hosts = world.allgather(world.hostname)
    # On one node nothing depends on the host name being resolvable.
    host = hosts[0] if len(set(hosts)) > 1 else LOOPBACK
    if world.rank != 0:
        port = world.broadcast(0)
        return TCPStore(host, port, world.size, is_master=False, wait_for_workers=False)
    store = TCPStore(host, 0, world.size, is_master=True, wait_for_workers=False)
    world.broadcast(store.port)
    return store


def _compile_nothing(function: Any = None, **_: Any) -> Any:
    """In place of ``torch.compile``, as a function and as a decorator with and without arguments."""
    return _compile_nothing if function is None else function


def load_deepspeed() -> None:
    """Import DeepSpeed without what takes seconds and is not used here.

    Its autotuner imports MLflow if it is installed. Each engine imports the Muon optimiser, whose functions are handed
    to ``torch.compile`` as they are defined, and that imports the whole compiler, though no function is called.
    """
    is_loaded, true_compile = "mlflow" in sys.modules, torch.compile
    sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type]  # documented: the import fails
    try:
        with without_garbage_collection():
            import deepspeed

            torch.compile = _compile_nothing  # type: ignore[assignment, misc]
            with suppress(ImportError):  # another DeepSpeed may have it elsewhere
                import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        torch.compile = true_compile  # type: ignore[misc]
        if not is_loaded:
            del sys.modules["mlflow"]


def _initialise_deepspeed() -> None:
    load_deepspeed()
    import deepspeed

    # It would be compiled at first use, for a minute, on every node; gloo does its work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


# -- DeepSpeed's engines round a model: the one that trains, the one that only reads ----------------------------------

REDUCE_BUCKET_ELEMENTS = 50_000_000
"""Gradients reduced in one collective at most; 200 MB in fp32, a tenth of DeepSpeed's default. It keeps a buffer of so
many, which a smaller model need not pay for."""

ADAM_EPSILON = 1e-8


def learning_rate(config: Config, step: int) -> float:
    """The learning rate of optimizer step ``step``, counted from 0 over all of the job.

    As transformers' schedules of these names have it: the last step of the job is one before the end.
    """
    settings = config.optimizer
    peak, warmup = settings.learning_rate, settings.warmup_steps
    past = max(0, step - warmup) / max(1, config.num_optimizer_steps - warmup)
    return scheduled_rate(peak, step, warmup, past, settings.schedule)


def deepspeed_settings(config: Config, num_ranks: int, device_type: str) -> dict[str, Any]:
    """DeepSpeed's configuration of the policy engine."""
    zero: dict[str, Any] = {"stage": config.optimizer.zero_stage}
    if config.optimizer.offload and device_type != "cpu":  # on a CPU all state is in host memory already
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if config.optimizer.offload == "parameters":
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        # Micro-batches are cut by tokens and their loss is scaled by us: to DeepSpeed each is one sample of one step.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": num_ranks,
        "gradient_clipping": config.optimizer.max_grad_norm,  # its default is 1, not off
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }


def frozen_deepspeed_settings(config: Config, num_ranks: int, device_type: str) -> dict[str, Any]:
    """DeepSpeed's configuration of a model that is read alone."""
    settings = deepspeed_settings(config, num_ranks, device_type)
    zero = settings["zero_optimization"]
    zero.pop("offload_optimizer", None)
    zero["stage3_max_reuse_distance"] = 0  # no backward pass comes: a layer goes as soon as it has been read
    return settings


def start_engine_all_ranks(model: torch.nn.Module, config: Config, num_ranks: int) -> Any:
    """The engine that trains a model, equal on all ranks (at stage 3 rank 0's counts alone); collective."""
    import deepspeed

    device_type = deepspeed.get_accelerator().device_name()
    settings = deepspeed_settings(config, num_ranks, device_type)
    num_parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    settings["zero_optimization"]["reduce_bucket_size"] = min(REDUCE_BUCKET_ELEMENTS, num_parameters)
    if config.optimizer.zero_stage == 3:
        _shard_over_all_ranks(model, settings)
    optimizer = _make_optimizer(model, config.optimizer, "offload_optimizer" in settings["zero_optimization"])
    with redirect_stdout(io.StringIO()):  # DeepSpeed prints the memory in use here
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    lengthen_timeouts(engine.data_parallel_group)
    return engine


def start_frozen_engine(model: torch.nn.Module, config: Config, num_ranks: int) -> Any:
    """The engine that shards rank 0's model and gathers it a layer at a time to read it; collective.

    DeepSpeed takes stage 3 without an optimiser for inference (its ``DeepSpeedZeRoOffload``): parameters stay in the
    precision that they have.
    """
    import deepspeed

    settings = frozen_deepspeed_settings(config, num_ranks, deepspeed.get_accelerator().device_name())
    _shard_over_all_ranks(model, settings)
    engine, *_ = deepspeed.initialize(model=model, config=settings, dist_init_required=False)
    lengthen_timeouts(engine.data_parallel_group)
    engine.eval()
    return engine


def _shard_over_all_ranks(model: torch.nn.Module, settings: dict[str, Any]) -> None:
    """Deal rank 0's parameters over the ranks one after another: a whole model never stands on a device."""
    import deepspeed

    device = torch.device(deepspeed.get_accelerator().current_device_name())
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
        torch.distributed.broadcast(buffer.data, 0)
    deepspeed.zero.Init(module=model, config_dict_or_path=settings)


def _make_optimizer(model: torch.nn.Module, settings: OptimizerSection, offloaded: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        eps=ADAM_EPSILON,
        weight_decay=settings.weight_decay,
        fused=offloaded or None,  # on host memory as fast as DeepSpeed's, which each node would compile first
    )
