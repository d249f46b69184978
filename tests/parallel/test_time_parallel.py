"""Steps that are solved for together: the pipeline's own result, the same bits on any number of ranks, refusals."""

from __future__ import annotations

import functools
import random
import re
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler

from partsong import DisplacedPatch, DraftedSteps, PatchPipeline, StepCache, TimeParallel, parse_strategy
from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel import mesh_for, parallelize
from partsong.parallel.ranks.launch import launch
from partsong.samplers import generate
from partsong.samplers.time_parallel import loop
from partsong.samplers.time_parallel.rehearse import rehearse
from tests import covering
from tests.parallel import time_parallel_worker as worker
from tests.parallel.time_parallel_worker import Account, scheduled, solved
from tests.pipelines.case import distance
from tests.pipelines.cases import CASES

EXACT = TimeParallel(window=3, tolerance=0.0)
#: Flow matching computes in float32 whatever its latents are.
FLOW = 1e-6


#: Of the same classes as others, or solvers of the same form.
ALIKE = (
    *("DPM-Solver++ 3M", "UniPC of order 3", "DEIS", "LMS", "LCM"),
    *("PNDM without its first steps", "DDIM with thresholds", "DDIM with noise"),
    *("KDPM2 ancestral", "DPM-Solver singlestep", "DDPM"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in ALIKE)) for name in worker.SCHEDULERS]
)
def test_without_tolerance_it_is_the_pipeline(name: str) -> None:
    case, pipe, more = scheduled(name)
    alone = case.run(pipe, **more)
    together, told = solved(case, pipe, EXACT, **more)
    assert distance(together, alone) <= FLOW
    # Some schedulers evaluate the model more often than they have steps.
    rounds, steps = map(int, re.findall(r"\d+", told.kept[0]))
    assert 2 <= rounds <= steps and steps >= 6
    assert distance(case.run(pipe, **more), alone) == 0.0


@pytest.mark.parametrize(
    "name",
    [
        "FluxPipeline",
        pytest.param("FluxFillPipeline", marks=pytest.mark.full),
        "StableDiffusionPAGPipeline",
        "StableDiffusionXLImg2ImgPipeline",
        pytest.param("LatentConsistencyModelPipeline", marks=pytest.mark.full),
        "CogVideoXPipeline",
        pytest.param("Kandinsky5T2VPipeline", marks=pytest.mark.full),
        pytest.param("Cosmos2TextToImagePipeline", marks=pytest.mark.full),
        "SkyReelsV2Pipeline",
    ],
)
def test_pipelines_that_prepare_their_models_input_in_ways_of_their_own(name: str) -> None:
    case = CASES[name]
    pipe = case.make()
    assert distance(solved(case, pipe, EXACT)[0], case.run(pipe)) <= FLOW


def test_a_pipeline_that_ends_before_its_schedule() -> None:
    case = CASES["StableDiffusionXLPipeline"]
    pipe, more = case.make(), {"denoising_end": 0.6, "num_inference_steps": 6, "output_type": "latent"}
    alone = case.run(pipe, **more)
    together, told = solved(case, pipe, EXACT, **more)
    assert distance(together, alone) <= FLOW
    assert "for 4 steps" in told.kept[0] or "for 3 steps" in told.kept[0]


def test_one_draft_is_the_pipeline_and_more_divide_the_rounds() -> None:
    case, pipe, more = scheduled("DDIM")
    alone = case.run(pipe, **more)
    one, told = solved(case, pipe, DraftedSteps(depth=1), **more)
    assert distance(one, alone) <= FLOW
    assert told.kept[0].startswith("6 rounds")
    three, told = solved(case, pipe, DraftedSteps(depth=3), **more)
    assert distance(three, alone) > 1e-6
    assert told.kept[0].startswith("3 rounds for 6 steps")


