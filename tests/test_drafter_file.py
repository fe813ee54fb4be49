"""Drafter folders: what is read from them, and what is no drafter of the model at hand."""

import pytest
import torch
from safetensors.torch import save_file
from tiny import CPU, embedded_decoder, embedded_folder

from tlt_hpc.config import ConfigError
from tlt_hpc.models.drafter_file import DRAFTER_FILE, drafter_sizes, load_drafter, read_drafter, read_drafter_of_init
from tlt_hpc.models.eagle import Eagle
from tlt_hpc.models.shape import read_shape

SHAPE = read_shape(embedded_folder())


def tensors():
    state = Eagle(SHAPE, 3, torch.float32, CPU).state_dict()
    return {f"{name}.weight": tensor for name, tensor in state.items()}


def test_sizes_are_those_of_a_drafter():
    made = Eagle(SHAPE, 0, torch.float32, CPU)
    assert drafter_sizes(SHAPE) == {name: tuple(p.shape) for name, p in made.named_parameters()}


def test_a_runs_file_is_read_without_its_moments(tmp_path):
    written = tensors()
    save_file(written | {"fc.first": torch.zeros(2), "num_steps": torch.tensor(7)}, tmp_path / DRAFTER_FILE)
    assert set(read_drafter(str(tmp_path), SHAPE, "--drafter x")) == set(written)
    for name, parameter in load_drafter(str(tmp_path), embedded_decoder(), "--drafter x").named_parameters():
        assert not parameter.requires_grad and torch.equal(parameter, written[f"{name}.weight"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (None, DRAFTER_FILE),
        ({"down.weight": None}, "'down' is missing"),
        ({"fc.weight": torch.ones(128, 255)}, "'fc' is"),
        ({}, "no whole safetensors file"),
    ],
    ids=["no file", "a missing tensor", "another size", "a cut file"],
)
def test_what_is_no_drafter_of_the_model_is_one_line_that_says_who_asked(changes, words, tmp_path):
    if changes is not None:
        stored = {name: tensor for name, tensor in (tensors() | changes).items() if tensor is not None}
        save_file(stored, tmp_path / DRAFTER_FILE)
    if changes == {}:
        (tmp_path / DRAFTER_FILE).write_bytes((tmp_path / DRAFTER_FILE).read_bytes()[:1000])
    with pytest.raises(ValueError, match=words) as found:
        load_drafter(str(tmp_path), embedded_decoder(), "--drafter here")
    with pytest.raises(ConfigError, match=words) as asked:
        read_drafter_of_init(str(tmp_path), "eagle", SHAPE, embedded_folder())
    said = str(asked.value)
    assert str(found.value).startswith("--drafter here: ") and "\n" not in said
    assert said.startswith(f"drafter.init = {str(tmp_path)!r}: ") and said.endswith("or 'random'")
