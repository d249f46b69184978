"""Runs on every rank: denoisers whose layers are on several ranks, against the serial pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from diffusers import PyramidAttentionBroadcastConfig

from partsong import CfgParallel, LayerPipeline, StepCache, Ulysses
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize, predict_memory
from tests.parallel.families import FAMILIES, dit
from tests.parallel.patch_pipeline_worker import deep
from tests.parallel.pipelines import PIPES, STEPS
from tests.parallel.ranks import error, gathered, on_first, refusal, staying_connected
from tests.parallel.unets import UNETS

#: How many pictures each pipeline makes.
PICTURES = {"DiT": 1, "PixArt": 2, "SD3": 1, "Flux": 3, "Wan": 1}
#: Layers that the pipeline itself leaves out in some calls, the second stage's first one among them.
SKIPPED = {"skip_guidance_layers": [1, 2], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}


def held(model: Any) -> int:
    """Bytes of the weights that are here."""
    return sum(weight.nbytes for weight in model.parameters())


def case(mesh: Mesh, name: str, *strategies: Strategy, **more: Any) -> dict[str, Any]:
    """Generations with the layers shared out, and one after that."""
    pipe, pictures = deep(name), PICTURES[name]
    want = on_first(lambda: PIPES[name].call(pipe, batch=pictures, **more))
    weights, whole = [*pipe.transformer.parameters()], held(pipe.transformer)
    with parallelize(pipe, *strategies, mesh=mesh) as plan:
        share = held(pipe.transformer)
        got = PIPES[name].call(pipe, batch=pictures, **more)
        with Ledger(flops=False) as ledger:
            again = PIPES[name].call(pipe, batch=pictures, **more)
        explained = plan.explain()
    sent = [int(record["bytes_sent"]) for record in ledger.records]
    return {
        "error": max(error(got, want), error(again, want)),
        "total": (int(ledger.summary()["bytes_sent"]), explained.bytes_total()[mesh.rank]),
        "by step": (sent[1:STEPS], [row[mesh.rank] for row in explained.bytes_by_step][1:]),
        "explained": str(explained),
        "share": share / whole,
        "restored": all(one is two for one, two in zip(weights, pipe.transformer.parameters(), strict=True)),
        "after": error(PIPES[name].call(pipe, batch=pictures, **more), want),
    }


def cases(nproc: int) -> dict[str, Callable[[Mesh], Any]]:
    """What runs on so many ranks."""
    every: dict[str, Callable[[Mesh], Any]] = {}
    for name in PICTURES:
        every[name] = lambda mesh, name=name: case(mesh, name, LayerPipeline())
    if nproc == 2:
        every["SD3, uneven"] = lambda mesh: case(mesh, "SD3", LayerPipeline(layers=(3, 1)))
        every["SD3, skipped layers"] = lambda mesh: case(mesh, "SD3", LayerPipeline(), **SKIPPED)
        every["memory"] = memory
        every["in flight"] = in_flight
    return every


@staying_connected
def run(nproc: int, labels: list[str]) -> dict[str, list[Any]]:
    """Some cases: what each rank measured."""
    torch.set_num_threads(1)
    with Mesh(pipe=nproc, timeout=60.0) as mesh:
        results = {label: gathered(cases(nproc)[label](mesh)) for label in labels}
    if nproc == 4:
        both = (CfgParallel(degree=2), LayerPipeline(degree=2))
        with Mesh(**mesh_for(both, nproc)) as mesh:
            results |= {f"{name} x CfgParallel": gathered(case(mesh, name, *both)) for name in ("Wan", "PixArt")}
    return results


def memory(mesh: Mesh) -> tuple[int, int]:
    """Bytes of the weights on this rank, and predicted."""
    model, named = FAMILIES["Flux"].model(8, torch.float32), FAMILIES["Flux"].call(8, 2, torch.float32)
    with parallelize(model, LayerPipeline(), mesh=mesh):
        share = held(model)
    return share, predict_memory(model, LayerPipeline(), ranks=2, rank=mesh.rank, **named).weights


@torch.no_grad()
def in_flight(mesh: Mesh) -> float:
    """Lets the second stage finish the first sample only once the first stage has begun the second one."""
    model, named = FAMILIES["DiT"].model(8, torch.float64), FAMILIES["DiT"].call(8, 2, torch.float64)
    want, begun = model(**named).sample, []

    def tell(*call: Any) -> None:
        begun.append(torch.ones(1))
        if len(begun) == 2:
            dist.send(begun[1], 1, tag=1)

    def listen(*call: Any) -> None:
        begun.append(torch.zeros(1))
        if len(begun) == 1:
            dist.recv(begun[0], 0, tag=1)

    with parallelize(model, LayerPipeline(), mesh=mesh):
        layer = model.transformer_blocks[-mesh.rank].attn1  # of the first block in the first stage, or the last one
        hook = layer.register_forward_pre_hook(listen if mesh.rank else tell)
        got = model(**named).sample
        hook.remove()
    assert len(begun) == 2, "each stage has each sample once"
    return error(got, want)


@staying_connected
def refusals() -> dict[str, list[str]]:
    """What is refused, on every rank."""
    torch.set_num_threads(1)
    sd3, unet = deep("SD3"), UNETS["SD"].model(torch.float64)
    skipping = FAMILIES["HunyuanDiT"].model(8, torch.float64)
    cached = deep("Flux")
    with Mesh(pipe=2) as mesh:

        def put(target: Any, *strategies: Strategy) -> Callable[[], Any]:
            return lambda: parallelize(target, *strategies, mesh=mesh)

        def caches() -> None:
            with parallelize(cached, LayerPipeline(), mesh=mesh):
                config: Any = PyramidAttentionBroadcastConfig(spatial_attention_block_skip_range=2)
                cached.transformer.enable_cache(config)

        asked = {
            "UNet": put(unet, LayerPipeline()),
            "long skips": put(skipping, LayerPipeline()),
            "few blocks": put(dit(8, num_layers=1), LayerPipeline()),
            "wrong layers": put(sd3, LayerPipeline(layers=(2, 3))),
            "StepCache": put(sd3, LayerPipeline(), StepCache()),
            "Ulysses": put(sd3, LayerPipeline(), Ulysses(degree=1)),
            "cache of diffusers": caches,
        }
        return {name: gathered(refusal(act)) for name, act in asked.items()}
