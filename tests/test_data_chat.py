"""Chat templates: the same tokens as transformers renders, of known models and of small ones, and mistakes in them."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
from answers import refusal
from data_sets import PLAIN, RAW, all_prompts, config_of, gcd_row, open_data, texts, write_jsonl
from smollm2 import smollm2_folder
from tiny import byte_tokenizer
from transformers import AutoTokenizer

from tlt_hpc.common.records import ChatFormat
from tlt_hpc.data.prompts import open_prompts
from tlt_hpc.data.reader import PromptReader
from tlt_hpc.models.tokenizer import load_tokenizer, read_chat_format

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
SPEC = importlib.util.find_spec("trl")
assert SPEC is not None and SPEC.origin is not None
TEMPLATES = Path(SPEC.origin).parent / "chat_templates"
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]", "<|user|>",
    "<\uff5cbegin▁of▁sentence\uff5c>", "<\uff5cend▁of▁sentence\uff5c>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>",
    "<|start|>", "<|message|>", "<|return|>", "<|channel|>", "<|end|>", "<think>", "</think>", "<|END_RESPONSE|>",
    "<|END_OF_TURN_TOKEN|>",
]  # fmt: skip
TOKENIZER = byte_tokenizer([CHATML, REASONING, STRICT, "<|im_start|>user\n1+1?<|im_end|>"], 500, SPECIAL)
BOS = {"bos_token": "<bos>", "eos_token": "</s>"}
LONG = "data.max_prompt_tokens=9000"
Chat = list[dict[str, Any]]


def template(name: str) -> str:
    return MISTRAL if name == "mistral" else (TEMPLATES / f"{name}.jinja").read_text()


def folder_with(text: str | None, place: Path, **settings: Any) -> Path:
    """A model folder with this chat template."""
    place.mkdir(parents=True, exist_ok=True)
    TOKENIZER.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings}))
    if text is not None:
        (place / "chat_template.jinja").write_text(text)
    return place


def rendered(folder: Path, chats: list[Chat], *overrides: str) -> list[tuple[str, list[int]]]:
    """Text and tokens of chats as the prompts of a run with this model folder."""
    path = write_jsonl(Path("chats.jsonl"), [{"prompt": chat, "answer": "1"} for chat in chats])
    data = config_of(path, LONG, *overrides).data
    reader = PromptReader(data, load_tokenizer(folder), read_chat_format(folder))
    return [(prompt.text, prompt.tokens.tolist()) for prompt in map(reader.read, range(len(chats)))]


def by_transformers(folder: Path, chats: list[Chat], **options: Any) -> list[tuple[str, list[int]]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = options or {"add_generation_prompt": True}
    return [
        (
            tokenizer.apply_chat_template(chat, tokenize=False, **options),
            list(tokenizer.apply_chat_template(chat, tokenize=True, **options)["input_ids"]),
        )
        for chat in chats
    ]


def user(content: object) -> Chat:
    return [{"role": "user", "content": content}]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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


@pytest.mark.parametrize("text", [CHATML, REASONING, ""], ids=["chatml", "reasoning", "smollm2"])
def test_templates_render_as_transformers_renders_them(text: str, tmp_path: Path) -> None:
    tokens = {"eos_token": "<|im_end|>", "bos_token": {"__type": "AddedToken", "content": "<|im_start|>"}}
    folder = folder_with(text, tmp_path / "model", **tokens) if text else smollm2_folder()
    chats = random_chats(40) + random_chats(20, "system")
    names = "reasoning_content", "thinking", "reasoning"
    unset = {**user("c")[0], **dict.fromkeys(names)}
    chats += [[*user("a"), {"role": "assistant", "content": "b", name: "I think"}, unset] for name in names]
    found = rendered(folder, chats)
    assert found == by_transformers(folder, chats)
    assert text != REASONING or all("<think>I think</think>" in shown for shown, _ in found[-3:])


def test_of_several_templates_the_default_one_and_always_the_same_date(tmp_path: Path) -> None:
    """With the clock's date, which transformers takes, a prompt would depend on the day of the run."""
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    folder = folder_with(None, tmp_path / "several", chat_template=several)
    assert rendered(folder, [user("1,2")]) == by_transformers(folder, [user("1,2")])
    ((text, _),) = rendered(folder_with(DATED, tmp_path / "model"), [user("1")])
    assert text == "26 Jul 20241"


# --- arguments ---


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("qwen3", {"enable_thinking": False}),
        ("qwen3", {"enable_thinking": True}),
        ("gptoss", {"reasoning_effort": "high", "model_identity": "M"}),
    ],
)
def test_arguments_are_those_of_transformers(name: str, args: dict[str, Any], tmp_path: Path) -> None:
    text = template(name).replace("strftime_now(", "'today'.format(")  # gptoss writes the day
    folder = folder_with(text, tmp_path / "model", **BOS)
    given = "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in args.items()) + "}"
    found = rendered(folder, [user("1+1?")], f"data.template_args={given}")
    assert found == by_transformers(folder, [user("1+1?")], add_generation_prompt=True, **args)
    assert (found == rendered(folder, [user("1+1?")])) == (args == {"enable_thinking": True})


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


