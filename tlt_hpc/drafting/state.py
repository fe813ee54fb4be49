"""The drafter that a rank trains: weights, Adam moments and averaged weights, and how they are saved and restored.

Knows neither what it learns from nor the other ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_hpc.config import UserError
from tlt_hpc.models.drafter import TOKEN_IDS, Drafter, parse_layer_settings

_MOMENTS = ("exp_avg", "exp_avg_sq")
_BETAS, _MAX_GRAD_NORM = (0.9, 0.95), 1.0
_CPU_CHUNK, _CUDA_CHUNK = 2**16, 2**22
"""Values that are fingerprinted at once: what a cache holds, and what makes a launch worth its while."""


class TrainedDrafter:
    """A drafter in float32 with its optimiser; every rank holds one, and merges make them equal."""

    def __init__(self, drafter: Drafter, learning_rate: float, span: int) -> None:
        """Begin with zero moments.

        Args:
            learning_rate: of Adam.
            span: merges over which the served weights are averaged; see ``WeightAverage``.
        """
        self.drafter, self.learning_rate = drafter, learning_rate
        self.has_learned = False
        """The weights have learned something; a random drafter is not worth asking."""
        self.num_steps = 0
        """Optimiser steps that the weights have seen."""
        self.parameters = dict(drafter.named_parameters())
        self._moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self.parameters.items()}
        self.average = WeightAverage({name: p.data for name, p in self.parameters.items()}, span)

    def step(self) -> bool:
        """Clip the gradient and take a step of Adam; return False, and change nothing, if it is not finite."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), _MAX_GRAD_NORM)
        if bool(norm.isfinite()):
            self._take_adam_step()
            return True
        self.drop_gradients()
        return False

    @torch.no_grad()
    def _take_adam_step(self) -> None:
        """Adam (Kingma & Ba, 2015); the moments are kept here because the merge averages them too."""
        self.num_steps += 1
        self.has_learned = True
        first, second = (1 - beta**self.num_steps for beta in _BETAS)
        for name, parameter in self.parameters.items():
            mean, square = self._moments[name]
            gradient = parameter.grad
            assert gradient is not None
            mean.lerp_(gradient, 1 - _BETAS[0])
            square.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
            denominator = (square / second).sqrt_().add_(1e-8)
            parameter.addcdiv_(mean, denominator, value=-self.learning_rate / first)
            parameter.grad = None

    def drop_gradients(self) -> None:
        """Free all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    # -- all weights and moments as one array -------------------------------------------------------------------

    def weights_and_moments(self) -> list[Tensor]:
        """Return weights and moments: the tensors themselves, which the next step changes."""
        return [tensor for name, p in self.parameters.items() for tensor in (p.data, *self._moments[name])]

    def assign_flat_values(self, flat: Tensor) -> None:
        """Copy values [n] to ``weights_and_moments``, in their order."""
        tensors = self.weights_and_moments()
        for tensor, values in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(values.view_as(tensor))

    def fingerprint(self) -> str:
        """Return a digest of the bits of weights, moments and averaged weights, computed on their device."""
        sums = torch.stack(
            [_bit_sum(tensor) for tensor in (*self.weights_and_moments(), *self.average.means().values())]
        )
        return hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()

    # -- what is saved and restored -----------------------------------------------------------------------------

    def averaged_weights(self) -> dict[str, Tensor]:
        """Return the weights that the engine drafts with, averaged over the last merges, by parameter name."""
        return {**self.drafter.state_dict(), **self.average.means()}

    def host_state_copy(self) -> dict[str, Tensor]:
        """Return a copy in host memory of weights, averaged and as they are, moments and counters, by name."""
        return {name: tensor.cpu().clone() for name, tensor in self.live_state().items()}

    def live_state(self) -> dict[str, Tensor]:
        """Return what ``host_state_copy`` copies: the tensors themselves, which the next micro-step or merge changes.

        ``<name>.weight`` is what is served, and ``<name>.trained``, where it may differ, what training continues from.
        """
        ids = self.drafter.token_ids
        return {
            **{f"{name}.weight": mean for name, mean in self.average.means().items()},
            **self._training_tensors("trained" if self.average.num_bytes else "weight"),
            **({} if ids is None else {TOKEN_IDS: ids}),
            **self.drafter.own.to_tensors(),
            "num_averaged": torch.tensor(self.average.num_taken),
            "num_steps": torch.tensor(self.num_steps),
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a ``host_state_copy``, also one that was averaged over another span.

        Raises:
            UserError: a tensor is missing or has another shape, or the layer other settings.
        """
        self._check_layer(state)
        is_averaged = any(name.endswith(".trained") for name in state)
        wanted = self._training_tensors("trained" if is_averaged else "weight")
        for name, tensor in {**self._training_tensors("weight"), **wanted}.items():
            _check_tensor_shape(name, state, tensor)
        self.num_steps = int(state["num_steps"])
        self.has_learned |= self.num_steps > 0
        self._load_vocabulary(state)
        for name, tensor in wanted.items():
            tensor.copy_(state[name])
        averaged = int(state.get("num_averaged", torch.tensor(0)))
        self.average.load({name: state[f"{name}.weight"] for name in self.parameters}, averaged)

    def copy_weights_from(self, state: Mapping[str, Tensor]) -> None:
        """Copy another drafter's weights, in any precision, but neither its moments nor its step count.

        Raises:
            UserError: a weight is missing or has another shape, or the layer other settings.
        """
        self._check_layer(state)
        for name, parameter in self.parameters.items():
            _check_tensor_shape(f"{name}.weight", state, parameter)
            parameter.data.copy_(state[f"{name}.weight"])
        self._load_vocabulary(state)
        self.has_learned = True

    def set_draft_vocabulary(self, token_ids: NDArray[np.int64]) -> None:
        """Replace the vocabulary of an untrained EAGLE-3 drafter by ``token_ids`` [W], ascending."""
        assert self.drafter.token_ids is not None and not self.has_learned
        self.drafter.token_ids.copy_(torch.from_numpy(token_ids))

    def _check_layer(self, state: Mapping[str, Tensor]) -> None:
        if (found := parse_layer_settings(state)) != (own := self.drafter.own):
            raise UserError(
                f"the drafter's layer has the settings {found.changed_settings_json}, and this run's "
                f"{own.changed_settings_json}; use the drafter.init that the run began with"
            )

    def _load_vocabulary(self, state: Mapping[str, Tensor]) -> None:
        if self.drafter.token_ids is not None:
            _check_tensor_shape(TOKEN_IDS, state, self.drafter.token_ids)
            self.drafter.token_ids.copy_(state[TOKEN_IDS])

    def _training_tensors(self, kind: str) -> dict[str, Tensor]:
        """Return the tensors that training continues from: weights as ``<name>.<kind>``, and both moments."""
        names = [f"{name}.{part}" for name in self.parameters for part in (kind, *_MOMENTS)]
        return dict(zip(names, self.weights_and_moments(), strict=True))


