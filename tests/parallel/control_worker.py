"""Runs on every rank: pipelines with ControlNets under a plan, against what the same pipelines make alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from diffusers import (
    FluxControlNetModel,
    FluxControlNetPipeline,
    FluxMultiControlNetModel,
    MultiControlNetModel,
    SD3MultiControlNetModel,
    StableDiffusion3ControlNetPipeline,
    StableDiffusionControlNetPipeline,
)
from diffusers.utils import logging
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from partsong import CfgParallel, DisplacedPatch, PartialPatch, Ring, SyncPatch, Ulysses
from partsong.errors import PartsongError
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from tests.parallel.ranks import gathered, on_first
from tests.pipelines.case import Case, distance
from tests.pipelines.cases import CASES, flux, sd3, stable_diffusion
from tests.pipelines.parts import picture
from tests.tiny_models.weights import noise

STRATEGIES: dict[str, tuple[Strategy, ...]] = {
    "Ulysses": (Ulysses(),),
    "Ring": (Ring(),),
    "SyncPatch": (SyncPatch(),),
    "DisplacedPatch": (DisplacedPatch(warmup_steps=99),),
    "CfgParallel x Ulysses": (CfgParallel(degree=2), Ulysses()),
    # Approximate: only their bytes are compared.
    "DisplacedPatch, 1": (DisplacedPatch(warmup_steps=1),),
    "DisplacedPatch, forecast norms": (DisplacedPatch(warmup_steps=1, norms="forecast"),),
    "PartialPatch, auto": (PartialPatch(warmup_steps=2),),
}
APPROXIMATE = ("DisplacedPatch, 1", "DisplacedPatch, forecast norms", "PartialPatch, auto")


def _flux(*nets: FluxControlNetModel) -> Any:
    pipe = CASES["FluxPipeline"].build()
    parts = {name: part for name, part in pipe.components.items() if name not in ("image_encoder", "feature_extractor")}
    return FluxControlNetPipeline(**parts, controlnet=_several(FluxMultiControlNetModel, nets))


def _several(wrapper: Any, nets: tuple[Any, ...]) -> Any:
    return wrapper(list(nets)) if len(nets) > 1 else next(iter(nets))


def _flux_net(seed: int = 0, **changed: Any) -> FluxControlNetModel:
    return _shifted(flux.control_net(**changed), seed)


def _shifted(net: Any, seed: int) -> Any:
    """A net with other weights than its like."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1 + seed / 8)
    return net


def _flux_call(*modes: int, pictures: int = 1) -> Callable[[int], dict[str, Any]]:
    def call(samples: int) -> dict[str, Any]:
        hints = [picture(samples, seed=6 + number) for number in range(pictures)]
        named = flux._guided(samples) | {"control_image": hints if pictures > 1 else hints[0], "num_inference_steps": 4}
        if pictures > 1:
            # A net that is called twice needs a start and an end for each picture.
            named |= {"controlnet_conditioning_scale": [0.7, 0.4]}
            named |= {"control_guidance_start": [0.0, 0.0], "control_guidance_end": [1.0, 1.0]}
        return named | ({"control_mode": list(modes) if pictures > 1 else modes[0]} if modes else {})

    return call


def _united_twice() -> Any:
    """One net for several kinds of hints, which is called once for each."""
    pipe = _flux(_flux_net(num_mode=4))
    pipe.controlnet = FluxMultiControlNetModel([pipe.controlnet])
    return pipe


def _sd3(**changed: Any) -> Any:
    nets = tuple(_shifted(sd3._control(**changed), seed) for seed in range(1 + (not changed)))
    net = _several(SD3MultiControlNetModel, nets)
    return sd3._pipe(StableDiffusion3ControlNetPipeline, controlnet=net)


def _sd3_call(samples: int) -> dict[str, Any]:
    hints = [picture(samples, seed=6), picture(samples, seed=7)]
    return sd3._prompts(samples) | {"control_image": hints, "controlnet_conditioning_scale": [0.8, 0.3]}


def _stable_diffusion(**changed: Any) -> Any:
    nets = tuple(_shifted(stable_diffusion.control(), seed) for seed in range(2))
    for net in nets:
        net.register_to_config(**changed)
    return stable_diffusion.plain(StableDiffusionControlNetPipeline, controlnet=MultiControlNetModel(list(nets)))


def _two_hints(samples: int) -> dict[str, Any]:
    hints = [stable_diffusion.picture(samples, seed=7), stable_diffusion.picture(samples, seed=8)]
    return stable_diffusion.prompts(samples) | {"image": hints, "controlnet_conditioning_scale": [0.7, 0.4]}


