"""Runs on every rank: what the support page refuses, asked of a plan."""

from __future__ import annotations

from typing import Any

from partsong.knobs import kebab
from partsong.parallel import ADAPTERS, Mesh, Strategy, mesh_for, parallelize
from partsong.samplers.long_video.frame_rotary import turning_models
from partsong.samplers.registry import strategies
from partsong.samplers.structure_guidance.strategy import MODELS as GUIDED
from tests.parallel import lagged_worker
from tests.parallel.clip_models import VIDEOS
from tests.parallel.families import FAMILIES
from tests.parallel.ranks import gathered
from tests.pipelines import test_video_clips
from tests.pipelines import worker as pipeline_worker
from tests.pipelines.cases import MODELS, models_of

#: Models whose input is not cut: `tests.pipelines` samples with them.
_WHOLE = [name for name, adapter in ADAPTERS.items() if adapter.whole is not None]
#: Pairs with a matrix of their own: UNets, whose images or frames are cut into rows, a strategy that cuts blocks, and
#: one that cuts frames.
TESTED_ELSEWHERE = (
    {(name, model) for name in strategies() for model in ("UNet2DConditionModel", "UNet2DModel")}
    | {("clip-parallel", type(video.build()).__name__) for video in VIDEOS.values()}
    | {(name, model) for name in ("cfg-parallel", "data-parallel") for model in _WHOLE}
    | {(kebab(name), model) for name in pipeline_worker.STRATEGIES for model in (*MODELS, "UNet3DConditionModel")}
    | {("clip-parallel", model) for name in test_video_clips.NAMES for model in models_of(name)}
    | {(name, "PriorTransformer") for name in ("tensor-parallel", "sharded-weights")}  # its pipelines are tried with it
    | {("patch-pipeline", model) for model in ADAPTERS}
    | {(name, model) for name in ("time-parallel", "drafted-steps") for model in ADAPTERS}  # test_time_parallel
    | {("step-cache", model) for model in ADAPTERS}
    | {("lagged-layers", model) for name in lagged_worker.OTHERS for model in models_of(name)}
    | {("structure-guidance", model) for model in GUIDED}
    | {(name, model) for name in ("dual-parallel", "timestep-pipeline") for model in turning_models()}
)


def refusals() -> dict[tuple[str, str], list[str]]:
    """What every rank is told for every refused pair of a strategy and a model that `FAMILIES` can build."""
    models: dict[str, Any] = {type(model).__name__: model for model in (f.build(8) for f in FAMILIES.values())}
    told = {}
    for name, kind in strategies().items():
        if not kind().axes:
            continue  # leaves nothing to ranks: its own tests ask it of every model
        refused = [model for model in models if kind().refuses(ADAPTERS[model])]
        with Mesh(**mesh_for((kind(),), 2)) as mesh:
            for model in refused:
                told[name, model] = gathered(_said(models[model], kind(), mesh))
    return told


def _said(model: Any, strategy: Strategy, mesh: Mesh) -> str:
    try:
        parallelize(model, strategy, mesh=mesh)
    except Exception as problem:  # noqa: BLE001 - the test reads which one it was
        return f"{type(problem).__name__}: {problem}"
    return "accepted"
