"""Owns the DeepSpeed engine round the policy model: updates, weights out, state out and in; knows no decoding or file.

The update is a function of the rollouts in key order, the weights and the number of ranks, never of timing; on a GPU
operators add in a fixed order there (``kernels.deterministic_operations``).
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from tlt_hpc.cluster.watch.rank_progress import BEAT
from tlt_hpc.common.records import FinishReason, Rollout
from tlt_hpc.config import Config
from tlt_hpc.kernels.dispatch import deterministic_operations
from tlt_hpc.models.lora import add_adapters, merge_adapters, named_adapters, without_adapters
from tlt_hpc.models.piece import Piece
from tlt_hpc.models.policy_model import PolicyModel
from tlt_hpc.models.weight_files import is_fused_expert_name
from tlt_hpc.rl.advantage import token_weights
from tlt_hpc.rl.batches import Indices, pack_rollouts, plan_updates
from tlt_hpc.rl.distributed import join_sequence_group, learning_rate, start_engine_all_ranks, start_frozen_engine
from tlt_hpc.rl.loss import correction_weights, kl_estimate, mismatch_terms, policy_loss
from tlt_hpc.rl.stats import PolicyStats, RolloutMismatch, TokenSums, gradient_error
from tlt_hpc.rl.train_state import TrainState, gather_parameters

if TYPE_CHECKING:
    from tlt_hpc.mpi.world import World


@dataclass(frozen=True)
class _Batch:
    """A micro-batch on the device: see ``batches.MicroBatch``.

    What a token counts in the loss, its advantage and its recorded log-probability are [T], as targets;
    ``indices`` are those of the responses that its rows count.
    """

    indices: Indices
    lengths: tuple[int, ...]
    tokens: torch.Tensor
    positions: torch.Tensor
    where: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor
    advantages: torch.Tensor
    rollout_log_probs: torch.Tensor


class Policy:
    """The model that is trained, sharded by ZeRO over all ranks of a process group that has been joined before.

    The model is a causal language model in the manner of Hugging Face, in ``config.model.dtype``, equal on all ranks
    (at ZeRO stage 3 rank 0's counts alone); it belongs to the policy from here on. ``reference`` is needed where
    ``algorithm.kl_coefficient`` is above 0: it makes the model that is the reference, and is called once the policy is
    sharded, so that no rank ever has two whole ones at stage 3. With ``config.lora`` adapters are added, which alone
    are trained and saved, and the reference is the model without them. ``excluded``: ids without a probability, those
    that the rollout's decoder excludes. All methods are collective.

    Raises:
        ConfigError: a combination of ZeRO stage, dtype and offload that DeepSpeed does not train exactly.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: Config,
        world: World,
        reference: Callable[[], torch.nn.Module] | None = None,
        excluded: Sequence[int] = (),
    ) -> None:
        assert torch.distributed.is_initialized(), "join_process_group comes first"
        world.print_once("starting DeepSpeed")
        import deepspeed  # seconds, and files, that a rank which trains no policy does without

        assert (config.algorithm.kl_coefficient > 0) == (reference is not None), "a reference goes with a KL term"
        dtypes = {str(parameter.dtype) for parameter in model.parameters()}
        assert dtypes == {f"torch.{config.model.dtype}"}, f"model in {dtypes}, config says {config.model.dtype}"
        self._config, self._world = config, world
        # The rollout of temperature 0 is no sample of any softmax; its groups have zero variance anyway.
        self._temperature = config.rollout.temperature or 1.0
        if config.lora.rank:
            add_adapters(model, config.lora, config.run.seed)
        self._weights_of_model = dict(model.named_parameters())
        self._parameters = dict(named_adapters(model)) if config.lora.rank else self._weights_of_model
        """Those that are trained."""
        self._attention_crossover_tokens = attention_crossover_tokens(model)
        repeats_layers = config.optimizer.uses_gradient_checkpointing(deepspeed.get_accelerator().device_name())
        self._sequence = join_sequence_group(world, config.optimizer.sequence_parallel)
        self._excluded = excluded
        trained = PolicyModel(model, repeats_layers, self._sequence, excluded)
        self.engine = start_engine_all_ranks(trained, config, world.size)
        self._state = TrainState(self.engine, self._parameters, self._zero_stage, world)
        self._recipe = config.algorithm.recipe
        self._reference: Any = None
        if reference is not None:
            self._reference = self._forward_without_adapters if config.lora.rank else self._start_reference(reference())
        self._num_steps = 0
        self._has_state = False

    @property
    def optimizer_step_count(self) -> int:
        """Optimiser steps taken since the weights were first loaded, over all runs of the job."""
        return self._num_steps

    @deterministic_operations()
    def update(self, rollouts: Sequence[Rollout], advantages: NDArray[np.float32]) -> PolicyStats:
        """Train on one step's rollouts, ``updates_per_step`` times on a part of them each.

        Args:
            rollouts: all of the step, of all ranks, ordered by key; the same on every rank.
            advantages: [T], of all response tokens in the order of ``rollouts``.

        Raises:
            NotFiniteError: the gradient is not finite, on all ranks.
        """
        keys = [rollout.key for rollout in rollouts]
        assert keys == sorted(keys), "rollouts ordered by key"
        by_response = np.split(advantages, _response_ends(rollouts)[:-1])
        plans = self._plan_micro_batches(rollouts, self._config.algorithm.updates_per_step)
        own = [
            [self._make_device_batch(rollouts, by_response, weights, indices) for indices in plan[self._share_index]]
            for plan, weights in ((plan, self._loss_weights(rollouts, plan)) for plan in plans)
        ]
        self.engine.train()
        started = time.perf_counter()
        old = self._old_log_probs(own)
        updating = time.perf_counter()
        sums, norms = TokenSums(), []
        for batches, old_log_probs in zip(own, old, strict=True):
            is_finite = self._accumulate(batches, old_log_probs, sums)
            norms.append(self._step_optimizer())
            if not math.isfinite(norms[-1]) or norms[-1] < 0:  # DeepSpeed gives -1 for some that are not finite
                blamed = self._world.allgather(_find_non_finite_responses(batches, is_finite))
                raise gradient_error(self._config, keys, norms[-1], self._num_steps, chain.from_iterable(blamed))
        seconds = (updating - started, time.perf_counter() - updating)
        num_tokens = sum(rollout.response_tokens.size for rollout in rollouts)
        totals = sums.sum_over_ranks(self._world, self._config.optimizer.sequence_parallel)
        return self._gather_stats(totals, norms, num_tokens, seconds)

    @deterministic_operations()
    def reference_kl_by_token_all_ranks(self, rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
        """Each token's distance from the reference before the update; [T], in the order of ``rollouts``. Collective.

        From this policy's own pass, not from the rollout's log-probabilities, whose last bits tell how it was decoded.

        Args:
            rollouts: all of the step, of all ranks; the same on every rank.
        """
        assert self._reference is not None, "there is no reference"
        (plan,) = self._plan_micro_batches(rollouts, 1)
        ends = _response_ends(rollouts)
        found, nothing = np.zeros(ends[-1]), [np.zeros(0, np.float32)] * len(rollouts)
        for indices in plan[self._share_index]:
            batch = self._make_device_batch(rollouts, nothing, np.zeros(len(rollouts)), indices)
            log_probs, reference = self._log_probs(self.engine, batch), self._log_probs(self._reference, batch)
            kl = kl_estimate(self._config.algorithm.kl_estimator, log_probs, reference).double().cpu().numpy()
            for index in indices:
                size = rollouts[index].response_tokens.size
                found[ends[index] - size : ends[index]], kl = kl[:size], kl[size:]
        if self._world.rank % self._config.optimizer.sequence_parallel:  # the ranks of a sequence have the same
            found[:] = 0.0
        return self._world.sum_over_ranks(found)

    def gather_named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The full weights under their Hugging Face names and in their shapes, a tied one once; collective.

        They are gathered a layer at a time on every rank. A tensor is good only until the next is asked for, and every
        rank must take them all.
        """
        for _, layer in groupby(self._weights_of_model.items(), lambda named: _layer_of(named[0])):
            weights = dict(layer)
            BEAT.tick()
            with gather_parameters(weights.values(), self._zero_stage):
                held = {name: parameter.detach() for name, parameter in weights.items()}
                yield from merge_adapters(held, self._config.lora)

    def state_shard(self) -> Iterator[tuple[str, Piece]]:
        """This rank's share of the training state: fp32 pieces of ``<name>.master`` and of Adam's two moments.

        Nothing is gathered or copied: what a rank holds is what ZeRO gave it, or, at stage 0, an equal part of all.
        The shards together have each element once. bf16 weights are made from the masters and are not among them. A
        piece is good only until the next is asked for; ask for all of them.
        """
        self._create_optimizer_moments()
        yield from self._state.own_state_pieces()

    @property
    def num_shard_bytes(self) -> int:
        """Bytes of ``state_shard``, known before there are moments."""
        return self._state.num_shard_bytes

    def load_state(
        self,
        read: Callable[[Iterable[str]], Iterator[tuple[str, torch.Tensor]]],
        read_span: Callable[[str, int, int, tuple[int, ...]], torch.Tensor],
        num_steps: int,
    ) -> None:
        """Take over a state that ``state_shard`` gave on all ranks, on any number of ranks and at any ZeRO stage.

        At stage 3 a rank reads its own share of the large tensors alone: all of a 70B model's state is 850 GB.

        Args:
            read: the full tensors of names such as ``lm_head.weight.exp_avg``, in their order; called on every rank.
            read_span: the elements from the first to before the second index of one of them, which must have the given
                shape, counted flat.
            num_steps: ``optimizer_step_count`` of that state.

        Raises:
            UserError: on all ranks, if a tensor cannot be read on one.
        """
        self._create_optimizer_moments()
        self._state.load(read, read_span, num_steps)
        self._num_steps = num_steps

    def gather_weights_sha256(self) -> str:
        """Hash of all fp32 weights that are trained in the order of their names, equal on all ranks."""
        digest = hashlib.sha256()
        for name in sorted(self._parameters):
            weights = self._state.gather_master_weights(name).to("cpu", torch.float32)
            digest.update(name.encode())
            # Gathering adds zeros, which turns -0 into +0; so that the stage does not matter, always.
            digest.update((weights + 0.0).contiguous().numpy().data)
        return digest.hexdigest()

    def close(self) -> None:
        """Free the engine; the process group stays, and another policy may follow in this process."""
        if self._reference is not None and self._zero_stage == 3 and not self._config.lora.rank:
            self._reference.destroy()
        self._reference = None
        self.engine.destroy()
        del self._state
        self.engine = None  # the last reference to DeepSpeed's groups, whose threads must end before Python does
        self._parameters.clear()
        self._weights_of_model.clear()

    def _forward_without_adapters(self, *inputs: Any) -> Any:
        """The reference of a policy with adapters: the model that they were added to."""
        with without_adapters(self.engine.module.inner):
            return self.engine(*inputs)

    def _start_reference(self, model: torch.nn.Module) -> Any:
        """The model that is the reference, sharded at ZeRO stage 3 as the policy is; whole on every rank below."""
        read = PolicyModel(model.requires_grad_(False).eval(), sequence=self._sequence, excluded=self._excluded)
        if self._zero_stage == 3:
            return start_frozen_engine(read, self._config, self._world.size)
        return read.to(self.engine.device)

    def _plan_micro_batches(self, rollouts: Sequence[Rollout], num_updates: int) -> list[list[list[Indices]]]:
        settings = self._config.optimizer
        return plan_updates(
            [rollout.prompt_tokens.size + rollout.response_tokens.size for rollout in rollouts],
            num_updates,
            self._world.size // settings.sequence_parallel,
            settings.micro_batch_tokens,
            self._attention_crossover_tokens,
        )

    @property
    def _share_index(self) -> int:
        """Which of a plan's shares is this rank's, and of the ranks that compute with it."""
        return self._world.rank // self._config.optimizer.sequence_parallel

    def _loss_weights(self, rollouts: Sequence[Rollout], plan: Sequence[Sequence[Indices]]) -> NDArray[np.float64]:
        """What a token of each response counts in the loss of one update; [N], zero for those that are not part of it.

        These are the responses of other updates, and those that were cut where ``algorithm.overlong = "mask"``.
        """
        indices = [index for share in plan for part in share for index in part]
        if self._config.algorithm.overlong == "mask":
            indices = [index for index in indices if rollouts[index].finish_reason != FinishReason.LENGTH]
        lengths = [rollouts[index].response_tokens.size for index in indices]
        weights = np.zeros(len(rollouts))
        if indices:
            weights[indices] = token_weights(lengths, self._recipe.aggregation, self._config.rollout.max_new_tokens)
        return weights

    def _make_device_batch(
        self,
        rollouts: Sequence[Rollout],
        advantages: Sequence[NDArray[np.float32]],
        weights: NDArray[np.float64],
        indices: Indices,
    ) -> _Batch:
        micro = pack_rollouts([rollouts[index] for index in indices])
        counts = weights[list(indices)].astype(np.float32)[micro.rows]
        nothing = np.zeros(0, np.float32)
        own = np.concatenate([nothing, *(advantages[index] for index in indices)])
        recorded = np.concatenate([nothing, *(rollouts[index].log_probs for index in indices)])
        arrays = (micro.tokens, micro.positions, micro.where, micro.targets, micro.rows, counts, own, recorded)
        return _Batch(indices, micro.lengths, *(torch.from_numpy(array).to(self.engine.device) for array in arrays))

    def _forward(self, model: Callable[..., Any], batch: _Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies of the response tokens, [R] both, and the load-balancing loss."""
        algorithm = self._config.algorithm
        inputs = (batch.tokens, batch.positions, batch.lengths, batch.where, batch.targets, self._temperature)
        balances = algorithm.router_aux_coefficient > 0 and torch.is_grad_enabled()
        log_probs, entropy, router_loss = model(*inputs, algorithm.entropy_coefficient > 0, balances)
        return log_probs, entropy, router_loss

    @torch.no_grad()
    def _log_probs(self, model: Callable[..., Any], batch: _Batch) -> torch.Tensor:
        BEAT.tick()
        return self._forward(model, batch)[0]

    def _old_log_probs(self, own: Sequence[Sequence[_Batch]]) -> list[Sequence[torch.Tensor | None]]:
        """Log-probs before the first update; None for its own batches, whose pass in that update computes them."""
        first, *later = own
        return [[None] * len(first), *([self._log_probs(self.engine, batch) for batch in batches] for batches in later)]

    def _accumulate(
        self, batches: Sequence[_Batch], old: Sequence[torch.Tensor | None], sums: TokenSums
    ) -> list[torch.Tensor]:
        """Gradient of one update's loss over all micro-batches and ranks; adds to this rank's sums for the stats.

        Returns which tokens' losses [T] are finite, of each micro-batch.
        """
        is_finite = []
        for index, (batch, old_log_probs) in enumerate(zip(batches, old, strict=True)):
            BEAT.enter_part("micro-batch", index + 1, len(batches))
            self.engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            losses = self._token_losses_adding_stats(batch, old_log_probs, sums)
            is_finite.append(losses.detach().isfinite())
            # DeepSpeed averages over ranks; the tokens' weights are those of all ranks' tokens.
            self.engine.backward(losses.sum() * self._world.size, scale_wrt_gas=False)
        return is_finite

    def _token_losses_adding_stats(self, batch: _Batch, old: torch.Tensor | None, sums: TokenSums) -> torch.Tensor:
        """What each token adds to the loss [T]; adds to the sums for the stats."""
        algorithm, recipe = self._config.algorithm, self._recipe
        log_probs, entropy, router_loss = self._forward(self.engine, batch)
        old = log_probs.detach() if old is None else old
        bounds = (recipe.clip_low, recipe.clip_high, algorithm.clip_dual)
        pg_losses, clipped = policy_loss(recipe.loss, log_probs, old, batch.advantages, batch.rows, *bounds)
        corrections, outside = correction_weights(algorithm.correction, old, batch.rollout_log_probs)
        pg_losses = pg_losses * corrections
        losses, kl = pg_losses, torch.zeros_like(old)
        if self._reference is not None and algorithm.kl_placement == "loss":
            kl = kl_estimate(algorithm.kl_estimator, log_probs, self._log_probs(self._reference, batch))
            losses = losses + algorithm.kl_coefficient * kl
        if algorithm.entropy_coefficient:
            losses = losses - algorithm.entropy_coefficient * entropy
        if algorithm.router_aux_coefficient:
            losses = losses + algorithm.router_aux_coefficient * router_loss
        with torch.no_grad():
            distance, k1, k3 = mismatch_terms(old, batch.rollout_log_probs)
            per_token = (
                *(pg_losses * batch.weights, entropy, old - log_probs, clipped, kl, router_loss.expand_as(old)),
                *(distance, k1, k3, corrections, outside),
            )
            sums.add(per_token, distance)
        return losses * batch.weights

    def _step_optimizer(self) -> float:
        """One optimiser step; returns the gradient's global norm before clipping, whether it is finite or not."""
        self._set_learning_rate(learning_rate(self._config, self._num_steps))
        own_norm = None
        if self._zero_stage == 0:
            gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
            own_norm = torch.nn.utils.get_total_norm(gradients)
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm() if own_norm is None else own_norm)
        self._num_steps += 1
        self._has_state = True
        return norm

    def _set_learning_rate(self, value: float) -> None:
        for group in self.engine.basic_optimizer.param_groups:
            group["lr"] = value

    def _gather_stats(
        self, totals: TokenSums, norms: Sequence[float], num_tokens: int, seconds: tuple[float, float]
    ) -> PolicyStats:
        entropy, ppo_kl, clipped, kl, router_loss, diff, *others = (totals.sums[1:] / num_tokens).tolist()
        old_seconds, update_seconds = np.max(self._world.allgather(seconds), axis=0).tolist()
        return PolicyStats(
            pg_loss=float(totals.sums[0]) / len(norms),
            entropy=entropy,
            ppo_kl=ppo_kl,
            pg_clipfrac=clipped,
            kl_loss=kl,
            router_aux_loss=router_loss,
            grad_norm=float(np.mean(norms)),
            lr=learning_rate(self._config, self._num_steps - 1),
            num_tokens=num_tokens,
            old_log_prob_seconds=old_seconds,
            update_seconds=update_seconds,
            mismatch=RolloutMismatch(diff, totals.largest, *others),
        )

    @property
    def _zero_stage(self) -> int:
        return self._config.optimizer.zero_stage

    def _create_optimizer_moments(self) -> None:
        """Have the optimiser's moments exist, which only a first step makes: all zero, the weights untouched."""
        if self._has_state:
            return
        self._set_learning_rate(0.0)
        self.engine.train()
        self.engine.set_gradient_accumulation_boundary(True)
        nothing = self._make_device_batch([], [], np.zeros(0), ())
        self.engine.backward(self._forward(self.engine, nothing)[0].sum(), scale_wrt_gas=False)
        self.engine.step()
        self._has_state = True
        self._state.set_step_count(self._num_steps)


