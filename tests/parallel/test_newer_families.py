"""What the newest families promise besides: MiniMax-H3's sound is right too, and Flux 3 refuses what is not cut."""

from __future__ import annotations

from typing import Any

import torch

from partsong import CfgParallel, Ulysses
from partsong.parallel import Mesh, Strategy, parallelize
from partsong.parallel.ranks.launch import launch
from tests.newer_names import or_reason
from tests.parallel.families import FAMILIES
from tests.parallel.ranks import error, gathered, refusal


def _apart(mesh: Mesh, strategy: Strategy) -> list[float]:
    """How far video and sound are from those of one rank."""
    family = FAMILIES["MiniMax-H3"]
    model, named = family.model(6, torch.float64), family.call(6, 2, torch.float64)
    wanted = model(**named, return_dict=False)
    with parallelize(model, strategy, mesh=mesh):
        return [error(got, want) for got, want in zip(model(**named, return_dict=False), wanted, strict=True)]


def _refused(mesh: Mesh) -> str:
    """What is said of a reference picture."""
    family = FAMILIES["Flux 3"]
    model, named = family.model(6, torch.float64), family.call(6, 2, torch.float64)
    given: dict[str, Any] = {"image_cond_hidden_states": torch.zeros(2, 4, 4, dtype=torch.float64)}
    with parallelize(model, Ulysses(), mesh=mesh):
        return refusal(lambda: model(**named, **given, image_cond_ids=torch.zeros(4, 4)))


@torch.no_grad()
def _ranks() -> list[Any]:
    with Mesh(ulysses=2) as mesh:
        told = [_apart(mesh, Ulysses()), or_reason(lambda: _refused(mesh))]
    with Mesh(cfg=2) as mesh:
        return gathered([*told, _apart(mesh, CfgParallel())])


def test_sound_is_that_of_one_rank_and_reference_pictures_are_refused() -> None:
    for cut, said, shared in launch(_ranks, 2):
        assert max(*cut, *shared) <= 1e-12
        assert "image_cond_hidden_states" in said
        assert "blocks of their own" in said


def test_a_reference_picture_is_taken_on_one_rank() -> None:
    family = FAMILIES["Flux 3"]
    model, named = family.model(6, torch.float64), family.call(6, 2, torch.float64)
    given: dict[str, Any] = {"image_cond_hidden_states": torch.ones(2, 4, 4, dtype=torch.float64)}
    with torch.no_grad():
        wanted = model(**named, **given, image_cond_ids=torch.zeros(4, 4))[0]
        with parallelize(model, Ulysses()):
            alone = model(**named, **given, image_cond_ids=torch.zeros(4, 4))[0]
    assert torch.equal(alone, wanted)
