"""Chat templates: the same tokens as transformers renders, and mistakes in templates and messages."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from data_sets import PLAIN, all_prompts, texts, write_jsonl
from smollm2 import smollm2_folder
from tiny import byte_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tlt_hpc.common.records import ChatFormat
from tlt_hpc.config import ConfigError, load_config
from tlt_hpc.data.reader import PromptReader
from tlt_hpc.data.rows import RowError
from tlt_hpc.models.tokenizer import load_tokenizer, read_chat_format

TINY = Path(__file__).resolve().parent.parent / "jobs" / "tiny.toml"

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
REASONING = """{{- bos_token if bos_token is defined else '(none)' }}
{%- for m in messages[::-1] %}{% if m.reasoning_content is string %}<think>{{ m.reasoning_content }}</think>
{%- endif %}{% generation %}{{ m.content | trim }}{% endgeneration %}{{ eos_token }}{{ m | tojson }}
{%- if loop.index > 3 %}{% break %}{% endif %}{% endfor %}{{ tools is none }}"""
# After Llama 3.2's.
DATED = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
STRICT = """{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{{ m['content'] }}{% endfor %}"""


TOKENIZER = byte_tokenizer([CHATML, REASONING, STRICT], 400, ["<|im_start|>", "<|im_end|>", "<|user|>"])


def folder_with(template: str | None, place: Path, **settings: Any) -> Path:
    """A model folder with this chat template."""
    place.mkdir(parents=True, exist_ok=True)
    TOKENIZER.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings}))
    if template is not None:
        (place / "chat_template.jinja").write_text(template)
    return place


Chat = list[dict[str, Any]]


def rendered(folder: Path, chats: list[Chat], place: Path) -> list[tuple[str, list[int]]]:
    """Text and tokens of chats as the prompts of a run with this model folder."""
    path = write_jsonl(place / "chats.jsonl", [{"prompt": chat, "answer": "1"} for chat in chats])
    config = load_config(TINY, [f"data.source={path}", "data.max_prompt_tokens=900"])
    reader = PromptReader(config.data, 0, load_tokenizer(folder), read_chat_format(folder))
    return [(prompt.text, prompt.tokens.tolist()) for prompt in map(reader.read, range(len(chats)))]


def rendered_by_transformers(folder: Path, chats: list[Chat]) -> list[tuple[str, list[int]]]:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return [
        (
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False),
            list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)["input_ids"]),
        )
        for chat in chats
    ]


def random_chats(count: int, first: str = "user") -> list[Chat]:
    """Random chats with letters of many scripts, special tokens of templates, and surrounding spaces."""
    draw = random.Random(count)
    pieces = ["Hello", " world ", "\n", "  ", "Größe", "数学", "🙂", "<|im_end|>", "<|im_start|>", "</think>"]
    pieces += ["{{ x }}", '"q"', "<b>&amp;</b>", "\\frac{1}{2}", "é", "\t", "stop", "", "12345"]
    text = lambda: "".join(draw.choices(pieces, k=draw.randint(1, 8)))  # noqa: E731
    found = []
    for _ in range(count):
        roles = [first, *draw.choices(["user", "assistant", "tool", "system"], k=draw.randint(0, 4)), "user"]
        found.append([{"role": role, "content": text()} for role in roles])
    return found


def user(content: str) -> Chat:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("template", [CHATML, REASONING, ""], ids=["chatml", "reasoning", "smollm2"])
def test_templates_render_as_transformers_renders_them(template: str, tmp_path: Path) -> None:
    tokens = {"eos_token": "<|im_end|>", "bos_token": {"__type": "AddedToken", "content": "<|im_start|>"}}
    folder = folder_with(template, tmp_path / "model", **tokens) if template else smollm2_folder()
    chats = random_chats(40) + random_chats(20, "system")
    assert rendered(folder, chats, tmp_path) == rendered_by_transformers(folder, chats)


def test_reasoning_under_any_of_its_names(tmp_path: Path) -> None:
    folder = folder_with(REASONING, tmp_path / "model", eos_token="<|im_end|>")
    names = "reasoning_content", "thinking", "reasoning"
    unset = {**user("c")[0], **dict.fromkeys(names)}
    chats = [[*user("a"), {"role": "assistant", "content": "b", name: "I think"}, unset] for name in names]
    found = rendered(folder, chats, tmp_path)
    assert found == rendered_by_transformers(folder, chats)
    assert all("<think>I think</think>" in text for text, _ in found)


def test_templates_in_the_tokenizers_configuration(tmp_path: Path) -> None:
    chats = [user("1,2")]
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    folder = folder_with(None, tmp_path / "several", chat_template=several)
    assert rendered(folder, chats, tmp_path) == rendered_by_transformers(folder, chats)


def test_the_date_is_always_the_same(tmp_path: Path) -> None:
    """With the clock's date, which transformers takes, a prompt would depend on the day of the run."""
    ((text, _),) = rendered(folder_with(DATED, tmp_path / "model"), [user("1")], tmp_path)
    assert text == "26 Jul 20241"


# --- what is fed, and what is refused ---


def chat_file(place: Path, *messages: tuple[str, str]) -> Path:
    row = {"prompt": [{"role": role, "content": content} for role, content in messages], "answer": "1"}
    return write_jsonl(place / "chat.jsonl", [row])


def test_a_system_prompt_comes_before_chats_without_one(tmp_path: Path) -> None:
    system = "data.system_prompt='8,'"
    path = chat_file(tmp_path, ("user", "1"))
    assert texts(all_prompts(path, system, chat=PLAIN)) == ["8,1="]
    assert texts(all_prompts(chat_file(tmp_path, ("system", "9,"), ("user", "1")), system, chat=PLAIN)) == ["9,1="]
    text = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1,2", "answer": "1"}])
    assert texts(all_prompts(text, chat=PLAIN)) == ["1,2"], "a text is not changed without a request"
    assert texts(all_prompts(text, system, "data.text_prompts=chat", chat=PLAIN)) == ["8,1,2="]
    with pytest.raises(ConfigError) as caught:
        all_prompts(text, system, chat=PLAIN)
    assert str(caught.value) == (
        f"data.system_prompt is set, but the prompt of {text}:1 is a text that is fed as it is; "
        "set data.text_prompts = 'chat' or omit data.system_prompt"
    )


def test_a_template_of_ones_own_and_none(tmp_path: Path) -> None:
    path = chat_file(tmp_path, ("user", "1"))
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }},")
    assert texts(all_prompts(path, f"data.chat_template={tmp_path}/mine.jinja", chat=PLAIN)) == ["1,"]
    with pytest.raises(ConfigError, match=f"^{path}:1: the prompt is a list of messages, and the model folder has no "):
        all_prompts(path, chat=ChatFormat())


