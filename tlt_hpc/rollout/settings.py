"""The settings of an engine, and which requests it accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tlt_hpc.common.records import Request, SamplingParams
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.rollout.device_cache import AttentionKind
from tlt_hpc.rollout.kv_cache import PoolSizes, page_bytes
from tlt_hpc.rollout.strategy import OFF, STORED_DEPTHS, Strategy

Detokenizer = Callable[[list[int]], str]


_STORED_LOGITS = 2**26
"""Logits of a pass in which texts are drafted from that were generated ahead."""


@dataclass(frozen=True)
class EngineSettings:
    """``params`` are those of a request without its own; its ``max_tokens`` is the cap of all. ``num_tokens`` is the
    vocabulary without padding rows, which are never sampled.
    """

    params: SamplingParams
    num_tokens: int
    eos_token_ids: tuple[int, ...]
    max_live: int
    max_prompt_tokens: int
    tie_guard: bool
    kv_bytes: int = 0
    """Budget of the paged cache, keys, values and features; 0: room for ``max_live`` responses of full length."""
    page_size: int = 128
    prefill_tokens: int = 4096
    """Tokens of one prefill chunk."""
    attention: AttentionKind = "auto"
    """Layout of keys and values, and their reading; the text does not depend on it."""
    strategies: tuple[Strategy, ...] = (OFF,)
    stored_texts: bool = False
    """Texts that were generated ahead may be drafted from."""
    chooser: Literal["goodput", "random"] = "goodput"
    """``random`` is for checks that the text does not depend on the strategy."""
    seed: int = 0
    detokenize: Detokenizer | None = None
    """Needed for stop strings alone."""

    @property
    def max_depth(self) -> int:
        """Most drafts that a row may accept in a round."""
        return max(self.stored_depth, *(strategy.depth for strategy in self.strategies))

    @property
    def stored_depth(self) -> int:
        """Most drafts of a stored text."""
        return STORED_DEPTHS[-1] if self.stored_texts else 0

    @property
    def max_slots(self) -> int:
        """Most positions from a row's last token on that a round may write."""
        return max(1 + self.stored_depth, *(strategy.num_slots for strategy in self.strategies))

    def max_pass_tokens(self, vocab_size: int) -> dict[bool, int]:
        """Most tokens of a pass over chains (False) and, where a strategy has them, of one with trees (True)."""
        # spans of stored texts are long, so their logits are bounded
        stored = min((1 + self.stored_depth) * self.max_live, _STORED_LOGITS // vocab_size) if self.stored_texts else 0
        found = {False: max(self.max_live, stored)}
        for one in self.strategies:
            is_tree = one.branching > 1
            found[is_tree] = max(found.get(is_tree, stored), self.max_live * one.widest_pass)
        return found


def check_request(request: Request, params: SamplingParams, settings: EngineSettings, num_ids: int) -> None:
    """Refuse a request that an engine with these settings and ``num_ids`` token ids cannot carry out.

    Raises:
        ValueError: its prompt or its length is not what the engine was built for.
    """
    length = len(request.prompt_tokens)
    name = f"draw {request.key.draw}, sample {request.key.sample}"
    if not 0 < length <= settings.max_prompt_tokens:
        raise ValueError(
            f"prompt of {name} has {length} tokens; the engine takes 1 to "
            f"{settings.max_prompt_tokens}: raise data.max_prompt_tokens or drop the prompt"
        )
    if request.prompt_tokens.min() < 0 or request.prompt_tokens.max() >= num_ids:
        raise ValueError(f"prompt of {name} has a token outside 0 to {num_ids - 1}")
    if not 1 <= params.max_tokens <= settings.params.max_tokens:
        raise ValueError(
            f"{name}: max_tokens = {params.max_tokens}; the engine was made for responses of 1 to "
            f"{settings.params.max_tokens} tokens: raise rollout.max_new_tokens"
        )


def check_settings(settings: EngineSettings, drafter: Drafter | None) -> None:
    """Refuse what would fail in the middle of a rollout.

    Raises:
        ValueError: the drafter is of another vocabulary, or drafts fewer tokens than a strategy branches.
    """
    largest = settings.num_tokens - 1
    ids = drafter.served_ids if drafter is not None else None
    if ids is not None and not ids.is_meta and int(ids[-1]) > largest:
        raise ValueError(
            f"the drafter drafts token {int(ids[-1])}, and the vocabulary has ids 0 to {largest}; give one that was "
            "made for this tokenizer"
        )
    widest = max(strategy.branching for strategy in settings.strategies)
    if ids is not None and len(ids) < widest:
        raise ValueError(f"the drafter drafts {len(ids)} tokens, a strategy branches {widest} times; use narrower ones")


def pool_sizes(settings: EngineSettings, decoder: Decoder, num_features: int) -> PoolSizes:
    """Sizes of the cache within the budget of the settings.

    Raises:
        ValueError: the budget does not hold a single sequence of full length.
    """
    num_positions = settings.max_prompt_tokens + settings.params.max_tokens + settings.max_slots + 1
    each = -(-num_positions // settings.page_size)
    size = page_bytes(decoder.part, settings.page_size, decoder.dtype, num_features)
    # one page more than those given to sequences takes values that must not be kept
    num_pages = max(0, settings.kv_bytes // size - 1) if settings.kv_bytes else settings.max_live * each
    if num_pages < each:
        raise ValueError(
            f"rollout.kv_bytes = {settings.kv_bytes} holds {num_pages} pages of {settings.page_size} tokens, one "
            f"sequence of full length takes {each}; give at least {(each + 1) * size} or lower rollout.max_new_tokens"
        )
    # one row more is padding
    return PoolSizes(num_pages, settings.page_size, settings.max_live + 1, num_positions, num_features)
