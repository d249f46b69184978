"""Runs on every rank: what the support page refuses, asked of a plan."""

from __future__ import annotations

from typing import Any

from partsong.parallel import ADAPTERS, Mesh, Strategy, mesh_for, parallelize
from partsong.samplers.registry import strategies
from tests.parallel.families import FAMILIES
from tests.parallel.ranks import gathered, staying_connected


@staying_connected
def refusals() -> dict[tuple[str, str], list[str]]:
    """What every rank is told for every refused pair of a strategy and a model that `FAMILIES` can build."""
    models: dict[str, Any] = {type(model).__name__: model for model in (f.build(8) for f in FAMILIES.values())}
    told = {}
    for name, kind in strategies().items():
        if not kind().axes:
            continue  # leaves nothing to ranks: its own tests ask it of every model
        refused = [model for model in models if kind().refuses(ADAPTERS[model])]
        with Mesh(**mesh_for((kind(),), 2)) as mesh:
            for model in refused:
                told[name, model] = gathered(_said(models[model], kind(), mesh))
    return told


def _said(model: Any, strategy: Strategy, mesh: Mesh) -> str:
    try:
        parallelize(model, strategy, mesh=mesh)
    except Exception as problem:  # noqa: BLE001 - the test reads which one it was
        return f"{type(problem).__name__}: {problem}"
    return "accepted"
