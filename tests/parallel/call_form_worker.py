"""Runs on every rank: loops of strategies, and how the model is called in them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.utils import logging
from peft import LoraConfig
from torch import Tensor

from partsong import (
    CfgParallel,
    DataParallel,
    Mesh,
    PatchPipeline,
    StepCache,
    TimeParallel,
    Ulysses,
)
from partsong.parallel import Strategy, mesh_for, parallelize
from tests.parallel.families import FAMILIES
from tests.parallel.ranks import gathered, staying_connected
from tests.pipelines.case import Through, denoisers, distance
from tests.pipelines.cases import CASES

#: How many positions and which keywords a call had.
Form = tuple[int, frozenset[str]]

#: Strategies that call the model themselves, or in advance; in pipelines whose calls have positions.
LOOPS: dict[str, tuple[str, Strategy]] = {
    "CfgParallel": ("FluxPipeline", CfgParallel()),
    "PatchPipeline": ("PixArtAlphaPipeline", PatchPipeline()),
    "TimeParallel": ("StableDiffusionPipeline", TimeParallel()),
}
#: Strategies whose hooks are around a model that reads the scale of a LoRA from the call's keywords.
SCALED: dict[str, tuple[Strategy, ...]] = {
    "Ulysses": (Ulysses(),),
    "StepCache": (StepCache(), DataParallel()),
}


@staying_connected
def on_ranks() -> tuple[dict[str, list[tuple[set[Form], set[Form]]]], dict[str, list[tuple[float, float]]]]:
    """The forms of a model's calls, alone and in each loop; and how far a scaled LoRA is from itself alone."""
    logging.set_verbosity_error()
    loops = {name: gathered(_forms(*LOOPS[name])) for name in LOOPS}
    return loops, {name: gathered(_scaled(SCALED[name])) for name in SCALED}


def _forms(name: str, strategy: Strategy) -> tuple[set[Form], set[Form]]:
    case = CASES[name]
    pipe = case.make()
    (model,) = denoisers(pipe)
    forms: set[Form] = set()

    def record(*args: Any, **kwargs: Any) -> Any:
        forms.add((len(args), frozenset(kwargs)))
        return type(model).forward(model, *args, **kwargs)

    vars(model)["forward"] = record
    case.run(pipe)
    alone = forms.copy()
    forms.clear()
    with Mesh(**mesh_for((strategy,), 2)) as mesh, parallelize(pipe, strategy, mesh=mesh) as plan:
        case.run(Through(plan))
    return alone, forms


def _scaled(strategies: tuple[Strategy, ...]) -> tuple[float, float]:
    """How far a call with half of a LoRA is from the same call alone, and from one with all of it."""
    model, named = FAMILIES["Flux"].model(8, torch.float64), FAMILIES["Flux"].call(8, 1, torch.float64)
    torch.manual_seed(7)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    model.double()

    def run(scale: float) -> list[Tensor]:
        with torch.no_grad():
            return [model(**named, joint_attention_kwargs={"scale": scale})[0]]

    half, full = run(0.5), run(1.0)
    with Mesh(**mesh_for(strategies, 2)) as mesh, parallelize(model, *strategies, mesh=mesh):
        got = run(0.5)
    return distance(got, half), distance(got, full)
