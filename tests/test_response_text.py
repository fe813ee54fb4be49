"""The text of a response that is judged: tags stay, also those that are special tokens; control tokens do not."""

from __future__ import annotations

import numpy as np
import pytest
from smollm2 import smollm2_folder
from tiny import byte_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models

from tlt_hpc.rewards.text import tags
from tlt_hpc.run.session import text_of

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
TEXT = "<think>a é</think>\n<answer>42</answer>"


def read(tokenizer: Tokenizer, text: str) -> str:
    return text_of(tokenizer, np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32))


@pytest.mark.parametrize("is_special", [False, True])
def test_tags_stay_and_control_tokens_do_not(is_special: bool) -> None:
    tokenizer = byte_tokenizer([TEXT], 300, ["<|im_end|>", "<s>", "</s>", "<end_of_turn>", "<eos>"])
    tokenizer.add_tokens([AddedToken(tag, special=is_special) for tag in TAGS])
    found = read(tokenizer, f"<s>{TEXT}<end_of_turn><|im_end|></s><eos>")
    assert found == TEXT and tags(found, ["think", "answer"]) == 1.0


def test_spaces_are_those_of_the_whole_text() -> None:
    """Decoders of this kind strip a text's first space, so tags must not cut the text into several."""
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "?": 2}, unk_token="?"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(name) for name in ("<think>", "</think>", "</s>")])
    assert text_of(tokenizer, np.array([0, 3, 1, 4, 1, 5])) == "a<think> b</think> b"


def test_tokens_that_the_tokenizer_lacks_are_left_out() -> None:
    """Models may have more rows than their tokenizer has tokens."""
    tokenizer = byte_tokenizer([TEXT], 300, ["<|im_end|>"])
    assert text_of(tokenizer, np.array([60000, *tokenizer.encode("a").ids, 2**31 - 1], np.int32)) == "a"
    assert text_of(tokenizer, np.array([], np.int32)) == ""


def test_real_tokenizers_text_is_what_it_was() -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_folder() / "tokenizer.json"))
    ids = tokenizer.encode("<|im_start|>assistant\nGrößer 数学 🙂 <think>\\boxed{1}</think><|im_end|>\n<file_sep>").ids
    assert text_of(tokenizer, np.array(ids)) == tokenizer.decode(ids, skip_special_tokens=True)
