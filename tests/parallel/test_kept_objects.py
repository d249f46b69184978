"""Under a plan a model is saved whole and cast, or refuses it in one line; nothing runs whole on every rank unsaid."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from partsong.parallel.ranks.launch import launch
from tests.parallel import kept_objects_worker as worker

#: What is refused under every plan, and only where ranks have parts of the weights, with words of the reason.
COPIES = {"deepcopy": "cannot be copied", "deepcopy of a layer": "cannot be copied", "pickle": "cannot be copied"}
PARTS = "has only this rank's part of its weights"
SAVING = dict.fromkeys(("state_dict", "state_dict of a layer", "save_pretrained"), "each rank has a share")
REFUSED: dict[str, dict[str, str]] = {
    "TensorParallel": {**COPIES, "load_state_dict": PARTS},
    "ShardedWeights": {**COPIES, "load_state_dict": PARTS, **SAVING},
    "Ulysses": COPIES,
}


@functools.cache
def acts() -> dict[tuple[str, str], list[dict[str, Any]]]:
    return launch(worker.acts, 2, 2)


@pytest.mark.parametrize("plan", worker.PLANS)
@pytest.mark.parametrize("act", worker.ACTS)
def test_is_done_whole_or_refused(plan: str, act: str) -> None:
    words = REFUSED[plan].get(act)
    loads = act == "load_state_dict" and words is None
    for rank in acts()[plan, act]:
        assert (words or "") in rank["said"]
        assert bool(rank["said"]) == (words is not None), rank["said"]
        assert "\n" not in rank["said"]
        assert rank["same"] is (True if act in SAVING and words is None else rank["same"])
        if not loads:
            assert max(rank["under"], rank["after"]) <= (1e-5 if act == "cast" else 1e-10)


def test_a_hook_that_sees_a_part_is_named_once() -> None:
    for none, *said in launch(worker.own_hooks, 2, 2):
        assert none == "0"
        assert len(said) == 1
        assert "keep_tokens on transformer_blocks.1" in said[0]


def test_what_would_run_whole_on_every_rank_is_refused() -> None:
    for said in launch(worker.replaced, 2, 2):
        assert "the transformer of this StableDiffusion3Pipeline was replaced" in said["replaced"]
        assert not said["back"]
        assert "cannot be copied" in said["deepcopy"]
        assert "this plan was undone" in said["entered"]
        assert "this plan was undone" in said["generate"]
        assert not said["copied"]
