"""Runs on every rank: PatchPipeline against serial pipelines, and after its warm-up against its definition.

The definition: patches of a step come one after another. Each attends to the keys and values of the whole picture,
fresh for the patches up to its own, those of the step before for the ones that follow.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchHeunDiscreteScheduler,
)
from torch import Tensor, nn

from partsong import CfgParallel, PatchPipeline
from partsong.errors import DistributedError
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, parallelize
from partsong.samplers import generate
from tests.parallel.patch_models_worker import Still
from tests.parallel.pipeline_worker import clean, footprint
from tests.parallel.pipelines import PIPES, STEPS
from tests.parallel.ranks import error, gathered, on_first
from tests.tiny_models.weights import randomize

SIZE = (48, 80)  # 15 tokens of the picture, 9 for DiT, 7 of the text: no number of patches below divides them all
PIPELINES = ("DiT", "PixArt", "SD3", "Flux")


def sample(plan: Any, name: str, seed: int | None = 9, **more: Any) -> Tensor:
    """One generation through the plan."""
    named = PIPES[name].arguments(1, plan.target.transformer.dtype, SIZE) | {"num_inference_steps": STEPS, **more}
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    output = generate(plan, **named, generator=generator)
    return torch.as_tensor(next(iter(output.values())))


def deep(name: str) -> Any:
    """The pipeline with at least four blocks, so that every rank has one."""
    pipe = PIPES[name].make()
    model = pipe.transformer
    for key, count in {"num_layers": 4, "num_single_layers": 2}.items():
        if key in model.config:
            model = type(model)(**{**model.config, key: count})
    torch.manual_seed(11)
    randomize(model)
    pipe.transformer = model.double().eval()
    return pipe


def leftovers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "partsong-paused-call"]


# --- exact: warm-up to the end, and stale where nothing moves ---------------------------------------------------------


def exact(mesh: Mesh, name: str, patches: int | None, warmup: int = STEPS) -> dict[str, Any]:
    """A generation under a plan; on two ranks also a second one, and then the pipeline without it."""
    pipe = deep(name)
    want = PIPES[name].call(pipe, size=SIZE)
    before = footprint(pipe)
    with parallelize(pipe, PatchPipeline(num_patches=patches, warmup_steps=warmup), mesh=mesh) as plan:
        first = sample(plan, name) if mesh.world_size == 2 else want
        with Ledger(flops=False) as ledger:
            second = sample(plan, name)
        explained = plan.explain()
        predicted = (explained.bytes_total()[mesh.rank], [row[mesh.rank] for row in explained.bytes_by_step])
    after = footprint(pipe)
    sent = [int(record["bytes_sent"]) for record in ledger.records]
    return {
        "error": max(error(second, want), error(first, want) if warmup == STEPS else error(second, first)),
        "total": (int(ledger.summary()["bytes_sent"]), predicted[0]),
        # What is sent once, before the first step, is in the first record.
        "by step": (sent[1:], predicted[1][1:]),
        "restored": mesh.world_size > 2 or torch.equal(PIPES[name].call(pipe, size=SIZE), want),
        "clean": clean(pipe.vae) and before["scheduler"] == after["scheduler"] and before["pipe"] == after["pipe"],
        "threads": leftovers(),
    }


def still(mesh: Mesh, name: str, patches: int) -> float:
    """Every step at the same time and without a change: stale keys are then fresh ones, and the patches must fit."""
    pipe = deep(name)
    pipe.scheduler = Still()
    want = PIPES[name].call(pipe, size=SIZE)
    with parallelize(pipe, PatchPipeline(num_patches=patches), mesh=mesh) as plan:
        return error(sample(plan, name), want)


# --- after the warm-up, against the definition ------------------------------------------------------------------------


class Simulated:
    """A DiT block's self-attention over patches in sequence, with full-length tensors and dense weights.

    Knows nothing of ranks or messages: `patch` says which queries are computed, None all of them.
    """

    def __init__(self) -> None:
        self.patch: Tensor | None = None
        self.known: dict[int, Tensor] = {}

    def __call__(self, attn: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        q, k, v = (f(hidden_states).unflatten(2, (attn.heads, -1)) for f in (attn.to_q, attn.to_k, attn.to_v))
        fresh = torch.stack((k, v))
        if self.patch is not None:
            fresh = torch.where(self.patch[None, None, :, None, None], fresh, self.known[id(attn)])
        self.known[id(attn)] = fresh
        k, v = fresh
        weights = (torch.einsum("blhd,bmhd->bhlm", q, k) * q.shape[-1] ** -0.5).softmax(-1)
        return attn.to_out[0](torch.einsum("bhlm,bmhd->blhd", weights, v).flatten(2))


def simulate(steps: int, patches: int, warmup: int) -> Tensor:
    """The DiT pipeline's latents, written out: DDIM, guidance over a batch of two, patches one after another."""
    pipe = deep("DiT")
    model, scheduler = pipe.transformer, DDIMScheduler()
    attention = Simulated()
    for block in model.transformer_blocks:
        block.attn1.set_processor(attention)
    side = model.config.sample_size
    tokens = (side // 2) ** 2
    owner = torch.cat([torch.full((len(run),), p) for p, run in enumerate(torch.arange(tokens).tensor_split(patches))])
    pixels = owner.view(side // 2, side // 2).repeat_interleave(2, 0).repeat_interleave(2, 1)
    latents = torch.randn(1, 4, side, side, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    scheduler.set_timesteps(steps)
    for step, time in enumerate(scheduler.timesteps):
        noise = torch.zeros_like(latents)
        for patch in [None] if step < warmup else range(patches):
            attention.patch = None if patch is None else owner == patch
            both = model(torch.cat([latents] * 2), timestep=time.expand(2), class_labels=torch.tensor([1, 1000])).sample
            guided = both[1:] + 4.0 * (both[:1] - both[1:])
            noise = guided if patch is None else torch.where(pixels == patch, guided, noise)
        latents = scheduler.step(noise, time, latents, return_dict=False)[0]
    return latents / pipe.vae.config.scaling_factor


def defined(mesh: Mesh, patches: int, warmup: int) -> tuple[float, float]:
    """The distance from the definition, and from the serial pipeline."""
    pipe = deep("DiT")
    steps, decoded, decode = 5, list[Tensor](), pipe.vae.decode
    # DiTPipeline has no output_type="latent", and before diffusers 0.41 gives pictures of float32 only.
    pipe.vae.decode = lambda latents, *args, **named: decoded.append(latents) or decode(latents, *args, **named)
    with parallelize(pipe, PatchPipeline(num_patches=patches, warmup_steps=warmup), mesh=mesh) as plan, torch.no_grad():
        sample(plan, "DiT", num_inference_steps=steps)
        wanted, serial = on_first(lambda: (simulate(steps, patches, warmup), simulate(steps, 1, steps)))
        (got,) = decoded
        return error(got, wanted), error(got, serial)


# --- cases by number of ranks -----------------------------------------------------------------------------------------


def cases(nproc: int) -> dict[str, Callable[[Mesh], Any]]:
    """Two ranks get every case, more ranks those that depend on their number."""
    found: dict[str, Callable[[Mesh], Any]] = {}
    for name in PIPELINES:
        found[f"exact {name}"] = lambda mesh, n=name: exact(mesh, n, None)
    for name in PIPELINES if nproc == 2 else ("SD3",):
        found[f"exact {name}, many patches"] = lambda mesh, n=name: exact(mesh, n, nproc + 3)
        found[f"stale {name}"] = lambda mesh, n=name: exact(mesh, n, None, warmup=1)
        found[f"still {name}"] = lambda mesh, n=name: still(mesh, n, 3)
    for patches, warmup in ((nproc, 1), (5, 2), (9, 1)):
        found[f"defined {patches} {warmup}"] = lambda mesh, p=patches, w=warmup: defined(mesh, p, w)
    return found


def run(nproc: int, labels: list[str]) -> dict[str, list[Any]]:
    """Some cases: what each rank measured."""
    torch.set_num_threads(1)
    with Mesh(pipe=nproc) as mesh:
        return {label: gathered(cases(nproc)[label](mesh)) for label in labels}


# --- single scenarios on two ranks ------------------------------------------------------------------------------------


def apart(mesh: Mesh, name: str, strategy: Strategy, scheduler: Any = None, **more: Any) -> Any:
    """The distance from the serial pipeline, without a generator: every rank's default one stands elsewhere."""
    pipe = deep(name)
    pipe.scheduler = scheduler or pipe.scheduler
    torch.manual_seed(100)
    want, state = PIPES[name].call(pipe, size=SIZE, seed=None, **more), torch.get_rng_state()
    torch.manual_seed(100 + mesh.rank)
    with parallelize(pipe, strategy, mesh=mesh) as plan:
        got = sample(plan, name, seed=None, **more)
    return error(got, want), torch.equal(torch.get_rng_state(), state), leftovers()


def refused(mesh: Mesh, name: str, strategy: Strategy | None = None, scheduler: Any = None, **more: Any) -> Any:
    pipe = deep(name)
    pipe.scheduler = scheduler or pipe.scheduler
    mine = {
        key: value[mesh.rank] if isinstance(value, list) and len(value) == 2 else value for key, value in more.items()
    }
    with parallelize(pipe, strategy or PatchPipeline(), mesh=mesh) as plan:
        return sample(plan, name, **mine)


def direct(mesh: Mesh, name: str) -> Any:
    pipe = deep(name)
    with parallelize(pipe, PatchPipeline(), mesh=mesh):
        return PIPES[name].call(pipe)


def bare(mesh: Mesh) -> Any:
    return parallelize(deep("SD3").transformer, PatchPipeline(), mesh=mesh)


def composed(mesh: Mesh) -> Any:
    return parallelize(deep("SD3"), PatchPipeline(), CfgParallel(), mesh=mesh)


def prompts() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(1, 7, 12).double(), torch.randn(1, 7, 12).double()]


FULL = PatchPipeline(warmup_steps=99)
SCENARIOS: Mapping[str, Callable[[Mesh], Any]] = {
    "Heun": lambda mesh: apart(mesh, "SD3", FULL, FlowMatchHeunDiscreteScheduler()),
    "noise in every step": lambda mesh: apart(mesh, "DiT", FULL, DDPMScheduler()),
    "one patch": lambda mesh: apart(mesh, "Flux", PatchPipeline(num_patches=1)),
    "uneven stages": lambda mesh: apart(mesh, "SD3", PatchPipeline(warmup_steps=3, layers=(1, 3))),
    "thresholding": lambda mesh: refused(
        mesh, "PixArt", None, DPMSolverMultistepScheduler(thresholding=True, sample_max_value=9.0)
    ),
    "callback": lambda mesh: refused(mesh, "SD3", callback_on_step_end=print),
    "few tokens": lambda mesh: refused(mesh, "DiT", PatchPipeline(num_patches=10)),
    "wrong stages": lambda mesh: refused(mesh, "DiT", PatchPipeline(layers=(1, 1))),
    "left out blocks": lambda mesh: refused(
        mesh, "SD3", skip_guidance_layers=[0], skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0
    ),
    "other prompt": lambda mesh: refused(mesh, "SD3", prompt_embeds=prompts()),
    "plain call SD3": lambda mesh: direct(mesh, "SD3"),
    "plain call DiT": lambda mesh: direct(mesh, "DiT"),
    "bare model": bare,
    "composed": composed,
}


def scenarios() -> dict[str, list[Any]]:
    """Every scenario: what each rank got, or the error it was given."""
    torch.set_num_threads(1)
    results = {}
    with Mesh(pipe=2, timeout=20.0) as mesh:
        for name, scenario in SCENARIOS.items():
            try:
                value = scenario(mesh)
            except Exception as problem:  # noqa: BLE001 - the test reads which one it was
                value = f"{type(problem).__name__}: {problem}; threads left: {leftovers()}"
            results[name] = gathered(value if not isinstance(value, torch.Tensor) else "a picture")
    return results


def fail(how: str) -> str:
    """The second stage dies or raises in the second step; says what the first one was told."""
    torch.set_num_threads(1)
    with Mesh(pipe=2) as mesh:
        pipe = deep("SD3")
        block, calls = pipe.transformer.transformer_blocks[-1], []

        def strike(*_: Any) -> None:
            calls.append(1)
            if len(calls) > 2:
                if how == "dies":
                    os._exit(7)
                raise ZeroDivisionError("in the second stage")

        if mesh.rank == 1:
            block.register_forward_pre_hook(strike)
        try:
            with parallelize(pipe, PatchPipeline(), mesh=mesh) as plan:
                sample(plan, "SD3")
        except DistributedError as problem:
            raise RuntimeError(f"{problem}; threads left: {leftovers()}") from problem
    return "a picture"
