"""DeepSpeed's engines round a model: the one that trains, the one that only reads. Knows no rollout.

DeepSpeed is imported where it is used: it takes seconds, and commands that train no policy do without.
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Any

import torch

from tlt_hpc.config import Config, OptimizerSection
from tlt_hpc.config.schedule import scheduled_rate
from tlt_hpc.rl.distributed import lengthen_timeouts

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


def engine_settings(config: Config, num_ranks: int, device_type: str) -> dict[str, Any]:
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


def frozen_settings(config: Config, num_ranks: int, device_type: str) -> dict[str, Any]:
    """DeepSpeed's configuration of a model that is read alone."""
    settings = engine_settings(config, num_ranks, device_type)
    zero = settings["zero_optimization"]
    zero.pop("offload_optimizer", None)
    zero["stage3_max_reuse_distance"] = 0  # no backward pass comes: a layer goes as soon as it has been read
    return settings


def start_engine(model: torch.nn.Module, config: Config, num_ranks: int) -> Any:
    """The engine that trains a model, equal on all ranks (at stage 3 rank 0's counts alone); collective."""
    import deepspeed

    device_type = deepspeed.get_accelerator().device_name()
    settings = engine_settings(config, num_ranks, device_type)
    num_parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    settings["zero_optimization"]["reduce_bucket_size"] = min(REDUCE_BUCKET_ELEMENTS, num_parameters)
    if config.optimizer.zero_stage == 3:
        _partition(model, settings)
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

    settings = frozen_settings(config, num_ranks, deepspeed.get_accelerator().device_name())
    _partition(model, settings)
    engine, *_ = deepspeed.initialize(model=model, config=settings, dist_init_required=False)
    lengthen_timeouts(engine.data_parallel_group)
    engine.eval()
    return engine


def _partition(model: torch.nn.Module, settings: dict[str, Any]) -> None:
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
