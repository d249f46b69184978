"""Marked places against plain searches, and numbers of rows against the tensors they come from."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from partsong.samplers.text.canvas import pick, places_of, read_rows


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_places_are_those_of_a_search(share: float) -> None:
    mask = torch.rand(4, 9, generator=torch.Generator().manual_seed(2)) < share
    most = int(mask.sum(1).max())
    index, real = pick(mask, most)
    assert index.shape == real.shape == (4, max(most, 1))
    for row, (places, exist) in enumerate(zip(index, real, strict=True)):
        assert places[exist].tolist() == mask[row].nonzero().flatten().tolist()
        assert len(set(places.tolist())) == len(places), "writes at filler must not meet those at real places"
    assert places_of(mask, int(mask.sum())).tolist() == mask.flatten().nonzero().flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_arrive_to_the_last_bit(dtype: torch.dtype) -> None:
    nats = torch.tensor([0.1, -0.0, math.inf, math.nan, 1e-30], dtype=dtype)
    most, bits = torch.iinfo(torch.int64).max, "d" if dtype is torch.float64 else "f"
    given = {"nats": nats, "large": torch.full((5,), most), "flags": nats > 0, "short": torch.arange(5).to(torch.int8)}
    read = read_rows(given)
    assert [struct.pack(bits, x) for x in read["nats"]] == [struct.pack(bits, x) for x in nats.tolist()]
    assert (read["large"], read["flags"], read["short"]) == ([most] * 5, [1, 0, 1, 0, 1], [0, 1, 2, 3, 4])
