"""Long prompts that ranks cut among them: the logits, texts and bytes of one process, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from partsong.parallel.ranks.launch import launch
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.text.context import _Cut
from tests.parallel import context_worker as worker

#: Norms over the width of all heads are computed in single precision, whatever the model's type.
SINGLE = {"olmo2": 1e-6}
QUICK = ("llama", "gpt2")


@functools.cache
def results(nproc: int, families: tuple[str, ...]) -> list[dict[str, Any]]:
    return launch(worker.run, nproc, nproc, [*families])


CASES = [
    *((2, QUICK, family) for family in QUICK),
    (3, QUICK[:1], "llama"),
    *(
        pytest.param(nproc, worker.FAMILIES, each, marks=pytest.mark.full)
        for nproc in (2, 4)
        for each in worker.FAMILIES
    ),
]


@pytest.mark.parametrize(("nproc", "families", "family"), CASES)
def test_equals_one_process(nproc: int, families: tuple[str, ...], family: str) -> None:
    for rank in results(nproc, families):
        case = rank[family]
        assert max(case["errors"].values()) <= SINGLE.get(family, 1e-10), case["errors"]
        assert case["same"]
        assert "calls with 8 or more tokens are cut" in case["said"]


@pytest.mark.parametrize(("nproc", "families", "family"), CASES)
def test_sends_what_is_predicted_and_nothing_for_short_calls(
    nproc: int, families: tuple[str, ...], family: str
) -> None:
    for rank in results(nproc, families):
        case = rank[family]
        assert all(counted == predicted for counted, predicted in case["told"].values())
        assert case["told"][7][1] == 0 < case["told"][19][1]
        compares = 4 * 8 * (nproc - 1)  # which a prediction of the whole call has in it
        assert case["predicted"] == {length: counted + compares for length, (counted, _) in case["told"].items()}


def test_ranks_have_as_many_keys_to_attend_to() -> None:
    """A piece from the front and the one as far from the end see as many tokens, whichever the pair."""
    for size in (2, 3, 4):
        seen = []
        for rank in range(size):
            cut = _Cut(24 * size, Axis("ring", tuple(range(size)), rank), torch.device("cpu"))
            seen.append(sum(sum(range(first + 1, first + length + 1)) for first, length in cut.pieces))
        assert len(set(seen)) == 1


def test_what_cannot_be_cut_is_refused_on_all_ranks() -> None:
    for rank in results(2, QUICK):
        said = rank["refused"]
        assert "under ContextParallel a rank has those of its own tokens only" in said["states"]
        assert said["goes on"] == ""
        assert "mistral with a sliding window of 4" in said["window"]
        assert "its layers do not all attend to the tokens before them" in said["not causal"]
