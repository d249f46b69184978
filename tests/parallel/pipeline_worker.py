"""Runs on every rank: real pipelines under each strategy, against the serial pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers import FlowMatchHeunDiscreteScheduler
from torch import nn

from partsong import CfgParallel, DataParallel, DisplacedPatch, Ring, Ulysses, Usp
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from tests.parallel.families import FAMILIES
from tests.parallel.pipelines import PIPES, STEPS, Pipe
from tests.parallel.ranks import error, gathered, staying_connected

ODD, EVEN = (48, 80), (64, 64)
DTYPES = {"float64": torch.float64, "float32": torch.float32}
#: What a case is made of: number of ranks, strategies, pipeline and type. Each draws pictures of both sizes.
Key = tuple[int, str, str, str]


def strategies(nproc: int) -> dict[str, tuple[Strategy, ...]]:
    cases: dict[str, tuple[Strategy, ...]] = {
        "CfgParallel": (CfgParallel(),),
        "DataParallel": (DataParallel(),),
        "Ulysses": (Ulysses(),),
        "Ring": (Ring(),),
        "Usp": (Usp(),),
        "DisplacedPatch": (DisplacedPatch(warmup_steps=STEPS),),
    }
    if nproc == 4:
        cases["CfgParallel x Ulysses"] = (CfgParallel(), Ulysses())
        cases["CfgParallel x DisplacedPatch"] = (CfgParallel(degree=2), DisplacedPatch(degree=2, warmup_steps=STEPS))
    return cases


def footprint(pipe: Any) -> dict[str, Any]:
    """What hooks could leave behind: the names on every module, and what the scheduler and the pipeline carry."""
    modules = {
        f"{part}.{name}": sorted(vars(child))
        for part in ("transformer", "vae")
        for name, child in getattr(pipe, part).named_modules()
    }
    return {"modules": modules, "scheduler": sorted(vars(pipe.scheduler)), "pipe": sorted(vars(pipe))}


def clean(module: nn.Module) -> bool:
    return not any({"forward", "_diffusers_hook"} & vars(child).keys() for child in module.modules())


@functools.cache
def serial(pipe_of: Pipe, batch: int, dtype: torch.dtype) -> tuple[Any, list[torch.Tensor]]:
    """A pipeline and its pictures of both sizes; every strategy takes it over as the one before left it."""
    pipe = pipe_of.make(dtype)
    return pipe, [pipe_of.call(pipe, batch, size) for size in (EVEN, ODD)]


def case(pipe_of: Pipe, batch: int, dtype: torch.dtype, chosen: tuple[Strategy, ...], mesh: Mesh) -> dict[str, Any]:
    """Two sizes in a row under one plan, then the pipeline without it."""
    pipe, want = serial(pipe_of, batch, dtype)
    before = footprint(pipe)
    plan = parallelize(pipe, *chosen, mesh=mesh)
    got = [pipe_of.call(pipe, batch, EVEN)]
    with Ledger(flops=False) as ledger:
        got.append(pipe_of.call(pipe, batch, ODD))
        predicted = plan.explain().bytes_total()
    plan.undo()
    rows = gathered(
        {
            "error": max(error(g, w) for g, w in zip(got, want, strict=True)),
            "sent": int(ledger.summary()["bytes_sent"]),
            "records": sum("note" not in record for record in ledger.records),
            "restored": torch.equal(pipe_of.call(pipe, batch, ODD), want[1]),
            "left": footprint(pipe)["scheduler"] == before["scheduler"] and footprint(pipe)["pipe"] == before["pipe"],
            "clean": clean(pipe.transformer) and clean(pipe.vae) if pipe_of.calls == 1 else not _forwards(pipe),
        }
    )
    return {"rows": rows, "predicted": predicted}


def _forwards(pipe: Any) -> bool:
    # Pipelines that name their calls (cache_context) leave a registry of their own behind; a forward they do not.
    return any("forward" in vars(child) for child in pipe.transformer.modules())


@staying_connected
def matrix(nproc: int, keys: list[Key]) -> dict[Key, dict[str, Any]]:
    """These cases, which are all on the ranks of this process."""
    results = {}
    for label, chosen in strategies(nproc).items():
        if not (some := [key for key in keys if key[1] == label]):
            continue
        with Mesh(**mesh_for(chosen, nproc)) as mesh:
            for key in some:
                batch = 3 if label == "DataParallel" else 1
                results[key] = case(PIPES[key[2]], batch, DTYPES[key[3]], chosen, mesh)
    return results


# --- single scenarios on two ranks -----------------------------------------------------------------------------------


def other_arguments(mesh: Mesh, **by_rank: Any) -> Any:
    pipe = PIPES["SD3"].make()
    mine = {name: values[mesh.rank] for name, values in by_rank.items()}
    with parallelize(pipe, Ulysses(), mesh=mesh):
        return PIPES["SD3"].call(pipe, **mine)


def other_prompt(mesh: Mesh) -> Any:
    torch.manual_seed(1)
    return other_arguments(mesh, prompt_embeds=[torch.randn(1, 7, 12).double(), torch.randn(1, 7, 12).double()])


def other_length(mesh: Mesh) -> Any:
    long, short = torch.ones(1, 9, 12).double(), torch.ones(1, 7, 12).double()
    return other_arguments(mesh, prompt_embeds=[long, short], negative_prompt_embeds=[long, short])


def other_size(mesh: Mesh) -> Any:
    return other_arguments(mesh, height=[48, 64])


def larger_size(mesh: Mesh) -> Any:
    return other_arguments(mesh, height=[64, 48])


def other_guidance(mesh: Mesh) -> Any:
    return other_arguments(mesh, guidance_scale=[3.0, 4.0])


def two_plans(mesh: Mesh) -> Any:
    pipe = PIPES["SD3"].make()
    with parallelize(pipe, Ulysses(), mesh=mesh):
        parallelize(pipe, Ulysses(), mesh=mesh)
    return "accepted"


def two_plans_first_survives(mesh: Mesh) -> Any:
    pipe = PIPES["SD3"].make()
    want = PIPES["SD3"].call(pipe)
    with parallelize(pipe, Ulysses(), mesh=mesh):
        try:
            parallelize(pipe, Ulysses(), mesh=mesh)
        except ValueError:
            pass
        with Ledger() as ledger:
            got = PIPES["SD3"].call(pipe)
    return error(got, want), ledger.summary()["bytes_sent"] > 0, clean(pipe.transformer)


def unknown(mesh: Mesh) -> Any:
    return parallelize(nn.Linear(2, 2), Ulysses(), mesh=mesh)


def control_residual(mesh: Mesh) -> Any:
    """A residual for 11 tokens where the picture has 12."""
    model, named = FAMILIES["SD3"].model(6, torch.float32), FAMILIES["SD3"].call(6, 1, torch.float32)
    with parallelize(model, Ulysses(), mesh=mesh), torch.no_grad():
        return model(**named, block_controlnet_hidden_states=[torch.zeros(1, 11, 24)])


def refused_argument(mesh: Mesh) -> Any:
    model, named = FAMILIES["Flux2"].model(6, torch.float32), FAMILIES["Flux2"].call(6, 1, torch.float32)
    with parallelize(model, Ulysses(), mesh=mesh), torch.no_grad():
        return model(**named, kv_cache_mode="cached")


class Einsum:
    """An attention processor that computes attention without torch's function for it."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        q, k, v = (f(hidden_states).unflatten(2, (attn.heads, -1)) for f in (attn.to_q, attn.to_k, attn.to_v))
        weights = torch.einsum("blhd,bmhd->bhlm", q, k).softmax(-1)
        return attn.to_out[0](torch.einsum("bhlm,bmhd->blhd", weights, v).flatten(2))


