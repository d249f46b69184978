"""StepCache: off at threshold 0, its definition where it leaves blocks out, the same decisions on any ranks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from partsong import DisplacedPatch, PatchPipeline, StepCache
from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel import parallelize
from partsong.parallel.adapters import adapter_for
from partsong.parallel.cuts.block_lists import blocks_of, chain_reason
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import cache_worker
from tests.parallel.families import FAMILIES, Family, adapter_of
from tests.parallel.pipelines import PIPES
from tests.parallel.ranks import error
from tests.parallel.unets import UNETS
from tests.pipelines.case import distance
from tests.pipelines.cases import CASES

SIDE = 8


CHAINS = [name for name in FAMILIES if chain_reason(adapter_of(name)) is None]


def _inputs(family: Family, step: int) -> dict[str, Any]:
    """What the model is asked in a step: later, and of latents that have moved."""
    named = family.at(family.call(SIDE, 2, torch.float64), 900.0 - 100 * step)
    name = adapter_of(family.name).sample
    moved = [x * (1 + 0.1 * step) for x in named[name]] if isinstance(named[name], list) else None
    return named | {name: named[name] * (1 + 0.1 * step) if moved is None else moved}


def _answer(model: Any, named: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        output = model(**named, return_dict=False)[0]
    return torch.stack(output) if isinstance(output, list) else output


def _recorded(model: Any) -> dict[str, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """What enters and leaves every block in the next call, by its name."""
    found: dict[str, Any] = {}

    def record(block: Any) -> Callable[..., None]:
        signature = inspect.signature(block.module.forward)

        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            leaving = output if isinstance(output, tuple) else (output,)
            found[block.name] = (tuple(given[name] for name in block.names), leaving)

        return hook

    for block in blocks_of(model, adapter_for(model)):
        block.module.register_forward_hook(record(block), with_kwargs=True)
    return found


def _without_blocks(model: Any, known: dict[str, Any]) -> None:
    """Lets every block but the first add what it has added in a recorded call."""
    for block in blocks_of(model, adapter_for(model))[1:]:
        entering, leaving = known[block.name]
        added = tuple(None if after is None else after - b for after, b in zip(leaving, entering, strict=True))
        signature = inspect.signature(block.module.forward)

        def forward(*args: Any, _s: Any = signature, _b: Any = block, _a: Any = added, **kwargs: Any) -> Any:
            given = _s.bind(*args, **kwargs).arguments
            values = [None if a is None else given[n] + a for n, a in zip(_b.names, _a, strict=True)]
            return tuple(values) if len(values) > 1 else values[0]

        block.module.forward = forward


@pytest.mark.parametrize("name", CHAINS)
def test_what_is_left_out_is_added_as_it_was(name: str) -> None:
    family = FAMILIES[name]
    plain = family.model(SIDE, torch.float64)
    model, twin = copy.deepcopy(plain), copy.deepcopy(plain)
    known = _recorded(twin)
    _answer(twin, _inputs(family, 0))
    _without_blocks(twin, dict(known))
    with parallelize(model, StepCache(threshold=1e9, warmup_steps=1, max_skips=1)) as plan:
        got = [_answer(model, _inputs(family, step)) for step in range(3)]
        cache = plan.denoisers[0].attachments[0]
        assert (cache.computed, cache.skipped) == (4, 2)  # of two samples
    assert torch.equal(got[0], _answer(plain, _inputs(family, 0)))
    assert error(got[1], _answer(twin, _inputs(family, 1))) <= 1e-12
    assert torch.equal(got[2], _answer(plain, _inputs(family, 2)))
    assert not torch.equal(got[1], _answer(plain, _inputs(family, 1)))


@pytest.mark.parametrize("name", ["DiT", "Flux", "Wan"])
def test_nothing_is_left_out_at_threshold_zero(name: str) -> None:
    pipe = PIPES[name].make()
    wanted = PIPES[name].call(pipe)
    with parallelize(pipe, StepCache(threshold=0.0)) as plan:
        assert torch.equal(PIPES[name].call(pipe), wanted)
        assert plan.denoisers[0].attachments[0].skipped == 0
    assert torch.equal(PIPES[name].call(pipe), wanted)


#: Pipelines of models that are in no family here.
OTHERS = (
    "AceStepPipeline",
    "HiDreamImagePipeline",
    pytest.param("HunyuanVideoFramepackPipeline", marks=pytest.mark.full),
    pytest.param("Kandinsky5T2IPipeline", marks=pytest.mark.full),
    pytest.param("WanVACEPipeline", marks=pytest.mark.full),
    "HunyuanDiTControlNetPipeline",
)


@pytest.mark.parametrize("name", OTHERS)
def test_other_pipelines_are_themselves_at_threshold_zero_and_leave_blocks_out_at_a_high_one(name: str) -> None:
    case = CASES[name]
    pipe = case.make()
    wanted = case.run(pipe)
    for threshold in (0.0, 1e9):
        with parallelize(pipe, StepCache(threshold=threshold, warmup_steps=1, max_skips=1, keep_last=False)) as plan:
            apart = distance(case.run(pipe), wanted)
            skipped = plan.denoisers[0].attachments[0].skipped
        assert (skipped > 0) == (threshold > 0)
        assert 0 < apart < 1 if skipped else apart <= 1e-12
    assert distance(case.run(pipe), wanted) == 0


#: Caches that are not the usual one of a pipeline.
MORE = {
    "summed": cache_worker.SUMMED,
    "late": cache_worker.LATE,
    "late summed": cache_worker.LATE_SUMMED,
    "spectral": cache_worker.SPECTRAL,
    "late spectral": cache_worker.LATE_SPECTRAL,
    "video": cache_worker.VIDEO,
}


@pytest.mark.parametrize("nproc", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_decide_as_one_does_and_send_what_they_predict(nproc: int) -> None:
    found = launch(cache_worker.ranks, nproc, nproc, covering.FULL)
    for sent, predicted in found.pop("counted"):
        assert sent == predicted
    for (name, batch, *more), made in found.items():
        alone = cache_worker.alone(name, batch, next((MORE[each] for each in more if each in MORE), None))
        assert min(made.skipped, alone.skipped, alone.computed) > 0, name
        assert made.decisions == alone.decisions, name
        assert error(made.output, alone.output) <= 1e-10, (name, made.computed, alone.computed)


def test_guidance_branches_decide_for_themselves_and_some_steps_are_left_out() -> None:
    alone = cache_worker.alone("Wan")
    assert alone.skipped > 0
    assert alone.computed + alone.skipped == 2 * cache_worker.STEPS


def test_nothing_is_left_out_in_the_warm_up_of_what_reads_the_last_step() -> None:
    family = FAMILIES["DiT"]
    model = family.model(SIDE, torch.float64)
    with parallelize(model, DisplacedPatch(warmup_steps=3), StepCache(warmup_steps=1, mask="0")) as plan:
        for step in range(5):
            _answer(model, _inputs(family, step))
        decisions = plan.denoisers[0].attachments[0].decisions
        assert [(each.step, any(each.left_out)) for each in decisions] == [(step, step >= 3) for step in range(5)]


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"threshold": -0.1}, "threshold=-0.1; use a number of 0 or more"),
        ({"threshold": "much"}, "threshold='much'"),
        ({"warmup_steps": 0}, "warmup_steps=0; use a positive integer"),
        ({"max_skips": 0}, "max_skips=0; use a positive integer"),
    ],
)
def test_refused_knobs(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        StepCache(**knobs).validate()
    assert words in str(caught.value)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in CHAINS])
def test_models_without_a_chain_of_blocks_are_refused(name: str) -> None:
    model = FAMILIES[name].model(SIDE, torch.float64)
    with pytest.raises(UnsupportedError, match="leave it out"):
        parallelize(model, StepCache())
    assert not any("_diffusers_hook" in vars(child) for child in model.modules())


def test_unets_and_strategies_with_loops_of_their_own_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="rows of an image"):
        parallelize(next(iter(UNETS.values())).model(torch.float64), StepCache())
    model = FAMILIES["DiT"].model(SIDE, torch.float64)
    with pytest.raises(UnsupportedError, match="does not compose with StepCache"):
        parallelize(model, PatchPipeline(degree=1), StepCache())


def test_residuals_of_a_controlnet_are_new_in_every_step() -> None:
    family = FAMILIES["Flux"]
    model, twin = (family.model(SIDE, torch.float64) for _ in range(2))

    def call(step: int) -> dict[str, Any]:
        named = _inputs(family, step)
        shape = (2, named["hidden_states"].shape[1], 24)
        draw = torch.Generator().manual_seed(step)
        names = ("controlnet_block_samples", "controlnet_single_block_samples")
        return named | {name: [torch.randn(shape, generator=draw, dtype=torch.float64)] for name in names}

    known = _recorded(twin)
    _answer(twin, call(0))
    _without_blocks(twin, dict(known))
    with parallelize(model, StepCache(threshold=1e9, warmup_steps=1)) as plan:
        _answer(model, call(0))
        got = _answer(model, call(1))
        assert plan.denoisers[0].attachments[0].skipped == 2
    assert error(got, _answer(twin, call(1))) <= 1e-12
    assert error(got, _answer(twin, call(0))) > 1e-3
