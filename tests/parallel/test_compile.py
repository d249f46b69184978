"""torch.compile of a model's blocks and the exact strategies do not disturb each other, in either order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from partsong import Ulysses
from partsong.errors import ArgumentTypeError, UnsupportedError
from partsong.parallel import Mesh, capture, parallelize
from partsong.parallel.hooks.redirect import compiled_operator
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import compile_worker
from tests.parallel.families import FAMILIES

#: Generating C++ takes most of the time and adds nothing that strategies could disturb. Code compiled before a plan has
#: guards to be broken; code compiled under one is new.
NAMES = list(compile_worker.CASES)[: None if covering.FULL else 1]
CAPTURED = ["ring", "tensor-parallel", "lagged-layers"]


@pytest.fixture(scope="module")
def results() -> dict[str, list[dict[str, Any]]]:
    return launch(compile_worker.run, 2, NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_blocks_give_the_serial_output(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    assert len(results[name]) == 2
    for row in results[name]:
        assert row["compiled"], "nothing was compiled"
        assert row["inside"] <= 1e-5
        assert row["after"] <= 1e-5, "after undo()"


@pytest.fixture(scope="module")
def captured() -> dict[str, list[dict[str, Any]]]:
    return launch(compile_worker.run_captured, 2, CAPTURED)


@pytest.mark.full
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_blocks_pause_at_exchanges_only(captured: dict[str, list[dict[str, Any]]], name: str) -> None:
    # Projections, norms and rotations inside attention are compiled too: without them it is 99 operators on each rank.
    assert sum(row["calls"] for row in captured[name]) >= 250
    for row in captured[name]:
        assert row["inside"] <= 1e-5
        assert row["fused"] > 0, "layers that were changed under the plan are compiled again"
        assert row["breaks"] == row["left"] == 0


def test_graphs_are_refused_without_cuda() -> None:
    model = FAMILIES["Flux"].model(8, torch.float32)
    refused = pytest.raises(UnsupportedError, match="records CUDA graphs, and this plan computes on cpu")
    with Mesh(device="cpu") as mesh, parallelize(model, Ulysses(), mesh=mesh) as plan, refused:
        capture(plan, graphs=True)
    with pytest.raises(ArgumentTypeError, match="what parallelize.. returned, not FluxTransformer2DModel"):
        capture(model)  # type: ignore[arg-type]


def test_what_another_library_had_in_the_operators_place_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda *given: calls.append(given))
    others = functional.scaled_dot_product_attention
    take_out = compiled_operator()
    heads = torch.zeros(1, 1, 2, 2)
    functional.scaled_dot_product_attention(heads, heads, heads)
    assert len(calls) == 1, "where no plan attends, theirs is called"
    take_out()
    assert functional.scaled_dot_product_attention is others
