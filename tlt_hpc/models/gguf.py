"""GGUF files as Hugging Face folders: weights dequantised once to fp32. Knows no download and no decoder."""

from __future__ import annotations

import tempfile
from pathlib import Path

_OF_THE_GGUF = {"quantization_config", "_name_or_path", "_model_name_or_path", "pretraining_tp"}


def convert_gguf(file: Path, folder: Path, end_tokens: tuple[str, ...]) -> None:
    """Write a Llama in GGUF as a folder of fp32 safetensors, tokenizer.json and the ids that end a response.

    Written beside ``folder`` and renamed, so that the folder is whole as soon as it exists.

    Raises:
        ValueError: an end token is not in the file's vocabulary.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    vocabulary = tokenizer.get_vocab()
    if unknown := [token for token in end_tokens if token not in vocabulary]:
        raise ValueError(f"{file} has no token {unknown[0]!r}; name end tokens of its own vocabulary")
    ends = [vocabulary[token] for token in end_tokens]
    source = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    kept = {key: value for key, value in source.config.to_dict().items() if key not in _OF_THE_GGUF}
    model = LlamaForCausalLM(LlamaConfig(**{**kept, "eos_token_id": ends}))  # what is read from a GGUF cannot be saved
    model.load_state_dict(source.state_dict())
    model.generation_config = GenerationConfig(eos_token_id=ends)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as part:
        written = Path(part) / "model"
        model.save_pretrained(written)
        tokenizer.save_pretrained(written)
        _publish(written, folder)


def _publish(written: Path, folder: Path) -> None:
    try:
        written.rename(folder)
    except OSError:  # somebody else converted the same file in the meantime
        if not (folder / "config.json").is_file():
            raise
