"""Chat templates of known models: arguments, parts, continued messages as transformers has them; ends of turns."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from data_sets import PLAIN, RAW, config_of, gcd_row, open_data, write_jsonl
from smollm2 import smollm2_folder
from tiny import byte_tokenizer
from transformers import AutoTokenizer

from tlt_hpc.common.records import ChatFormat
from tlt_hpc.config import ConfigError
from tlt_hpc.data.chat import ChatTemplate
from tlt_hpc.data.prompts import open_prompts
from tlt_hpc.data.reader import PromptReader
from tlt_hpc.data.rows import RowError
from tlt_hpc.models.tokenizer import load_tokenizer, read_chat_format

Chat = list[dict[str, Any]]

SPEC = importlib.util.find_spec("trl")
assert SPEC is not None and SPEC.origin is not None
TEMPLATES = Path(SPEC.origin).parent / "chat_templates"
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""
ZEPHYR = """{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token }}
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"""
SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]"),
    *(
        "<\uff5cbegin▁of▁sentence\uff5c>",
        "<\uff5cend▁of▁sentence\uff5c>",
        "<\uff5cUser\uff5c>",
        "<\uff5cAssistant\uff5c>",
        "<|start|>",
        "<|message|>",
    ),
    *("<|return|>", "<|channel|>", "<|end|>", "<think>", "</think>"),
    *("<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"),
]
TOKENIZER = byte_tokenizer(["user assistant system <|im_start|>user\n1+1?<|im_end|>"], 400, SPECIAL)


def template(name: str) -> str:
    known = {"mistral": MISTRAL, "zephyr": ZEPHYR}
    return known.get(name) or (TEMPLATES / f"{name}.jinja").read_text()


def folder_of(name: str, place: Path, **tokens: str) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    TOKENIZER.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **tokens}))
    (place / "chat_template.jinja").write_text(template(name))
    return place


def rendered(folder: Path, chat: Chat, *overrides: str) -> tuple[str, list[int]]:
    """Text and tokens of a chat as the prompt of a run with this model folder."""
    path = write_jsonl(folder / "chats.jsonl", [{"prompt": chat, "answer": "1"}])
    reader = PromptReader(config_of(path, *overrides).data, 0, load_tokenizer(folder), read_chat_format(folder))
    prompt = reader.read(0)
    return prompt.text, prompt.tokens.tolist()


def by_transformers(folder: Path, chat: Chat, **options: Any) -> tuple[str, list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(chat, tokenize=False, **options)
    return text, list(tokenizer.apply_chat_template(chat, tokenize=True, **options)["input_ids"])


def user(content: object) -> Chat:
    return [{"role": "user", "content": content}]


BOS = {"bos_token": "<bos>", "eos_token": "</s>"}
LONG = "data.max_prompt_tokens=9000"


# --- arguments ---


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("qwen3", {"enable_thinking": False}),
        ("qwen3", {"enable_thinking": True}),
        ("gptoss", {"reasoning_effort": "high", "model_identity": "M", "strange": [1, {"a": None}]}),
    ],
)
def test_arguments_are_those_of_transformers(name: str, args: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path / "model", **BOS)
    if name == "gptoss":  # which writes the day
        (folder / "chat_template.jinja").write_text(template(name).replace("strftime_now(", "'today'.format("))
    written = {key: value for key, value in args.items() if key != "strange"}
    given = "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in written.items()) + "}"
    found = rendered(folder, user("1+1?"), LONG, f"data.template_args={given}")
    assert found == by_transformers(folder, user("1+1?"), add_generation_prompt=True, **args)
    assert (found == rendered(folder, user("1+1?"), LONG)) == (args == {"enable_thinking": True})


def test_arguments_that_have_no_effect_are_warned_of(tmp_path: Path) -> None:
    chat, text = write_jsonl(tmp_path / "chat.jsonl", [{"prompt": user("1"), "answer": "1"}]), tmp_path / "text.jsonl"
    write_jsonl(text, [gcd_row(1)])
    args = "data.template_args={enable_thinking = false, low = 1}"
    reads = ChatFormat("{% if enable_thinking is defined %}1{% else %}2{% endif %}{{ messages[0].content }}")
    warned = "data.template_args: the chat template does not read 'low', which has no effect"
    assert open_data(chat, args, chat=reads, count=1).warning == warned
    assert open_data(chat, chat=reads, count=1).warning == ""
    ignored = (
        "data.template_args = {'enable_thinking': False, 'low': 1} has no effect: no prompt is rendered by a chat "
    )
    assert open_data(text, args, chat=reads, count=1).warning.startswith(ignored)
    assert open_data(text, args, chat=ChatFormat(), count=1).warning.startswith(ignored)
    with pytest.raises(ConfigError, match=r"^data\.template_args has 'messages', which every prompt is rendered with"):
        config_of(text, "data.template_args={messages = []}")


def test_arguments_are_part_of_what_a_resume_compares(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chat.jsonl", [{"prompt": user("1"), "answer": "1"}])
    marks = [open_data(path, *args, chat=PLAIN).fingerprints()["chat template"] for args in (
        [], ["data.template_args={}"], ["data.template_args={a = 1}"], ["data.template_args={a = 2}"]
    )]  # fmt: skip
    assert marks[0] == marks[1] and len(set(marks)) == 3


# --- parts ---


@pytest.mark.parametrize(
    ("name", "is_as_given"), [("gemma3", True), ("qwen2_5_vl", True), ("qwen2_5", False), ("llama3", False)]
)
def test_text_parts(name: str, is_as_given: bool, tmp_path: Path) -> None:
    """A template that reads parts gets them; for others, which refuse a list or write Python's, they are joined."""
    folder = folder_of(name, tmp_path / "model", **BOS)
    parts = [{"type": "text", "text": "1 + 1 "}, {"type": "text", "text": " is?"}]
    found = rendered(folder, user(parts), LONG)
    assert found == by_transformers(folder, user(parts if is_as_given else "1 + 1  is?"), add_generation_prompt=True)
    assert "type" not in found[0]