class Causal:
    """An attention processor that looks back only."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        q, k, v = (
            f(hidden_states).unflatten(2, (attn.heads, -1)).transpose(1, 2) for f in (attn.to_q, attn.to_k, attn.to_v)
        )
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attn.to_out[0](out.transpose(1, 2).flatten(2))


def processor(mesh: Mesh, made: Any) -> Any:
    model, named = FAMILIES["DiT"].model(6, torch.float32), FAMILIES["DiT"].call(6, 1, torch.float32)
    for block in model.transformer_blocks:
        block.attn1.set_processor(made)
    with parallelize(model, Ulysses(), mesh=mesh), torch.no_grad():
        return model(**named)


def few_tokens(mesh: Mesh) -> Any:
    model, named = FAMILIES["DiT"].model(2, torch.float32), FAMILIES["DiT"].call(2, 1, torch.float32)
    with parallelize(model, Ring(), mesh=mesh), torch.no_grad():
        return model(**named)


def changed_prompt(mesh: Mesh, name: str, strategy: Strategy) -> Any:
    """The negative prompt (Wan) or the latents and the prompt (Flux) change after the second of four steps."""
    pipe_of, pipe = PIPES[name], PIPES[name].make()
    changed = "negative_prompt_embeds" if name == "Wan" else "prompt_embeds"

    def change(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {changed: tensors[changed] * 0.5, "latents": tensors["latents"] * 1.1} if step == 1 else tensors

    more = {
        "num_inference_steps": 4,
        "callback_on_step_end": change,
        "callback_on_step_end_tensor_inputs": [changed, "latents"],
    }
    want = pipe_of.call(pipe, **more)
    plain = pipe_of.call(pipe, num_inference_steps=4)
    with parallelize(pipe, strategy, mesh=mesh):
        got = pipe_of.call(pipe, **more)
    return error(got, want), error(plain, want)


def changed_in_the_last_step(mesh: Mesh) -> Any:
    """A negative prompt that is a new tensor in every step, and another one in the last of five."""

    def change(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        prompt = tensors["negative_prompt_embeds"]
        return {"negative_prompt_embeds": prompt * 0.5 if step == 3 else prompt.clone()}

    more = {"callback_on_step_end": change, "callback_on_step_end_tensor_inputs": ["negative_prompt_embeds"]}
    plan = parallelize(pipe := PIPES["Wan"].make(), CfgParallel(), mesh=mesh)
    try:  # the call itself has to say it: undoing the plan would be too late
        return PIPES["Wan"].call(pipe, num_inference_steps=5, **more)
    finally:
        plan.abandon()


def diverging(mesh: Mesh) -> Any:
    """A callback that changes the latents after the third of five steps, and on one rank only."""

    def change(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"latents": tensors["latents"] * 1.1} if step == 2 and mesh.rank == 1 else tensors

    with parallelize(pipe := PIPES["SD3"].make(), Ulysses(), mesh=mesh):
        return PIPES["SD3"].call(pipe, num_inference_steps=5, callback_on_step_end=change)


def second_order(mesh: Mesh, name: str, strategy: Strategy) -> Any:
    """Two model evaluations per step of the sampler; the error and how often the scheduler's step was called."""
    pipe_of, pipe = PIPES[name], PIPES[name].make()
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    want = pipe_of.call(pipe)
    with parallelize(pipe, strategy, mesh=mesh) as plan:
        got = pipe_of.call(pipe)
        calls = plan.clock.step
    return error(got, want), calls