class WeightAverage:
    """Follows named weights (Polyak & Juditsky, 1992): their plain mean at first, later an exponential one.

    ``span`` is about how many of the last ``add_current_weights`` it reaches back over; with 1 it holds nothing and is
    the weights.
    """

    def __init__(self, weights: Mapping[str, Tensor], span: int) -> None:
        """Follow ``weights``, the tensors themselves, by name."""
        assert span >= 1, f"span = {span}"
        self._weights, self._span = weights, span
        self._means = {name: torch.empty_like(weight) for name, weight in weights.items()} if span > 1 else {}
        self.num_taken = 0
        """How often the weights have gone into the mean; until then it is the weights as they are."""

    @property
    def num_bytes(self) -> int:
        """The bytes of the means; 0 if ``span`` is 1."""
        return sum(mean.nbytes for mean in self._means.values())

    @torch.no_grad()
    def add_current_weights(self) -> None:
        """Add the current weights to the mean; the first time they are all of it."""
        self.num_taken += 1
        share = 1 / min(self.num_taken, self._span)
        for name, mean in self._means.items():
            if share == 1:  # what the mean held before is nothing, not even a number perhaps
                mean.copy_(self._weights[name])
            else:
                mean.lerp_(self._weights[name], share)

    def means(self) -> Mapping[str, Tensor]:
        """Return the mean by name: the tensors themselves, which the next ``add_current_weights`` changes."""
        return self._means if self._means and self.num_taken else self._weights

    def load(self, means: Mapping[str, Tensor], num_taken: int) -> None:
        """Restore ``means`` and ``num_taken`` of an earlier average."""
        self.num_taken = num_taken
        for name, mean in self._means.items():
            mean.copy_(means[name])


def _bit_sum(tensor: Tensor) -> Tensor:
    """Sum of x(2x + 1) over the bits of each float32, modulo 2^64.

    No two values have the same term, so that any one that differs shows, and an ulp more here and less there do not
    cancel as they would in a plain sum.
    """
    bits = tensor.detach().flatten().view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in torch.split(bits, _CUDA_CHUNK if bits.is_cuda else _CPU_CHUNK):
        values = part.long()
        total += (values * (2 * values + 1)).sum()
    return total


def _check_tensor_shape(name: str, state: Mapping[str, Tensor], wanted: Tensor) -> None:
    if name not in state or state[name].shape != wanted.shape:
        found = list(state[name].shape) if name in state else "missing"
        raise UserError(
            f"drafter tensor {name!r}: {found}, this model needs {list(wanted.shape)}; "
            "give a drafter trained for this model or drafter.init = 'random'"
        )
