"""What the tests share: the embedded model's decoder, requests for it, and random tiny models of both families."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tlt_hpc.common.records import Request, Rollout, SampleKey, SamplingParams, Stream
from tlt_hpc.config import EMBEDDED_MODEL
from tlt_hpc.data.prompts import draw_from_split
from tlt_hpc.kernels.gumbel import gumbel_noise_reference
from tlt_hpc.models.decoder import Decoder
from tlt_hpc.models.drafter import Drafter
from tlt_hpc.models.folder import read_folder_weights
from tlt_hpc.models.layers import Attend
from tlt_hpc.models.shape import read_shape
from tlt_hpc.models.tokenizer import find_model, load_tokenizer
from tlt_hpc.rollout.chooser import Agree
from tlt_hpc.rollout.device_cache import make_cache
from tlt_hpc.rollout.engine import RolloutEngine
from tlt_hpc.rollout.kv_cache import PoolSizes
from tlt_hpc.rollout.sampling import SamplingRule
from tlt_hpc.rollout.settings import EngineSettings
from tlt_hpc.rollout.strategy import OFF, Strategy
from tlt_hpc.storage.feature_file import Document

CPU = torch.device("cpu")
NUM_TOKENS = 20
EOS = 1


@cache
def embedded_folder() -> Path:
    return find_model(EMBEDDED_MODEL)


@cache
def embedded_tokenizer() -> Tokenizer:
    return load_tokenizer(embedded_folder())


@cache
def embedded_decoder() -> Decoder:
    decoder = Decoder(read_shape(embedded_folder()), torch.float32, CPU)
    decoder.load_weights(read_folder_weights(embedded_folder()), 0)
    return decoder


def byte_tokenizer(texts: Sequence[str], num_tokens: int, special: Sequence[str]) -> Tokenizer:
    """A byte-level BPE learned on texts: merges join most of them, bytes of rarer characters stay tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": num_tokens, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(list(texts) * 3, trainers.BpeTrainer(special_tokens=list(special), **options))
    return tokenizer


def response_text(pairs: Sequence[tuple[int, int]], answer: str) -> str:
    """A response to a problem of the embedded task that shows ``pairs`` as its working."""
    return "<think>" + ";".join(f"{a},{b}" for a, b in pairs) + "</think>\\boxed{" + answer + "}"


def gcd_requests(num_prompts: int, group_size: int, step: int = 0, seed: int = 0) -> list[Request]:
    source = random.Random(f"{seed}/{step}")
    requests = []
    for draw in range(num_prompts):
        text = draw_from_split(source, "train").prompt
        tokens = np.array(embedded_tokenizer().encode(text).ids, dtype=np.int32)
        requests += [Request(SampleKey(seed, Stream.TRAIN, step, draw, sample), tokens) for sample in range(group_size)]
    return requests


def make_engine(
    strategies: Sequence[Strategy] = (OFF,),
    *,
    rule: SamplingRule | None = None,
    max_new_tokens: int = 160,
    drafter: Drafter | None = None,
    decoder: Decoder | None = None,
    agree: Agree | None = None,
    drafter_is_trained: bool = False,
    **options,
) -> RolloutEngine:
    """Of the embedded model, which ``decoder`` may compute otherwise; ``options`` of its settings."""
    rule = rule or SamplingRule(1.0, NUM_TOKENS)
    params = SamplingParams(max_new_tokens, rule.temperature, rule.top_k, rule.top_p)
    defaults = {
        "params": params, "eos_token_ids": (EOS,), "max_live": 16, "max_prompt_tokens": 16, "tie_guard": True
    }  # fmt: skip
    settings = EngineSettings(num_tokens=NUM_TOKENS, strategies=tuple(strategies), **defaults | options)
    engine = RolloutEngine(
        decoder or embedded_decoder(), settings, drafter, agree, drafter_is_trained=drafter_is_trained
    )
    engine.load_policy(read_folder_weights(embedded_folder()), 0)
    engine.calibrate(gcd_requests(4, 1, seed=99))
    return engine


