"""Group norms that hand a convolution the rows around a rank's own: which ones may, and that all ranks wait less."""

from __future__ import annotations

import functools

import torch
from diffusers.models.resnet import ResnetBlock2D
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from partsong.ledger import Ledger
from partsong.parallel import Mesh
from partsong.parallel.cuts.row_blocks import framed_norms
from partsong.parallel.cuts.rows import RowLevels, RowSplit
from partsong.parallel.exchange.borders import SyncBorders
from partsong.parallel.exchange.displaced_borders import DisplacedBorders
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.ranks.launch import launch
from tests.parallel.ranks import gathered

BOTH = {"norm1": "conv1", "norm2": "conv2"}


def block(**settings: object) -> ResnetBlock2D:
    torch.manual_seed(0)
    made = ResnetBlock2D(in_channels=8, out_channels=8, temb_channels=None, groups=4, **settings)  # type: ignore[arg-type]
    return made.double().eval()


def pairs(module: nn.Module) -> dict[str, str]:
    """The pairs inside one block."""
    found = framed_norms({f"here.{name}" if name else "here": child for name, child in module.named_modules()})
    return {norm.removeprefix("here."): conv.removeprefix("here.") for norm, conv in found.items()}


def test_norms_that_a_convolution_follows() -> None:
    assert pairs(block()) == BOTH
    assert pairs(block(non_linearity="mish")) == BOTH
    assert pairs(block(up=True)) == {"norm2": "conv2"}
    assert pairs(block(down=True)) == {"norm2": "conv2"}
    # A shift after the norm moves the zeros beyond the image.
    assert pairs(block(time_embedding_norm="scale_shift")) == {"norm1": "conv1"}
    adapted = inject_adapter_in_model(LoraConfig(target_modules=["conv1"], r=2), block())
    assert pairs(adapted) == {"norm2": "conv2"}


def waits(nproc: int) -> list[tuple[float, int, int, int]]:
    """For each way to exchange: the distance from the whole block's result, messages, bytes, and bytes predicted."""
    module, rows = block(), []
    x = torch.randn(2, 8, 12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with Mesh(patch=nproc) as mesh, torch.no_grad():
        axis, whole = mesh.axis("patch"), module(x, None)
        clock = StepClock()
        for borders in (SyncBorders(axis), DisplacedBorders(axis, clock, 9, 0, fresh_norms=True)):
            split, hooks = RowSplit(module, axis, borders, [], lambda name: False), HookSet()
            split.attach(hooks)
            split.begin(RowLevels((12,), nproc), 0, 2)
            own = split.own
            with Ledger(flops=False) as ledger:
                got = module(x[..., own, :], None)
                told = ledger.summary()
            hooks.remove()
            error = float((got - whole[..., own, :]).abs().max())
            sent = split.predict(2, axis.index, (0, False))
            rows += gathered((error, int(told["messages"]), int(told["bytes_sent"]), sent))
    return rows


@functools.cache
def results(nproc: int) -> list[tuple[float, int, int, int]]:
    return launch(waits, nproc, nproc)


def test_rows_and_statistics_travel_together() -> None:
    for nproc in (2, 3):
        together, apart = results(nproc)[:nproc], results(nproc)[nproc:]
        for error, _, sent, predicted in (*together, *apart):
            assert error <= 1e-12
            assert sent == predicted > 0
        assert [row[2] for row in together] == [row[2] for row in apart]  # the same bytes
        # Two norms with a message to each other rank; apart, the convolutions' messages to the neighbours come on top.
        neighbours = [1 if rank in (0, nproc - 1) else 2 for rank in range(nproc)]
        assert [row[1] for row in together] == [2 * (nproc - 1)] * nproc
        assert [row[1] for row in apart] == [2 * (nproc - 1) + 2 * each for each in neighbours]
