"""Runs on every rank: pipelines of further image families, and calls that bring residuals, against the serial ones."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.utils import logging

from partsong import CfgParallel, DataParallel, Ulysses
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.hooks.samples import sample_of
from tests.parallel.families import FAMILIES
from tests.parallel.image_pipelines import IMAGE_PIPES
from tests.parallel.ranks import error, gathered, staying_connected

STRATEGIES: dict[str, Strategy] = {"Ulysses": Ulysses(), "CfgParallel": CfgParallel()}
RESIDUAL_STRATEGIES: dict[str, Strategy] = {"Ulysses": Ulysses(), "DataParallel": DataParallel()}
#: What a case of residuals is made of: number of ranks, strategy and family.
Case = tuple[int, str, str]
#: Family -> what its ControlNet would add to the blocks: name of the argument, how many tensors.
RESIDUALS = {
    "SD3": {"block_controlnet_hidden_states": 2},
    "Flux": {"controlnet_block_samples": 1, "controlnet_single_block_samples": 2},
    "QwenImage": {"controlnet_block_samples": 2},
    "Sana": {"controlnet_block_samples": 1},
    "HunyuanDiT": {"controlnet_block_samples": 1},
    "Z-Image": {"controlnet_block_samples": 2},
}


@staying_connected
def pipelines(cases: list[tuple[str, str]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Pipelines under a strategy: error, bytes counted and predicted, on each rank."""
    logging.set_verbosity_error()
    results = {}
    for label, strategy in STRATEGIES.items():
        with Mesh(**mesh_for((strategy,), 2)) as mesh:
            for name in (name for other, name in cases if other == label):
                size = (96, 160) if name == "Sana" else (48, 80)
                results[label, name] = gathered(_pipeline(IMAGE_PIPES[name], strategy, mesh, size))
    return results


def _pipeline(pipe_of: Any, strategy: Strategy, mesh: Mesh, size: tuple[int, int]) -> dict[str, Any]:
    pipe = pipe_of.make()
    torch.manual_seed(3)  # SD3's ControlNet pipeline encodes its picture with noise that no generator governs
    want = pipe_of.call(pipe, size=size)
    torch.manual_seed(3)
    with parallelize(pipe, strategy, mesh=mesh) as plan, Ledger(flops=False) as ledger:
        got = pipe_of.call(pipe, size=size)
        predicted = plan.explain().bytes_total()[mesh.rank]
    return {"error": error(got, want), "sent": int(ledger.summary()["bytes_sent"]), "predicted": predicted}


@staying_connected
def residuals(nproc: int, cases: list[Case]) -> dict[Case, list[tuple[float, float]]]:
    """Error with residuals, and what the residuals change, on each rank."""
    logging.set_verbosity_error()
    results = {}
    for label, strategy in RESIDUAL_STRATEGIES.items():
        with Mesh(**mesh_for((strategy,), nproc)) as mesh, torch.no_grad():
            for case in (case for case in cases if case[1] == label):
                results[case] = gathered(_with_residuals(case[2], strategy, mesh))
    return results


def _with_residuals(name: str, strategy: Strategy, mesh: Mesh) -> tuple[float, float]:
    family = FAMILIES[name]
    model, named = family.model(6, torch.float64), family.call(6, 2, torch.float64)
    if name == "Z-Image":  # its residuals are as long as the longest sequence of the whole batch
        named["cap_feats"] = named["cap_feats"][:1] * 2
    want, plain = sample_of(model(**named, **_residuals(name))), sample_of(model(**named))
    with parallelize(model, strategy, mesh=mesh):
        got = sample_of(model(**named, **_residuals(name)))
    return error(got, want), error(plain, want)


def _residuals(name: str) -> dict[str, Any]:
    """Fresh ones for every call: a model may use up the list it is given."""
    tokens = {"Sana": 42, "SD3": 12, "QwenImage": 15, "Flux": 10, "Z-Image": 64}.get(name, 9)
    width = 96 if name == "HunyuanDiT" else 24
    made: dict[str, Any] = {}
    torch.manual_seed(6)
    for argument, count in RESIDUALS[name].items():
        tensors = [torch.randn(2, tokens, width, dtype=torch.float64) for _ in range(count)]
        made[argument] = dict(enumerate(tensors)) if name == "Z-Image" else tensors
    return made
