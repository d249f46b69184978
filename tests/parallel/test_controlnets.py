"""ControlNets are cut as the model they steer: each rank computes its share, and the result is the serial one."""

from __future__ import annotations

import functools

import pytest

from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import control_worker as worker
from tests.parallel.control_worker import Outcome

KINDS = (
    "FluxControlNetPipeline",
    "StableDiffusion3ControlNetPipeline",
    "QwenImageControlNetPipeline",
    "HunyuanDiTControlNetPipeline",
    "SanaControlNetPipeline",
    "StableDiffusionControlNetPipeline",
    "StableDiffusionXLControlNetUnionPipeline",
    "AnimateDiffControlNetPipeline",
    "AnimateDiffSparseControlNetPipeline",
    *worker.OWN,
)
#: What is old on a rank belongs to a net and to its call in a step.
STALE = ("Flux, one net twice", "SD, two nets", "SD, shorter text", "SD3, no text")
SHARED = ("Flux, two nets", "SD, two nets")
EVERY = [
    *((2, name, "Ulysses") for name in KINDS),
    *((2, name, "DisplacedPatch") for name in ("Flux, one net twice", "SD, shorter text")),
    *((2, name, strategy) for name in STALE for strategy in worker.APPROXIMATE),
    *((3, name, "Ring") for name in KINDS[::2]),
    *((4, name, "CfgParallel x Ulysses") for name in SHARED),
]
#: By default one net of each form on two ranks; more ranks have rows and tokens in uneven parts, and branches apart.
USUAL = {
    *((2, name, "Ulysses") for name in ("FluxControlNetPipeline", "HunyuanDiTControlNetPipeline")),
    *((2, name, "Ulysses") for name in ("SanaControlNetPipeline", "StableDiffusionXLControlNetUnionPipeline")),
    *((2, name, "Ulysses") for name in ("AnimateDiffSparseControlNetPipeline", "Flux, only double blocks")),
    *((2, name, "Ulysses") for name in ("SD3, two nets", "SD, two nets")),
    (2, "Flux, one net twice", "DisplacedPatch"),
    *((2, name, worker.APPROXIMATE[place % 3]) for place, name in enumerate(STALE)),
    *((3, name, "Ring") for name in ("FluxControlNetPipeline", "StableDiffusionControlNetPipeline")),
    (4, "Flux, two nets", "CfgParallel x Ulysses"),
}
TRIED = [case for case in EVERY if covering.FULL or case in USUAL]


@functools.cache  # one launch per number of ranks
def outcomes(nproc: int) -> dict[tuple[str, str], list[Outcome]]:
    return launch(worker.run, nproc, nproc, [(name, strategy) for n, name, strategy in TRIED if n == nproc])


@pytest.mark.parametrize(("nproc", "name", "strategy"), TRIED)
def test_each_rank_computes_its_share(nproc: int, name: str, strategy: str) -> None:
    ranks = outcomes(nproc)[name, strategy]
    cut = nproc // 2 if nproc == 4 else nproc
    for row in ranks:
        assert row.apart <= 1e-9 or strategy in worker.APPROXIMATE
        assert len(row.sizes) == len(row.whole) > 0
        assert all(own < size for own, size in zip(row.sizes, row.whole, strict=True))
    together = [sum(sizes) for sizes in zip(*(row.sizes for row in ranks), strict=True)]
    assert together == [size * nproc // cut for size in ranks[0].whole]


@pytest.mark.parametrize(("nproc", "name", "strategy"), TRIED)
def test_result_is_the_serial_one_and_bytes_are_as_predicted(nproc: int, name: str, strategy: str) -> None:
    for row in outcomes(nproc)[name, strategy]:
        assert row.error <= 1e-9 or strategy in worker.APPROXIMATE
        assert row.sent == row.predicted > 0


def test_what_cannot_be_cut_stays_whole() -> None:
    assert set(launch(worker.cuts, 1, 1).values()) == {0}
    assert launch(worker.cuts, 2, 2) == {"plain": 1, "two": 2, "pooled": 0, "shared layers": 0}


def test_ranks_with_different_hints_are_told() -> None:
    assert all("was given another controlnet_cond" in said for said in launch(worker.other_hint, 2, 2))