def test_templates_that_are_no_jinja(tmp_path: Path) -> None:
    path = chat_file(tmp_path, ("user", "1"))
    with pytest.raises(ConfigError, match=r"^the model folder: the chat template is no Jinja .*Expected an expression"):
        all_prompts(path, chat=ChatFormat("\n{% for x in %}"))
    mine = tmp_path / "mine.jinja"
    for content, place, reason in (
        (b"{{ x", mine, "the chat template is no Jinja"),
        (b"", tmp_path / "none.jinja", "No such file or directory"),
        (b"\xff", mine, "is not UTF-8"),
        (b" \n", mine, "is empty"),
    ):
        mine.write_bytes(content)
        with pytest.raises(ConfigError, match=f"^data.chat_template = '{place}'.* {reason}.*; "):
            all_prompts(path, f"data.chat_template={place}")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (STRICT, "Conversation roles must alternate user/assistant"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__' of 'list' object is unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError maximum recursion depth exceeded"),
    ],
)
def test_messages_that_a_template_refuses(template: str, reason: str, tmp_path: Path) -> None:
    path = chat_file(tmp_path, ("user", "1"), ("user", "2"))
    with pytest.raises(RowError) as caught:
        all_prompts(path, chat=ChatFormat(template))
    assert str(caught.value).startswith(f"{path}:1: the chat template refuses the messages: {reason}")