def test_the_tolerance_bounds_what_is_accepted() -> None:
    case, pipe, more = scheduled("DDIM")
    rows = [solved(case, pipe, TimeParallel(window=4, tolerance=each), **more) for each in (1e-6, 1e-3, 10.0)]
    rounds = [int(told.kept[0].split()[0]) for _, told in rows]
    assert rounds[0] >= rounds[1] > rounds[2]
    alone = case.run(pipe, **more)
    drift = [distance(tensors, alone) for tensors, _ in rows]
    assert drift[0] < drift[2]
    assert float(rows[2][1].kept[0].rsplit(" ", 1)[1]) <= 10.0


@functools.cache
def on_ranks(nproc: int) -> dict[tuple[str, str], list[Account]]:
    some = [(name, label) for ranks, name, label in ON_RANKS if nproc in (1, ranks)]
    return worker.ranks(1, some) if nproc == 1 else launch(worker.ranks, nproc, nproc, some)


#: By default the ways to solve take turns with the schedulers, on two ranks.
ON_RANKS = [
    (nproc, name, label)
    for nproc in (2, 3)
    for place, name in enumerate(worker.ON_RANKS)
    for turn, label in enumerate(worker.STRATEGIES)
    if covering.FULL or (nproc == 2 and (place - turn) % 3 == 0)
]


@pytest.mark.parametrize(("nproc", "name", "label"), ON_RANKS)
def test_the_same_bits_on_any_number_of_ranks(nproc: int, name: str, label: str) -> None:
    (alone,) = on_ranks(1)[name, label]
    rows = on_ranks(nproc)[name, label]
    assert len(rows) == nproc
    for row in rows:
        assert (row.digest, row.kept) == (alone.digest, alone.kept)
        assert row.sent == row.predicted > 0


@pytest.mark.parametrize("name", ["StableDiffusionPipeline + one sample", "WanPipeline"])
def test_the_second_generation_is_rehearsed_once_and_still_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pipeline does with outputs is compared with the generation before, unless that was another call."""
    case, seeds = CASES[name], list[int]()
    pipe = case.make()

    def counting(*args: Any, **named: Any) -> Any:
        seeds.append(named["seed"])
        return rehearse(*args, **named)

    monkeypatch.setattr(loop, "rehearse", counting)
    more = {"num_inference_steps": case.call(1).get("num_inference_steps", 3) + 1}
    alone, longer = case.run(pipe), case.run(pipe, **more)
    with parallelize(pipe, EXACT) as plan:
        for made in (2, 3, 4):
            assert distance(case.run(worker.Through(plan)), alone) <= FLOW
            assert len(seeds) == len({*seeds}) == made
        assert distance(case.run(worker.Through(plan), **more), longer) <= FLOW
        assert len(seeds) == 6  # other steps: twice again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_guidance_that_is_rescaled_later_is_refused(dtype: torch.dtype) -> None:
    case = CASES["StableDiffusionPipeline + one sample"]
    pipe = case.make().to(dtype)
    with parallelize(pipe, EXACT) as plan:
        case.run(worker.Through(plan))
        with pytest.raises(UnsupportedError, match="as guidance_rescale does; set"):
            case.run(worker.Through(plan), guidance_rescale=0.7)


def test_half_precision_beside_latents_in_float32_is_no_rescaled_guidance() -> None:
    case = CASES["WanPipeline"]
    pipe = case.make()
    pipe.transformer.to(torch.bfloat16)
    assert distance(solved(case, pipe, EXACT)[0], case.run(pipe)) <= 2e-2


class _Restless(DDIMScheduler):
    """A scheduler with noise of its own, which nobody can draw again."""

    def step(self, model_output: Any, timestep: Any, sample: Any, eta: float = 0.0, **more: Any) -> Any:
        return super().step(model_output + random.random(), timestep, sample, eta, **more)


def _refused(case: str, change: Any = None, **more: Any) -> None:
    chosen = CASES[case]
    pipe = chosen.make()
    if change is not None:
        pipe.scheduler = change(pipe.scheduler)
    solved(chosen, pipe, EXACT, **more)


@pytest.mark.parametrize(
    ("case", "change", "more", "reason"),
    [
        ("StableDiffusionPipeline", None, {"callback_on_step_end": print}, "callback_on_step_end cannot be honoured"),
        ("StableDiffusionPipeline", None, {"guidance_rescale": 0.7}, "as where guidance keeps a norm"),
        ("StableDiffusionPipeline + one sample", None, {"guidance_rescale": 0.7}, "as guidance_rescale does; set"),
        ("StableDiffusionInpaintPipeline", None, {}, "changes the latents between its steps"),
        ("StableDiffusionControlNetPipeline", None, {}, "down_block_additional_residuals was given"),
        ("QwenImagePipeline", None, {}, "not a weighted sum of its model's outputs"),
        ("LTX2Pipeline", None, {}, "returns two samples"),
        ("ZImagePipeline", None, {}, "a list of latents"),
        ("KandinskyPriorPipeline", None, {}, "what it returns is no sample"),
        (
            "StableDiffusionPipeline",
            lambda old: _Restless.from_config(old.config),
            {"num_inference_steps": 4},
            "_Restless: the same step comes out differently each time",
        ),
    ],
)
def test_what_is_no_sum_is_refused(case: str, change: Any, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(reason)):
        _refused(case, change, **more)


def test_it_needs_a_pipeline_and_exact_strategies_beside_it() -> None:
    with pytest.raises(UnsupportedError, match="give it a pipeline with a scheduler"):
        parallelize(CASES["FluxPipeline"].make().transformer, EXACT)
    for other in (DisplacedPatch(degree=2), StepCache(), DraftedSteps(degree=2), PatchPipeline(degree=2)):
        with pytest.raises(UnsupportedError, match="does not compose with|both use the mesh axis"):
            mesh_for((TimeParallel(degree=2), other), 4)


@functools.cache
def mixed() -> dict[tuple[str, str], list[tuple[float, int, int]]]:
    return launch(worker.mixes, 4, MIXED)


#: By default each mix is on one pipeline.
MIXED = [
    (name, label)
    for place, name in enumerate(worker.MIXED)
    for turn, label in enumerate(worker.MIXES)
    if covering.FULL or place == turn % len(worker.MIXED)
]


@pytest.mark.parametrize(("name", "label"), MIXED)
def test_points_in_time_beside_what_splits_a_call(name: str, label: str) -> None:
    """The pipeline's own result, with the predicted bytes, where ranks share every call as well."""
    rows = mixed()[name, label]
    assert len(rows) == 4
    for error, sent, predicted in rows:
        assert error <= FLOW
        assert sent == predicted > 0


