"""Runs on every rank: pipelines whose steps are solved for together."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DEISMultistepScheduler,
    DPMSolverMultistepScheduler,
    DPMSolverSinglestepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    KDPM2AncestralDiscreteScheduler,
    LCMScheduler,
    LMSDiscreteScheduler,
    PNDMScheduler,
    UniPCMultistepScheduler,
)
from diffusers.utils import logging
from torch import Tensor

from partsong import CfgParallel, DataParallel, DraftedSteps, Ring, TimeParallel, Ulysses
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from tests.parallel.ranks import gathered, on_first
from tests.pipelines.case import Case, Through, distance
from tests.pipelines.cases import CASES

_SETTINGS: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
#: Scheduler, and what the pipeline's call is given besides.
SCHEDULERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "DDIM": (DDIMScheduler(**_SETTINGS, clip_sample=False), {}),
    "DDIM with noise": (DDIMScheduler(**_SETTINGS, clip_sample=False), {"eta": 1.0}),
    "DDPM": (DDPMScheduler(**_SETTINGS, clip_sample=False), {}),
    "Euler": (EulerDiscreteScheduler(**_SETTINGS), {}),
    "Euler ancestral": (EulerAncestralDiscreteScheduler(**_SETTINGS), {}),
    "LCM": (LCMScheduler(**_SETTINGS), {}),
    # These remember earlier steps, correct them, clip, or take two evaluations for a step.
    "DPM-Solver++ 2M": (DPMSolverMultistepScheduler(**_SETTINGS), {}),
    "DPM-Solver++ 3M": (DPMSolverMultistepScheduler(**_SETTINGS, solver_order=3), {}),
    "SDE-DPM-Solver++": (DPMSolverMultistepScheduler(**_SETTINGS, algorithm_type="sde-dpmsolver++"), {}),
    "DPM-Solver singlestep": (DPMSolverSinglestepScheduler(**_SETTINGS), {}),
    "UniPC": (UniPCMultistepScheduler(**_SETTINGS), {}),
    "UniPC of order 3": (UniPCMultistepScheduler(**_SETTINGS, solver_order=3), {}),
    "DEIS": (DEISMultistepScheduler(**_SETTINGS), {}),
    "LMS": (LMSDiscreteScheduler(**_SETTINGS), {}),
    "PNDM": (PNDMScheduler(**_SETTINGS), {}),
    "PNDM without its first steps": (PNDMScheduler(**_SETTINGS, skip_prk_steps=True), {}),
    "Heun": (HeunDiscreteScheduler(**_SETTINGS), {}),
    "KDPM2 ancestral": (KDPM2AncestralDiscreteScheduler(**_SETTINGS), {}),
    "DDIM that clips": (DDIMScheduler(**_SETTINGS, clip_sample=True), {}),
    "DDIM with thresholds": (DDIMScheduler(**_SETTINGS, thresholding=True), {}),
}


def solved(
    case: Case, pipe: Any, *strategies: Strategy, mesh: Mesh | None = None, **more: Any
) -> tuple[list[Tensor], Any]:
    """What a case makes with some strategies, and its plan's account."""
    with parallelize(pipe, *strategies, mesh=mesh) as plan:
        result = case.run(Through(plan), **more)
        return result, plan.explain()


def scheduled(name: str) -> tuple[Case, Any, dict[str, Any]]:
    """Stable Diffusion with a scheduler: case, pipeline, and arguments for six steps."""
    case = CASES["StableDiffusionPipeline"]
    pipe = case.make()
    pipe.scheduler, more = SCHEDULERS[name]
    return case, pipe, more | {"num_inference_steps": 6}


@dataclass(frozen=True)
class Account:
    """What a rank saw of a generation."""

    digest: tuple[str, ...]
    sent: int
    predicted: int
    kept: str


STRATEGIES: dict[str, Strategy] = {
    "window of 2": TimeParallel(window=2, tolerance=0.1),
    "window of 4": TimeParallel(window=4, tolerance=0.02),
    "to the last bit": TimeParallel(window=3, tolerance=0.0),
    "drafts": DraftedSteps(depth=3),
}
ON_RANKS = ("DDIM with noise", "SDE-DPM-Solver++", "UniPC")


def ranks(nproc: int, cases: list[tuple[str, str]]) -> dict[tuple[str, str], list[Account]]:
    """Some schedulers, each with some strategy."""
    logging.set_verbosity_error()
    results = {}
    with Mesh(time=nproc) as mesh:
        for name, label in dict.fromkeys(cases):
            case, pipe, more = scheduled(name)
            with Ledger(flops=False) as ledger:
                tensors, told = solved(case, pipe, STRATEGIES[label], mesh=mesh, **more, output_type="latent")
            digest = tuple(sha256(x.contiguous().numpy().tobytes()).hexdigest() for x in tensors)
            sent = int(ledger.summary()["bytes_sent"])
            account = Account(digest, sent, told.bytes_total()[mesh.rank], told.kept[0])
            results[name, label] = [account] if nproc == 1 else gathered(account)
            assert not any("forward" in vars(module) for module in pipe.unet.modules())
    return results


#: What splits a call beside points in time, on four ranks.
MIXES: dict[str, tuple[Strategy, ...]] = {
    "guidance": (TimeParallel(window=3, tolerance=0.0), CfgParallel()),
    "samples": (DraftedSteps(depth=1), DataParallel(degree=2)),
    "tokens": (TimeParallel(window=2, tolerance=0.0, degree=2), Ulysses()),
    "a ring": (TimeParallel(window=3, tolerance=0.0, degree=2), Ring(degree=2)),
}
#: Guidance in one call over rows, in two calls over tokens, and text among the tokens.
MIXED = ("StableDiffusionPipeline", "WanPipeline", "SanaPipeline")


def mixes(cases: list[tuple[str, str]]) -> dict[tuple[str, str], list[tuple[float, int, int]]]:
    """Pipelines with a mix each: the distance from the serial result, the bytes sent and those predicted."""
    logging.set_verbosity_error()
    results = {}
    with Mesh(data=4):  # keeps the ranks connected from one mesh to the next
        for name, label in cases:
            case, strategies = CASES[name], MIXES[label]
            pipe = case.make()
            alone = on_first(lambda case=case, pipe=pipe: case.run(pipe))
            with Mesh(**mesh_for(strategies, 4)) as mesh, Ledger(flops=False) as ledger:
                tensors, told = solved(case, pipe, *strategies, mesh=mesh)
                sent, predicted = int(ledger.summary()["bytes_sent"]), told.bytes_total()[mesh.rank]
            results[name, label] = gathered((distance(tensors, alone), sent, predicted))
    return results
