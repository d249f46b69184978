"""What the support page refuses is refused, and what it promises is in the matrix."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re

import diffusers
import pytest

from partsong.knobs import kebab
from partsong.parallel import ADAPTERS
from partsong.parallel.ranks.launch import launch
from partsong.samplers.long_video.frame_rotary import turning_models
from partsong.samplers.registry import strategies
from partsong.samplers.structure_guidance.strategy import MODELS as GUIDED
from partsong.samplers.support import support_rows
from tests.newer_names import is_there
from tests.parallel import kept_reference_worker, support_worker, test_lagged_layers
from tests.parallel.clip_models import VIDEOS
from tests.parallel.equivalence_worker import compared
from tests.parallel.families import FAMILIES, adapter_of
from tests.parallel.unets import UNETS
from tests.pipelines import test_video_clips
from tests.pipelines import worker as pipeline_worker
from tests.pipelines.cases import MODELS, models_of

#: Models whose input is not cut: `tests.pipelines` samples with them.
_WHOLE = [name for name, adapter in ADAPTERS.items() if adapter.whole is not None]
FAMILY_MODELS = {adapter_of(name).model for name in FAMILIES}
UNET_MODELS = {type(unet.build()).__name__ for unet in UNETS.values()}
#: Pairs with a matrix of their own: UNets, whose images or frames are cut into rows, a strategy that cuts blocks, and
#: one that cuts frames.
TESTED_ELSEWHERE = (
    {(name, model) for name in strategies() for model in ("UNet2DConditionModel", "UNet2DModel")}
    | {("clip-parallel", type(video.build()).__name__) for video in VIDEOS.values()}
    | {(name, model) for name in ("cfg-parallel", "data-parallel") for model in _WHOLE}
    | {(kebab(name), model) for name in pipeline_worker.STRATEGIES for model in (*MODELS, "UNet3DConditionModel")}
    | {("offload-weights", model) for model in (*MODELS, "UNet3DConditionModel")}  # test_offloaded_pipelines
    | {("clip-parallel", model) for name in test_video_clips.NAMES for model in models_of(name)}
    | {
        (name, "PriorTransformer") for name in ("tensor-parallel", "sharded-weights", "offload-weights")
    }  # its pipelines are tried with it
    | {
        (kebab(name), "WanAnimate2Transformer3DModel") for name in kept_reference_worker.STRATEGIES
    }  # test_kept_reference
    | {("patch-pipeline", model) for model in ADAPTERS}
    | {(name, model) for name in ("time-parallel", "drafted-steps") for model in ADAPTERS}  # test_time_parallel
    | {("step-cache", model) for model in ADAPTERS}
    | {
        (name, model)
        for name in ("cross-attention-cache", "packed-weights")
        for model in (*MODELS, *FAMILY_MODELS, *UNET_MODELS, "PriorTransformer", "UNet3DConditionModel")
    }  # test_cross_attention_cache, test_packed_weights
    | {("lagged-layers", model) for name in test_lagged_layers.OTHERS for model in models_of(name)}
    | {("structure-guidance", model) for model in GUIDED}
    | {(f"{name}-pipeline", model) for name in ("timestep", "cascade") for model in turning_models()}
    | {("dual-parallel", model) for model in turning_models()}
)
DENOISING = {name: kind for name, kind in strategies().items() if kind.denoises}


def test_every_promise_is_in_the_matrix() -> None:
    promised = {
        (name, row["model"])
        for row in support_rows()
        for name, kind in DENOISING.items()
        if row.get(kind.__name__, "refused") != "refused" and is_there(getattr(diffusers, row["model"], None))
    }
    tested = compared() | TESTED_ELSEWHERE
    assert promised <= tested, sorted(promised - tested)
    assert len(promised) > 0.5 * len(ADAPTERS) * len(DENOISING)


def test_every_model_that_diffusers_cuts_by_a_plan_of_its_own_has_a_row() -> None:
    modules = pkgutil.walk_packages(diffusers.models.__path__, "diffusers.models.")
    named = (item for module in modules for item in vars(importlib.import_module(module.name)).items())
    planned = {
        name
        for name, kind in named
        if inspect.isclass(kind) and any(getattr(kind, plan, None) for plan in ("_cp_plan", "_tp_plan"))
    }
    assert len(planned) >= 8, "diffusers names its plans otherwise"
    assert planned <= ADAPTERS.keys(), sorted(planned - ADAPTERS.keys())


@pytest.mark.slow
def test_refused_cells_raise_with_their_reason() -> None:
    for (strategy, model), told in launch(support_worker.refusals, 2).items():
        reason = strategies()[strategy]().refuses(ADAPTERS[model])
        assert reason is not None
        assert told == [f"UnsupportedError: {strategies()[strategy].__name__} on {model}: {reason}"] * 2


def test_no_advice_leads_to_another_refusal() -> None:
    kinds = {kind.__name__: kind for kind in DENOISING.values()}
    for adapter in ADAPTERS.values():
        for kind in kinds.values():
            reason = kind().refuses(adapter) or ""
            for word in re.findall(r"\w+", reason.rpartition("; use ")[2]):
                advised = kinds.get(word)
                assert advised is None or advised().refuses(adapter) is None, (kind.__name__, adapter.model, reason)
