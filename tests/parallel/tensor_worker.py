"""Runs on every rank: models whose layers are cut into columns, alone and beside other strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from partsong import CfgParallel, DisplacedPatch, Ring, TensorParallel, Ulysses
from partsong.errors import PartsongError
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.hooks.samples import sample_of
from partsong.parallel.ranks.sums import sum_over, sum_sends
from tests.parallel.families import FAMILIES
from tests.parallel.ranks import error, gathered, staying_connected
from tests.tiny_models.weights import randomize

SIDE, STEPS = 8, (900, 100)
#: Two streams and one; the same with fused projections; norms over the whole width; heads that share keys.
MODELS = ("Flux", "Flux fused", "SD3", "Wan", "Lumina2")
MIXES: dict[str, tuple[Strategy, ...]] = {
    "alone": (TensorParallel(),),
    "Ulysses": (Ulysses(degree=2), TensorParallel(degree=2)),
    "Ring": (TensorParallel(degree=2), Ring()),
    "CfgParallel": (CfgParallel(), TensorParallel(degree=2)),
    "DisplacedPatch": (DisplacedPatch(degree=2, warmup_steps=len(STEPS)), TensorParallel(degree=2)),
}


def build(name: str, heads: int = 4) -> Any:
    """A tiny model with so many heads."""
    family = FAMILIES[name.removesuffix(" fused")]
    kind = family.build(SIDE)
    config = {**kind.config, "num_attention_heads": heads}
    if name == "Lumina2":  # two heads read the same keys
        width = kind.config["hidden_size"] // kind.config["num_attention_heads"]
        config |= {"num_attention_heads": 2 * heads, "num_kv_heads": heads, "hidden_size": 2 * heads * width}
    if name == "SD3":
        config |= {"caption_projection_dim": heads * config["attention_head_dim"]}
    torch.manual_seed(11)
    model = type(kind).from_config(config).eval().to(torch.float64)
    randomize(model)
    if name.endswith("fused"):
        model.fuse_qkv_projections()
    return model


def calls(name: str, batch: int = 2) -> list[dict[str, Any]]:
    """The inputs of two steps."""
    family = FAMILIES[name.removesuffix(" fused")]
    named = family.call(SIDE, batch, torch.float64)
    return [family.at(named, time) for time in STEPS]


def _held(weight: Any) -> Any:
    """What of a weight is in this rank's memory."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def outcome(name: str, strategies: tuple[Strategy, ...], mesh: Mesh) -> dict[str, Any]:
    """How far a mix is from one rank, and what it sent."""
    model = build(name)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        want = [sample_of(model(**call)) for call in calls(name)]
        with parallelize(model, *strategies, mesh=mesh) as plan, Ledger(flops=False) as ledger:
            got = [sample_of(model(**call)) for call in calls(name)]
            explained = plan.explain()
            predicted, steps, said = explained.bytes_total(), explained.bytes_by_step, str(explained)
            held = sum(_held(parameter).numel() for parameter in model.parameters())
        after = sample_of(model(**calls(name)[0]))
    return {
        "error": max(error(g, w) for g, w in zip(got, want, strict=True)),
        "counted": int(ledger.summary()["bytes_sent"]),
        "predicted": predicted,
        "steps": steps,
        "held": held / sum(parameter.numel() for parameter in weights.values()),
        "same weights": all(weights[name] is now for name, now in model.named_parameters()),
        "same answer": torch.equal(after, want[0]),
        "said": said,
    }


@staying_connected
def mixes(
    nproc: int, tried: Mapping[str, tuple[Strategy, ...]], cases: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Models with a mix each, on each rank."""
    results = {}
    for mix, strategies in tried.items():
        with Mesh(**mesh_for(strategies, nproc)) as mesh:
            mesh.axis(*mesh.degrees)
            for name in (name for name, other in cases if other == mix):
                results[name, mix] = gathered(outcome(name, strategies, mesh))
    return results


def uneven(nproc: int) -> list[dict[str, Any]]:
    """Four heads on three ranks."""
    with Mesh(tensor=nproc) as mesh:
        return gathered(outcome("SD3", (TensorParallel(),), mesh))


def moved(nproc: int) -> list[dict[str, Any]]:
    """Weights that are cast under a plan: the shares are cast, and the whole ones once they are back."""
    with Mesh(tensor=nproc) as mesh, torch.no_grad():
        model = build("SD3")
        with parallelize(model, TensorParallel(), mesh=mesh):
            model.float()
            cut = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        types = {parameter.dtype for parameter in model.parameters()}
        whole = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        return gathered({"types": types, "cut": cut, "whole": whole})


def refusals(nproc: int) -> dict[str, list[str]]:
    """What is said of mixes that cannot be."""
    said = {}
    for label, (heads, strategies) in {
        "heads": (nproc - 1, (TensorParallel(),)),
        "tokens": (3, (TensorParallel(degree=2), Ulysses(degree=nproc // 2))),
    }.items():
        with Mesh(**mesh_for(strategies, nproc)) as mesh:
            model = build("SD3", heads)
            try:
                with parallelize(model, *strategies, mesh=mesh):
                    text = "ran"
            except PartsongError as problem:
                text = str(problem)
            hooked = any("forward" in vars(module) for module in model.modules())
            said[label] = gathered(text + " and left hooks" * hooked)
    return said


def sums(nproc: int) -> list[dict[str, Any]]:
    """Sums of numbers that no order of addition keeps, on each rank."""
    with Mesh(tensor=nproc) as mesh:
        axis, results = mesh.axis("tensor"), {}
        for numel in (1, 7, 64):
            parts = (
                torch.randn(nproc, numel, generator=torch.Generator().manual_seed(3))
                * 10.0 ** torch.arange(nproc)[:, None]
            )
            with Ledger() as ledger:
                total = sum_over(axis, parts[axis.index].clone())
            counted = int(ledger.summary()["bytes_sent"])
            results[numel] = (total.tolist(), counted, 4 * sum_sends(numel, nproc, axis.index), parts.sum(0).tolist())
        return gathered(results)


def check_mix(ranks: list[dict[str, Any]], *, tells_all: bool) -> None:
    """Asserts that a mix equals one rank, that bytes are as predicted, and that undoing it gives everything back.

    Args:
        ranks: what `outcome` says on each rank.
        tells_all: whether a rank can tell the bytes of all; with samples of other text lengths it knows its own only.
    """
    counted = [rank["counted"] for rank in ranks]
    assert min(counted) > 0
    for index, rank in enumerate(ranks):
        assert rank["error"] <= 1e-10
        assert rank["predicted"][index] == counted[index]
        assert rank["predicted"] == counted or not tells_all
        assert rank["same weights"], "undo() must give back the very parameters"
        assert rank["same answer"]