def generate(engine: RolloutEngine, requests: Sequence[Request]) -> list[Rollout]:
    engine.submit(requests)
    while engine.has_work:
        engine.step()
    return engine.take_finished_rollouts()


def gumbel_rows(words: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Noise of response positions: words [B, 4], positions [B, n] -> [B, n, V]."""
    noise = gumbel_noise_reference(words.repeat_interleave(positions.shape[1], 0), positions.flatten(), vocab_size)
    return noise.view(*positions.shape, -1)


def texts(rollouts: Sequence[Rollout]) -> dict[SampleKey, list[int]]:
    return {rollout.key: rollout.response_tokens.tolist() for rollout in rollouts}


def tree_relations(parents: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths [N] of a tree's nodes, and which nodes are each one's ancestors or itself, a mask [N, N]."""
    ancestors = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        ancestors[node] |= ancestors[parent] if node else False
    return ancestors.sum(1) - 1, ancestors


def paged_attention(decoder: Decoder, num_rows: int, num_positions: int) -> Callable[[torch.Tensor], Attend]:
    """Attention over rows of their own pages, as a function of the positions [B, n] of a pass."""
    size = 64
    each = -(-num_positions // size)
    tables = [list(range(row * each, (row + 1) * each)) for row in range(num_rows)]
    sizes = PoolSizes(num_rows * each, size, num_rows, num_positions)
    cache = make_cache(decoder.part, sizes, decoder.dtype, CPU)
    for row, table in enumerate(tables):
        cache.set_table(row, table)
    layout = cache.build_layout(tables, num_rows * each)
    return lambda positions: cache.make_attention(layout, cache.tables, positions)


def decode_in_pieces(decoder: Decoder, tokens: torch.Tensor, pieces: Sequence[int]) -> torch.Tensor:
    """Hidden states [B, T, H] of rows of tokens [B, T], fed to a cache in pieces of the given widths."""
    attention = paged_attention(decoder, *tokens.shape)
    out, start = [], 0
    for width in filter(None, pieces):
        positions = torch.arange(start, start + width).expand(tokens.shape[0], width)
        piece = tokens[:, start : start + width]
        out.append(
            decoder.hidden_states(piece.flatten(), positions.flatten(), attention(positions)).view(*piece.shape, -1)
        )
        start += width
    return torch.cat(out, 1)


def random_document(length: int, prompt_length: int, seed: int, num_layers: int = 1) -> Document:
    """A document of random tokens and features [length - 1, num_layers, 128]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(NUM_TOKENS, (length,), generator=generator).numpy().astype(np.int32)
    features = torch.randn(length - 1, num_layers, 128, generator=generator).to(torch.bfloat16)
    return Document(tokens, prompt_length, features.view(torch.uint16).numpy(), 0)


def to_floats(features: NDArray[np.uint16]) -> torch.Tensor:
    """The numbers of features, which are bits of bfloat16."""
    return torch.from_numpy(features).view(torch.bfloat16).float()


class KeptFeatures:
    """A feature sink that puts documents together again: ``whole`` has prompt length and features by tokens."""

    def __init__(self) -> None:
        self.whole: dict[tuple[int, ...], tuple[int, NDArray[np.uint16]]] = {}
        self.firsts: list[tuple[tuple[int, ...], int]] = []
        """Each delivery's prompt and the position of its first features."""
        self._prompts: dict[tuple[int, ...], NDArray[np.uint16]] = {}

    def __call__(self, tokens: NDArray[np.int32], prompt_length: int, features: NDArray[np.uint16], first: int) -> None:
        prompt = tuple(tokens[:prompt_length].tolist())
        if first == 0:
            self._prompts[prompt] = features[: prompt_length - 1]
        whole = np.concatenate([self._prompts[prompt][:first], features])
        self.whole[tuple(tokens.tolist())] = prompt_length, whole
        self.firsts.append((prompt, first))
