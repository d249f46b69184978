"""Runs on every rank: pipelines that change under a plan."""

from __future__ import annotations

import copy
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.utils import logging

from partsong import DisplacedPatch, SyncPatch, parallelize
from tests.parallel.ranks import gathered
from tests.parallel.unets import UNETS
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
        return gathered(calls == before and any(calls[0][0].notes[0]))


def lora_loaded_late() -> list[str]:
    """What is said of a LoRA with convolutions that came after the plan."""
    from peft import LoraConfig

    unet = UNETS["SD"].model(torch.float64)
    call = UNETS["SD"].calls((8, 12), torch.float64, (900.0,))[0]
    with parallelize(unet, SyncPatch()):
        unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "conv1"]))
        try:
            unet(**call)
        except Exception as problem:  # noqa: BLE001 - the test reads which one it was
            return gathered(f"{type(problem).__name__}: {problem}")
    return gathered("accepted")
