"""Runs on every rank: adapters that do not fit, or not the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from diffusers.utils import logging
from peft import LoraConfig, inject_adapter_in_model

from partsong import Ulysses
from partsong.parallel import Mesh, parallelize
from tests.features.loras import load_lora, lora_state
from tests.parallel.ranks import gathered
from tests.pipelines.case import distance
from tests.pipelines.cases import CASES

CASE = CASES["StableDiffusion3Pipeline"]


def everything() -> dict[str, list[str]]:
    """What is said of each wrong adapter, on each rank."""
    logging.set_verbosity(logging.CRITICAL)
    results: dict[str, list[str]] = {}
    with Mesh(ulysses=2) as mesh:
        pipe = CASE.make()
        alone = CASE.run(pipe)
        with parallelize(pipe, Ulysses(), mesh=mesh):
            results["another width"] = gathered(said(lambda: pipe.load_lora_weights(_wide_state(pipe))))
            results["another kind"] = gathered(said(lambda: pipe.load_lora_weights(_unet_state())))
            same = distance(CASE.run(pipe), alone) <= 1e-9
            results["the plan afterwards"] = gathered("as before" if same else "another picture")
        for how, load in _OTHERS.items():
            results[how] = gathered(said(lambda load=load: _on_another_rank(load, mesh)))
        results["peft's own function"] = gathered(said(lambda: _past_the_methods(mesh)))
    return results


def said(act: Callable[[], Any]) -> str:
    """The error of an act."""
    try:
        act()
    except Exception as problem:  # noqa: BLE001 - the test reads which one it was
        return f"{type(problem).__name__}: {problem}"
    return "accepted"


def _wide_state(pipe: Any) -> dict[str, torch.Tensor]:
    wide = {"num_attention_heads": 4, "caption_projection_dim": 32}
    state = lora_state(SD3Transformer2DModel(**{**pipe.transformer.config, **wide}), 1)
    return {f"transformer.{key}": value for key, value in state.items()}


def _unet_state() -> dict[str, torch.Tensor]:
    unet = CASES["StableDiffusionPipeline"].build().unet
    return {f"unet.{key}": value for key, value in lora_state(unet, 1).items()}


_OTHERS: dict[str, Callable[[Any, int], None]] = {
    "another file": lambda pipe, rank: load_lora(pipe, "one", rank),
    "another weight": lambda pipe, rank: _weighted(pipe, 1.0 - 0.5 * rank),
    "none": lambda pipe, rank: None if rank else load_lora(pipe, "one", 1),
}


def _weighted(pipe: Any, weight: float) -> None:
    load_lora(pipe, "one", 1)
    pipe.set_adapters(["one"], [weight])


def _on_another_rank(load: Callable[[Any, int], None], mesh: Mesh) -> None:
    pipe = CASE.make()
    load(pipe, mesh.rank)
    with parallelize(pipe, Ulysses(), mesh=mesh):
        CASE.run(pipe)


def _past_the_methods(mesh: Mesh) -> None:
    pipe = CASE.make()
    with parallelize(pipe, Ulysses(), mesh=mesh):
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_q"]), pipe.transformer)
        CASE.run(pipe)
