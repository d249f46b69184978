"""What is read out of tensors is read once, and arguments that are expected are compared without a wait."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel.cuts.same_arguments import ExpectedArguments, equal_arguments
from partsong.parallel.hooks.known_values import KnownValues, same_values
from partsong.parallel.ranks.later import Later, on_device
from partsong.parallel.step_cache.late_measures import LateFirstBlockChange, LateInputChange


def test_a_fact_is_found_once_for_every_state_of_a_tensor() -> None:
    known, looks = KnownValues(), []

    def total(tensor: Tensor) -> float:
        looks.append(tensor)
        return float(tensor.sum())

    numbers = torch.arange(6.0)
    assert known.of(total, numbers) == known.of(total, numbers.view(6)) == 15
    assert len(looks) == 1
    assert known.of(total, numbers[:3]) == 3
    numbers.add_(1)
    assert known.of(total, numbers) == 21
    assert known.of(total, numbers, key="other") == 21
    assert len(looks) == 4
    with torch.inference_mode():
        untracked = torch.ones(2)
    assert known.of(total, untracked) == known.of(total, untracked) == 2
    assert len(looks) == 6


def test_same_memory_is_the_same_and_other_memory_unknown() -> None:
    time = torch.tensor([3.0, 2.0])
    assert same_values(time[0].expand(4), time[0].expand(4)) is True
    assert same_values(time, time.clone()) is None
    assert same_values(time, time[:1]) is False
    assert same_values(time, time.double()) is False
    assert equal_arguments({"a": [time]}, {"a": [time.clone()]})
    assert not equal_arguments({"a": [time]}, {"a": [time + 1]})


def _step(time: float, other: float | None = None) -> list[dict[str, Tensor]]:
    """The two calls of a step: of one timestep, made anew for each, with a prompt of their own."""
    calls = []
    for prompt, now in zip(PROMPTS, (time, time if other is None else other), strict=True):
        calls.append({"timestep": torch.tensor([now]), "prompt": prompt})
    return calls


PROMPTS = (torch.zeros(2), torch.ones(2))


def _expected(steps: list[list[dict[str, Tensor]]]) -> list[bool]:
    """Whether the second call of each step but the first was what the first call lets expect."""
    expected, came = ExpectedArguments(), []
    for last, now in itertools.pairwise(steps):
        expected.check()
        guess = expected.of(1, last[1], last[0], now[0])
        came.append(expected.have_come(1, guess, now[1]))
    expected.check()
    return came


def test_arguments_that_move_on_together_are_expected() -> None:
    assert _expected([_step(9.0 - number) for number in range(6)]) == [True] * 5


def test_another_argument_in_the_first_steps_is_no_error() -> None:
    steps = [_step(9.0), _step(8.0), _step(7.0, 1.0), *(_step(6.0 - number) for number in range(4))]
    assert _expected(steps) == [True, False, False, True, True, True]


def test_another_argument_later_ends_the_generation() -> None:
    steps = [*(_step(9.0 - number) for number in range(4)), _step(2.0, 1.0)]
    with pytest.raises(UnsupportedError, match="call 2 of the model had another timestep .* leave CfgParallel out"):
        _expected(steps)


def test_a_new_prompt_in_mid_generation_is_seen_at_once() -> None:
    steps = [_step(9.0 - number) for number in range(5)]
    steps[3][1]["prompt"] = steps[4][1]["prompt"] = torch.full((2,), 2.0)
    assert _expected(steps) == [True, True, False, True]


def test_numbers_arrive_as_they_were() -> None:
    numbers = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    assert Later(numbers).read() == [[1.0, 2.0]]
    assert on_device([[1, 2]], torch.device("cpu")).tolist() == [[1, 2]]


def _compare(now: Tensor, before: Tensor) -> object:
    apart = ((now - before).abs().flatten(1).sum(1) / before.abs().flatten(1).sum(1)).tolist()
    return lambda: apart


SEEN = [torch.tensor([[float(10 + number**2)], [10.0 + number]]) for number in range(6)]


def _relative(now: int, before: int) -> list[float]:
    return ((SEEN[now] - SEEN[before]).abs() / SEEN[before].abs())[:, 0].tolist()


def test_the_first_block_is_taken_to_change_as_fast_as_it_did() -> None:
    measure = LateFirstBlockChange(_compare, samples=2)  # type: ignore[arg-type]
    found = []
    for step, computed in enumerate(([True] * 2, [True] * 2, [False] * 2, [False, True], [False] * 2)):
        found.append(measure.errors(SEEN[step], step) if step else [])
        measure.look_ahead(SEEN[step])
        measure.settle(SEEN[step], computed)
    assert found[1] == [float("inf")] * 2
    assert found[2] == pytest.approx(_relative(1, 0))
    assert found[3] == pytest.approx([change * 2 for change in _relative(2, 1)])
    # The first sample is two steps from its last computed one, the second was computed in the step before.
    assert found[4] == pytest.approx([_relative(3, 1)[0] * 3 / 2, _relative(3, 1)[1] / 2])


def test_changes_of_the_input_add_up_and_the_last_is_taken_twice() -> None:
    measure = LateInputChange(_compare, lambda change: 2 * change)  # type: ignore[arg-type]
    found = []
    for step, computed in enumerate(([True] * 2, [True] * 2, [False] * 2, [False, True], [False] * 2)):
        found.append(measure.errors(SEEN[step], step) if step else [])
        measure.look_ahead(SEEN[step])
        measure.settle(SEEN[step], computed)
    changes = [[2 * change for change in _relative(step, step - 1)] for step in range(1, 5)]
    assert found[2] == pytest.approx(changes[0])
    assert found[3] == pytest.approx([2 * change for change in changes[1]])
    assert found[4] == pytest.approx([changes[1][0] + 2 * changes[2][0], changes[2][1]])
