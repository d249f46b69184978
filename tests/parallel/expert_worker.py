"""Runs on every rank: pipelines around mixtures of tiny experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils import logging
from torch import Tensor, nn

from partsong import CfgParallel, DataParallel, ExpertMixture, ExpertParallel
from partsong.errors import PartsongError
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from tests.parallel.families import FAMILIES
from tests.parallel.pipelines import PIPES
from tests.parallel.ranks import gathered, staying_connected

EXPERTS, BATCH = 4, 3


@dataclass
class Made:
    """What became of a generation.

    Attributes:
        outputs: pictures of every rank.
        sent: bytes that each rank's ledger counted.
        predicted: bytes that the plan predicted for each rank.
        held: the experts that each rank has loaded.
    """

    outputs: list[Tensor]
    sent: list[int]
    predicted: list[int]
    held: list[list[int]]


def tiny_expert(number: int) -> nn.Module:
    """One of the tiny experts, with weights of its own."""
    model = FAMILIES["SD3"].model(8, torch.float64)
    made = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=made, dtype=torch.float64))
    return model


class TinyRouter(nn.Module):
    """Sends samples here and there, as their latents and the timestep have it."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(9)
        self.weight = nn.Parameter(torch.randn(4, experts, generator=made, dtype=torch.float64))

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> Tensor:
        return 30 * hidden_states.mean(dim=(2, 3)) @ self.weight * timestep.double()[:, None].cos()


def mixture(**knobs: Any) -> ExpertMixture:
    """Four experts that are made when they are needed."""
    makers = [lambda number=number: tiny_expert(number) for number in range(EXPERTS)]
    return ExpertMixture(makers, TinyRouter(), like=tiny_expert(0).to("meta"), **knobs)


def named() -> dict[str, Any]:
    """Arguments of one call."""
    return FAMILIES["SD3"].call(8, BATCH, torch.float64)


def _pipe() -> Any:
    pipe = PIPES["SD3"].make()
    pipe.transformer = mixture(top_k=2)
    return pipe


def serial() -> Tensor:
    """What the pipeline makes alone."""
    return PIPES["SD3"].call(_pipe(), BATCH)


def _made(strategies: tuple[Strategy, ...], nproc: int) -> Made:
    pipe = _pipe()
    with Mesh(**mesh_for(strategies, nproc)) as mesh, parallelize(pipe, *strategies, mesh=mesh) as plan:
        with Ledger(flops=False) as ledger:
            output = PIPES["SD3"].call(pipe, BATCH)
        sent, predicted = int(ledger.summary()["bytes_sent"]), plan.explain().bytes_total()[mesh.rank]
        held = sorted(map(int, pipe.transformer.loaded))
        rows = gathered((output, sent, predicted, held)) if nproc > 1 else [(output, sent, predicted, held)]
        return Made(*map(list, zip(*rows, strict=True)))


@staying_connected
def run(nproc: int, every: bool = True) -> dict[str, Made]:
    """Everything on some ranks; or, on more ranks than there are cores, what has other experts there."""
    logging.set_verbosity_error()
    plans: dict[str, tuple[Strategy, ...]] = {
        "as it is": (ExpertParallel(),),
        "top 1": (ExpertParallel(top_k=1),),
        "all, warm": (ExpertParallel(top_k=EXPERTS, temperature=2.0),),
    }
    few = nproc > 2 and not every
    results = {name: _made(strategies, nproc) for name, strategies in plans.items() if name == "top 1" or not few}
    if nproc in (1, 4):
        both = (ExpertParallel(degree=max(1, nproc // 2), top_k=1), CfgParallel(degree=min(2, nproc)))
        results["beside guidance"] = _made(both, nproc)
        both = (ExpertParallel(degree=max(1, nproc // 2), top_k=1), DataParallel(degree=min(2, nproc)))
        results["beside data"] = _made(both, nproc)
    return results


def too_many() -> list[str]:
    """What every one of too many ranks says."""
    with Mesh(**mesh_for((ExpertParallel(),), 5)) as mesh:
        try:
            parallelize(mixture(), ExpertParallel(), mesh=mesh)
        except PartsongError as problem:
            said = f"{type(problem).__name__}: {problem}"
        else:
            said = "accepted"
        return gathered(said)
