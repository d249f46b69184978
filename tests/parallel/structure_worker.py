"""Runs on every rank: StructureGuidance against the plain pipeline, and against its definition written out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from partsong import CfgParallel, ParallelVae, StructureGuidance
from partsong.ledger import Ledger
from partsong.parallel import Mesh, mesh_for, parallelize
from partsong.samplers import generate
from tests.parallel.pipeline_worker import clean
from tests.parallel.pipelines import PIPES, pooled_call
from tests.parallel.ranks import error
from tests.parallel.ranks import gathered as every
from tests.parallel.unets import UNET_PIPES, WIDTH

STEPS = 4
#: Pixels: the tiny UNets were "trained" on 64 x 64; SD3 is told so, which is a latent of 8 x 8.
TRAINED, WIDE = (64, 64), (128, 96)


def pipeline(name: str) -> Any:
    pipe = PIPES[name].make() if name in PIPES else UNET_PIPES[name].make()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def named(name: str, size: tuple[int, int], steps: int = STEPS) -> dict[str, Any]:
    """A call with guidance, prompts as embeddings."""
    draw = torch.Generator().manual_seed(1)
    if name in PIPES:
        given = pooled_call(1, torch.float64)
    else:
        width = {"prompt_embeds": (1, 5, WIDTH), "negative_prompt_embeds": (1, 5, WIDTH)}
        if name == "SDXL":
            width |= {"pooled_prompt_embeds": (1, 10), "negative_pooled_prompt_embeds": (1, 10)}
        given = {key: torch.randn(shape, generator=draw, dtype=torch.float64) for key, shape in width.items()}
    return given | {"height": size[0], "width": size[1], "num_inference_steps": steps, "output_type": "pt"}


def picture(output: Any) -> Tensor:
    return torch.as_tensor(next(iter(output.values())))


def sample(pipe: Any, mesh: Mesh, arguments: dict[str, Any], *more: Any, **knobs: Any) -> dict[str, Any]:
    """A generation under a plan: the picture, and the bytes counted and predicted, in all and by step."""
    strategy = StructureGuidance(**{"training_size": 64, **knobs})
    with parallelize(pipe, strategy, *more, mesh=mesh) as plan, Ledger() as ledger:
        got = picture(generate(plan, **arguments, generator=torch.Generator().manual_seed(9)))
        said = plan.explain()
    counted = [int(record["bytes_sent"]) for record in ledger.records]
    return {
        "picture": got,
        "total": (int(ledger.summary()["bytes_sent"]), said.bytes_total()[mesh.rank]),
        "by step": (counted[1:STEPS], [row[mesh.rank] for row in said.bytes_by_step][1:]),
        "forwards": int(ledger.summary()["forwards"]),
        "clean": all(clean(part) for part in (plan.denoisers[0].module, pipe.vae)),
    }


CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "SD": ("SD", {}),
    "SD, attention": ("SD", {"mask": "attention", "overlap": 0.0}),
    "SD, prediction": ("SD", {"guide": "prediction", "overlap": 0.0, "until": 0.6}),
    "SDXL": ("SDXL", {"overlap": 0.0, "until": 0.0}),
    "SD3": ("SD3", {"overlap": 0.0, "weight": 0.7, "power": 0.5}),
    "SD3, attention": ("SD3", {"mask": "attention", "overlap": 0.4}),
}


TRAINED_CASES = ("trained SD", "trained SDXL", "trained SD3")


def trained(mesh: Mesh, name: str) -> dict[str, Any]:
    """At the training size."""
    pipe = pipeline(name)
    arguments = named(name, TRAINED)
    want = picture(pipe(**arguments, generator=torch.Generator().manual_seed(9)))
    found = sample(pipe, mesh, arguments)
    return found | {"error": error(found.pop("picture"), want)}


def run(nproc: int, labels: list[str]) -> dict[str, list[Any]]:
    """Some cases, and one with its decoder cut, as every rank measured them."""
    torch.set_num_threads(1)
    found: dict[str, list[Any]] = {}
    gathered = every if nproc > 1 else lambda value: [value]
    with Mesh(patch=nproc) as mesh:
        for label in labels:
            if label in CASES:
                name, knobs = CASES[label]
                found[label] = gathered(sample(pipeline(name), mesh, named(name, WIDE), **knobs))
            else:
                found[label] = gathered(trained(mesh, label.removeprefix("trained ")))
    with Mesh(**mesh_for((StructureGuidance(), ParallelVae()), nproc)) as mesh:
        found["decoder"] = gathered(sample(pipeline("SD"), mesh, named("SD", WIDE), ParallelVae()))
    return found


# --- the definition ---------------------------------------------------------------------------------------------------


def defined() -> Tensor:
    """SD3 at twice the size, written out: 3 x 3 patches of 8 x 6 latents, Euler steps, one guide a step old."""
    pipe, given = pipeline("SD3"), named("SD3", WIDE)
    model = pipe.transformer
    scheduler: Any = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(STEPS)
    texts = torch.cat([given["negative_prompt_embeds"], given["prompt_embeds"]])
    pooled = torch.cat([given["negative_pooled_prompt_embeds"], given["pooled_prompt_embeds"]])

    def predict(latents: Tensor, time: Tensor) -> Tensor:
        both = model(torch.cat([latents] * 2), texts, pooled, time.expand(2)).sample
        return both[:1] + 7.0 * (both[1:] - both[:1])

    large = torch.randn(1, 4, 16, 12, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    small = 2 * F.avg_pool2d(large, 2)
    before: Tensor | None = None
    for step, time in enumerate(scheduler.timesteps):
        level, after = scheduler.sigmas[step], scheduler.sigmas[step + 1]
        velocity, weights = torch.zeros_like(large), torch.zeros_like(large)
        for top in (0, 4, 8):
            for left in (0, 3, 6):
                inside = (..., slice(top, top + 8), slice(left, left + 6))
                weight = ramp(8, 4, top > 0, top < 8)[:, None] * ramp(6, 3, left > 0, left < 6)
                velocity[inside] += weight * predict(large[inside], time)
                weights[inside] += weight
        velocity /= weights
        little = predict(small, time)
        noise = time.double() / 1000  # the level without the rounding of the scheduler's table
        guess = small - noise * little
        clean = large - noise * velocity
        guide = F.interpolate(guess if before is None else before, None, 2, "bilinear")
        clean = clean + max(0.0, (noise - 0.3) / 0.7) * (guide - clean)
        large = large + (after - level) * (large - clean) / noise
        small, before = small + (after - level) * little, guess
    scale, shift = pipe.vae.config.scaling_factor, pipe.vae.config.shift_factor
    return (pipe.vae.decode(large / scale + shift).sample / 2 + 0.5).clamp(0, 1).detach()


def ramp(size: int, shared: int, before: bool, after: bool) -> Tensor:
    place = torch.arange(size, dtype=torch.float64) + 0.5
    up = (place / shared).clamp(max=1) if before else torch.ones_like(place)
    return up * ((size - place) / shared).clamp(max=1) if after else up


# --- refusals ---------------------------------------------------------------------------------------------------------


def refused(mesh: Mesh, name: str, size: tuple[int, int] = WIDE, **more: Any) -> Any:
    return sample(pipeline(name), mesh, named(name, size) | more)


def direct(mesh: Mesh) -> Any:
    pipe = pipeline("SD")
    with parallelize(pipe, StructureGuidance(), mesh=mesh):
        return pipe(**named("SD", WIDE))


def other_scheduler(mesh: Mesh) -> Any:
    from diffusers import EDMEulerScheduler

    pipe = pipeline("SD")
    pipe.scheduler = EDMEulerScheduler()
    return sample(pipe, mesh, named("SD", WIDE))


SCENARIOS: Mapping[str, Callable[[Mesh], Any]] = {
    "callback": lambda mesh: refused(mesh, "SD", callback_on_step_end=print),
    "size": lambda mesh: refused(mesh, "SD3", (128, 80)),
    "scheduler": other_scheduler,
    "pipeline": lambda mesh: refused(mesh, "ControlNet", image=torch.zeros(1, 3, 64, 64).double()),
    "model": lambda mesh: sample(pipeline("Flux"), mesh, {}),
    "bare model": lambda mesh: parallelize(pipeline("SD").unet, StructureGuidance(), mesh=mesh),
    "composed": lambda mesh: parallelize(pipeline("SD"), StructureGuidance(), CfgParallel(), mesh=mesh),
    "plain call": direct,
}


def scenarios(nproc: int) -> dict[str, list[str]]:
    """Every scenario: the error each rank was given."""
    torch.set_num_threads(1)
    told = {}
    with Mesh(patch=nproc, timeout=20.0) as mesh:
        for name, scenario in SCENARIOS.items():
            try:
                said = f"{type(scenario(mesh)).__name__}"
            except Exception as problem:  # noqa: BLE001 - the test reads which one it was
                said = f"{type(problem).__name__}: {problem}"
            told[name] = every(said)
    return told
