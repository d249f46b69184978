"""Runs on every rank: pipelines that change under a plan."""

from __future__ import annotations

import copy
from typing import Any

import torch
from accelerate import cpu_offload
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.utils import logging
from torch import Tensor, nn

from partsong import DisplacedPatch, Mesh, SyncPatch, Ulysses, parallelize
from partsong.parallel.ranks.noise import share_latents
from tests.parallel.families import FAMILIES
from tests.parallel.ranks import gathered, refusal
from tests.parallel.unets import UNETS
from tests.pipelines.case import denoisers, distance
from tests.pipelines.cases import CASES


def changed_schedulers() -> list[Any]:
    """The second picture of a plan whose scheduler was exchanged, and the same picture of a plan of its own."""
    logging.set_verbosity_error()
    case = CASES["FluxPipeline"]
    pipe = case.make()
    with parallelize(pipe, DisplacedPatch(warmup_steps=1)):
        case.run(pipe, num_inference_steps=4, prompt_embeds=torch.ones(2, 7, 12, dtype=torch.float64))
        pipe.scheduler = FlowMatchEulerDiscreteScheduler()
        after = case.run(pipe, num_inference_steps=4)[0]
    with parallelize(pipe, DisplacedPatch(warmup_steps=1)):
        return gathered((after, case.run(pipe, num_inference_steps=4)[0]))


def notes_after_another_call() -> list[bool]:
    """Whether what was noted of a call is still there when it was looked at and the model is called again."""
    logging.set_verbosity_error()
    case = CASES["FluxPipeline"]
    pipe = case.make()
    with parallelize(pipe, SyncPatch()) as plan:
        case.run(pipe)
        calls = plan.denoisers[0].seen.calls
        before = copy.deepcopy(calls)
        plan.explain()
        cut = plan.denoisers[0].cut
        assert cut is not None
        cut.begin_forward(torch.zeros(2, 15, 16))
        return gathered(calls == before and any(calls[0][0].runs[0][0].notes[1:]))


def wrapped(hows: list[tuple[str, str]]) -> dict[tuple[str, str], list[float]]:
    """How far a pipeline under a plan is from itself alone, where others have wrapped its layers before or since."""
    logging.set_verbosity_error()
    with Mesh(data=2):  # keeps the ranks connected from one plan to the next
        return {how: gathered(_wrapped(*how)) for how in hows}


def _wrapped(name: str, how: str) -> float:
    case, (change, when) = CASES[name], how.split(" ")
    alone, pipe = case.make(), case.make()
    CHANGES[change](alone)
    want = case.run(alone)
    if when == "before":
        CHANGES[change](pipe)
    with parallelize(pipe, SyncPatch()):
        if when == "after":
            CHANGES[change](pipe)
        got = case.run(pipe)
    return max(distance(got, want), distance(case.run(pipe), want))


def _offload(pipe: Any) -> None:
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            cpu_offload(part, execution_device=torch.device("cpu"))


def _cast(pipe: Any) -> None:
    for part in denoisers(pipe):
        part.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float64)


def _group_offload(pipe: Any) -> None:
    here = torch.device("cpu")
    for part in denoisers(pipe):
        part.enable_group_offload(onload_device=here, offload_device=here, offload_type="leaf_level")


def _other_type(pipe: Any) -> None:
    for part in denoisers(pipe):
        part.to(torch.float32)


CHANGES = {"offload": _offload, "casting": _cast, "groups": _group_offload, "float32": _other_type}


def moved_away() -> list[str]:
    """What is said of a model that was moved to a device that its ranks do not exchange on."""
    unet = UNETS["SD"].model(torch.float64)
    call = UNETS["SD"].calls((8, 12), torch.float64, (900.0,))[0]
    with torch.no_grad(), parallelize(unet, SyncPatch()):
        unet.to("meta")
        try:
            unet(**{name: value.to("meta") if isinstance(value, Tensor) else value for name, value in call.items()})
        except Exception as problem:  # noqa: BLE001 - the test reads which one it was
            return gathered(f"{type(problem).__name__}: {problem}")
    return gathered("accepted")


def lora_loaded_late() -> list[str]:
    """What is said of a LoRA with convolutions that came after the plan, past the model's own methods."""
    from peft import LoraConfig, inject_adapter_in_model

    unet = UNETS["SD"].model(torch.float64)
    call = UNETS["SD"].calls((8, 12), torch.float64, (900.0,))[0]
    with torch.no_grad(), parallelize(unet, SyncPatch()):
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_q", "conv1"]), unet)
        try:
            unet(**call)
        except Exception as problem:  # noqa: BLE001 - the test reads which one it was
            return gathered(f"{type(problem).__name__}: {problem}")
    return gathered("accepted")


def other_types() -> list[str]:
    """What is said where the weights, the first latents or an input of rank 1 have another type."""
    with Mesh(ulysses=2) as mesh:
        dtype, everyone = (torch.float64, torch.float32)[mesh.rank], mesh.axis("ulysses")
        said = [refusal(lambda: parallelize(FAMILIES["DiT"].model(8, dtype), Ulysses(), mesh=mesh))]
        said.append(refusal(lambda: share_latents(everyone, torch.ones(2, 3, dtype=dtype))))
        named = FAMILIES["DiT"].call(8, 1, torch.float64)
        named["hidden_states"] = named["hidden_states"].to(dtype)
        with parallelize(FAMILIES["DiT"].model(8, torch.float64), Ulysses(), mesh=mesh) as plan, torch.no_grad():
            said.append(refusal(lambda: plan.target(**named)))
        return gathered(" ".join(said))
