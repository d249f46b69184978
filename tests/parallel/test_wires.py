"""Wires: their messages bit by bit, what rounding may cost, error feedback, and which strategies refuse which."""

from __future__ import annotations

import itertools
import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from partsong import DisplacedPatch, PartialPatch, Ring, TokenRing, Ulysses, Usp, parse_strategy
from partsong.errors import ArgumentError
from partsong.parallel import Strategy, mesh_for
from partsong.parallel.exchange.wires import RANK, WIRES, FewBits, FourBits, WireName, bytes_sent, wire_of

SHAPES = ((5, 2, 2, 3, 7), (16, 1, 2, 4, 16), (3, 1, 2, 1, 5), (1, 2, 3))


def draw(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def through(name: str, values: Tensor, last: Tensor | None = None) -> Tensor:
    """What arrives of values."""
    return WIRES[name].decode(WIRES[name].encode(values, last), tuple(values.shape))


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 2, 2, 3, 7), (4, 1, 2, 0, 7)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_messages_have_the_size_that_shapes_say(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = draw(shape).to(dtype)
    message = WIRES[name].encode(values)
    assert (message.dtype, message.shape) == (torch.uint8, (WIRES[name].size(shape),))
    assert WIRES[name].decode(message, shape).shape == shape


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("channels", [1, 7, 8, 9, 21])
def test_few_bits_by_their_definition(bits: int, channels: int) -> None:
    """One by one: scales in bfloat16, a code for the nearest level, code i of a byte from its bit ``i * bits`` on."""
    tokens, wire = 6, WIRES[f"{bits}bit"]
    assert isinstance(wire, FewBits)
    values = draw((tokens, 1, 1, channels)).float()
    message = wire.encode(values)
    by_channel, by_token, packed = message.split([2 * channels, 2 * tokens, len(message) - 2 * channels - 2 * tokens])
    size = values.double().reshape(tokens, channels).abs()
    token, channel = by_token.view(torch.bfloat16), by_channel.view(torch.bfloat16)
    torch.testing.assert_close(token.double(), size.mean(1), rtol=2**-8, atol=0.0)
    torch.testing.assert_close(channel.double(), size.mean(0) / size.mean(), rtol=2**-8, atol=0.0)
    width, arrived = -(-channels * bits // 8), wire.decode(message, tuple(values.shape)).reshape(tokens, channels)
    for n in range(tokens):
        for c in range(channels):
            step = token[n].item() * channel[c].item() * wire.distance
            levels = [(code + 0.5 - 2 ** (bits - 1)) * step for code in range(2**bits)]
            place = c * bits
            code = int(packed[n * width + place // 8]) >> place % 8 & (2**bits - 1)
            assert arrived[n, c].item() == pytest.approx(levels[code], rel=1e-6)
            distances = [abs(level - values[n, 0, 0, c].item()) for level in levels]
            assert distances[code] == pytest.approx(min(distances), abs=1e-6)


@pytest.mark.parametrize(("name", "most"), [("int8", 0.51 / 127), ("fp8", 1 / 15)])
def test_eight_bits_round_to_near_the_value(name: str, most: float) -> None:
    """int8 errs by about half a step, of which the largest value of a token and head has 127; fp8 has 4 digits."""
    values = draw((40, 2, 2, 3, 16)) * 10 ** draw((40, 2, 2, 3, 1), seed=1)
    off = (through(name, values).double() - values).abs()
    largest = (
        values.abs().amax(-1, keepdim=True) if name == "int8" else values.abs().clamp_min(1e-2 * values.abs().max())
    )
    assert (off / largest).max() <= most * 1.01
    assert through(name, torch.zeros(4, 1, 2, 3, 8)).eq(0).all()


def test_eight_bits_keep_outliers_of_a_head_to_themselves() -> None:
    values = draw((8, 1, 2, 2, 16))
    loud = values.clone()
    loud[:, :, :, 1] *= 1e4
    assert torch.equal(through("int8", values)[:, :, :, 0], through("int8", loud)[:, :, :, 0])


@pytest.mark.parametrize("name", ["4bit", "2bit", "1bit"])
def test_what_a_message_could_not_say_is_sent_later(name: str) -> None:
    """On normal numbers one bit leaves sqrt(1 - 2 / pi) of their norm, and a base that stands still is approached."""
    values = draw((512, 1, 2, 4, 32))
    base, left = torch.zeros_like(values), []
    for _ in range(8):
        base = base + through(name, values - base)
        left.append(((values - base).norm() / values.norm()).item())
    first, fourth = {"1bit": (math.sqrt(1 - 2 / math.pi), 0.18), "2bit": (0.344, 0.069), "4bit": (0.108, 0.0265)}[name]
    assert left[0] == pytest.approx(first, rel=0.05)
    assert left[3] == pytest.approx(fourth, rel=0.05)
    assert all(after < before for before, after in itertools.pairwise(left))


def test_low_rank_carries_what_has_that_rank() -> None:
    values = torch.einsum("lbr,brc->lbc", draw((40, 2, RANK)), draw((2, RANK, 24), seed=1)).view(40, 2, 3, 8)
    assert (through("lowrank", values) - values).norm() <= 1e-2 * values.norm()


def test_low_rank_goes_on_from_the_last_message() -> None:
    """Each message repeats the iterations on the same matrix, so factors get no worse and come near the best ones."""
    values, wire = draw((60, 1, 2, 4, 16)), WIRES["lowrank"]
    matrix = values.reshape(60, 2, 64).transpose(0, 1)
    best = torch.linalg.svdvals(matrix)[:, RANK:].norm() / matrix.norm()
    last, left = None, []
    for _ in range(6):
        last = wire.encode(values, last)
        left.append(((wire.decode(last, tuple(values.shape)) - values).norm() / values.norm()).item())
    assert left[-1] <= left[0] and left[-1] == pytest.approx(best.item(), rel=0.01)


@pytest.mark.parametrize("channels", [1, 7, 64])
def test_four_bits_of_border_rows(channels: int) -> None:
    """The largest of a row is 7 steps; all else is rounded to whole steps."""
    values = draw((9, 2, channels))
    wire = FourBits()
    message = wire.encode(values)
    assert len(message) == wire.size((9, 2, channels)) == 18 * (2 + (channels + 1) // 2)
    step = values.abs().amax(-1, keepdim=True) / 7
    assert ((wire.decode(message, (9, 2, channels)) - values).abs() <= step * (0.5 + 7 * 2**-8)).all()
    assert wire.decode(wire.encode(values * 0), (9, 2, channels)).eq(0).all()


@pytest.mark.parametrize(("name", "most"), [("int8", 1.016), ("4bit", 0.52), ("2bit", 0.27), ("1bit", 0.142)])
def test_bytes_for_each_number(name: str, most: float) -> None:
    shape = (128, 1, 2, 24, 128)
    assert bytes_sent(wire_of(name), shape, 2) <= most * math.prod(shape)  # type: ignore[arg-type]
    assert bytes_sent(None, shape, 2) == 2 * math.prod(shape)


STRATEGIES = (DisplacedPatch, PartialPatch, Ring, Ulysses, Usp, TokenRing)


@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("wire", get_args(WireName))
def test_classes_and_refusals(kind: Any, wire: str) -> None:
    chosen = kind(wire=wire)
    if kind in (Ulysses, Usp, TokenRing) and wire not in ("none", "fp8", "int8"):
        with pytest.raises(
            ArgumentError, match=f"{kind.__name__}: wire='{wire}'; residuals need a base .* fp8 or int8"
        ):
            mesh_for([chosen], 2)
        return
    mesh_for([chosen], 2)
    stays = issubclass(kind, DisplacedPatch)
    assert chosen.kind == ("exact" if wire == "none" and not stays else "approximate")
    assert (chosen.rounded() is None) == (wire == "none")
    assert wire == "none" or f"by the wire {wire}" in chosen.rounded()


@pytest.mark.parametrize("kind", STRATEGIES)
def test_unknown_wires_are_refused_by_name(kind: Any) -> None:
    with pytest.raises(ArgumentError, match=r"wire.*'3bit'.*1bit"):
        mesh_for([kind(wire="3bit")], 2)


def test_partial_patch_sends_all_ranks_the_same_by_a_wire() -> None:
    with pytest.raises(ArgumentError, match=r"PartialPatch: wire='1bit' with far=0.5; .* leave far at 1"):
        mesh_for([PartialPatch(wire="1bit", far=0.5)], 2)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("displaced-patch:wire=1bit", DisplacedPatch(wire="1bit")),
        ("partial-patch:portion=0.3,wire=lowrank", PartialPatch(portion=0.3, wire="lowrank")),
        ("ring:degree=2,wire=4bit", Ring(degree=2, wire="4bit")),
        ("ulysses:wire=int8", Ulysses(wire="int8")),
        ("usp:wire=fp8", Usp(wire="fp8")),
        ("token-ring:wire=int8", TokenRing(wire="int8")),
    ],
)
def test_wires_are_read_from_text(text: str, want: Strategy) -> None:
    assert parse_strategy(text) == want