def _response_ends(rollouts: Sequence[Rollout]) -> NDArray[np.int64]:
    """Where each response's tokens end among those of all, [N]."""
    return np.cumsum([rollout.response_tokens.size for rollout in rollouts])


def _find_non_finite_responses(batches: Sequence[_Batch], is_finite: Sequence[torch.Tensor]) -> list[int]:
    """Indices of the responses with a loss that is not finite."""
    found = zip(batches, is_finite, strict=True)
    return [batch.indices[row] for batch, finite in found for row in set(batch.rows[~finite].tolist())]


def _layer_of(name: str) -> str:
    """The layer that a weight belongs to; its own name outside of all layers."""
    found = re.match(r".*\.layers\.\d+\.", name)
    return found[0] if found else name


def attention_crossover_tokens(model: torch.nn.Module) -> float:
    """Tokens of a document at which its attention costs as much as the products with the model's weights.

    A product takes 2 operations a weight and token; attention, 4 a width, layer and token that is seen, of which there
    are half as many as the document has. Of experts those count that a token passes through.
    """
    config: Any = model.config
    weights = sum(parameter.numel() for name, parameter in model.named_parameters() if not is_fused_expert_name(name))
    if experts := sum(parameter.numel() for name, parameter in model.named_parameters() if is_fused_expert_name(name)):
        weights += experts * config.num_experts_per_tok // config.num_experts
    width: int = config.num_hidden_layers * config.hidden_size
    return weights / width
