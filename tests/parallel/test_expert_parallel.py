"""Mixtures of experts: equal to the monolith where all is known, and the same bits on any ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partsong import (
    ExpertMixture,
    ExpertParallel,
    NoiseExpert,
    StepCache,
    Ulysses,
    UnsupportedError,
    parallelize,
    predict,
)
from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.ledger import Ledger
from partsong.parallel import mesh_for
from partsong.parallel.expert_parallel.routing import expert_weights
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import expert_worker
from tests.parallel.ranks import error

GROUPS, EACH, WIDTH, SPREAD = 4, 3, 5, 0.3


def centres() -> Tensor:
    """Of a mixture of Gaussians, group after group, with weights that differ."""
    return torch.randn(GROUPS * EACH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def shares() -> Tensor:
    weights = torch.rand(GROUPS * EACH, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.1
    return weights / weights.sum()


def log_joint(x: Tensor, level: Tensor, which: slice) -> Tensor:
    """The logarithm of every Gaussian's share of the density at noisy points, `[points, gaussians]`."""
    mean, variance = (1 - level) * centres()[which, None], (1 - level) ** 2 * SPREAD**2 + level**2
    distances = (x[None] - mean).square().sum(-1)
    return (shares()[which, None].log() - 0.5 * distances / variance[:, 0] - 0.5 * WIDTH * variance[:, 0].log()).T


