"""Runs on every rank: gradients through calls under a plan, against those of one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from partsong import EncodeOnce, ParallelVae, PartsongError, SyncPatch, zoo
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.hooks.samples import samples_of
from tests.parallel import equivalence_worker
from tests.parallel.families import FAMILIES
from tests.parallel.ranks import gathered, refusal, staying_connected
from tests.pipelines.cases import CASES

SIDE = 8
#: What calls for a gradient: inputs, weights, or both.
WANTED = ("inputs", "weights", "both")


@staying_connected
def every_strategy(nproc: int) -> dict[str, list[Any]]:
    """How far the gradients of each strategy are from those of one rank, or why it refuses to compute them."""
    results = {}
    for name, strategies in equivalence_worker.strategies(nproc).items():
        families = equivalence_worker.families(strategies)
        family = "SD3" if "SD3" in families else families[0]
        with Mesh(**mesh_for(strategies, nproc)) as mesh:
            results[name] = gathered([_outcome(family, strategies, mesh, wanted) for wanted in WANTED])
    return results


def _outcome(family: str, strategies: tuple[Strategy, ...], mesh: Mesh, wanted: str) -> float | str:
    model, named = FAMILIES[family].model(SIDE, torch.float64), FAMILIES[family].call(SIDE, 3, torch.float64)
    model.requires_grad_(wanted != "inputs")
    sample = next(name for name in named if name in ("hidden_states", "sample"))
    given = {**named, sample: named[sample].clone().requires_grad_(wanted != "weights")}
    want = gradients(model, given)
    try:
        with parallelize(model, *strategies, mesh=mesh), Ledger():
            got = gradients(model, given)
    except PartsongError as problem:
        return str(problem)
    return max(_apart(one, other) for one, other in zip(got, want, strict=True))


def gradients(model: nn.Module, named: dict[str, Any], scale: float = 1.0) -> list[Tensor | None]:
    """The outputs of a call, and the gradients of a loss of them."""
    outputs = samples_of(model(**named))
    sum(scale * output.pow(2).sum() for output in outputs).backward()  # type: ignore[union-attr]
    held = [*model.parameters(), *(value for value in named.values() if isinstance(value, Tensor))]
    found = [output.detach() for output in outputs] + [each.grad for each in held]
    for each in held:
        each.grad = None
    return found


def _apart(got: Tensor | None, want: Tensor | None) -> float:
    if got is None or want is None:
        return 0.0 if got is want else float("inf")
    return ((got - want).norm() / want.norm().clamp(min=1e-12)).item()


def other_losses(nproc: int) -> list[str]:
    """What is said where ranks compute losses of their own."""
    from partsong import DataParallel

    with Mesh(data=nproc) as mesh:
        model, named = FAMILIES["DiT"].model(SIDE, torch.float64), FAMILIES["DiT"].call(SIDE, 2, torch.float64)
        with parallelize(model, DataParallel(), mesh=mesh):
            try:
                gradients(model.requires_grad_(True), named, scale=1.0 + mesh.rank)
            except PartsongError as problem:
                return gathered(str(problem))
        return gathered("")


@staying_connected
def beside_the_denoiser(nproc: int) -> list[list[str]]:
    """What every rank says of gradients of a ControlNet, of both halves of an autoencoder, and of a text encoder."""
    case = CASES["StableDiffusionControlNetPipeline"]
    pipe, calls = case.make(), []
    hook = pipe.controlnet.register_forward_pre_hook(lambda _, *given: calls.append(given), with_kwargs=True)
    case.run(pipe)
    hook.remove()
    (args, named), *_ = calls
    said = []
    with Mesh(patch=nproc) as mesh, parallelize(pipe, SyncPatch(), ParallelVae(), mesh=mesh):
        said.append(refusal(lambda: pipe.controlnet(*args, **named)))
        said.append(refusal(lambda: pipe.vae.encode(torch.zeros(1, 3, 32, 32, dtype=torch.float64))))
        said.append(refusal(lambda: pipe.vae.decode(torch.zeros(1, 4, 8, 8, dtype=torch.float64))))
    pipe = zoo.load("shapes")
    pipe.text_encoder.requires_grad_(True)
    with Mesh(patch=nproc) as mesh, parallelize(pipe, SyncPatch(), EncodeOnce(), mesh=mesh):
        said.append(refusal(lambda: pipe.encode_prompt(prompt="a red circle", device=mesh.device)))
    return gathered(said)
