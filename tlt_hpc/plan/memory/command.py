"""``tlt plan``: the options, and the command."""

from __future__ import annotations

import argparse
import json
import math

from tlt_hpc.common.console import TextConsole
from tlt_hpc.config import Config, ConfigError, check_model_limits, check_ranks, check_sequence_parallel, load_config
from tlt_hpc.models.shape import ModelShape, check_sharding
from tlt_hpc.plan.memory.knobs import turn_knobs
from tlt_hpc.plan.memory.limits import Limits
from tlt_hpc.plan.memory.parts import Situation
from tlt_hpc.plan.memory.phases import plan_memory
from tlt_hpc.plan.memory.report import GB, as_json, one_line, show
from tlt_hpc.plan.memory.shapes import find_shape

DOES_NOT_FIT = 1
"""Exit status of a plan that exceeds what there is."""


def run(options: argparse.Namespace) -> int:
    """Print the plan of a job; returns the exit status.

    Raises:
        ValueError: the configuration, the shape or an option cannot be.
    """
    config = load_config(options.config, options.overrides)
    limits = _limits(options)
    plan = plan_memory(_situation(config, options))
    knobs = turn_knobs(plan)
    if options.json:
        print(json.dumps(as_json(plan, limits, knobs), indent=2))
    else:
        show(plan, limits, knobs, TextConsole())
    return 0 if limits.hold(plan) else DOES_NOT_FIT


def summarise(config: Config, shape: ModelShape, num_ranks: int) -> str:
    """The line of a dry run: the peak of a run on GPUs. Empty where it would be on CPUs."""
    if config.model.device == "cpu" or (config.model.device == "auto" and config.model.dtype == "float32"):
        return ""
    return one_line(plan_memory(Situation(config, shape, num_ranks, num_ranks, "cuda")))


def _situation(config: Config, options: argparse.Namespace) -> Situation:
    num_ranks = options.ranks or options.gpus or config.run.ranks
    check_ranks(config, num_ranks)
    shape = find_shape(config.model.path, options.shape)
    check_model_limits(config, shape.max_positions)
    check_sequence_parallel(config, shape.num_heads, shape.num_kv_heads, num_ranks)
    _check_replicas(config, shape, options.gpus)
    if options.gpus is None:
        if config.model.device == "cuda":
            raise ConfigError("model.device = 'cuda' and no --gpus; say how many GPUs a node has, e.g. --gpus 8")
        return Situation(config, shape, num_ranks, num_ranks, "cpu")
    if config.model.device == "cpu":
        raise ConfigError(f"--gpus {options.gpus} with model.device = 'cpu'; leave one of them out")
    if num_ranks > options.gpus and num_ranks % options.gpus:
        raise ConfigError(
            f"--ranks {num_ranks} do not fill nodes of --gpus {options.gpus}; use --ranks "
            f"{num_ranks // options.gpus * options.gpus}, a rank for each GPU"
        )
    return Situation(config, shape, num_ranks, options.gpus, "cuda")


def _check_replicas(config: Config, shape: ModelShape, num_gpus: int | None) -> None:
    """Refuse replicas that a run would refuse: of ranks that do not divide the model, or that are on several nodes."""
    size = config.rollout.tensor_parallel
    try:
        check_sharding(shape, size, "rollout.tensor_parallel")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if num_gpus is not None and num_gpus % size:
        raise ConfigError(
            f"--gpus {num_gpus} makes no whole replicas of rollout.tensor_parallel = {size} on a node; use "
            f"{math.gcd(num_gpus, size)} or nodes of another number of GPUs"
        )


def _limits(options: argparse.Namespace) -> Limits:
    for name in ("gpus", "ranks", "gpu_memory", "host_memory"):
        value = vars(options)[name]
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: give a number above 0")
    if options.gpu_memory is not None and options.gpus is None:
        raise ConfigError(f"--gpu-memory {options.gpu_memory:g} without --gpus; say how many GPUs a node has")
    device, host = (None if gb is None else int(gb * GB) for gb in (options.gpu_memory, options.host_memory))
    return Limits(device, host)
