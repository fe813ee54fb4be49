"""transformers' own ``generate``, plain, with prompt lookup and with an assistant: what a bench is held against.

The user of ``generate`` has static batches: padded on the left, and running until the longest response is done.
Knows nothing of the engine; besides folder.py the one place that imports transformers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tlt_hpc.models.folder import load_policy_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WAYS = ("generate", "prompt_lookup", "assisted")
_LOOKUP_TOKENS = 10
"""Tokens that prompt lookup proposes, as transformers' documentation does."""


class Generate:
    """A transformers model that generates responses of given lengths."""

    def __init__(self, folder: Path, dtype: str, device: torch.device, assistant: Path | None = None) -> None:
        """Load the model, and a smaller one that assists it where there is one.

        Raises:
            ValueError: the assistant cannot be read, or its vocabulary is another.
        """
        self._model = _load(folder, dtype, device)
        self._assistant = None if assistant is None else _load_assistant(assistant, dtype, device)
        self._device = device
        if self._assistant is not None and self._assistant.config.vocab_size != self._model.config.vocab_size:
            raise ValueError(
                f"--assistant {assistant} has {self._assistant.config.vocab_size} tokens, the model "
                f"{self._model.config.vocab_size}; give a smaller model of the same tokenizer"
            )

    def why_not(self, way: str, batch_size: int) -> str | None:
        """Why a way cannot be run, or None."""
        if way == "assisted" and self._assistant is None:
            return "no smaller model of the same tokenizer was given (--assistant)"
        if way != "generate" and batch_size > 1:
            return "transformers takes one sequence at a time"
        return None

    def run(
        self,
        way: str,
        prompts: Sequence[NDArray[np.int32]],
        lengths: Sequence[int],
        batch_size: int,
        temperature: float,
    ) -> float:
        """Seconds for all prompts in batches of ``batch_size``, each batch as long as the longest of its ``lengths``.

        No response ends before that, so that a batch has the tokens it is meant to have.
        """
        start = time.perf_counter()
        for first in range(0, len(prompts), batch_size):
            chunk = slice(first, first + batch_size)
            self._batch(way, prompts[chunk], max(lengths[chunk]), temperature)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start

    @torch.inference_mode()
    def _batch(self, way: str, prompts: Sequence[NDArray[np.int32]], length: int, temperature: float) -> Tensor:
        tokens, mask = pad_left(prompts, self._device)
        with _only_errors():
            out = self._model.generate(
                tokens,
                attention_mask=mask,
                generation_config=self._settings(way, length, temperature),
                assistant_model=self._assistant if way == "assisted" else None,
            )
        assert out.shape[1] == tokens.shape[1] + length, f"{way} gave {out.shape[1] - tokens.shape[1]} of {length}"
        result: Tensor = out
        return result

    def _settings(self, way: str, length: int, temperature: float) -> Any:
        """Every field that a model folder could set otherwise is named: the same text law as the engine's."""
        from transformers import GenerationConfig

        sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
        eos = self._model.generation_config.eos_token_id
        return GenerationConfig(
            do_sample=temperature > 0,
            max_new_tokens=length,
            min_new_tokens=length,
            repetition_penalty=1.0,
            num_beams=1,
            eos_token_id=eos,
            pad_token_id=0,
            prompt_lookup_num_tokens=_LOOKUP_TOKENS if way == "prompt_lookup" else None,
            **sampling,
        )


def pad_left(prompts: Sequence[NDArray[np.int32]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and attention mask [B, P] int64 of prompts that end in one column."""
    width = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, width - len(prompt) :] = 1
    return tokens.to(device), mask.to(device)


@contextmanager
def _only_errors() -> Iterator[None]:
    """Assisted generate warns of calls that transformers itself makes; nobody else can mend them."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _load_assistant(folder: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    try:
        return _load(folder, dtype, device)
    except (OSError, ValueError) as error:  # transformers raises either, with pages of advice
        what = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"--assistant {folder}: {what}; give a whole model folder") from None


def _load(folder: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    model = load_policy_model(folder, dtype).to(device)  # type: ignore[arg-type]
    return model.eval()
