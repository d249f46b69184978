"""Measures of `StepCache` against their rules by hand, and samples of a batch that decide as they do alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from partsong import StepCache
from partsong.errors import ArgumentError, UnsupportedError
from partsong.parallel import parallelize
from partsong.parallel.adapters import adapter_for
from partsong.parallel.cuts.batch_rules import BatchRules
from partsong.parallel.cuts.block_lists import blocks_of, chain_reason
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.step_cache.blocks import CachedBlocks, Decision
from partsong.parallel.step_cache.tables import CacheCalibration, write_calibrations
from tests.parallel.families import FAMILIES, adapter_of
from tests.parallel.pipelines import PIPES
from tests.parallel.ranks import error

SIDE, STEPS = 8, 4
CHAINS = [name for name in FAMILIES if chain_reason(adapter_of(name)) is None]
#: One of each kind; the others are tried in the full run.
QUICK = ("DiT", "PixArt masked", "SD3", "Flux", "Wan", "Lumina2", "Z-Image", "Stable Audio")
MEASURES = ("first_block", "input")
#: By default the two measures take turns with the quick ones.
FAMILY = [
    pytest.param(name, measure, marks=[] if name in QUICK[turn::2] else [pytest.mark.full])
    for name in CHAINS
    for turn, measure in enumerate(MEASURES)
]
#: Change of output is change of input.
SAME = CacheCalibration(polynomial=(1.0, 0.0))


def _asked(name: str, step: int) -> dict[str, Any]:
    """What a model is asked in a step: of two samples the second moves, and the noise level hardly falls."""
    family = FAMILIES[name]
    named = family.at(family.call(SIDE, 2, torch.float64), 900.0 - step)
    sample = adapter_of(name).sample
    moved = [named[sample][0], named[sample][1].flip(0) * (1 + step)] if step % 2 else list(named[sample])
    return named | {sample: moved if isinstance(named[sample], list) else torch.stack(moved)}


def _answer(model: Any, named: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        output = model(**named, return_dict=False)[0]
    return torch.stack(output) if isinstance(output, list) else output


@dataclass
class Ran:
    """What a model answered in some steps, and what became of its blocks."""

    answers: list[Tensor]
    decisions: list[Decision]
    evaluations: int
    blocks: int
    together: bool


def _run(name: str, cache: StepCache, rows: slice = slice(None)) -> Ran:
    """Asks a model in some steps, for two samples or one of them."""
    model = FAMILIES[name].model(SIDE, torch.float64)
    rules = BatchRules.of(adapter_for(model))
    with parallelize(model, cache) as plan:
        calls = (_asked(name, step) for step in range(STEPS))
        answers = [_answer(model, call if rows == slice(None) else rules.cut(call, rows, 2)) for call in calls]
        cached: CachedBlocks = plan.denoisers[0].attachments[0]  # type: ignore[assignment]
        together = cached.measuring.decides_together
        return Ran(answers, list(cached.decisions), cached.evaluations, len(cached.blocks), together)


def _between(name: str, knobs: dict[str, Any]) -> float:
    """A threshold between the errors of two samples in the first step that measures them."""
    errors = _run(name, StepCache(threshold=0.0, **knobs)).decisions[1].errors
    assert max(errors) > 1.01 * min(errors)
    return math.sqrt(max(errors) * min(errors))


@pytest.mark.parametrize(("name", "measure"), FAMILY)
def test_samples_of_a_batch_decide_as_they_do_alone(name: str, measure: Any) -> None:
    knobs = {"warmup_steps": 1, "forecast": "linear", "measure": measure, "calibration": SAME, "max_skips": 2}
    if _run(name, StepCache(threshold=0.0, **knobs)).together:
        both = _run(name, StepCache(threshold=1e9, **knobs))
        assert [each.left_out for each in both.decisions[:2]] == [(False, False), (True, True)]
        return
    cache = StepCache(threshold=_between(name, knobs), **knobs)
    both = _run(name, cache)
    assert set(both.decisions[1].left_out) == {True, False}
    for row in range(2):
        alone = _run(name, cache, slice(row, row + 1))
        assert [each.left_out[row] for each in both.decisions] == [each.left_out[0] for each in alone.decisions]
        for step in range(STEPS):
            assert error(both.answers[step][row : row + 1], alone.answers[step]) <= 1e-11, (row, step)
    left_out = [left for each in both.decisions for left in each.left_out]
    in_skips = left_out.count(True) * (measure == "first_block")
    assert both.evaluations == left_out.count(False) * both.blocks + in_skips


def test_the_sum_of_input_changes_is_that_of_the_rule() -> None:
    calibration = CacheCalibration(polynomial=(3.0, -2.0, 0.8, -0.01))
    knobs: dict[str, Any] = {"warmup_steps": 1, "measure": "input", "calibration": calibration}
    plain = FAMILIES["SD3"].model(SIDE, torch.float64)
    inputs: list[Tensor] = []
    attention = plain.transformer_blocks[0].attn
    attention.register_forward_pre_hook(lambda *given: inputs.append(given[2]["hidden_states"]), with_kwargs=True)
    for step in range(STEPS):
        _answer(plain, _asked("SD3", step))
    ran = _run("SD3", StepCache(threshold=1e9, max_skips=9, keep_last=False, **knobs))
    sums = [0.0, 0.0]
    for step, decision in enumerate(ran.decisions[1:], 1):
        for row in range(2):
            now, before = inputs[step][row], inputs[step - 1][row]
            x = float((now - before).abs().sum() / before.abs().sum())
            sums[row] += max(3.0 * x**3 - 2.0 * x**2 + 0.8 * x - 0.01, 0.0)
        assert decision.errors == pytest.approx(sums, rel=1e-9)
        assert decision.left_out == (True, True)


def _decided(pipe: Any, cache: StepCache, steps: int) -> list[bool]:
    with parallelize(pipe, cache) as plan:
        PIPES["Flux"].call(pipe, num_inference_steps=steps)
        cached = plan.denoisers[0].attachments[0]
        assert cached.evaluations == cached.computed * len(cached.blocks)
        return [each.left_out[0] for each in cached.decisions if each.branch == 0]


def test_magnitudes_drift_as_calibrated() -> None:
    ratios = (1.0, 1.1, 0.96, 0.9, 0.98, 1.0, 1.3, 1.01)
    cache = StepCache(measure="magnitude", threshold=0.13, warmup_steps=2, calibration=CacheCalibration(ratios=ratios))
    wanted, product, total = [False, False], 1.0, 0.0
    for step in range(2, 7):
        product *= ratios[step]
        total += abs(1.0 - product)
        wanted.append(total < 0.13)
        product, total = (product, total) if wanted[-1] else (1.0, 0.0)
    assert wanted.count(True) == 3
    assert _decided(PIPES["Flux"].make(), cache, 8) == [*wanted, False]


def test_calibrations_are_read_from_a_file_and_refused_for_other_numbers_of_steps(tmp_path: Path) -> None:
    pipe, path = PIPES["Flux"].make(), tmp_path / "step_cache.json"
    known = {6: CacheCalibration(polynomial=(0.5, 0.25)), 8: CacheCalibration(ratios=(1.0,) * 8)}
    write_calibrations(path, known, model="Flux")
    cache = StepCache(measure="magnitude", threshold=0.1, calibration=path)
    assert _decided(pipe, cache, 8) == [False, False, True, True, True, False, True, False]
    with parallelize(pipe, cache), pytest.raises(UnsupportedError, match="calibrated for 8 steps, .* has 6"):
        PIPES["Flux"].call(pipe, num_inference_steps=6)
    refused: list[tuple[Any, Any, str]] = [
        ("input", None, "no polynomial is known"),
        ("magnitude", CacheCalibration(polynomial=(1.0,)), "no table of ratios is known"),
    ]
    for measure, knob, words in refused:
        with pytest.raises(UnsupportedError, match=words):
            parallelize(pipe, StepCache(measure=measure, calibration=knob))
    for knob, words in ((tmp_path / "none.json", "is no file"), (CacheCalibration(ratios=[1.0]), "a tuple of numbers")):  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=words):
            parallelize(pipe, StepCache(measure="input", calibration=knob))
    path.write_text('{"steps": {"8": {"other": [1]}}}')
    with pytest.raises(ArgumentError, match="holds no calibration"):
        parallelize(pipe, StepCache(measure="input", calibration=path))


def test_a_file_in_the_folder_of_the_model_is_taken(tmp_path: Path) -> None:
    model = FAMILIES["DiT"].model(SIDE, torch.float64)
    model.save_pretrained(tmp_path / "transformer")
    write_calibrations(tmp_path / "step_cache.json", {5: SAME})
    loaded = type(model).from_pretrained(tmp_path / "transformer")
    with parallelize(loaded, StepCache(measure="input")) as plan:
        assert plan.denoisers[0].attachments[0].measuring.calibrated is not None
    assert len(blocks_of(loaded, adapter_for(loaded))) == 2


def test_the_reach_of_a_forecast_skips_steps_that_were_left_out() -> None:
    clock = StepClock()
    clock.begin([10.0, 9.0, 7.0, 6.0, 5.5])
    ratios = []
    for step in range(5):
        clock.step, clock.branch = step, 1
        ratios.append(clock.step_ratio)
        if step == 2:
            clock.leave_out()
    assert ratios == [None, None, 2.0, 2.0, pytest.approx(0.5 / 3)]  # from 10 over 9 to 6 it is 3, which is capped
    clock.branch = 0
    assert clock.step_ratio == pytest.approx(0.5)
