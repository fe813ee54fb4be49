"""The policy's weights in a checkpoint: all of them, or adapters that are merged into a model folder's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from tlt_hpc.checkpoint.claim import MODEL
from tlt_hpc.checkpoint.manifest import Checkpoint
from tlt_hpc.config import Config, UserError
from tlt_hpc.models.folder import DTYPES
from tlt_hpc.models.lora import adapter_names, merge
from tlt_hpc.models.piece import Cut, ReadCut
from tlt_hpc.models.weight_files import (
    UNREADABLE,
    Place,
    StoredTensor,
    expert_places,
    is_fused_expert_name,
    opening_safetensors,
    read_headers,
    weights_digest,
)
from tlt_hpc.storage.folder import RunFolder
from tlt_hpc.storage.records import read_record

_MASTER = ".master"


def open_policy(run: RunFolder, config: Config, checkpoint: Checkpoint, model: Path) -> PolicyWeights:
    """The policy in a checkpoint of a run; ``model`` is the folder that the run began with.

    Raises:
        UserError: the folder has other weights than those that the adapters were trained on, or cannot be read.
    """
    if not config.lora.rank:
        return PolicyWeights(checkpoint, config, model)
    noted = (read_record(run.data, dict[str, str], "remove it to go without this check") or {}).get(MODEL)
    policy = PolicyWeights(checkpoint, config, model)
    known = {each for name in policy.shapes for each in adapter_names(name)}
    if (noted is not None and noted != weights_digest(model)) or not policy.trained_shapes.keys() <= known:
        raise UserError(
            f"the weights in {model} are not those that the adapters in {checkpoint.folder} were trained on; give the "
            "folder that the run began with"
        )
    return policy


def policy_readers(
    run: RunFolder, config: Config, checkpoint: Checkpoint, model: Path
) -> Iterator[tuple[str, ReadCut]]:
    """``open_policy``'s weights, each to be read before the next is asked for; nothing is opened before the first."""
    yield from open_policy(run, config, checkpoint, model).iter_weight_readers()


@dataclass(frozen=True)
class PolicyWeights:
    """Weights under their Hugging Face names, read one at a time."""

    checkpoint: Checkpoint
    config: Config
    """The configuration of the run."""
    model: Path
    """The folder that the run began with; read where the run trains adapters."""

    @property
    def dtype(self) -> torch.dtype:
        """The precision that the policy is trained in."""
        return DTYPES[self.config.model.dtype]

    @cached_property
    def trained_shapes(self) -> dict[str, Sequence[int]]:
        """The shape of each tensor that was trained, by its name in the checkpoint, sorted."""
        parts = self.checkpoint.tensors.get("policy", {})
        return {n.removesuffix(_MASTER): parts[n].shape for n in sorted(parts) if n.endswith(_MASTER)}

    @cached_property
    def shapes(self) -> dict[str, Sequence[int]]:
        """The shape of every weight, by its Hugging Face name, sorted; nothing is read but the heads of files."""
        if not self.config.lora.rank:
            experts = {own: shape for own, (_, shape) in self._experts.items()}
            return dict(
                sorted(
                    (experts | {n: s for n, s in self.trained_shapes.items() if not is_fused_expert_name(n)}).items()
                )
            )
        return {name: stored.sizes for name, stored in sorted(self._base_model_headers.items())}

    @cached_property
    def _experts(self) -> dict[str, tuple[Place, tuple[int, int]]]:
        """The weights that a checkpoint has in a tensor for all experts, by their names in a model's file."""
        fused = (
            expert_places(name, shape) for name, shape in self.trained_shapes.items() if is_fused_expert_name(name)
        )
        return {own: place for each in fused for own, place in each.items()}

    @cached_property
    def _base_model_headers(self) -> dict[str, StoredTensor]:
        return read_headers(self.model)

    @contextmanager
    def open_weight_reader(self) -> Iterator[Callable[[str], Tensor]]:
        """A function that reads a weight by its name: float32 masters, or with adapters in the run's precision."""
        with self.checkpoint.open_tensor_reader("policy") as trained, opening_safetensors(UNREADABLE) as stored:
            last_experts = lru_cache(maxsize=2)(lambda fused: trained(fused + _MASTER))  # of a layer, once for each

            def read(name: str) -> Tensor:
                if not self.config.lora.rank:
                    place = self._experts.get(name, (None,))[0]
                    return trained(name + _MASTER) if place is None else place.view_in(last_experts(place.name))
                weight: Tensor = stored(self._base_model_headers[name].file, name).to(self.dtype)
                names = adapter_names(name)
                if names[0] not in self.trained_shapes:
                    return weight
                down, up = (trained(each + _MASTER).to(self.dtype) for each in names)
                return merge(weight, down, up, self.config.lora)

            yield read

    @contextmanager
    def open_adapter_reader(self) -> Iterator[Callable[[str], Tensor]]:
        """A function that reads one of ``trained_shapes``, as a float32 master."""
        with self.checkpoint.open_tensor_reader("policy") as trained:
            yield lambda name: trained(name + _MASTER)

    def iter_weight_readers(self) -> Iterator[tuple[str, ReadCut]]:
        """Yield each weight's name with a function that reads it, or a cut of it, before the next is asked for."""
        with self.open_weight_reader() as read:
            for name in self.shapes:
                yield name, partial(_read_cut, read, name)


def _read_cut(read: Callable[[str], Tensor], name: str, cut: Cut | None) -> Tensor:
    whole = read(name)
    return whole if cut is None else cut.cut_from(name, whole)