def test_a_warm_up_of_all_steps_is_the_pipeline_and_a_check_is_a_window() -> None:
    case, pipe, more = scheduled("DDIM")
    alone = case.run(pipe, **more)
    slow, told = solved(case, pipe, DraftedSteps(depth=3, warmup_steps=6), **more)
    assert distance(slow, alone) <= FLOW
    assert told.kept[0].startswith("6 rounds")
    checked, told = solved(case, pipe, DraftedSteps(depth=3, check=0.01), **more)
    window, _ = solved(case, pipe, TimeParallel(window=3, tolerance=0.01), **more)
    assert distance(checked, window) == 0.0
    assert told.kind == "bounded" and not told.stale
    with pytest.raises(ArgumentError, match="leave warmup_steps at 0"):
        DraftedSteps(check=0.1, warmup_steps=2).validate()


@pytest.mark.parametrize("text", ["time-parallel:window=0", "time-parallel:tolerance=-1", "drafted-steps:depth=0"])
def test_knobs_out_of_bounds_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError):
        parse_strategy(text).validate()


def test_calls_beside_the_loop_are_refused() -> None:
    case, pipe, more = scheduled("DDIM")
    with parallelize(pipe, EXACT) as plan:
        with pytest.raises(ArgumentError, match="use generate"):
            case.run(pipe, **more)
        torch.manual_seed(3)
        assert generate(plan, **{**case.call(1), **more}) is not None


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_every_pipeline_is_right_or_refused(name: str) -> None:
    case = CASES[name]
    pipe = case.make()
    alone = case.run(pipe)
    try:
        together, _ = solved(case, pipe, EXACT)
    except UnsupportedError:
        together = case.run(pipe)
        assert distance(together, alone) == 0.0
    else:
        assert distance(together, alone) <= max(FLOW, case.tolerance)
