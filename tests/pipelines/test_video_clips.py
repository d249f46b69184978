"""Video pipelines in clips: exact where clips see everything, and the same on any number of ranks where they do not."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
from diffusers.utils import logging
from torch import Tensor

from partsong import ClipParallel, Mesh, parallelize
from partsong.ledger import Ledger
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel.clip_models import VIDEOS
from tests.parallel.ranks import gathered, on_first
from tests.pipelines.case import distance
from tests.pipelines.cases import CASES, cases_beside, models_of

#: One pipeline or two of every newer family; ChronoEdit's has two frames.
_CHOSEN = (
    "WanVACEPipeline",
    "WanAnimatePipeline",
    "ChronoEditPipeline",
    "HunyuanVideo15Pipeline",
    "LTX2Pipeline",
    "Kandinsky5T2VPipeline",
    "CosmosTextToWorldPipeline",
    "Cosmos2_5_PredictBasePipeline",
    "AllegroPipeline",
    "EasyAnimatePipeline",
    "MotifVideoPipeline",
    "AnyFlowPipeline",
    "Kandinsky6TI2VAPipeline",
    "StableVideoDiffusionPipeline",
)
_MODELS = {model for name in _CHOSEN for model in models_of(name)} | {type(v.build()).__name__ for v in VIDEOS.values()}
_BESIDE = cases_beside(ClipParallel(), _MODELS)
NAMES = (*_CHOSEN, *_BESIDE)
PRODUCT = [(nproc, name) for nproc in (2, 3) for name in NAMES if (nproc, name) != (3, "ChronoEditPipeline")]
#: The rest is left to ``--full``: their models have clips of their own in tests/parallel.
FEW = (2, "WanVACEPipeline"), (2, "ChronoEditPipeline"), (2, "HunyuanVideo15Pipeline"), (2, "LTX2Pipeline")
FEW += (2, "CosmosTextToWorldPipeline"), (2, "StableVideoDiffusionPipeline")
TRIED = PRODUCT if covering.FULL else [*FEW, *((2, name) for name in _BESIDE)]


@dataclass(frozen=True)
class Clips:
    """What a rank saw of one pipeline: distances, and bytes that were sent and predicted."""

    from_serial: float
    from_one_rank: float
    sent: int
    predicted: int


def in_clips(nproc: int, names: list[str]) -> dict[str, list[Clips]]:
    """Runs on every rank."""
    logging.set_verbosity_error()
    with Mesh(clip=nproc) as mesh:
        return {name: gathered(_in_clips(name, mesh)) for name in names}


def _in_clips(name: str, mesh: Mesh) -> Clips:
    case = CASES[name]
    pipe = case.make()
    alone = on_first(lambda: case.run(pipe))
    with parallelize(pipe, ClipParallel(window=None), mesh=mesh) as plan, Ledger(flops=False) as ledger:
        whole = case.run(pipe)
        predicted = plan.explain().bytes_total()[mesh.rank]
    with parallelize(pipe, ClipParallel(window=1), mesh=mesh):
        near = case.run(pipe)

    def near_alone() -> list[Tensor]:
        with parallelize(pipe, ClipParallel(window=1), mesh=mesh.alone()):
            return case.run(pipe)

    sent = int(ledger.summary()["bytes_sent"])
    return Clips(distance(whole, alone), distance(near, on_first(near_alone)), sent, predicted)


@functools.cache
def launched(nproc: int) -> dict[str, list[Clips]]:
    return launch(in_clips, nproc, nproc, [name for ranks, name in TRIED if ranks == nproc])


@pytest.mark.parametrize(("nproc", "name"), TRIED)
def test_a_video_in_clips(nproc: int, name: str) -> None:
    rows, tolerance = launched(nproc)[name], CASES[name].tolerance
    assert len(rows) == nproc
    for row in rows:
        assert row.from_serial <= tolerance
        assert row.from_one_rank <= tolerance
        assert row.sent == row.predicted > 0