# --- an assistant's message that is continued ---


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3", "gemma3", "deepseek_r1_distill", "mistral", "smollm2"])
@pytest.mark.parametrize("content", ["Let me think", "<think>\n", "b ", "1<|im_end|>", " "])
def test_a_final_message_is_continued_as_in_transformers(name: str, content: str, tmp_path: Path) -> None:
    folder = smollm2_folder() if name == "smollm2" else folder_of(name, tmp_path / "model", **BOS)
    chat = [*user("1+1?"), {"role": "assistant", "content": content}]
    path = write_jsonl(
        tmp_path / "chats.jsonl", [{"prompt": chat, "answer": "1"}, {"prompt": user("2"), "answer": "1"}]
    )
    data = config_of(path, LONG, "data.template_args={continue_final_message=true}").data
    reader = PromptReader(data, 0, load_tokenizer(folder), read_chat_format(folder))
    prompts = [(prompt.text, prompt.tokens.tolist()) for prompt in map(reader.read, range(2))]
    assert prompts[0] == by_transformers(folder, chat, continue_final_message=True)
    assert prompts[1] == by_transformers(folder, user("2"), add_generation_prompt=True)


def test_a_final_message_of_parts_is_continued(tmp_path: Path) -> None:
    folder = folder_of("gemma3", tmp_path / "model", **BOS)
    parts = [{"type": "text", "text": "So "}, {"type": "text", "text": "it is"}]
    chat = [*user("1+1?"), {"role": "assistant", "content": parts}]
    found = rendered(folder, chat, LONG, "data.template_args={continue_final_message=true}")
    assert found == by_transformers(folder, chat, continue_final_message=True)


def test_a_final_message_that_the_template_leaves_out(tmp_path: Path) -> None:
    chat = [*user("1"), {"role": "assistant", "content": "2"}]
    path = write_jsonl(tmp_path / "chat.jsonl", [{"prompt": chat, "answer": "1"}])
    with pytest.raises(RowError, match="the chat template refuses the messages: it leaves out some of the assistant's"):
        open_data(
            path, "data.template_args={continue_final_message=true}", chat=ChatFormat("{{ messages[0].content }}")
        )


# --- ends of turns ---

# the token that ends a turn of known templates, by the tokens that their folders name
ENDS = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "mistral": "</s>",
    "zephyr": "</s>",
    "deepseek_r1_distill": "<\uff5cend▁of▁sentence\uff5c>",
    "phi3": "<|end|>",
    "gptoss": "<|return|>",
}


def warned(name: str, ends: list[str], place: Path) -> str:
    """The line about data of chats for a model that has these end tokens."""
    path = write_jsonl(place / "chat.jsonl", [{"prompt": user("1+1?"), "answer": "2"}])
    ids = tuple(TOKENIZER.token_to_id(end) for end in ends)
    chat = ChatFormat(template(name), tuple(BOS.items()), ids)
    return open_prompts(config_of(path, LONG), TOKENIZER, chat).warning


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_turn_is_an_end_token_or_warned_of(name: str, tmp_path: Path) -> None:
    assert warned(name, [ENDS[name], "<|endoftext|>"], tmp_path) == ""
    token = TOKENIZER.token_to_id(ENDS[name])
    assert warned(name, ["<|endoftext|>"], tmp_path) == (
        f"the chat template ends a turn with {ENDS[name]!r}, which is no end token of the model, so that responses "
        f"run on to their largest length: add {token} to eos_token_id in generation_config.json of the model folder"
    )


def test_a_turn_may_end_with_several_tokens(tmp_path: Path) -> None:
    assert warned("cohere2", ["<|END_OF_TURN_TOKEN|>"], tmp_path) == ""
    assert "ends a turn with '<|END_RESPONSE|>'" in warned("cohere2", ["<|endoftext|>"], tmp_path)


def test_smollm2_ends_its_turns() -> None:
    folder = smollm2_folder()
    found = read_chat_format(folder)
    end = ChatTemplate(found.template, dict(found.special_tokens), "").turn_end()
    assert end == "<|im_end|>\n"


def test_texts_and_templates_without_an_end_are_not_warned_of(tmp_path: Path) -> None:
    """A base model that reads plain texts ends with its own token, whatever its template says."""
    path = write_jsonl(tmp_path / "text.jsonl", [gcd_row(1)])
    assert open_data(path, chat=ChatFormat(template("qwen2_5"), (), (1,)), count=1).warning == ""
    assert open_data(path, "data.text_prompts=chat", chat=ChatFormat(RAW.template, (), (1,)), count=1).warning == ""
    refuses = ChatFormat(
        "{{ messages[0].content }}{% if messages[1] %}{{ raise_exception('one') }}{% endif %}", (), (1,)
    )
    assert open_data(path, "data.text_prompts=chat", chat=refuses, count=1).warning == ""