SCENARIOS: Mapping[str, Callable[[Mesh], Any]] = {
    "other prompt": other_prompt,
    "other length": other_length,
    "other size": other_size,
    "larger size": larger_size,
    "other guidance": other_guidance,
    "diverging callback": diverging,
    "two plans": two_plans,
    "two plans, first survives": two_plans_first_survives,
    "unknown model": unknown,
    "ControlNet": control_residual,
    "refused argument": refused_argument,
    "einsum processor": lambda mesh: processor(mesh, Einsum()),
    "causal processor": lambda mesh: processor(mesh, Causal()),
    "few tokens": few_tokens,
    "changed in the last step": changed_in_the_last_step,
    "changed prompt Flux cfg": lambda mesh: changed_prompt(mesh, "Flux", CfgParallel()),
    "changed prompt Wan cfg": lambda mesh: changed_prompt(mesh, "Wan", CfgParallel()),
    "Heun cfg": lambda mesh: second_order(mesh, "Wan", CfgParallel()),
    "Heun displaced": lambda mesh: second_order(mesh, "SD3", DisplacedPatch(warmup_steps=99)),
}
AXIS = {
    "changed prompt Flux cfg": "cfg",
    "changed prompt Wan cfg": "cfg",
    "Heun cfg": "cfg",
    "few tokens": "ring",
    "changed in the last step": "cfg",
    "Heun displaced": "patch",
}


@staying_connected
def scenarios() -> dict[str, list[Any]]:
    """Every scenario on two ranks: what each rank got, or the error it was given."""
    results = {}
    for name, scenario in SCENARIOS.items():
        with Mesh(timeout=20.0, **{AXIS.get(name, "ulysses"): 2}) as mesh:
            try:
                value = scenario(mesh)
            except Exception as problem:  # noqa: BLE001 - the test reads which one it was
                value = f"{type(problem).__name__}: {problem}"
            results[name] = gathered(value if not isinstance(value, torch.Tensor) else "a picture")
    return results