def _shortens(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
    return {"prompt_embeds": given["prompt_embeds"][:, :3]} if step == 1 else given


def _shortened(samples: int) -> dict[str, Any]:
    """A call whose text is shorter from the third step on, so that nothing from the steps before fits."""
    named = stable_diffusion.controlled(stable_diffusion.prompts)(samples) | {"num_inference_steps": 4}
    return named | {"callback_on_step_end": _shortens, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}


#: A ControlNet without a text reads picture tokens alone.
_SILENT = {"joint_attention_dim": None}
OWN = {
    case.name: case
    for case in (
        Case(
            name="Flux, a net for several kinds",
            build=lambda: _flux(_flux_net(num_mode=4)),
            call=_flux_call(2),
        ),
        Case(
            name="Flux, only double blocks",
            build=lambda: _flux(_flux_net(num_layers=2, num_single_layers=0)),
            call=_flux_call(),
        ),
        Case(
            name="Flux, two nets",
            build=lambda: _flux(_flux_net(num_mode=4), _flux_net(1, num_mode=4)),
            call=_flux_call(2, 3, pictures=2),
        ),
        Case(name="Flux, one net twice", build=_united_twice, call=_flux_call(1, 3, pictures=2)),
        Case(name="SD3, two nets", build=_sd3, call=_sd3_call),
        Case(name="SD3, no text", build=lambda: _sd3(**_SILENT), call=sd3._controlled),
        Case(name="SD, two nets", build=_stable_diffusion, call=_two_hints),
        Case(name="SD, shorter text", build=CASES["StableDiffusionControlNetPipeline"].build, call=_shortened),
    )
}
ALL = CASES | OWN


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of a pipeline under a strategy.

    Attributes:
        error: relative distance to the serial result.
        sent: bytes that the ledger counted.
        predicted: bytes that `Plan.explain` predicted.
        apart: distance of what the ControlNets returned, added up over the ranks, to what they return alone.
        sizes: positions that the layers before each residual got.
        whole: the same in a serial run.
    """

    error: float
    sent: int
    predicted: int
    apart: float
    sizes: tuple[int, ...]
    whole: tuple[int, ...]


class Watch:
    """Notes what ControlNets return in their first calls, and how many positions their last layers get."""

    def __init__(self, pipe: Any) -> None:
        self.returned: list[Tensor] = []
        self.sizes: list[int] = []
        nets = getattr(pipe.controlnet, "nets", [pipe.controlnet])
        self.handles = [net.register_forward_hook(self._note_output) for net in nets]
        for net in nets:
            last = [*getattr(net, "controlnet_blocks", ()), *getattr(net, "controlnet_single_blocks", ())]
            last = last or [*net.controlnet_down_blocks][1:]
            self.handles += [layer.register_forward_pre_hook(self._note_size) for layer in last]

    def _note_output(self, net: nn.Module, given: Any, output: Any) -> None:
        if len(self.returned) < 12:
            self.returned += [part for part in tree_leaves(output) if isinstance(part, Tensor)]

    def _note_size(self, layer: nn.Module, given: Any) -> None:
        self.sizes.append(given[0][0].numel())

    def close(self) -> tuple[list[Tensor], tuple[int, ...]]:
        for handle in self.handles:
            handle.remove()
        return self.returned, tuple(self.sizes)


def watched(case: Case, pipe: Any) -> tuple[list[Tensor], list[Tensor], tuple[int, ...]]:
    watch = Watch(pipe)
    result = case.run(pipe)
    return (result, *watch.close())


def run(nproc: int, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], list[Outcome]]:
    """The outcome of every pair of a case and a strategy, on each rank."""
    logging.set_verbosity_error()
    results = {}
    with Mesh(data=nproc):
        for name in dict.fromkeys(name for name, _ in pairs):
            case = replace(ALL[name], samples=min(ALL[name].samples, 2))
            pipe = case.make()
            alone = on_first(lambda case=case, pipe=pipe: watched(case, pipe))
            for strategy in (strategy for other, strategy in pairs if other == name):
                results[name, strategy] = gathered(_outcome(case, pipe, alone, STRATEGIES[strategy], nproc))
    return results


def _outcome(case: Case, pipe: Any, alone: Any, strategies: tuple[Strategy, ...], nproc: int) -> Outcome:
    result, returned, whole = alone
    with (
        Mesh(**mesh_for(strategies, nproc)) as mesh,
        parallelize(pipe, *strategies, mesh=mesh) as plan,
        Ledger(flops=False) as ledger,
    ):
        got, shares, sizes = watched(case, pipe)
        predicted = plan.explain().bytes_total()[mesh.rank]
    sums = [share.clone() for share in shares]
    for total in sums:
        dist.all_reduce(total)
    groups = mesh.degrees["cfg"]  # each has all shares
    apart = distance([total / groups for total in sums], returned) if shares else 0.0
    return Outcome(distance(got, result), int(ledger.summary()["bytes_sent"]), predicted, apart, sizes, whole)


def cuts(nproc: int) -> dict[str, int]:
    """How many ControlNets are cut: of a plain pipeline, of two, of those that return means, of those that share."""
    makes = {
        "plain": ALL["StableDiffusionControlNetPipeline"].make,
        "two": ALL["SD, two nets"].make,
        "pooled": lambda: _stable_diffusion(global_pool_conditions=True),
        "shared layers": ALL["ZImageControlNetPipeline"].make,
    }
    with Mesh(ulysses=nproc) as mesh:
        return {name: _number_cut(make(), mesh) for name, make in makes.items()}


def _number_cut(pipe: Any, mesh: Any) -> int:
    with parallelize(pipe, Ulysses(), mesh=mesh) as plan:
        return len(plan.controlnets)


def other_hint(nproc: int) -> list[str]:
    """What is said on each rank where the last one has another picture for its ControlNet."""
    case = ALL["FluxControlNetPipeline"]
    pipe = case.make()
    with Mesh(ulysses=nproc) as mesh, parallelize(pipe, Ulysses(), mesh=mesh):
        moved = noise(2, 3, 48, 80, seed=20 + (mesh.rank == nproc - 1)).sigmoid()
        said = ""
        try:
            replace(case, call=lambda samples: case.call(samples) | {"control_image": moved}).run(pipe)
        except PartsongError as problem:
            said = str(problem)
        return gathered(said)
