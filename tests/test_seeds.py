"""Noise is a function of seed and position."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partsong import seeds
from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.random_bits import philox, to_normal

FULL = (2, 3, 10, 14)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ((0,) * 6, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 6, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(words, answer) -> None:
    # The three vectors of the Random123 distribution (kat_vectors).
    counter = tuple(torch.tensor([word]) for word in words[:4])
    assert " ".join(f"{int(word):08x}" for word in philox(counter, words[4:])) == answer


@pytest.mark.parametrize("draw", [seeds.noise, seeds.uniform])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", range(4))
def test_shards_are_slices_of_the_whole(draw, num_ranks, dim) -> None:
    whole = draw(7, FULL)
    cuts = [rank * FULL[dim] // num_ranks for rank in range(num_ranks + 1)]
    shards = []
    for low, high in itertools.pairwise(cuts):
        shape, start = list(FULL), [0] * 4
        shape[dim], start[dim] = high - low, low
        shards.append(draw(7, shape, start=start, full_shape=FULL))
    assert torch.equal(torch.cat(shards, dim), whole)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**64 - 1), data=st.data())
def test_any_box(seed, data) -> None:
    full = data.draw(st.lists(st.integers(0, 7), max_size=4))
    start = [data.draw(st.integers(0, n)) for n in full]
    shape = [data.draw(st.integers(0, n - low)) for n, low in zip(full, start, strict=True)]
    box = tuple(slice(low, low + n) for low, n in zip(start, shape, strict=True))
    part = seeds.noise(seed, shape, start=start, full_shape=full, dtype=torch.float64)
    assert torch.equal(part, seeds.noise(seed, full, dtype=torch.float64)[box])


def test_chunks_do_not_show() -> None:
    # Longer than a chunk, at an odd offset: vector loops and their remainders have to agree to the last bit.
    size = 2 * seeds._CHUNK + 77
    whole = seeds.noise(3, (size,), dtype=torch.float64)
    for start, count in ((1, size - 1), (seeds._CHUNK - 3, 9), (size - 5, 5)):
        part = seeds.noise(3, (count,), start=(start,), full_shape=(size,), dtype=torch.float64)
        assert torch.equal(part, whole[start : start + count])


def test_positions_beyond_32_bits() -> None:
    full = (1 << 20, 1 << 20)
    noise = seeds.noise(1, (1, 4), start=(1 << 19, 5), full_shape=full)
    assert torch.equal(noise, seeds.noise(1, (4,), start=((1 << 39) + 5,), full_shape=(1 << 40,)).view(1, 4))
    assert not torch.equal(noise.view(-1), seeds.noise(1, (4,), start=(5,), full_shape=(9,)))


def test_values_are_frozen() -> None:
    # A change here changes every image: it needs a new major version.
    assert seeds.noise(0, (3,), dtype=torch.float64).tolist() == NOISE_OF_SEED_0
    assert seeds.uniform(0, (3,), dtype=torch.float64).tolist() == UNIFORM_OF_SEED_0
    assert seeds.derive(0) == 8493733112532773764
    assert seeds.derive(1, "noise", 3) == 4051041382567941852


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_are_one_rounding_apart(dtype) -> None:
    for draw in (seeds.noise, seeds.uniform):
        wide = draw(5, (4000,), dtype=torch.float64)
        narrow = draw(5, (4000,), dtype=dtype)
        assert narrow.dtype is dtype
        if draw is seeds.noise:
            assert torch.equal(narrow, wide.to(dtype))
        else:
            assert narrow.min() >= 0
            assert narrow.max() < 1
            assert (narrow.double() - wide).abs().max() <= torch.finfo(dtype).eps


def test_normal_moments_and_distribution() -> None:
    x = seeds.noise(11, (300_000,), dtype=torch.float64)
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((x**power).mean()) - expected) < 4.5 * math.sqrt(variance / len(x))
    # Kolmogorov-Smirnov at the 1e-4 level.
    steps = torch.arange(1, len(x) + 1) / len(x)
    assert (torch.special.ndtr(x.sort().values) - steps).abs().max() < 2.23 / math.sqrt(len(x))


def test_uniform_moments() -> None:
    x = seeds.uniform(11, (300_000,), dtype=torch.float64)
    assert abs(float(x.mean()) - 0.5) < 4.5 * math.sqrt(1 / 12 / len(x))
    assert (x.sort().values - torch.arange(1, len(x) + 1) / len(x)).abs().max() < 2.23 / math.sqrt(len(x))


def test_neighbours_seeds_and_streams_are_unrelated() -> None:
    n = 100_000
    limit = 4.5 / math.sqrt(n)
    x = seeds.noise(0, (n,), dtype=torch.float64)
    assert abs(float((x[1:] * x[:-1]).mean())) < limit
    assert abs(float((x * seeds.noise(1, (n,), dtype=torch.float64)).mean())) < limit
    assert abs(float((x * seeds.noise(1 << 32, (n,), dtype=torch.float64)).mean())) < limit
    assert abs(float((x * (seeds.uniform(0, (n,), dtype=torch.float64) - 0.5)).mean())) < limit


def test_quantile_in_centre_and_tails() -> None:
    bits = torch.cat([torch.arange(2000), torch.linspace(0, 2**53 - 1, 20000, dtype=torch.float64).long()])
    p = (bits | 1).double() * 2.0**-53
    expected = torch.special.ndtri(p)
    assert ((to_normal(bits) - expected).abs() / expected.abs().clamp(min=1e-3)).max() < 3e-15
    mirrored = to_normal(2**53 - 1 - bits)
    assert torch.equal(mirrored, -to_normal(bits))


def test_derive() -> None:
    derived = {seeds.derive(seed, *labels) for seed in (0, 1) for labels in ((), (1,), ("1",), ("a", "b"), ("a/'b'",))}
    assert len(derived) == 10
    assert all(0 <= seed < 1 << 64 for seed in derived)
    for bad in (1.5, None, True):
        with pytest.raises(ArgumentTypeError, match="label"):
            seeds.derive(0, bad)


def test_images_do_not_depend_on_their_batch() -> None:
    batch = seeds.for_images(9, 5)
    assert len(set(batch)) == 5
    assert batch[3:] == seeds.for_images(9, 2, first=3)
    together = [torch.randn(4, generator=generator) for generator in seeds.generators(9, 3)]
    alone = torch.randn(4, generator=seeds.generators(9, 1, first=2)[0])
    assert torch.equal(together[2], alone)
    assert seeds.for_images(9, 0) == []
    for bad in (-1, 1.0, True):
        with pytest.raises(ArgumentError, match="num=.*; use an integer of 0 or more"):
            seeds.for_images(9, bad)


@pytest.mark.parametrize("seed", [True, 1.0, None, "1"])
def test_seeds_of_another_type(seed) -> None:
    with pytest.raises(ArgumentTypeError, match="a seed is an int"):
        seeds.noise(seed, (1,))


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_seeds_out_of_range(seed) -> None:
    with pytest.raises(ArgumentError, match="0 <= seed"):
        seeds.generators(seed, 1)


@pytest.mark.parametrize(
    "box",
    [
        {"shape": (3,), "start": (2,)},
        {"shape": (3,), "start": (0, 0), "full_shape": (4,)},
        {"shape": (3,), "start": (2,), "full_shape": (4,)},
        {"shape": (-1,)},
        {"shape": (1,), "start": (-1,), "full_shape": (4,)},
        {"shape": (1, 1), "full_shape": (1 << 32, 1 << 32)},
    ],
)
def test_boxes_that_cannot_be(box) -> None:
    with pytest.raises(ArgumentError):
        seeds.noise(0, **box)


def test_wrong_types() -> None:
    with pytest.raises(ArgumentTypeError, match="floating"):
        seeds.noise(0, (1,), dtype=torch.int64)
    with pytest.raises(ArgumentTypeError, match="sequences"):
        seeds.noise(0, 3)


def test_base_modules_load_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, partsong.seeds, partsong.progress, partsong.outputs, partsong.ledger, partsong.errors;"
        "print(sorted({'torch', 'numpy', 'PIL', 'imageio', 'tqdm'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


NOISE_OF_SEED_0 = [-0.2558159702035155, 1.9148032727702817, -2.0652553603794996]
UNIFORM_OF_SEED_0 = [0.17893146841678087, 0.9114282064411308, 0.09505053978765898]
