"""What of a model folder is text: where it lies, its tokenizer, its chat template. Knows no weights and no torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tlt_hpc.common.files import DamagedText, decode_utf8, os_error_text, parse_json_object, read_bytes
from tlt_hpc.common.records import ChatFormat
from tlt_hpc.config import EMBEDDED_MODEL, UserError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Those that transformers hands to a template by name."""
_EMPTY_NAME = re.compile(
    r"[<\[].*(?<![a-z])(reserved|unused|place.?holder|dummy|multimodal|image|img|vision|video|audio|object_ref"
    r"|(box|quad)_(start|end)|(control|special|extra|extra_id)_\d+)(?![a-z]).*[>\]]",
    re.IGNORECASE,
)
"""Added tokens that stand for nothing yet, or for what is no text."""
_TAG = re.compile(r"<[A-Za-z][A-Za-z0-9_-]*>")
_OWNERS = {"Qwen": "Qwen", "DeepSeek-R1-": "deepseek-ai", "Llama-": "meta-llama", "SmolLM": "HuggingFaceTB"}
"""Beginning of a model's name -> who publishes it on the hub."""


def find_model(path: str) -> Path:
    """The folder of ``embedded:tiny`` or of a path.

    Raises:
        ValueError: there is no such folder.
    """
    folder = package_asset_folder("tiny") if path == EMBEDDED_MODEL else Path(path)
    if not (folder / "config.json").is_file():
        wrong = "has no config.json" if folder.is_dir() else "does not exist"
        raise ValueError(
            f"model.path = {path!r} {wrong}; on the login node: hf download {hub_name(folder)} "
            f"--local-dir {shlex.quote(path)}"
        )
    return folder


def hub_name(folder: Path) -> str:
    """The repository on the hub that a model's folder is named after; ``ORG/NAME`` of an unknown family."""
    owner = next((owner for family, owner in _OWNERS.items() if folder.name.startswith(family)), "")
    return f"{owner}/{folder.name}" if owner else "ORG/NAME"


def package_asset_folder(name: str) -> Path:
    """A folder of the package's own data."""
    return Path(str(resources.files("tlt_hpc") / "models" / "assets" / name))


def load_tokenizer(folder: Path) -> Tokenizer:
    """The fast tokenizer of a model folder; read once while the file stays as it is.

    Raises:
        ValueError: the folder has no tokenizer.json, or it is none.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"model folder {folder} has no tokenizer.json; save the fast tokenizer there with save_pretrained"
        )
    found = path.stat()
    return _read_tokenizer(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=4)
def _read_tokenizer(path: Path, changed: int, size: int) -> Tokenizer:
    read_json(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises this very class, no narrower one
        raise UserError(f"{path} is no tokenizer ({error}); save it again with save_pretrained") from error
    tokenizer.no_truncation()  # some files keep how their training cut and padded, which transformers undoes too
    tokenizer.no_padding()
    return tokenizer


@lru_cache(maxsize=4)
def control_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Special tokens that are no text of a response: all but pairs of tags; ``<s>`` and ``</s>`` are no such pair."""
    special = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    closing = {text: f"</{text[1:]}" for text in special.values() if _TAG.fullmatch(text) and text != "<s>"}
    pairs = {pair for pair in closing.items() if pair[1] in special.values()}
    tags = {text for pair in pairs for text in pair}
    return frozenset(token for token, text in special.items() if text not in tags)


def tokens_without_text(folder: Path, tokenizer: Tokenizer, num_ids: int, end_ids: Sequence[int]) -> tuple[int, ...]:
    """Ids below ``num_ids`` that no text of a response has, in ascending order; they are never sampled.

    These are ids without a token (padding of the vocabulary, gaps), special tokens with a role that is none in a
    response (begin of text, padding, unknown, and those of encoders), and added tokens whose name says that they are
    reserved or stand for images, video or sound. End tokens are never among them. Other special tokens are not either:
    models write their thoughts, calls of tools and the like with such.
    """
    known = set(tokenizer.get_vocab(with_added_tokens=True).values())
    in_roles = {text for role, text in _named_tokens(_tokenizer_settings(folder)) if role != "eos_token"}
    empty = {
        token
        for token, added in tokenizer.get_added_tokens_decoder().items()
        if (added.special and added.content in in_roles) or _EMPTY_NAME.fullmatch(added.content)
    }
    return tuple(token for token in range(num_ids) if (token not in known or token in empty) and token not in end_ids)


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    files = (folder / name for name in ("special_tokens_map.json", "tokenizer_config.json"))
    return {key: value for file in files if file.is_file() for key, value in read_json(file).items()}


def _named_tokens(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The special tokens that have a role, and their texts."""
    found = ((name, settings.get(name)) for name in _SPECIAL_TOKENS)
    texts = ((name, token.get("content") if isinstance(token, dict) else token) for name, token in found)
    return ((name, text) for name, text in texts if text is not None)


def read_chat_format(folder: Path) -> ChatFormat:
    """The chat template of a model folder, found as transformers finds it; empty where it has none.

    Raises:
        UserError: a file that is no JSON, or several templates and no default.
    """
    settings = _tokenizer_settings(folder)
    file = folder / "chat_template.jinja"  # of newer folders; it goes before the configuration's
    template = read_text(file) if file.is_file() else settings.get("chat_template")
    if isinstance(template, list):
        template = _default_chat_template(template, folder)
    return ChatFormat(template or "", tuple(_named_tokens(settings)))


def _default_chat_template(templates: list[Mapping[str, str]], folder: Path) -> str:
    by_name = {entry["name"]: entry["template"] for entry in templates}
    if "default" not in by_name:
        raise UserError(
            f"model folder {folder} has the chat templates {', '.join(sorted(by_name))} and no default; "
            "save the one you want as a file and give data.chat_template"
        )
    return by_name["default"]


_MOST_BYTES = 2**28
"""Of a file of text; the longest, tokenizers, have 30 MB."""


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
        UserError: it cannot be read, or is not UTF-8.
    """
    try:
        return decode_utf8(read_bytes(path, _MOST_BYTES))
    except OSError as error:
        raise UserError(os_error_text(error)) from None
    except DamagedText as error:
        raise UserError(f"{path} is not UTF-8 ({error}); download it again") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds.

    Raises:
        UserError: it cannot be read, is no JSON, or no object.
    """
    text = read_text(path)
    try:
        return parse_json_object(text.encode())
    except DamagedText as error:
        raise UserError(f"{path} is no JSON object ({error}); download it again") from None
