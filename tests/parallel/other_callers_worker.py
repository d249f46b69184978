"""Runs on every rank: one model called by the pipeline under a plan, by another pipeline, and by loops of one's own."""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from diffusers.utils import logging
from torch import Tensor

from partsong import CfgParallel, DataParallel, DisplacedPatch, LaggedLayers, PartialPatch, StepCache
from partsong.parallel import Mesh, Plan, Strategy, mesh_for, parallelize
from tests.parallel.ranks import error, gathered, on_first, staying_connected
from tests.pipelines.cases import CASES
from tests.tiny_models.weights import noise

CASE = CASES["StableDiffusion3Pipeline"]
STRATEGIES: dict[str, tuple[Strategy, ...]] = {
    "DisplacedPatch": (DisplacedPatch(warmup_steps=1),),
    "PartialPatch": (PartialPatch(warmup_steps=1),),
    "StepCache": (StepCache(warmup_steps=1, mask="01", keep_last=False), DataParallel()),
    "LaggedLayers": (LaggedLayers(warmup_steps=1),),
    "CfgParallel": (CfgParallel(),),
}


class Stopped(Exception):
    """Ends a picture in the middle."""


@staying_connected
def everything(names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """What each rank found under some strategies."""
    logging.set_verbosity_error()
    return {name: gathered(_Trial(STRATEGIES[name]).found) for name in names}


class _Trial:
    """Two pipelines with schedulers of their own around one model; the plan is on the first."""

    def __init__(self, strategies: tuple[Strategy, ...]) -> None:
        self.first = CASE.make()
        self.second = _beside(self.first, scheduler=FlowMatchEulerDiscreteScheduler())
        self.found: dict[str, Any] = {}
        self.exact = on_first(lambda: _drawn(self.first, 8))
        with Mesh(**mesh_for(strategies, 2)) as mesh:
            with parallelize(self.second, *strategies, mesh=mesh):
                own = _drawn(self.second, 5)
            with parallelize(self.first.transformer, *strategies, mesh=mesh):
                own_loop = self.loop(3)
            with parallelize(self.first, *strategies, mesh=mesh) as plan:
                self._in_turns(own, own_loop, plan)
                self._in_the_middle()
        self.found["hooks left"] = "maybe_free_model_hooks" in vars(self.second)

    def _in_turns(self, own: Tensor, own_loop: Tensor, plan: Plan) -> None:
        before = _tensors()
        found = {"before": _drawn(self.second, 5)}
        _drawn(self.first, 1)
        found |= {name: _drawn(self.second, 5) for name in ("after another", "again")}
        for seed in range(3):
            _drawn(self.second, seed)
            _drawn(self.second, seed, num_inference_steps=1)
        self.found["hooks between"] = "maybe_free_model_hooks" in vars(self.second)
        self.found["kept"] = _tensors() - before - len(found)
        self.found["steps"] = len(plan.explain().bytes_by_step)
        self.found |= {name: error(picture, found["before"]) for name, picture in found.items()}
        self.found["from its own plan"] = error(found["before"], own)
        loops = [self.loop(3), self.loop(4), self.loop(3)]
        self.found |= {"loop": error(loops[0], own_loop), "loop again": error(loops[2], own_loop)}

    def _in_the_middle(self) -> None:
        second, alone = _drawn(self.second, 5), _drawn(self.first, 8)

        def stop(*_: Any) -> Any:
            raise Stopped

        def draw_another(pipe: Any, step: int, time: Any, given: dict[str, Any]) -> dict[str, Any]:
            _drawn(self.second, 5)
            return given

        with suppress(Stopped):
            _drawn(self.first, 6, callback_on_step_end=stop)
        self.found["after an error"] = error(_drawn(self.second, 5), second)
        self.found["same scheduler"] = error(_drawn(_beside(self.first), 8), alone)
        nested = _drawn(self.first, 8, callback_on_step_end=draw_another)
        self.found["in a callback"], self.found["without one"] = error(nested, self.exact), error(alone, self.exact)
        self.found["after all"] = error(_drawn(self.first, 8), alone)

    def loop(self, seed: int) -> Tensor:
        """Samples without a pipeline."""
        scheduler: Any = FlowMatchEulerDiscreteScheduler()
        given = CASE.call(1)
        scheduler.set_timesteps(6)
        model, latents = self.first.transformer, noise(1, 4, 12, 12, seed=seed)
        named = {"encoder_hidden_states": given["prompt_embeds"], "pooled_projections": given["pooled_prompt_embeds"]}
        with torch.no_grad():
            for time in scheduler.timesteps:
                velocity = model(hidden_states=latents, timestep=time[None].double(), return_dict=False, **named)[0]
                latents = scheduler.step(velocity, time, latents, return_dict=False)[0]
        return latents


def _beside(pipe: Any, **changed: Any) -> Any:
    beside = StableDiffusion3Pipeline(**pipe.components | changed)
    beside.set_progress_bar_config(disable=True)
    return beside


def _drawn(pipe: Any, seed: int, **more: Any) -> Tensor:
    given = {"num_inference_steps": 6, "generator": torch.Generator().manual_seed(seed)}
    return CASE.run(pipe, **given | more)[0]


def _tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())
