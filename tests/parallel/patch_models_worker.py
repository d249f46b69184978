"""Runs on every rank: `PatchPipeline` on every family, and on pipelines of those that are cut in unusual ways."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput
from diffusers.utils import logging
from torch import Tensor, nn

from partsong import PatchPipeline
from partsong.errors import UnsupportedError
from partsong.ledger import Ledger
from partsong.parallel import Mesh, parallelize
from partsong.parallel.adapters import adapter_for
from partsong.samplers import generate
from tests.parallel.families import FAMILIES
from tests.parallel.pipelines import STEPS
from tests.parallel.ranks import error, gathered
from tests.pipelines.case import Case, distance
from tests.pipelines.cases import CASES


class Still(FlowMatchEulerDiscreteScheduler):
    """Gives back the prediction in the last step, and until then what it was given."""

    init_noise_sigma = 1.0

    def set_timesteps(self, num_inference_steps: int = 3, device: Any = None, sigmas: Any = None, **_: Any) -> None:
        self.timesteps, self.calls = torch.full((num_inference_steps,), 500.0), 0

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, return_dict: bool = True, **_: Any) -> Any:
        self.calls += 1
        made = model_output[:, : sample.shape[1]] if self.calls == len(self.timesteps) else sample
        return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=made) if return_dict else (made,)

    def scale_model_input(self, sample: Tensor, timestep: Any) -> Tensor:
        return sample


class OneModel:
    """The least that is a pipeline: calls a model with given arguments and steps its latents."""

    def __init__(self, model: nn.Module, named: dict[str, Any], latents: str) -> None:
        self.transformer, self.scheduler = model, Still()
        self.named, self.latents = named, latents

    @property
    def components(self) -> dict[str, Any]:
        return {"transformer": self.transformer, "scheduler": self.scheduler}

    @torch.no_grad()
    def __call__(self, num_inference_steps: int = STEPS) -> Tensor:
        latents = self.named[self.latents]
        self.scheduler.set_timesteps(num_inference_steps)
        is_list = isinstance(latents, list)
        latents = torch.stack(latents) if is_list else latents
        for time in self.scheduler.timesteps:
            given = list(latents.unbind()) if is_list else latents
            made = self.transformer(**{**self.named, self.latents: given}, return_dict=False)[0]
            made = torch.stack(made) if is_list else made
            latents = self.scheduler.step(made, time, latents, return_dict=False)[0]
        return latents


def patched(mesh: Mesh, name: str, batch: int) -> float | str:
    """A family in patches, with stale keys that are fresh ones as nothing changes: the error, or why it is refused."""
    model, named = FAMILIES[name].model(8, torch.float64), FAMILIES[name].call(8, batch, torch.float64)
    pipe = OneModel(model, named, adapter_for(model).sample)
    try:
        with parallelize(pipe, PatchPipeline(num_patches=3), mesh=mesh) as plan:
            got = generate(plan)
        return error(got, pipe())
    except UnsupportedError as problem:
        return str(problem)


def families(mesh: Mesh, names: list[str]) -> dict[str, float | str]:
    """Some families; Lumina 2, which puts each text before its picture, with one sample."""
    return {name: patched(mesh, name, batch=1 if name == "Lumina2" else 2) for name in names}


def each_family(names: list[str]) -> list[dict[str, float | str]]:
    """Some families: the errors on each rank, and what is said of texts of several lengths."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    with Mesh(pipe=2, timeout=20.0) as mesh:
        return gathered({**families(mesh, names), "texts of several lengths": patched(mesh, "Lumina2", batch=2)})


#: Pipelines of models that join streams, put tokens together early, or are given more tokens than their latents have.
PIPELINES = (
    "AceStepPipeline",
    "AnyFlowPipeline",
    "AuraFlowPipeline",
    "BriaFibo2Pipeline",
    "BriaFiboEditPipeline",
    "BriaFiboPipeline",
    "ChromaPipeline",
    "ErnieImagePipeline",
    "Flux2Pipeline",
    "FluxKontextPipeline",
    "HiDreamImagePipeline",
    "Ideogram4Pipeline",
    "Kandinsky5T2IPipeline",
    "Krea2Pipeline",
    "LongCatAudioDiTPipeline",
    "Lumina2Pipeline",
    "MochiPipeline",
    "PRXPipeline",
    "SkyReelsV2Pipeline",
    "StableAudio3Pipeline",
    "ZImagePipeline",
)


def case_of(name: str) -> Case:
    """The pipeline's case; Lumina 2 with one sample, whose unwanted text is longer than the other."""
    case = CASES[name]
    if name != "Lumina2Pipeline":
        return case
    longer = {"negative_prompt_attention_mask": torch.ones(1, 7, dtype=torch.int64)}
    return replace(case, samples=1, call=lambda samples: {**case.call(samples), **longer})


def pipelines(names: tuple[str, ...]) -> dict[str, list[Any]]:
    """Tiny pipelines in patches: the distance from the serial result, all warm-up and not, and bytes."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    with Mesh(pipe=2, timeout=20.0) as mesh:
        return {name: gathered(_pipeline(mesh, case_of(name))) for name in names}


def _pipeline(mesh: Mesh, case: Case) -> tuple[float, float, int, int]:
    pipe = case.make()
    want, apart = case.run(pipe), []
    for warmup in (99, 1):
        with parallelize(pipe, PatchPipeline(num_patches=2, warmup_steps=warmup), mesh=mesh) as plan:
            with Ledger(flops=False) as ledger:
                apart.append(distance(case.run(partial(generate, plan)), want))
            predicted = plan.explain().bytes_total()[mesh.rank]
    return apart[0], apart[1], int(ledger.summary()["bytes_sent"]), predicted