def test_arguments_are_part_of_what_a_resume_compares(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chat.jsonl", [{"prompt": user("1"), "answer": "1"}])
    marks = [open_data(path, *args, chat=PLAIN).fingerprints()["chat template"] for args in (
        [], ["data.template_args={}"], ["data.template_args={a = 1}"], ["data.template_args={a = 2}"]
    )]  # fmt: skip
    assert marks[0] == marks[1] and len(set(marks)) == 3


# --- parts, and an assistant's message that is continued ---

CONTINUED = "data.template_args={continue_final_message=true}"


@pytest.mark.parametrize(
    ("name", "is_as_given"), [("gemma3", True), ("qwen2_5_vl", True), ("qwen2_5", False), ("llama3", False)]
)
def test_text_parts(name: str, is_as_given: bool, tmp_path: Path) -> None:
    """A template that reads parts gets them; for others, which refuse a list or write Python's, they are joined."""
    folder = folder_with(template(name), tmp_path / "model", **BOS)
    parts = [{"type": "text", "text": "1 + 1 "}, {"type": "text", "text": " is?"}]
    found = rendered(folder, [user(parts)])
    assert found == by_transformers(folder, [user(parts if is_as_given else "1 + 1  is?")])
    assert "type" not in found[0][0]
    if name == "gemma3":
        chat = [*user("1+1?"), {"role": "assistant", "content": parts}]
        assert rendered(folder, [chat], CONTINUED) == by_transformers(folder, [chat], continue_final_message=True)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3", "gemma3", "deepseek_r1_distill", "mistral", "smollm2"])
def test_a_final_message_is_continued_as_in_transformers(name: str, tmp_path: Path) -> None:
    folder = smollm2_folder() if name == "smollm2" else folder_with(template(name), tmp_path / "model", **BOS)
    contents = "Let me think", "<think>\n", "b ", "1<|im_end|>", " "
    chats = [[*user("1+1?"), {"role": "assistant", "content": content}] for content in contents]
    *continued, asked = rendered(folder, [*chats, user("2")], CONTINUED)
    assert continued == by_transformers(folder, chats, continue_final_message=True)
    assert [asked] == by_transformers(folder, [user("2")])


def test_a_final_message_that_the_template_leaves_out(tmp_path: Path) -> None:
    path = chat_file(tmp_path, ("user", "1"), ("assistant", "2"))
    said = refusal(open_data, path, CONTINUED, chat=ChatFormat("{{ messages[0].content }}"))
    assert "the chat template refuses the messages: it leaves out some of the assistant's" in said


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
    assert refusal(all_prompts, text, system, chat=PLAIN) == (
        f"data.system_prompt is set, but the prompt of {text}:1 is a text that is fed as it is; "
        "set data.text_prompts = 'chat' or omit data.system_prompt"
    )


def test_a_template_of_ones_own_and_none(tmp_path: Path) -> None:
    path = chat_file(tmp_path, ("user", "1"))
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }},")
    assert texts(all_prompts(path, f"data.chat_template={tmp_path}/mine.jinja", chat=PLAIN)) == ["1,"]
    said = refusal(all_prompts, path, chat=ChatFormat())
    assert said.startswith(f"{path}:1: the prompt is a list of messages, and the model folder has no ")


def test_templates_that_are_no_jinja(tmp_path: Path) -> None:
    path = chat_file(tmp_path, ("user", "1"))
    said = refusal(all_prompts, path, chat=ChatFormat("\n{% for x in %}"))
    assert said.startswith("the model folder: the chat template is no Jinja ") and "Expected an expression" in said
    mine = tmp_path / "mine.jinja"
    for content, place, reason in (
        (b"{{ x", mine, "the chat template is no Jinja"),
        (b"", tmp_path / "none.jinja", "No such file or directory"),
        (b"\xff", mine, "is not UTF-8"),
        (b" \n", mine, "is empty"),
    ):
        mine.write_bytes(content)
        said = refusal(all_prompts, path, f"data.chat_template={place}")
        assert said.startswith(f"data.chat_template = '{place}'") and reason in said


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
    said = refusal(all_prompts, path, chat=ChatFormat(template))
    assert said.startswith(f"{path}:1: the chat template refuses the messages: {reason}")


# --- ends of turns ---

# the token that ends a turn of known templates, by the tokens that their folders name
ENDS = {
    "qwen2_5": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "mistral": "</s>",
    "deepseek_r1_distill": "<\uff5cend▁of▁sentence\uff5c>",
    "phi3": "<|end|>",
    "gptoss": "<|return|>",
    "cohere2": "<|END_RESPONSE|>",  # and <|END_OF_TURN_TOKEN|> after it
}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_turn_is_an_end_token_or_warned_of(name: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "chat.jsonl", [{"prompt": user("1+1?"), "answer": "2"}])

    def warning(*ends: str) -> str:
        ids = tuple(TOKENIZER.token_to_id(end) for end in ends)
        return open_prompts(
            config_of(path, LONG), TOKENIZER, ChatFormat(template(name), tuple(BOS.items()), ids)
        ).warning

    last = ENDS[name] if name != "cohere2" else "<|END_OF_TURN_TOKEN|>"
    assert warning(last, "<|endoftext|>") == ""
    token = TOKENIZER.token_to_id(ENDS[name])
    assert warning("<|endoftext|>") == (
        f"the chat template ends a turn with {ENDS[name]!r}, which is no end token of the model, so that responses "
        f"run on to their largest length: add {token} to eos_token_id in generation_config.json of the model folder"
    )


def test_texts_and_templates_without_an_end_are_not_warned_of(tmp_path: Path) -> None:
    """A base model that reads plain texts ends with its own token, whatever its template says."""
    path = write_jsonl(tmp_path / "text.jsonl", [gcd_row(1)])
    assert open_data(path, chat=ChatFormat(template("qwen2_5"), (), (1,)), count=1).warning == ""
    assert open_data(path, "data.text_prompts=chat", chat=ChatFormat(RAW.template, (), (1,)), count=1).warning == ""
    refuses = ChatFormat(
        "{{ messages[0].content }}{% if messages[1] %}{{ raise_exception('one') }}{% endif %}", (), (1,)
    )
    assert open_data(path, "data.text_prompts=chat", chat=refuses, count=1).warning == ""
