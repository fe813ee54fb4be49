"""Low-rank adapters of the policy (LoRA, arXiv 2106.09685): added by peft, and merged into the weights for decoding.

An adapted weight W [out, in] acts as W + alpha / r B A, of A [r, in] and B [out, r]; B is zero at first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tlt_hpc.config import LoraSection

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_BASE, _DOWN, _UP = ".base_layer", ".lora_A.default", ".lora_B.default"
"""What peft puts into the names of an adapted layer's tensors: those that it had, A and B."""


def target_layers(has_experts: bool) -> tuple[str, ...]:
    """The linear layers that get an adapter, in every layer of the model: all, or those of attention beside experts."""
    return _ATTENTION if has_experts else (*_ATTENTION, "gate_proj", "up_proj", "down_proj")


def add_adapters(model: torch.nn.Module, settings: LoraSection, seed: int) -> None:
    """Add adapters to a model of transformers, in its precision, and freeze all else.

    A is drawn on the host, from the seed and the adapter's number, so it is the same on all ranks and devices.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = target_layers(any(".experts." in name for name, _ in model.named_parameters()))
    wanted = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=list(targets))
    inject_adapter_in_model(wanted, model)
    for number, (name, parameter) in enumerate(named_adapters(model)):
        if _DOWN in name:
            bound = 1 / math.sqrt(parameter.shape[1])  # as torch's linear layers and peft
            drawn = torch.empty(parameter.shape, dtype=torch.float32)
            own_seed = (seed * 2**20 + number) % 2**64  # torch takes no larger one, and a run's has up to 63 bits
            drawn.uniform_(-bound, bound, generator=torch.Generator().manual_seed(own_seed))
            parameter.data.copy_(drawn)
        else:
            parameter.data.zero_()


def named_adapters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of the adapters, in the model's order."""
    return ((name, each) for name, each in model.named_parameters() if _DOWN in name or _UP in name)


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Context in which the model computes as it did before adapters were added."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merge_adapters(weights: Mapping[str, Tensor], settings: LoraSection) -> Iterator[tuple[str, Tensor]]:
    """The weights, of any shape, with their adapters merged as ``merge`` does, under Hugging Face names.

    Args:
        weights: of whole layers, by their names in the model.
    """
    for name, weight in weights.items():
        if _DOWN in name or _UP in name:
            continue
        down, up = (weights.get(name.replace(_BASE, part)) if _BASE in name else None for part in (_DOWN, _UP))
        yield name.replace(_BASE, ""), weight if down is None or up is None else merge(weight, down, up, settings)


def adapter_names(name: str) -> tuple[str, str]:
    """The names of A and B of a weight, by its Hugging Face name."""
    stem, _, kind = name.rpartition(".")
    return f"{stem}{_DOWN}.{kind}", f"{stem}{_UP}.{kind}"


def peft_name(name: str) -> str:
    """The name of an adapter's tensor in peft's files."""
    return f"base_model.model.{name.replace('.default.', '.')}"


def peft_settings(settings: LoraSection, base: str, adapters: Iterable[str]) -> dict[str, object]:
    """The content of peft's ``adapter_config.json`` for adapters, by their names, to the model ``base``."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "target_modules": sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in adapters}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def merge(weight: Tensor, down: Tensor, up: Tensor, settings: LoraSection) -> Tensor:
    """W + alpha / r B A, in the precision of W: W [out, in], A [r, in], B [out, r]."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    scale = settings.alpha / settings.rank
    return torch.addmm(weight.to(wide), up.to(wide), down.to(wide), alpha=scale).to(weight.dtype)
