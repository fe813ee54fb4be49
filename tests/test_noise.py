"""The noise: Philox against its published answers, the Gumbel law at both tails, windows equal to direct rows."""

import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from by_definition import noise_of, words_of
from by_definition import philox as defined_philox
from tiny import gumbel_rows

from tlt_hpc.common.records import SampleKey
from tlt_hpc.kernels.gumbel import gumbel, gumbel_noise_reference, philox
from tlt_hpc.rollout.noise import NoiseWindow, gumbel_number, noise_key

# Known answers of Random123 (kat_vectors, philox4x32 10 rounds): counter, key, output
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN)
def test_philox_gives_the_published_answers(counter, key, wanted):
    words = philox(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert tuple(int(word) for word in words) == wanted == philox(counter, key) == tuple(defined_philox(counter, key))


WORDS = {
    SampleKey(0, 0, 0, 0, 0): (0x1DCE342C, 0x8C833BF2, 0x7F2ABF5A, 0xA3CC3764),
    SampleKey(1, 0, 0, 0, 0): (0x31598FB6, 0xFE9C9641, 0x1601F2DD, 0xA9DCCC67),
    SampleKey(0, 1, 0, 0, 0): (0xCC344C17, 0x91B6B857, 0x9C80DC9E, 0x15884D43),
    SampleKey(0, 0, 1, 0, 0): (0x53BD3159, 0x2950456C, 0x6F2C214A, 0xBEC1D3C8),
    SampleKey(0, 0, 0, 1, 0): (0x37F5D993, 0xF283E534, 0xB25EDF76, 0x50F53A1B),
    SampleKey(0, 0, 0, 0, 1): (0xBE44EA19, 0x0FCEEE89, 0x8274ECD4, 0x2A479F04),
    SampleKey(-1, 4, 2**40, 7, 3): (0x1B6D2402, 0xDE179E7C, 0x805119D4, 0xF665975C),
}
"""Another version that gives other words gives other responses to the same seed."""


@pytest.mark.parametrize(("key", "words"), WORDS.items(), ids=str)
def test_the_words_of_a_key_stay_what_they_are(key, words):
    assert noise_key(key) == words == tuple(words_of(key))


@pytest.mark.parametrize("key", [SampleKey(0, 0, 0, 0, 0), SampleKey(7, 2, 100, 63, 15)])
def test_noise_is_what_its_definition_says(key):
    """Whole rows, single numbers on the host, and the numbers of listed ids, of which no value is read."""
    words, ids = torch.tensor([noise_key(key)]), torch.tensor([29, 3, 0, 17])
    rows = gumbel_rows(words, torch.tensor([[0, 1, 40_000]]), 30)[0]
    for row, position in zip(rows, (0, 1, 40_000), strict=True):
        wanted = noise_of(key, position, 30)
        np.testing.assert_allclose(row.numpy(), wanted, rtol=1e-6, atol=1e-7)
        numbers = [gumbel_number(noise_key(key), position, token) for token in range(30)]
        np.testing.assert_allclose(numbers, wanted, rtol=1e-12)
        assert torch.equal(gumbel_noise_reference(words, torch.tensor([position]), ids)[0], row[ids])
    on_meta = gumbel_noise_reference(words.to("meta"), torch.zeros(1).long().to("meta"), ids.to("meta"))
    assert on_meta.shape == (1, 4), "on the meta device a value cannot be read, as in a graph"


def test_gumbel_is_finite_and_right_at_both_ends():
    ends = gumbel(torch.tensor([0, 2**32 - 1]))
    assert torch.isfinite(ends).all()
    assert ends[0] == pytest.approx(-math.log(-math.log1p(-0.5 * 2.0**-32)), rel=1e-6)
    assert ends[1] == pytest.approx(-math.log(-math.log(0.5 * 2.0**-32)), rel=1e-6)


def test_maximum_over_a_large_vocabulary_has_the_gumbel_law():
    """The maximum of V standard Gumbels is Gumbel with location log V; fp32 uniforms would fail this by far."""
    vocab, rows = 152_064, 400
    words = torch.tensor([noise_key(SampleKey(1, 0, 0, 0, i)) for i in range(rows)])
    highest = torch.cat(
        [gumbel_rows(words[i : i + 20], torch.zeros(20, 1).long(), vocab).amax(-1) for i in range(0, rows, 20)]
    )
    shifted = (highest.flatten() - math.log(vocab)).double().sort().values
    law = torch.exp(-torch.exp(-shifted))
    steps = torch.arange(1, rows + 1) / rows
    distance = (law - steps).abs().max()
    assert distance < 1.63 / math.sqrt(rows), f"Kolmogorov-Smirnov distance {distance} (1 % level)"


def test_window_equals_direct_rows_however_rows_advance_and_move():
    window = NoiseWindow(4, 20, 5, torch.device("cpu"))
    keys = [SampleKey(0, 0, 0, 0, i) for i in range(4)]
    for row in range(3):
        window.set_row(row, keys[row], 0)
    generator = torch.Generator().manual_seed(0)
    positions, owners = torch.zeros(3, dtype=torch.int64), [0, 1, 2]
    for round_number in range(120):
        width = int(torch.randint(1, 6, (1,), generator=generator))
        window.prepare(positions.tolist(), width)
        at = positions.unsqueeze(1) + torch.arange(width)
        got = window.noise_at(torch.arange(3).repeat_interleave(width), at.flatten()).view(3, width, -1)
        for row, owner, position in zip(got, owners, positions.tolist(), strict=True):
            wanted = [noise_of(keys[owner], position + i, 20) for i in range(width)]
            np.testing.assert_allclose(row.numpy(), np.array(wanted), rtol=1e-6, atol=1e-7)
        positions = positions + torch.randint(1, width + 1, (len(owners),), generator=generator)
        if round_number == 40:  # row 0 ends, row 2 takes its place, and a new sample comes to row 2
            window.swap_rows(2, 0)
            window.set_row(2, keys[3], 0)
            owners, positions = [2, 1, 3], torch.tensor([positions[2], positions[1], 0])


@pytest.mark.ci  # a compiler's half minute
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler")
def test_the_fused_loop_gives_the_same_bits():
    vocab = 16_384
    window = NoiseWindow(3, vocab, 2, torch.device("cpu"))
    keys = [SampleKey(5, 0, 0, 0, i) for i in range(3)]
    for row, key in enumerate(keys):
        window.set_row(row, key, 9 * row)
    words = torch.tensor([noise_key(key) for key in keys])
    positions = torch.tensor([[0, 1], [9, 10], [18, 19]])
    rows = torch.arange(3).repeat_interleave(2)
    window.prepare([0, 9, 18], 2)
    found = window.noise_at(rows, positions.flatten()).view(3, 2, vocab)
    assert torch.equal(found, gumbel_rows(words, positions, vocab))
    window.prepare([1, 9, 18], 2)
    alone = window.noise_at(rows[:2], torch.tensor([1, 2]))
    assert torch.equal(alone, gumbel_rows(words[:1], torch.tensor([[1, 2]]), vocab)[0]), "one row"


@pytest.mark.ci
def test_a_compiler_that_fails_costs_speed_alone(tmp_path):
    compiler = tmp_path / "no-compiler"
    compiler.write_text("#!/bin/sh\necho cannot compile >&2; exit 1\n")
    compiler.chmod(0o755)
    code = (
        "import torch\n"
        "from tlt_hpc.kernels.gumbel import gumbel_noise_reference\n"
        "from tlt_hpc.rollout.noise import _compiled_gumbel_noise\n"
        "words, positions = torch.arange(12).view(3, 4), torch.arange(3)\n"
        "given = words, positions, 50\n"
        "assert torch.equal(_compiled_gumbel_noise(*given), gumbel_noise_reference(*given))\n"
    )
    environment = {**os.environ, "CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert f"{compiler} does not compile the noise" in found.stderr and "cannot compile" in found.stderr
