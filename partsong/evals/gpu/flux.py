"""The stage `flux`: one step of a Flux of 12 billion random weights, alone and under plans, and its memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from partsong.evals.gpu.findings import Equipment, Finding, at_least, at_most, holds, skipped, stated
from partsong.evals.gpu.mirrored import mirrored
from partsong.parallel import Mesh, Strategy, parallelize, predict_memory
from partsong.planner.calibration import calibrate
from partsong.planner.clock import replay
from partsong.planner.trace import trace_calls
from partsong.samplers import generate
from partsong.samplers.registry import DisplacedPatch, Ring, StepCache, TimeParallel, TokenRing, Ulysses

__all__ = ["build", "calibration", "call", "flux", "step_seconds"]

#: The parts of the published configuration that a tiny one changes.
_TINY: dict[str, Any] = {
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 16,
    "axes_dims_rope": (4, 6, 6),
}
#: Bytes that have to be free for the weights and what is computed with them.
ROOM = 40e9
STEPS, REPEATS = 8, 5


@torch.no_grad()
def build(equipment: Equipment) -> nn.Module:
    """Builds the model without ever holding its weights in the host's memory."""
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        model: Any = FluxTransformer2DModel(guidance_embeds=True, **equipment.pick({}, _TINY))
    model = model.to(equipment.pick(torch.bfloat16, torch.float32)).to_empty(device=equipment.device).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.02)
    return model


def call(equipment: Equipment, batch: int = 1) -> dict[str, Any]:
    """Makes the arguments of a call: 1024 by 1024 pixels and 512 text tokens, or a tiny part of that."""
    side, texts, width, pooled = equipment.pick((64, 512, 4096, 768), (8, 16, 32, 16))
    dtype = equipment.pick(torch.bfloat16, torch.float32)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=equipment.device, dtype=dtype)

    ids = torch.zeros(side * side, 3, device=equipment.device, dtype=dtype)
    places = torch.arange(side * side, device=equipment.device)
    ids[:, 1], ids[:, 2] = places // side, places % side
    return {
        "hidden_states": normal(batch, side * side, 64),
        "encoder_hidden_states": normal(batch, texts, width),
        "pooled_projections": normal(batch, pooled),
        "timestep": torch.full((batch,), 0.9, device=equipment.device, dtype=dtype),
        "guidance": torch.full((batch,), 3.5, device=equipment.device, dtype=torch.float32),
        "img_ids": ids,
        "txt_ids": torch.zeros(texts, 3, device=equipment.device, dtype=dtype),
    }


def step_seconds(run: Callable[[], Any], repeats: int = REPEATS, untimed: int = 2) -> float:
    """Returns the median time of a step, the device's work included."""
    seconds = []
    for _ in range(untimed + repeats):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[untimed:])


@torch.inference_mode()
def flux(equipment: Equipment) -> Iterator[Finding]:
    """Times steps of the model alone, under plans on one rank and on the first of two, and over whole generations."""
    if equipment.gpus and (free := torch.cuda.mem_get_info()[0]) < ROOM:
        yield skipped("stage", f"{free / 1e9:.0f} GB are free, and it takes {ROOM / 1e9:.0f}")
        return
    model, given = build(equipment), call(equipment)
    yield from _memory(model, given, equipment)
    alone = step_seconds(lambda: model(**given))
    yield stated("seconds of a step", alone)
    with Mesh() as mesh, parallelize(model, Ulysses(), mesh=mesh):
        ratio = step_seconds(lambda: model(**given)) / alone
    # Tiny steps are all host, so nothing is expected of their times.
    yield at_most("a step under a plan on one rank, by one alone", ratio, equipment.pick(1.05, None))
    for mix in ((Ulysses(),), (Ring(),), (TokenRing(),), (DisplacedPatch(warmup_steps=1),)):
        yield from _first_of_two(model, given, mix, alone, equipment)
    yield from _batch(model, alone, equipment)
    yield from _generations(model, equipment)


def _memory(model: nn.Module, given: dict[str, Any], equipment: Equipment) -> Iterator[Finding]:
    memory = predict_memory(model, ranks=1, **given)
    expected = memory.weights + memory.working + sum(x.nbytes for x in given.values())
    yield stated("GB that are predicted at the peak", expected / 1e9)
    if not equipment.gpus:
        yield skipped("GB at the peak, by those predicted", "no GPU")
        return
    model(**given)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    model(**given)
    ratio = torch.cuda.max_memory_allocated() / expected
    yield holds("GB at the peak, by those predicted", 0.9 <= ratio <= 1.1, ratio, "0.9 to 1.1")


def _first_of_two(
    model: nn.Module, given: dict[str, Any], mix: tuple[Strategy, ...], alone: float, equipment: Equipment
) -> Iterator[Finding]:
    """Times the first of two ranks whose messages take no longer than a copy."""
    with mirrored(2, mix, equipment.device) as mesh, parallelize(model, *mix, mesh=mesh):
        seconds = step_seconds(lambda: model(**given))
    yield stated(f"a step on the first of two ranks, {type(mix[0]).__name__}, by one alone", seconds / alone)


def _batch(model: nn.Module, alone: float, equipment: Equipment) -> Iterator[Finding]:
    four = call(equipment, 4)
    yield stated("a step of four samples, by four steps", step_seconds(lambda: model(**four)) / (4 * alone))


def _generations(model: nn.Module, equipment: Equipment) -> Iterator[Finding]:
    """Compares whole generations: with every second step left out, and with several steps solved for at a time."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    parts: dict[str, Any] = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "vae"))
    parts["transformer"] = model
    pipe = FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), **parts)
    pipe.set_progress_bar_config(disable=True)
    given, side = call(equipment), equipment.pick(1024, 128)
    asked: dict[str, Any] = {
        "prompt_embeds": given["encoder_hidden_states"],
        "pooled_prompt_embeds": given["pooled_projections"],
        "height": side,
        "width": side,
        "num_inference_steps": STEPS,
        "output_type": "latent",
    }

    def under(*mix: Strategy) -> float:
        with Mesh() as mesh, parallelize(pipe, *mix, mesh=mesh) as plan:
            return step_seconds(lambda: generate(plan, **asked, generator=torch.Generator().manual_seed(0)), 1, 1)

    plain = step_seconds(lambda: pipe(**asked, generator=torch.Generator().manual_seed(0)), 1, 1)
    yield stated(f"seconds of {STEPS} steps", plain)
    faster = plain / under(StepCache(mask="01", warmup_steps=1, keep_last=False))
    yield at_least("StepCache that leaves out every second step: times as fast", faster, equipment.pick(1.4, None))
    yield stated("TimeParallel on one rank, by the pipeline alone", under(TimeParallel(window=4)) / plain)


@torch.inference_mode()
def calibration(equipment: Equipment) -> Iterator[Finding]:
    """Measures this machine with one rank as `partsong calibrate` does, and holds a step of Flux to its prediction."""
    measured = calibrate(1)
    yield stated("spread of measured by predicted steps", measured.spread)
    model, given = build(equipment), call(equipment)
    predicted = replay(trace_calls(model, (), 1, given), measured.machine(1)).steady
    ratio = step_seconds(lambda: model(**given)) / predicted
    check = "a step of Flux, measured by predicted"
    yield holds(check, 0.75 <= ratio <= 1.33, ratio, "0.75 to 1.33") if equipment.gpus else stated(check, ratio)
