"""Drafter folders: what is read from them, and what is no drafter of the model at hand."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import CPU, embedded_decoder, embedded_folder

from tlt_hpc.cli.main import main
from tlt_hpc.config import EMBEDDED_MODEL, ConfigError
from tlt_hpc.models.drafter_file import DRAFTER_FILE, drafter_sizes, initial_drafter, load_drafter, read_drafter
from tlt_hpc.models.eagle import Eagle


@pytest.fixture(scope="module")
def decoder():
    return embedded_decoder()


def tensors(decoder):
    state = Eagle(decoder.shape, 3, torch.float32, CPU).state_dict()
    return {f"{name}.weight": tensor for name, tensor in state.items()}


def test_a_drafter_that_a_run_cannot_begin_with_is_named_before_it_starts(capsys):
    job = str(Path(__file__).parent.parent / "jobs" / "tiny.toml")
    for override, message in (
        ("drafter.init=nowhere", "tlt: drafter.init = 'nowhere': no drafter.safetensors there; "),
        ("drafter.form=eagle3", "tlt: drafter.init = 'embedded:tiny' is of the form 'eagle'; set drafter.form = "),
    ):
        assert main(["train", job, "--dry-run", override]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.startswith(message) and printed.err.count("\n") == 1


def test_sizes_are_those_of_a_drafter(decoder):
    made = Eagle(decoder.shape, 0, torch.float32, CPU)
    assert drafter_sizes(decoder.shape) == {name: tuple(p.shape) for name, p in made.named_parameters()}


def test_a_runs_file_is_read_without_its_moments(decoder, tmp_path):
    written = tensors(decoder)
    save_file(written | {"fc.first": torch.zeros(2), "num_steps": torch.tensor(7)}, tmp_path / DRAFTER_FILE)
    read = read_drafter(str(tmp_path), decoder.shape, "--drafter x")
    assert set(read) == set(written)
    served = load_drafter(str(tmp_path), decoder, "--drafter x")
    for name, parameter in served.named_parameters():
        assert not parameter.requires_grad
        assert torch.equal(parameter, written[f"{name}.weight"])


def test_the_embedded_drafter_is_found_by_the_models_name(decoder):
    assert load_drafter(EMBEDDED_MODEL, decoder, "--drafter").fc.dtype == torch.float32
    assert initial_drafter("random", "eagle", decoder.shape, embedded_folder()) is None


def broken(kind, decoder, folder):
    state = tensors(decoder)
    if kind == "a missing tensor":
        del state["down.weight"]
    if kind == "another size":
        state["fc.weight"] = state["fc.weight"][:, 1:].contiguous()
    if kind != "no file":
        save_file(state, folder / DRAFTER_FILE)
    if kind == "a cut file":
        (folder / DRAFTER_FILE).write_bytes((folder / DRAFTER_FILE).read_bytes()[:1000])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no file", DRAFTER_FILE),
        ("a missing tensor", "'down' is missing"),
        ("another size", "'fc' is"),
        ("a cut file", "no whole safetensors file"),
    ],
)
def test_what_is_no_drafter_of_the_model_is_one_line_that_says_who_asked(kind, words, decoder, tmp_path):
    broken(kind, decoder, tmp_path)
    with pytest.raises(ValueError, match=words) as found:
        load_drafter(str(tmp_path), decoder, "--drafter here")
    assert str(found.value).startswith("--drafter here: ")
    with pytest.raises(ConfigError, match=words) as asked:
        initial_drafter(str(tmp_path), "eagle", decoder.shape, embedded_folder())
    assert str(asked.value).startswith(f"drafter.init = {str(tmp_path)!r}: ")
    assert str(asked.value).endswith("or 'random'")
    assert "\n" not in str(asked.value)
