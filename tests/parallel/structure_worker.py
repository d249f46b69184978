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
from tests.pipelines.cases import CASES as OTHER_PIPES

STEPS = 4
#: Pixels: the tiny UNets were "trained" on 64 x 64; SD3 is told so, which is a latent of 8 x 8.
TRAINED, WIDE = (64, 64), (128, 96)


#: Pipelines of which `tests.pipelines` has a case.
OTHERS = {"Flux 2": "Flux2Pipeline", "Klein": "Flux2KleinPipeline", "Qwen": "QwenImagePipeline"}


def pipeline(name: str) -> Any:
    if name in OTHERS:
        pipe = OTHER_PIPES[OTHERS[name]].make()
        if hasattr(pipe.vae, "bn"):
            draw = torch.Generator().manual_seed(2)
            pipe.vae.bn.running_mean.copy_(torch.randn(16, generator=draw))
            pipe.vae.bn.running_var.copy_(torch.rand(16, generator=draw) + 0.5)
        return pipe
    pipe = PIPES[name].make() if name in PIPES else UNET_PIPES[name].make()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def named(name: str, size: tuple[int, int], steps: int = STEPS) -> dict[str, Any]:
    """A call with guidance, prompts as embeddings."""
    draw = torch.Generator().manual_seed(1)
    if name in OTHERS:
        given = OTHER_PIPES[OTHERS[name]].call(1)
    elif name == "SD3":
        given = pooled_call(1, torch.float64)
    elif name in PIPES:
        given = PIPES[name].arguments(1, torch.float64, size)
    else:
        width = {"prompt_embeds": (1, 5, WIDTH), "negative_prompt_embeds": (1, 5, WIDTH)}
        if name == "SDXL":
            width |= {"pooled_prompt_embeds": (1, 10), "negative_pooled_prompt_embeds": (1, 10)}
        given = {key: torch.randn(shape, generator=draw, dtype=torch.float64) for key, shape in width.items()}
    output_type = "latent" if name in OTHERS or name == "Flux" else "pt"
    return given | {"height": size[0], "width": size[1], "num_inference_steps": steps, "output_type": output_type}


def picture(output: Any) -> Tensor:
    return torch.as_tensor(next(iter(output.values())))


def sample(pipe: Any, mesh: Mesh, arguments: dict[str, Any], *more: Any, **knobs: Any) -> dict[str, Any]:
    """A generation under a plan: the picture, and the bytes counted and predicted, in all and by step."""
    strategy = StructureGuidance(**{"training_size": 64, **knobs})
    with parallelize(pipe, strategy, *more, mesh=mesh) as plan, Ledger(flops=False) as ledger:
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
    "PixArt": ("PixArt", {}),
    "Flux": ("Flux", {}),
    "Flux, attention": ("Flux", {"mask": "attention"}),
    "Flux 2": ("Flux 2", {"overlap": 0.0}),
    "Klein, prediction": ("Klein", {"guide": "prediction", "overlap": 0.0}),
    "Qwen": ("Qwen", {"mask": "attention", "overlap": 0.0}),
}


TRAINED_CASES = tuple(f"trained {name}" for name in ("SD", "SDXL", "SD3", "PixArt", "Flux", *OTHERS))


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


def defined(name: str) -> Tensor:
    """A picture at twice the size, written out: 3 x 3 patches of 8 x 6 latents, Euler steps, one guide a step old."""
    pipe, given = pipeline(name), named(name, WIDE)
    predict = {"SD3": predicted_at_once, "Flux": predicted_in_tokens}[name](pipe.transformer, given)
    scheduler: Any = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(
        **({"sigmas": [1.0, 0.75, 0.5, 0.25]} if name == "Flux" else {"num_inference_steps": STEPS})
    )
    large = torch.randn(1, 4, 16, 12, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    small = 2 * F.avg_pool2d(large, 2)
    before: Tensor | None = None
    # Where patches begin, and what they share with those before and after; packed ones begin with a token.
    columns = ((0, 0, 3), (3, 3, 3), (6, 3, 0)) if name == "SD3" else ((0, 0, 2), (4, 2, 4), (6, 4, 0))
    for step, time in enumerate(scheduler.timesteps):
        level, after = scheduler.sigmas[step], scheduler.sigmas[step + 1]
        velocity, weights = torch.zeros_like(large), torch.zeros_like(large)
        for top in (0, 4, 8):
            for left, before_it, after_it in columns:
                inside = (..., slice(top, top + 8), slice(left, left + 6))
                weight = ramp(8, 4 * (top > 0), 4 * (top < 8))[:, None] * ramp(6, before_it, after_it)
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
    if name == "Flux":
        return large
    scale, shift = pipe.vae.config.scaling_factor, pipe.vae.config.shift_factor
    return (pipe.vae.decode(large / scale + shift).sample / 2 + 0.5).clamp(0, 1).detach()


def ramp(size: int, before: int, after: int) -> Tensor:
    place = torch.arange(size, dtype=torch.float64) + 0.5
    up = (place / before).clamp(max=1) if before else torch.ones_like(place)
    return up * ((size - place) / after).clamp(max=1) if after else up


def predicted_at_once(model: Any, given: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """SD3's guided prediction."""
    texts = torch.cat([given["negative_prompt_embeds"], given["prompt_embeds"]])
    pooled = torch.cat([given["negative_pooled_prompt_embeds"], given["pooled_prompt_embeds"]])

    def predict(latents: Tensor, time: Tensor) -> Tensor:
        both = model(torch.cat([latents] * 2), texts, pooled, time.expand(2)).sample
        return both[:1] + 7.0 * (both[1:] - both[:1])

    return predict


def predicted_in_tokens(model: Any, given: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """Flux's guided prediction: two calls, with latents packed by hand."""

    def predict(latents: Tensor, time: Tensor) -> Tensor:
        rows, columns = latents.shape[2] // 2, latents.shape[3] // 2
        places = [(0.0, float(row), float(column)) for row in range(rows) for column in range(columns)]
        squares = [latents[:, :, 2 * int(r) : 2 * int(r) + 2, 2 * int(c) : 2 * int(c) + 2] for _, r, c in places]
        made = []
        for side in ("negative_", ""):
            tokens = model(
                hidden_states=torch.stack([square.flatten(1) for square in squares], dim=1),
                encoder_hidden_states=given[f"{side}prompt_embeds"],
                pooled_projections=given[f"{side}pooled_prompt_embeds"],
                timestep=time[None].double() / 1000,
                img_ids=torch.tensor(places, dtype=torch.float64),
                txt_ids=torch.zeros(7, 3, dtype=torch.float64),
            ).sample
            picture = torch.empty_like(latents)
            for token, (_, r, c) in zip(tokens.unbind(1), places, strict=True):
                picture[:, :, 2 * int(r) : 2 * int(r) + 2, 2 * int(c) : 2 * int(c) + 2] = token.view(1, 4, 2, 2)
            made.append(picture)
        return made[0] + 3.0 * (made[1] - made[0])

    return predict


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
    "model": lambda mesh: sample(pipeline("DiT"), mesh, {}),
    "bins": lambda mesh: refused(mesh, "PixArt", use_resolution_binning=True),
    "reference": lambda mesh: refused(mesh, "Flux 2", image=[object()]),
    "no start": lambda mesh: sample(pipeline("PixArt"), mesh, {}, mask="attention"),
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
