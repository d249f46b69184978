"""Forecasts of `StepCache`: exact on polynomials over uneven noise levels, and in a model what a twin adds by hand."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from partsong import StepCache, parse_strategy
from partsong.errors import ArgumentError
from partsong.parallel import parallelize
from partsong.parallel.adapters import adapter_for
from partsong.parallel.cuts.block_lists import blocks_of
from partsong.parallel.step_cache.forecasts import ORDERS, foca_weights
from partsong.parallel.step_cache.history import Added, Forecaster
from tests.parallel.families import FAMILIES
from tests.parallel.pipelines import PIPES
from tests.parallel.ranks import error

SIDE = 8
#: Forecasts that pass through what is known.
POLYNOMIALS = ("hold", "linear", "quadratic")
#: Falls in uneven steps.
LEVELS = (900.0, 850.0, 610.0, 540.0, 330.0, 200.0)


def _values(*numbers: float) -> Added:
    """What two lists of blocks add, the first of them nothing to the text; one number for each sample."""
    column = torch.tensor(numbers, dtype=torch.float64)[:, None] * torch.tensor([1.0, 3.0], dtype=torch.float64)
    return [(column, None), (2 * column,)]


@pytest.mark.parametrize("forecast", POLYNOMIALS)
def test_polynomials_up_to_the_order_are_continued_exactly(forecast: Any) -> None:
    order = ORDERS[forecast]
    terms = torch.randn(order + 1, generator=torch.Generator().manual_seed(order), dtype=torch.float64)

    def curve(step: int) -> float:
        return float(sum(terms[power] * (LEVELS[step] / 1000) ** power for power in range(order + 1)))

    forecaster = Forecaster(forecast, 1, LEVELS.__getitem__)
    for step in range(4):
        forecaster.note(_values(curve(step)), step)
    (first, nothing), (second,) = forecaster.at(5)
    assert nothing is None
    wanted = _values(curve(5))
    torch.testing.assert_close(first, wanted[0][0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(second, wanted[1][0], rtol=1e-12, atol=1e-12)


def test_fewer_steps_than_the_order_needs_lower_the_degree_and_a_level_met_twice_counts_once() -> None:
    levels = (900.0, 500.0, 500.0, 300.0)
    forecaster = Forecaster("quadratic", 1, levels.__getitem__)
    only = _values(7.0)
    forecaster.note(only, 0)
    assert forecaster.at(1)[0][0] is only[0][0]
    for step, value in ((1, 100.0), (2, 4.0)):
        forecaster.note(_values(value), step)
    line = 4.0 + (300 - 500) / (900 - 500) * (7.0 - 4.0)
    torch.testing.assert_close(forecaster.at(3)[0][0], _values(line)[0][0], rtol=1e-12, atol=0)


def test_half_goes_half_as_far_as_a_line() -> None:
    ahead = {}
    for forecast in ("hold", "half", "linear"):
        forecaster = Forecaster(forecast, 1, LEVELS.__getitem__)  # type: ignore[arg-type]
        for step, value in enumerate((7.0, 4.0, 5.5)):
            forecaster.note(_values(value), step)
        ahead[forecast] = forecaster.at(4)[1][0]
    torch.testing.assert_close(ahead["half"], (ahead["hold"] + ahead["linear"]) / 2, rtol=1e-12, atol=0)
    assert not torch.equal(ahead["hold"], ahead["linear"])


def test_foca_takes_the_mean_of_two_slopes() -> None:
    line = foca_weights(LEVELS[1:3], LEVELS[2:4], 77.0)
    values = [level - 5 for level in (*LEVELS[1:3], *LEVELS[2:4])]
    assert sum(a * b for a, b in zip([*line[0], *line[1]], values, strict=True)) == pytest.approx(72.0)
    # Even steps, two after the last full one: A + e/2 ((A - A') + (F - F')) with e = 2.
    own, others = foca_weights((4.0, 5.0), (3.0, 4.0), 2.0)
    got = own[0] * 2.0 + own[1] * 1.0 + others[0] * 7.0 + others[1] * 5.0
    assert got == pytest.approx(2 + 2 / 2 * ((2 - 1) + (7 - 5)))


@pytest.mark.parametrize("forecast", [*ORDERS, "foca"])
def test_samples_with_other_full_steps_forecast_as_if_alone(forecast: Any) -> None:
    draw = torch.Generator().manual_seed(3)
    together = Forecaster(forecast, 3, LEVELS.__getitem__)
    alone = [Forecaster(forecast, 1, LEVELS.__getitem__) for _ in range(3)]
    for step in range(len(LEVELS)):
        value = torch.randn(3, generator=draw, dtype=torch.float64).tolist()
        rows = [0, 1, 2] if step < 2 else [[1], [0, 2], [2], [0]][step - 2]
        if step >= 2:
            ahead, each = together.at(step), [one.at(step) for one in alone]
            for place in range(2):
                wanted = torch.cat([own[place][0] for own in each])  # type: ignore[arg-type, misc]
                torch.testing.assert_close(ahead[place][0], wanted, rtol=1e-12, atol=1e-12)
        together.note(_values(*(value[row] for row in rows)), step, None if step < 2 else rows)
        for row in rows:
            alone[row].note(_values(value[row]), step)


def _asked(step: int) -> dict[str, Any]:
    family = FAMILIES["SD3"]
    named = family.at(family.call(SIDE, 2, torch.float64), LEVELS[step])
    return named | {"hidden_states": named["hidden_states"] * (1 + 0.1 * step * step)}


def _answer(model: Any, step: int) -> Tensor:
    with torch.no_grad():
        return model(**_asked(step), return_dict=False)[0]


def _recorded(model: Any, steps: Sequence[int]) -> dict[str, list[tuple[Tensor | None, ...]]]:
    """What every block adds in some steps, by its name."""
    found: dict[str, list[Any]] = {}
    blocks = blocks_of(model, adapter_for(model))
    for block in blocks:

        def hook(module: Any, args: Any, kwargs: Any, output: Any, block: Any = block) -> None:
            given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
            leaving = output if isinstance(output, tuple) else (output,)
            added = [None if a is None else a - given[n] for n, a in zip(block.names, leaving, strict=True)]
            found.setdefault(block.name, []).append(tuple(added))

        block.module.register_forward_hook(hook, with_kwargs=True)
    for step in steps:
        _answer(model, step)
    return found


def _fitted(values: Sequence[Tensor], levels: Sequence[float], level: float) -> Tensor:
    """The polynomial through some values, fitted by numpy."""
    flat = np.stack([value.numpy().ravel() for value in values])
    terms = np.polyfit(np.array(levels) / 1000, flat, len(levels) - 1)
    powers = (level / 1000) ** np.arange(len(levels) - 1, -1, -1)
    return torch.from_numpy(powers @ terms).reshape(values[0].shape)


def _adding(model: Any, added: dict[str, tuple[Tensor | None, ...]]) -> None:
    """Lets every block that is named add these values and nothing else."""
    for block in blocks_of(model, adapter_for(model)):
        if block.name not in added:
            continue

        def forward(*args: Any, _block: Any = block, **kwargs: Any) -> Any:
            given = inspect.signature(type(_block.module).forward).bind(_block.module, *args, **kwargs).arguments
            pairs = zip(_block.names, added[_block.name], strict=True)
            values = [None if more is None else given[name] + more for name, more in pairs]
            return tuple(values) if len(values) > 1 else values[0]

        block.module.forward = forward


@pytest.mark.parametrize("forecast", POLYNOMIALS)
@pytest.mark.parametrize("mask", ["1101100", None])
def test_a_step_left_out_adds_what_a_fitted_polynomial_says(forecast: Any, mask: str | None) -> None:
    model, plain, twin = (FAMILIES["SD3"].model(SIDE, torch.float64) for _ in range(3))
    knobs: dict[str, Any] = {"threshold": 0.0} if mask else {"threshold": 1e9, "max_skips": 1}
    cache = StepCache(warmup_steps=1 if mask else 4, mask=mask[1:] if mask else None, forecast=forecast, **knobs)
    full, left_out = ((0, 1, 3, 4), (2, 5)) if mask else ((0, 1, 2, 3), (4,))
    with parallelize(model, cache) as plan:
        got = [_answer(model, step) for step in range(left_out[-1] + 1)]
        cached = plan.denoisers[0].attachments[0]
        assert (cached.computed, cached.skipped) == (2 * len(full), 2 * len(left_out))  # of two samples
    recorded = _recorded(plain, full)
    for step in full:
        assert torch.equal(got[step], _answer(plain, step))
    used = full[-ORDERS[forecast] - 1 :]
    ahead: dict[str, tuple[Tensor | None, ...]] = {}
    for name, steps in list(recorded.items())[0 if mask else 1 :]:
        columns = zip(*steps[len(full) - len(used) : len(full)], strict=True)
        levels = [LEVELS[step] for step in used]
        ahead[name] = tuple(None if c[0] is None else _fitted(c, levels, LEVELS[left_out[-1]]) for c in columns)
    _adding(twin, ahead)
    assert error(got[left_out[-1]], _answer(twin, left_out[-1])) <= 1e-10


@pytest.mark.parametrize("forecast", [*ORDERS, "foca"])
def test_a_mask_says_which_steps_are_computed_and_the_last_one_always_is(forecast: Any) -> None:
    pipe = PIPES["Flux"].make()
    wanted = PIPES["Flux"].call(pipe, num_inference_steps=8)
    for keep_last, computed in ((True, 5), (False, 4)):
        with parallelize(pipe, StepCache(warmup_steps=2, mask="100", forecast=forecast, keep_last=keep_last)) as plan:
            got = PIPES["Flux"].call(pipe, num_inference_steps=8)
            cached = plan.denoisers[0].attachments[0]
            assert (cached.computed, cached.skipped) == (2 * computed, 2 * (8 - computed))  # two branches
            assert cached.evaluations == 2 * computed * len(cached.blocks)
        assert 0 < error(got, wanted) < 1


@pytest.mark.parametrize("name", ["Flux", "DiT"])
def test_the_clock_knows_the_noise_levels_of_the_users_scheduler(name: str) -> None:
    pipe = PIPES[name].make()
    with parallelize(pipe, StepCache()) as plan:
        PIPES[name].call(pipe, num_inference_steps=3)
        known = pipe.scheduler.sigmas[:3] if name == "Flux" else pipe.scheduler.timesteps
        assert [plan.clock.level(step) for step in range(3)] == pytest.approx(known.tolist())


def test_knobs_have_a_text_form_and_bounds() -> None:
    asked = parse_strategy("step-cache:mask=0110,forecast=foca,keep_last=false")
    assert asked == StepCache(mask="0110", forecast="foca", keep_last=False)
    with pytest.raises(ArgumentError, match=r"mask='012'; use a word of the characters 0 and 1"):
        parse_strategy("step-cache:mask=012")
    refused: dict[str, dict[str, Any]] = {
        "a word of the characters 0 and 1": {"mask": "012"},
        "quadratic": {"forecast": "cubic"},
    }
    for words, knobs in refused.items():
        with pytest.raises(ArgumentError, match=words):
            StepCache(**knobs).validate()