class Flow(nn.Module):
    """The exact velocity of some of the Gaussians."""

    def __init__(self, which: slice) -> None:
        super().__init__()
        self.which = which
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def clean(self, x: Tensor, level: Tensor) -> Tensor:
        signal, variance = (1 - level) * SPREAD**2, (1 - level) ** 2 * SPREAD**2 + level**2
        mean = centres()[self.which]
        each = mean + (signal / variance)[:, None] * (x[:, None] - (1 - level)[:, None] * mean)
        return (log_joint(x, level, self.which).softmax(dim=1)[..., None] * each).sum(dim=1)

    def forward(self, hidden_states: Tensor, timestep: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        level = timestep[:, None] / 1000
        return ((hidden_states - self.clean(hidden_states, level)) / level * self.scale,)


class Noise(Flow):
    """The same model as one that predicts noise at the timesteps of a table."""

    def __init__(self, which: slice, table: Tensor) -> None:
        super().__init__(which)
        self.ratios = 0.5 * ((1 - table) / table).log()

    def forward(self, hidden_states: Tensor, timestep: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        low = timestep.long().clamp(max=len(self.ratios) - 2)
        ratio = torch.lerp(self.ratios[low], self.ratios[low + 1], timestep - low).exp()[:, None]
        alpha, level = (1 + ratio**2).rsqrt(), ratio / (1 + ratio)
        clean = self.clean(hidden_states * (1 - level) / alpha, level)
        return ((hidden_states - alpha * clean) / (alpha * ratio),)


class Router(nn.Module):
    """The exact posterior of the groups."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> Tensor:
        joint = log_joint(hidden_states, timestep[:, None] / 1000, slice(None))
        return self.scale * joint.view(len(joint), GROUPS, EACH).logsumexp(dim=2)


def group(number: int) -> slice:
    return slice(number * EACH, (number + 1) * EACH)


def analytic(experts: list[nn.Module] | None = None, **knobs: Any) -> ExpertMixture:
    return ExpertMixture(experts or [Flow(group(k)) for k in range(GROUPS)], Router(), **knobs)


def points(num: int = 40) -> tuple[Tensor, Tensor]:
    """Noisy points at all levels."""
    made = torch.Generator().manual_seed(3)
    return torch.randn(num, WIDTH, generator=made, dtype=torch.float64), 1000 * torch.linspace(0.02, 0.98, num).double()


@torch.no_grad()
def answer(model: nn.Module, **more: Any) -> Tensor:
    x, times = points()
    return model(x, times, return_dict=False, **more)[0]


def test_the_mixture_is_the_monolith() -> None:
    torch.testing.assert_close(answer(analytic()), answer(Flow(slice(None))), rtol=1e-12, atol=1e-12)


def test_asking_all_is_the_full_mixture_and_fewer_is_not() -> None:
    whole = answer(analytic())
    assert torch.equal(answer(analytic(top_k=GROUPS)), whole)
    errors = [float((answer(analytic(top_k=k)) - whole).norm()) for k in (1, 2, 3)]
    assert errors[0] > errors[1] > errors[2] > 0


def test_one_expert_answers_as_it_does_alone() -> None:
    weights = analytic(top_k=1).weights(dict(zip(("hidden_states", "timestep"), points(), strict=True)))
    got = answer(analytic(top_k=1))
    for number, rows in analytic().asked(weights):
        x, times = points()
        torch.testing.assert_close(got[rows], Flow(group(number))(x[rows], times[rows])[0], rtol=0, atol=0)


def test_a_temperature_moves_the_weights_as_it_says() -> None:
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(5)).double()
    torch.testing.assert_close(expert_weights(logits, temperature=2.0), (logits / 2).softmax(dim=1))
    sharp = expert_weights(logits, temperature=1e-4)
    assert torch.equal(sharp.argmax(dim=1), logits.argmax(dim=1)) and bool((sharp.max(dim=1).values > 0.999).all())
    two = expert_weights(logits, top_k=2)
    assert bool(((two > 0).sum(dim=1) == 2).all())
    torch.testing.assert_close(two.sum(dim=1), torch.ones(6).double())
    assert expert_weights(torch.zeros(1, 3), top_k=1).tolist() == [[1.0, 0.0, 0.0]]


def table() -> Tensor:
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    return (1 - betas).cumprod(dim=0)


def test_a_model_of_noise_is_the_same_expert() -> None:
    inside = table()
    ratios = ((1 - inside) / inside).sqrt()
    x, _ = points()
    levels = torch.linspace(float(ratios[0] / (1 + ratios[0])) + 1e-6, float(ratios[-1] / (1 + ratios[-1])) - 1e-6, 40)
    times = 1000 * levels.double()
    own, wanted = NoiseExpert(Noise(group(0), inside), inside), Flow(group(0))
    torch.testing.assert_close(own(x, times)[0], wanted(x, times)[0], rtol=1e-12, atol=1e-12)
    mixed = analytic([own, *(Flow(group(k)) for k in (1, 2, 3))])
    torch.testing.assert_close(mixed(x, times).sample, Flow(slice(None))(x, times)[0], rtol=1e-12, atol=1e-12)


def test_a_model_of_noise_may_be_the_first_expert_of_a_plan() -> None:
    experts = [NoiseExpert(expert_worker.tiny_expert(0), table()), expert_worker.tiny_expert(1)]
    mixture = ExpertMixture(experts, expert_worker.TinyRouter(2))
    with torch.no_grad():
        alone = mixture(**expert_worker.named()).sample
        with parallelize(mixture, ExpertParallel()):
            assert torch.equal(mixture(**expert_worker.named()).sample, alone)


def test_a_model_of_noise_stays_finite_beyond_its_table() -> None:
    own = NoiseExpert(Noise(group(0), table()), table())
    x, _ = points(2)
    assert bool(own(x, torch.tensor([1000.0, 1e-3]).double())[0].isfinite().all())


REFUSED = {
    "a mixture of 1 experts": lambda: ExpertMixture([Flow(group(0))], Router()),
    "top_k=5 of 4 experts": lambda: analytic(top_k=5),
    "temperature=0": lambda: analytic(temperature=0.0),
    "must fall": lambda: NoiseExpert(Flow(group(0)), table().flip(0)),
    "numbers between 0 and 1": lambda: NoiseExpert(Flow(group(0)), torch.tensor([1.0, 0.5])),
    "temperature=-1": lambda: mesh_for((ExpertParallel(temperature=-1.0),), 1),
    "returned \\[40, 4\\] for 40 samples and 3 experts": lambda: answer(analytic([Flow(group(k)) for k in range(3)])),
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_is_refused(words: str) -> None:
    with pytest.raises((ArgumentError, UnsupportedError), match=words):
        REFUSED[words]()


def test_things_that_are_no_models_are_refused() -> None:
    wrong: Any = 3
    with pytest.raises(ArgumentTypeError, match="expert 1 is a int"):
        ExpertMixture([Flow(group(0)), wrong], Router())
    with pytest.raises(ArgumentTypeError, match="the router is a int"):
        ExpertMixture([Flow(group(0)), Flow(group(1))], wrong)


@functools.cache
def results(nproc: int) -> dict[str, Any]:
    return expert_worker.run(1) if nproc == 1 else launch(expert_worker.run, nproc, nproc, covering.FULL)


@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_any_ranks_give_the_same_bits(nproc: int) -> None:
    alone = results(1)
    for name, made in results(nproc).items():
        # Guidance and data split the batch, and kernels round batches of other sizes differently.
        limit = 1e-12 if name.startswith("beside") else 0.0
        assert all(error(output, alone[name].outputs[0]) <= limit for output in made.outputs), name
        assert made.sent == made.predicted, name


@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_a_rank_holds_its_own_experts_only(nproc: int) -> None:
    held = results(nproc)["top 1"].held
    assert sorted(number for row in held for number in row) == [0, 1, 2, 3]
    assert len(held) == nproc


def test_the_plan_equals_the_pipeline_alone() -> None:
    alone = results(1)
    assert torch.equal(alone["as it is"].outputs[0], expert_worker.serial())
    assert not torch.equal(alone["top 1"].outputs[0], alone["as it is"].outputs[0])


def test_operations_are_those_of_the_experts_that_were_asked() -> None:
    mixture, flops = expert_worker.mixture(), []
    for top_k in (1, 4):
        with parallelize(mixture, ExpertParallel(top_k=top_k)), Ledger() as ledger, torch.no_grad():
            mixture(**expert_worker.named())
        flops.append(ledger.summary()["flops"])
    assert 3.9 <= flops[1] / flops[0] <= 4


def test_what_a_mixture_cannot_have_is_refused() -> None:
    mixture = expert_worker.mixture()
    with pytest.raises(UnsupportedError, match="it is one model, and an ExpertMixture has several"):
        parallelize(mixture.expert(0), ExpertParallel())
    with pytest.raises(ArgumentError, match="top_k=9 of 4 experts"):
        parallelize(mixture, ExpertParallel(top_k=9))
    with pytest.raises(UnsupportedError, match="each would have to be cut"):
        parallelize(mixture, StepCache())
    with pytest.raises(UnsupportedError, match="each would have to be cut"):
        predict(mixture, Ulysses(), ranks=2, **expert_worker.named())
    with pytest.raises(UnsupportedError, match="depends on the picture"):
        predict(mixture, ExpertParallel(), ranks=2, **expert_worker.named())


def test_more_ranks_than_experts_are_refused() -> None:
    assert (
        launch(expert_worker.too_many, 5)
        == ["ArgumentError: ExpertParallel: 5 ranks for 4 experts; use at most 4 ranks"] * 5
    )
