"""Predicted memory against the bytes of tensors that were really alive on every rank."""

from __future__ import annotations

import functools

import pytest

from partsong.parallel import ADAPTERS
from partsong.parallel.ranks.launch import launch
from partsong.samplers import registry
from tests import covering
from tests.parallel import memory_worker as worker

#: What works on a bare transformer for pictures. Which blocks a cache skips, numbers decide.
NAMES = [
    name
    for name, kind in registry.strategies().items()
    if (kind.axes or kind.uses_all_ranks)
    and kind.denoises
    and not kind.has_loop
    and name != "expert-parallel"
    and kind().refuses(ADAPTERS["FluxTransformer2DModel"]) is None
]
UNET = ("cfg-parallel", "sync-patch", "displaced-patch", "partial-patch", "sharded-weights")
PAIRS = [("Flux", "ulysses sharded-weights"), ("UNet", "sync-patch sharded-weights")]
WIRED = [("Flux", "displaced-patch:wire=int8")]
#: Those whose memory has parts that no other of them has, but for a ring.
FEW = [("Flux", name) for name in ("displaced-patch", "tensor-parallel")]
FEW += [("UNet", "displaced-patch"), PAIRS[0]]
EVERY = [("Flux", name) for name in NAMES] + [("UNet", name) for name in UNET] + PAIRS + WIRED
CASES = EVERY if covering.FULL else FEW


@functools.cache
def counted() -> dict[tuple[str, str], list[tuple[int, int]]]:
    return launch(worker.memory, 2, 2, CASES)


@pytest.mark.parametrize(("model", "names"), CASES)
@pytest.mark.slow
def test_memory_is_predicted(model: str, names: str) -> None:
    for real, predicted in counted()[model, names]:
        assert predicted == pytest.approx(real, rel=0.1)
