"""Trajectories solved for many points at once, against one step after the other, on models whose answer is known."""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
import torch
from torch import Tensor

from benchmarks.steps.chords import chords
from benchmarks.steps.parareal import parareal
from benchmarks.steps.reused_outputs import reused_outputs
from benchmarks.steps.step_rule import StepRule
from partsong.errors import ArgumentError
from partsong.samplers.denoising.drafts import drafts
from partsong.samplers.denoising.fixed_point import Evaluate, picard, serial

SIZE, CENTRES, SPREAD = 48, 384, 0.15


@cache
def centres() -> Tensor:
    return torch.randn(CENTRES, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def levels(steps: int, shift: float = 3.0) -> list[float]:
    """Noise levels of a rectified flow, from 1 to 0."""
    plain = [1 - step / steps for step in range(steps + 1)]
    return [shift * level / (1 + (shift - 1) * level) for level in plain]


def flow_rules(steps: int) -> list[StepRule]:
    s = levels(steps)
    return [StepRule(1.0, after - before) for before, after in itertools.pairwise(s)]


def mixture(steps: int) -> Evaluate:
    """The exact velocity of a flow from noise to a mixture of Gaussians, in float64."""
    s = levels(steps)

    def velocity(points: Tensor, numbers: list[int], samples: list[int]) -> Tensor:
        level = torch.tensor([s[number] for number in numbers], dtype=points.dtype)[:, None]
        clean = 1 - level
        variance = (clean * SPREAD) ** 2 + level**2
        apart = points[:, None] - clean[..., None] * centres()
        weights = (-apart.square().sum(-1) / (2 * variance)).softmax(-1)
        # Given its centre, a clean point is normal: the noisy one pulls it from there.
        pull = clean * SPREAD**2 / variance
        means = centres() + pull[..., None] * apart
        x0 = (weights[..., None] * means).sum(1)
        return (points - x0) / level

    return velocity


def noise_of(samples: int, seed: int = 1) -> Tensor:
    return torch.randn(samples, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def apart(one: Tensor, other: Tensor) -> float:
    """The median over samples of the relative distance."""
    return float(((one - other).norm(dim=1) / other.norm(dim=1)).median())


def cosine_alphas(steps: int) -> list[float]:
    return [math.cos(0.5 * math.pi * (1 - step / steps) * 0.98) ** 2 for step in range(steps + 1)]


def ddim_rules(steps: int, eta: float) -> list[StepRule]:
    """DDIM on predictions of noise (arXiv 2010.02502, equation 12); eta 1 is DDPM."""
    alphas, rules = cosine_alphas(steps), list[StepRule]()
    for now, after in itertools.pairwise(alphas):
        sigma = eta * math.sqrt((1 - after) / (1 - now) * (1 - now / after))
        keep = math.sqrt(after / now)
        rules.append(StepRule(keep, math.sqrt(max(1 - after - sigma**2, 0)) - keep * math.sqrt(1 - now), sigma))
    return rules


def second_order_rules(steps: int) -> list[StepRule]:
    """A step of two outputs, as Adams-Bashforth has it; the first one has one."""
    size = 1 / steps
    return [StepRule(1.0, size), *[StepRule(1.0, 1.5 * size, before=-0.5 * size)] * (steps - 1)]


def bent(points: Tensor, numbers: list[int], samples: list[int]) -> Tensor:
    """A model that is not linear, with a bend that depends on the step."""
    level = torch.tensor(numbers, dtype=points.dtype)[:, None] / 20
    return torch.sin(2 * points + level) - 0.3 * points


RULES = {
    "flow": flow_rules(20),
    "DDIM": ddim_rules(20, 0.0),
    "DDIM eta 1": ddim_rules(20, 1.0),
    "two outputs": second_order_rules(20),
}


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("window", [1, 2, 5, 40])
def test_tolerance_zero_is_one_step_after_the_other(kind: str, window: int) -> None:
    rules, start = RULES[kind], noise_of(3)
    noise = torch.stack([noise_of(3, seed=100 + number) for number in range(20)])
    twin = serial(bent, start, rules, noise)
    solved = picard(bent, start, rules, window=window, tolerance=0.0, noise=noise)
    assert (solved.sample - twin.sample).abs().max() < 1e-12
    assert solved.rounds <= 20 and solved.residual == 0.0
    if window == 1:
        assert solved.rounds == solved.evaluations // 3 == 20


@pytest.mark.parametrize("kind", RULES)
def test_one_draft_is_one_step_after_the_other(kind: str) -> None:
    rules, start = RULES[kind], noise_of(2)
    noise = torch.stack([noise_of(2, seed=100 + number) for number in range(20)])
    twin = serial(bent, start, rules, noise)
    assert torch.equal(drafts(bent, start, rules, num=1, noise=noise).sample, twin.sample)
    for num in (2, 3, 7):
        solved = drafts(bent, start, rules, num=num, noise=noise)
        assert solved.rounds == 1 + -(-19 // num) and solved.evaluations == twin.evaluations
        assert 1e-9 < apart(solved.sample, twin.sample) < 0.5


def test_a_linear_model_is_solved_in_no_more_rounds_than_steps() -> None:
    mix = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64) / SIZE
    rules, start = flow_rules(12), noise_of(2)

    def linear(points: Tensor, numbers: list[int], samples: list[int]) -> Tensor:
        return points @ mix

    twin = serial(linear, start, rules).sample
    solved = picard(linear, start, rules, window=12, tolerance=0.0)
    assert (solved.sample - twin).abs().max() < 1e-12 and solved.rounds <= 12


@pytest.mark.parametrize(
    ("steps", "window", "rounds", "error"), [(28, 4, 10, 2e-3), (28, 8, 8, 2e-3), (50, 4, 15, 2e-3), (50, 8, 10, 2e-3)]
)
def test_rounds_on_a_mixture_of_gaussians(steps: int, window: int, rounds: int, error: float) -> None:
    """So many rounds at so little error; parareal takes more rounds than there are steps, unless blocks overlap."""
    rules, start, model = flow_rules(steps), noise_of(12), mixture(steps)
    twin = serial(model, start, rules).sample
    taken, errors = list[int](), list[float]()
    for sample in range(12):  # by themselves: the slowest of a batch would hide the others
        solved = picard(
            model, start[sample : sample + 1], rules, window=window, tolerance=2e-2, scales=levels(steps)[:-1]
        )
        taken.append(solved.rounds)
        errors.append(apart(solved.sample, twin[sample : sample + 1]))
        assert solved.residual <= 2e-2
    assert sorted(taken)[6] <= rounds and sorted(errors)[6] < error


def test_no_sample_waits_for_another() -> None:
    rules, start, model = flow_rules(28), noise_of(6), mixture(28)
    together = picard(model, start, rules, window=4, tolerance=1e-2)
    alone = [picard(model, start[i : i + 1], rules, window=4, tolerance=1e-2) for i in range(6)]
    assert together.rounds == max(each.rounds for each in alone)
    assert together.evaluations == sum(each.evaluations for each in alone)
    assert (together.sample - torch.cat([each.sample for each in alone])).abs().max() < 1e-9


def test_a_smaller_tolerance_comes_nearer() -> None:
    rules, start, model = flow_rules(28), noise_of(8), mixture(28)
    twin = serial(model, start, rules).sample
    solved = [picard(model, start, rules, window=6, tolerance=tolerance) for tolerance in (1e-1, 1e-2, 1e-3, 1e-5)]
    errors = [apart(each.sample, twin) for each in solved]
    rounds = [each.rounds for each in solved]
    assert errors == sorted(errors, reverse=True) and rounds == sorted(rounds)
    assert all(each.residual <= bound for each, bound in zip(solved, (1e-1, 1e-2, 1e-3, 1e-5), strict=True))


@pytest.mark.parametrize("blocks", [1, 3, 4, 20])
def test_parareal_is_exact_after_as_many_corrections_as_blocks(blocks: int) -> None:
    rules, start = flow_rules(20), noise_of(3)
    twin = serial(bent, start, rules).sample
    solved = parareal(bent, start, rules, num_blocks=blocks, tolerance=0.0)
    assert (solved.sample - twin).abs().max() < 1e-12
    loose = parareal(bent, start, rules, num_blocks=blocks, tolerance=1.0)
    assert loose.rounds <= solved.rounds


def test_a_solver_ahead_is_corrected_by_the_one_behind() -> None:
    rules, start = flow_rules(4), noise_of(2)
    h = [rule.output for rule in rules]

    def at(point: Tensor, number: int) -> Tensor:
        return bent(point, [number] * 2, [0, 1])

    first = at(start, 0)
    behind, begin = start + h[0] * first, start + (h[0] + h[1]) * first
    guess = at(begin, 2)
    behind, ahead = behind + h[1] * at(behind, 1), begin + h[2] * guess
    last = ahead + h[3] * at(ahead, 3)
    coarse = h[2] + h[3]
    expected = last + behind + coarse * at(behind, 2) - begin - coarse * guess
    solved = chords(bent, start, rules, begins=(0, 2))
    assert (solved.sample - expected).abs().max() < 1e-12
    assert (solved.rounds, solved.evaluations) == (3, 2 * 5)


@pytest.mark.parametrize("begins", [(0,), (0, 1), (0, 1, 2)])
def test_solvers_that_begin_one_after_the_other_are_one(begins: tuple[int, ...]) -> None:
    rules, start = flow_rules(9), noise_of(3)
    solved = chords(bent, start, rules, begins=begins)
    assert solved.rounds == 9
    assert (solved.sample - serial(bent, start, rules).sample).abs().max() < 1e-12


def test_a_step_is_guessed_with_its_own_solvers_last_output() -> None:
    rules, start = flow_rules(5), noise_of(2)
    h = [rule.output for rule in rules]

    def at(point: Tensor, number: int) -> Tensor:
        return bent(point, [number] * 2, [0, 1])

    first = at(start, 0)
    x = start + h[0] * first
    one, two = at(x, 1), at(x + h[1] * first, 2)
    x = x + h[1] * one + h[2] * two
    three, four = at(x, 3), at(x + h[3] * two, 4)
    solved = reused_outputs(bent, start, rules, num=2, warmup=1)
    assert (solved.sample - (x + h[3] * three + h[4] * four)).abs().max() < 1e-12
    assert solved.rounds == 3


def test_what_means_nothing_is_refused() -> None:
    rules, start = flow_rules(4), noise_of(1)
    with pytest.raises(ArgumentError, match="picard: window=0"):
        picard(bent, start, rules, window=0)
    with pytest.raises(ArgumentError, match="they rise from 0 and end before step 4"):
        chords(bent, start, rules, begins=(0, 4))
    with pytest.raises(ArgumentError, match="chords: steps with noise"):
        chords(bent, start, second_order_rules(4), begins=(0, 2))
    with pytest.raises(ArgumentError, match="2 scales for 4 steps"):
        picard(bent, start, rules, scales=[1.0, 1.0])
    with pytest.raises(ArgumentError, match="drafts: num=0"):
        drafts(bent, start, rules, num=0)
    with pytest.raises(ArgumentError, match="the output of the previous step"):
        parareal(bent, start, second_order_rules(4))
