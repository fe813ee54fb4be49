"""Turns rows into prompts, rendered and tokenized when they are asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel, WordPiece

from tlt_hpc.common.records import ChatFormat, Prompt
from tlt_hpc.config import ConfigError, DataSection
from tlt_hpc.data.chat import ChatError, ChatTemplate, read_template
from tlt_hpc.data.files import TRAINED, open_rows
from tlt_hpc.data.rows import RowError
from tlt_hpc.data.schema import Messages, split_row, wanted_columns
from tlt_hpc.models.tokenizer import control_token_ids

PromptCheck = Callable[[Prompt], str]
"""Why no response to the prompt can be right, in words; raises ValueError if the prompt cannot be used at all."""


class OverlongError(RowError):
    """A prompt of more tokens than the limit."""

    def __init__(self, where: str, num_tokens: int, limit: int) -> None:
        super().__init__(
            where,
            f"prompt of {num_tokens} tokens, data.max_prompt_tokens = {limit}",
            "raise the limit, remove the row or set data.overlong = 'drop'",
        )


class PromptReader:
    """A data set's prompts by row. Without a tokenizer prompts have no tokens, and messages are not rendered.

    ``key`` names the data set in messages.

    Raises:
        ConfigError: no such file, or no such template.
    """

    def __init__(
        self,
        data: DataSection,
        seed: int,
        tokenizer: Tokenizer | None,
        chat: ChatFormat | None = None,
        check: PromptCheck = lambda _: "",
        key: str = TRAINED,
    ) -> None:
        self.rows = open_rows(data, seed, wanted_columns(data), key)
        self.source = f"{key} = {data.source_name!r}"
        """The data set in messages."""
        self.data, self._tokenizer, self._check = data, tokenizer, check
        self._unknown = unknown_id(tokenizer) if tokenizer else None
        self._chat = chat or ChatFormat()
        self._template = read_template(data, self._chat)
        self._has_rendered = False

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def template_digest(self) -> str:
        """SHA-256 of the chat template and its arguments, empty if there is none."""
        if self._template is None:
            return ""
        given = json.dumps(self._template.args, sort_keys=True) if self._template.args else ""
        return hashlib.sha256((self._template.text + given).encode()).hexdigest()

    @property
    def warning(self) -> str:
        """A line about the chat template, as far as the prompts that were read use it; empty: nothing is wrong."""
        used = self._template if self._has_rendered else None
        return "; ".join(filter(None, (self._args_warning(used), self._end_warning(used) if used else "")))

    def read(self, index: int) -> Prompt:
        """A row's prompt.

        Raises:
            RowError: the row is broken; ``OverlongError``: it is too long.
            ConfigError: the row is of a kind that the configuration does not provide for.
        """
        prompt = self.read_unlimited(index)
        if len(prompt.tokens) > self.data.max_prompt_tokens:
            raise OverlongError(self.rows.where(index), len(prompt.tokens), self.data.max_prompt_tokens)
        return prompt

    def read_unlimited(self, index: int) -> Prompt:
        """The same, whatever its length."""
        where = self.rows.where(index)
        row = split_row(self.rows[index], self.data, self.rows.kind, where)
        text = self._text_of(row.prompt, where)
        tokens = encode(self._tokenizer, text) if self._tokenizer else np.empty(0, np.int32)
        if self._tokenizer and not len(tokens):
            raise RowError(where, "prompt of 0 tokens; fix or remove the row")
        return Prompt(tokens, text, row.answer, row.source, row.extra)

    def check(self, index: int, prompt: Prompt) -> str:
        """Why no response to a row that was read can be right, with the row's place; empty: one can.

        Raises:
            RowError: the row cannot be used.
        """
        try:
            problem = self._check(prompt)
        except ValueError as error:
            raise RowError(self.rows.where(index), f"{error}; fix or remove the row") from None
        return f"{self.rows.where(index)}: {problem}" if problem else ""

    def is_partly_unknown(self, prompt: Prompt) -> bool:
        """Whether the tokenizer reads some of the prompt's characters as its token for unknown text."""
        return self._unknown is not None and bool((prompt.tokens == self._unknown).any())

    def left_out_start(self, index: int) -> str:
        """The token that the tokenizer puts before every text, if a row's prompt does not begin with it; else empty."""
        assert self._tokenizer is not None, "prompts have no tokens"
        prompt = self.read_unlimited(index)
        first = self._tokenizer.encode(prompt.text).ids[0]
        return "" if first == prompt.tokens[0] else str(self._tokenizer.id_to_token(first))

    def _text_of(self, prompt: str | Messages, where: str) -> str:
        """The text that the model is fed."""
        if self._tokenizer is None:
            return prompt if isinstance(prompt, str) else json.dumps(prompt, default=str)
        system = self.data.system_prompt
        if isinstance(prompt, str):
            if self.data.text_prompts == "raw":
                if system:
                    raise ConfigError(
                        f"data.system_prompt is set, but the prompt of {where} is a text that is fed as it is; "
                        "set data.text_prompts = 'chat' or omit data.system_prompt"
                    )
                return prompt
            prompt = ({"role": "user", "content": prompt},)
        if system and prompt[0]["role"] != "system":
            prompt = ({"role": "system", "content": system}, *prompt)
        return self._render(prompt, where)

    def _render(self, messages: Messages, where: str) -> str:
        if self._template is None:
            raise ConfigError(
                f"{where}: the prompt is a list of messages, and the model folder has no chat template; "
                "give a file of Jinja in data.chat_template, or use prompts that are texts"
            )
        self._has_rendered = True
        try:
            return self._template.render(messages)
        except ChatError as error:
            raise RowError(where, f"the chat template refuses the messages: {error}; fix the row") from None

    def _args_warning(self, used: ChatTemplate | None) -> str:
        args = self.data.template_args
        if not args or self._tokenizer is None:
            return ""
        if used is None:
            return f"data.template_args = {args!r} has no effect: no prompt is rendered by a chat template"
        unknown = ", ".join(map(repr, used.unknown_args))
        return f"data.template_args: the chat template does not read {unknown}, which has no effect" if unknown else ""

    def _end_warning(self, used: ChatTemplate) -> str:
        """A line about a turn's end that does not end a response of this model."""
        assert self._tokenizer is not None, "nothing is rendered"
        control, ends = control_token_ids(self._tokenizer), self._chat.end_token_ids
        after = self._tokenizer.encode(used.turn_end(), add_special_tokens=False).ids
        end = next((token for token in after if token in control), None)
        if end is None or not ends or not set(ends).isdisjoint(after):
            return ""
        return (
            f"the chat template ends a turn with {self._tokenizer.id_to_token(end)!r}, which is no end token of the "
            f"model, so that responses run on to their largest length: add {end} to eos_token_id in "
            "generation_config.json of the model folder"
        )


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """The token that stands for text that the tokenizer does not know; tokenizers of bytes know all text."""
    model = tokenizer.model
    token = model.unk_token if isinstance(model, (BPE, WordLevel, WordPiece)) else None
    return None if token is None else tokenizer.token_to_id(token)


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """A text's tokens [P] as it is: marks such as a chat template's are in the text or nowhere."""
    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)
