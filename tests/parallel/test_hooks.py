"""What others put on a user's object stays, whatever comes and goes first; a plan notices what changes under it."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.attention_processor import AttnAddedKVProcessor, AttnAddedKVProcessor2_0
from torch import nn

from partsong import DisplacedPatch, ParallelVae, SyncPatch, Ulysses, parallelize, predict
from partsong.errors import UnsupportedError
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import hooks_worker
from tests.pipelines.case import Case, denoisers
from tests.pipelines.cases import CASES
from tests.tiny_models.weights import noise

FLUX: Case = CASES["FluxPipeline"]


@pytest.fixture(scope="module")
def pipe() -> Any:
    return FLUX.make()


def test_a_forward_of_ones_own_stays(pipe: Any) -> None:
    calls = []
    model = pipe.transformer

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["timestep"])
        return type(model).forward(model, *args, **kwargs)

    model.forward = own
    with parallelize(pipe, Ulysses()):
        FLUX.run(pipe)
    assert vars(model)["forward"] is own
    assert len(calls) == 4
    del model.forward


@pytest.mark.parametrize("first", ["plan", "accelerate"])
@pytest.mark.parametrize("leaves_first", ["plan", "accelerate"])
def test_wrappers_come_and_go_in_any_order(pipe: Any, first: str, leaves_first: str) -> None:
    model, alone = pipe.transformer, FLUX.run(pipe)
    if first == "accelerate":
        add_hook_to_module(model, ModelHook())
    plan = parallelize(pipe, Ulysses())
    if first == "plan":
        add_hook_to_module(model, ModelHook())
    assert torch.equal(FLUX.run(pipe)[0], alone[0])
    if leaves_first == "accelerate":
        remove_hook_from_module(model)
        plan.undo()
    else:
        outside = vars(model)["forward"]
        plan.undo()
        assert first == "accelerate" or vars(model)["forward"] is outside
        assert hasattr(model, "_hf_hook")
        assert torch.equal(FLUX.run(pipe)[0], alone[0])
        remove_hook_from_module(model)
    assert torch.equal(FLUX.run(pipe)[0], alone[0])
    registries = [registry for m in model.modules() if (registry := getattr(m, "_diffusers_hook", None)) is not None]
    assert not any(registry.hooks for registry in registries)
    vars(model).pop("forward", None)


def test_a_method_of_ones_own_stays(pipe: Any) -> None:
    own = pipe.prepare_latents
    vars(pipe)["prepare_latents"] = own
    with parallelize(pipe, Ulysses()), pytest.raises(UnsupportedError, match="under another plan already"):
        parallelize(pipe, Ulysses())
    assert vars(pipe).pop("prepare_latents") is own


def test_another_scheduler_drives_the_clock(pipe: Any) -> None:
    first = pipe.scheduler
    with parallelize(pipe, DisplacedPatch()) as plan:
        FLUX.run(pipe)
        pipe.scheduler = FlowMatchEulerDiscreteScheduler()
        steps = []
        FLUX.run(pipe, callback_on_step_end=lambda *_: steps.append(plan.clock.step) or {})
        assert steps == [1, 2]
    assert "step" not in vars(pipe.scheduler)
    assert "step" not in vars(first)
    pipe.scheduler = first


def test_the_picture_after_a_change_of_schedulers_is_a_picture_of_its_own() -> None:
    for after, fresh in launch(hooks_worker.changed_schedulers, 2):
        assert torch.equal(after, fresh)


def test_what_was_noted_of_a_call_stays() -> None:
    assert launch(hooks_worker.notes_after_another_call, 2) == [True, True]


def test_layers_that_changed_since_are_refused(pipe: Any) -> None:
    for told in launch(hooks_worker.lora_loaded_late, 2):
        assert "the layers of UNet2DConditionModel have changed since parallelize()" in told
        assert "load adapters such as LoRA first" in told


def test_a_compiled_wrapper_is_told_of_the_method(pipe: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"call its own method compile\(\)"):
        parallelize(torch.compile(nn.Linear(2, 2)), Ulysses())


@pytest.mark.parametrize("wrapper", [nn.DataParallel, nn.parallel.DistributedDataParallel])
def test_a_wrapper_for_training_is_told_of_its_module(wrapper: type[nn.Module]) -> None:
    wrapped = wrapper.__new__(wrapper)  # without the process group that its own constructor asks for
    nn.Module.__init__(wrapped)
    wrapped.module = nn.Linear(2, 2)
    for strategies in ((Ulysses(),), (ParallelVae(),)):
        with pytest.raises(UnsupportedError, match=rf"this Linear is wrapped in {wrapper.__name__}.*pass its \.module"):
            parallelize(wrapped, *strategies)


@pytest.mark.parametrize("kind", [AttnAddedKVProcessor, AttnAddedKVProcessor2_0])
def test_a_processor_without_the_operator_is_refused_before_any_call(kind: type) -> None:
    (unet,) = denoisers(CASES["IFPipeline"].make())
    unet.set_attn_processor(kind())
    inputs = {"sample": torch.zeros(1, 3, 16, 20), "timestep": torch.tensor([5])}
    inputs = {name: value.double() for name, value in inputs.items()} | {
        "encoder_hidden_states": noise(1, 5, 12, seed=1)
    }
    refused = pytest.raises(UnsupportedError, match=r"\(AttnAddedKVProcessor\).*which diffusers calls .*2_0")
    with refused if kind is AttnAddedKVProcessor else nullcontext():
        predict(unet, SyncPatch(), ranks=2, **inputs)


def test_ranks_that_compute_in_other_types_are_told() -> None:
    for said in launch(hooks_worker.other_types, 2):
        assert (
            "rank 1 has other types in its DiTTransformer2DModel than rank 0: torch.float32 and torch.float64" in said
        )
        assert "rank 1 makes latents of shape [2, 3] of torch.float32, rank 0 of [2, 3] of torch.float64" in said
        assert "rank 1 was given another hidden_states than rank 0" in said


#: Offloading and casting put wrappers of their own around layers, before or after a plan. Weights that are float32 make
#: another picture than those in float64, by rounding: Flux does not take them.
WRAPPED = [
    (name, f"{change} {when}")
    for name in ("StableDiffusionPipeline", "FluxPipeline")
    for change in hooks_worker.CHANGES
    for when in ("before", "after")
    if (name, change) != ("FluxPipeline", "float32")
]
#: By default before and after take turns, the other way round on the second pipeline.
WRAPPED = [
    each
    for place, each in enumerate(WRAPPED)
    if covering.FULL or (place % 4 in (0, 3)) == (each[0] == "StableDiffusionPipeline")
]


@functools.cache
def wrapped() -> dict[tuple[str, str], list[float]]:
    return launch(hooks_worker.wrapped, 2, WRAPPED)


@pytest.mark.parametrize(("name", "how"), WRAPPED)
def test_layers_that_others_wrap_are_used_as_they_are_wrapped(name: str, how: str) -> None:
    assert max(wrapped()[name, how]) <= (1e-5 if how.startswith("float32") else 1e-10)


def test_a_model_moved_to_another_device_is_refused() -> None:
    for said in launch(hooks_worker.moved_away, 2):
        assert said.startswith("UnsupportedError: the latents of UNet2DConditionModel are on meta, and the ranks")
