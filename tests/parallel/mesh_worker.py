"""Runs on every rank: what a mesh says of its axes, and several meshes one after another."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from partsong import TensorParallel, Ulysses
from partsong.errors import ArgumentError
from partsong.parallel import Mesh, parallelize
from partsong.parallel.ranks.collectives import agree
from tests.parallel.families import FAMILIES, dit
from tests.parallel.ranks import error
from tests.tiny_models.weights import randomized


def describe(mesh: Mesh, *names: str) -> tuple[tuple[int, ...], int]:
    axis = mesh.axis(*names)
    assert axis.ranks[axis.index] == mesh.rank
    sums = agree(axis, [float(mesh.rank)])  # a message along the axis reaches exactly its ranks
    assert [int(row[0]) for row in sums] == list(axis.ranks)
    return axis.ranks, axis.index


def refused() -> str:
    try:
        Mesh(ulysses=3)
    except ArgumentError as error:
        return str(error)
    return "accepted"


def run(nproc: int) -> list[dict[str, Any]]:
    """On four ranks: what every rank sees."""
    assert nproc == 4
    seen: dict[str, Any] = {"refused": refused()}
    with Mesh(cfg=2, ulysses=2) as mesh:
        seen["cfg"], seen["ulysses"] = describe(mesh, "cfg"), describe(mesh, "ulysses")
        seen["both"], seen["swapped"] = describe(mesh, "cfg", "ulysses"), describe(mesh, "ulysses", "cfg")
        seen["ring"] = (mesh.axis("ring").ranks, mesh.axis("ring").group)
        seen["same object"] = mesh.axis("cfg") is mesh.axis("cfg", "data")
        seen["names"] = mesh.device_mesh.mesh_dim_names if mesh.device_mesh is not None else None
        seen["main"] = mesh.is_main
    seen["closed"] = not dist.is_initialized()
    with Mesh(ring=2, data=2) as mesh:
        seen["data"], seen["reopened ring"] = describe(mesh, "data"), describe(mesh, "ring")
    for _ in range(3):
        with Mesh(patch=4) as mesh:
            seen["patch"] = describe(mesh, "patch")
    seen["plan's own mesh"] = own_mesh()
    seen["degrees of the mesh"] = degrees_of_the_mesh() < 1e-10
    with Mesh(data=4) as mesh:
        rows: list[Any] = [None] * nproc
        dist.all_gather_object(rows, seen)
    return rows


def own_mesh() -> tuple[bool, bool, str]:
    """`parallelize` without a mesh opens one and closes it."""
    model, named = FAMILIES["DiT"].model(8, torch.float64), FAMILIES["DiT"].call(8, 1, torch.float64)
    with torch.no_grad():
        want = model(**named).sample
        with parallelize(model, Ulysses()) as plan:
            got = model(**named).sample
            inside = dist.is_initialized()
    right = torch.allclose(got, want, rtol=1e-10, atol=1e-12)
    return right and inside, not dist.is_initialized(), repr(plan.mesh).split(";")[0]


def degrees_of_the_mesh() -> float:
    """How far a model is from itself under two strategies that leave their degrees to the mesh."""
    model, named = randomized(dit(8, num_attention_heads=4)), FAMILIES["DiT"].call(8, 1, torch.float64)
    with torch.no_grad():
        want = model(**named).sample
        with Mesh(tensor=2, ulysses=2) as mesh, parallelize(model, Ulysses(), TensorParallel(), mesh=mesh):
            return error(model(**named).sample, want)
