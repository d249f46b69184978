"""The kernels of compressed messages against torch's operators, which define each format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from partsong.kernels.call import missing_triton
from partsong.parallel.exchange import wires
from partsong.parallel.exchange.wires import EIGHT_BIT, RESIDUAL, EightBits, FewBits

pytestmark = pytest.mark.skipif(bool(missing_triton()), reason=missing_triton() or "it is there")
#: Tokens, samples, keys and values, heads, channels: more than a tile of each, odd ones, and few.
SHAPES = ((37, 1, 2, 5, 27), (3, 2, 1, 1, 7), (33, 1, 1, 2, 64))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets the kernels compute here, in Triton's interpreter."""

    def switch(on: bool) -> None:
        from partsong.kernels import wires_triton

        monkeypatch.setattr(wires, "_fused", lambda device, dtype=torch.int8: wires_triton if on else None)

    return switch


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(len(shape) + shape[0])
    values = torch.randn(shape, generator=draw) * torch.rand(shape[0], 1, 1, 1, 1, generator=draw) * 9
    values[0] = 0.0
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_int8(fused: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    wire, values = EIGHT_BIT["int8"], drawn(shape, dtype)
    assert isinstance(wire, EightBits)
    fused(False)
    want = wire.encode(values)
    read = wire.decode(want, shape)
    fused(True)
    assert torch.equal(wire.encode(values), want)
    assert torch.equal(wire.decode(want, shape), read)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [name for name, wire in RESIDUAL.items() if isinstance(wire, FewBits)])
def test_residuals_of_few_bits(fused: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    wire, values = RESIDUAL[name], drawn(shape, dtype)
    fused(False)
    want = wire.encode(values)
    read = wire.decode(want, shape)
    fused(True)
    got = wire.encode(values)
    # Sums in another order may round a scale to its neighbour, and with it a number to the next level.
    assert (got != want).double().mean() <= 0.02
    assert (wire.decode(got, shape) - read).norm() <= 0.02 * read.norm()
    assert torch.equal(wire.decode(want, shape), read)


def test_what_is_empty_is_sent_as_before(fused: Any) -> None:
    fused(True)
    for wire in (EIGHT_BIT["int8"], RESIDUAL["2bit"]):
        message = wire.encode(torch.zeros(0, 1, 2, 2, 8))
        assert len(message) == 0
        assert wire.decode(message, (0, 1, 2, 2, 8)).shape == (0, 1, 2, 2, 8)
