"""PartialPatch is what its definition says in every step, sends no more than its budget, and chooses within bounds."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch

from partsong import PartialPatch, parse_strategy
from partsong.errors import ArgumentError
from partsong.parallel import mesh_for
from partsong.parallel.ranks.agreement import NUMBERS_PER_VALUE
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import partial_worker
from tests.parallel.displaced_worker import TIMES
from tests.parallel.partial_worker import BUDGETS, SHARPNESS, TOKENS, attention_inputs, cases

RANKS = (2, 3, 4) if covering.FULL else (2, 4)
#: By default four ranks do what takes neighbours on both sides, what is not done on fewer, and the one whose bytes are
#: counted.
USUAL = {4: ("one stream", "text between", "auto, ranks without heads")}
CASES = [
    (nproc, name) for nproc in RANKS for name in cases(nproc) if covering.FULL or name in USUAL.get(nproc, cases(nproc))
]


@functools.cache  # one launch per number of ranks
def results(nproc: int) -> dict[str, Any]:
    return launch(partial_worker.run, nproc, nproc, [name for ranks, name in CASES if ranks == nproc])


@pytest.mark.parametrize(("nproc", "name"), CASES)
def test_equals_its_definition_in_every_step_on_every_rank(nproc: int, name: str) -> None:
    case, ranks = cases(nproc)[name], results(nproc)["cases"][name]
    assert len(ranks) == nproc
    warm = case.strategy.warmup_steps * case.branches
    for rank in ranks:
        assert len(rank["errors"]) == len(TIMES) * case.branches
        assert max(rank["errors"]) <= 1e-10
        assert max(rank["from_displaced"][:warm]) <= 1e-10
        if min(rank["portions"]) < 1.0:
            assert min(rank["from_displaced"][warm + case.branches :]) > 1e-9, "rows that wait for their turn must show"


@pytest.mark.parametrize(("nproc", "name"), CASES)
def test_bytes_are_those_predicted(nproc: int, name: str) -> None:
    ranks = results(nproc)["cases"][name]
    counted = [rank["counted"] for rank in ranks]
    assert all(rank["predicted"] == counted for rank in ranks)


#: 9 image tokens over the ranks: what each holds, and what the busiest sends in a step, 0.3 of its patch to each side.
OWN = {2: [5, 4], 3: [3, 3, 3], 4: [3, 2, 2, 2]}
BUDGET = {2: 2, 3: 2, 4: 3}


@pytest.mark.parametrize("nproc", RANKS)
def test_a_step_sends_its_turn_within_the_budget(nproc: int) -> None:
    batch, layers, width, number, branches, outputs = 2, 2, 24, 8, 2, 16
    for rank, case in enumerate(results(nproc)["cases"]["one stream"]):
        gathered = OWN[nproc][rank] * (nproc - 1) * batch * outputs * number
        compared = 8 * NUMBERS_PER_VALUE * (nproc - 1)  # by which ranks see that their latents are the same
        keys_and_values = [rows * batch * 2 * width * number for rows in case["rows_by_step"]]
        want = [moved + branches * gathered + compared for moved in keys_and_values]
        assert case["bytes_by_step"][2:] == want[2:]
        assert max(case["rows_by_step"]) <= layers * branches * BUDGET[nproc]
        assert case["rows_by_step"][-1] == 0, "nothing is sent in the last step: nobody would read it"


@pytest.mark.parametrize("nproc", RANKS)
def test_a_portion_that_covers_everything_is_displaced_patch(nproc: int) -> None:
    assert results(nproc)["everything"] == [True] * (4 if nproc == 2 else 2)


def errors(layer: int, nproc: int) -> dict[float, float]:
    """The error of every candidate from its definition: dense attention, tokens out of sight left out."""
    q, k, v = attention_inputs(layer)
    shards = torch.arange(TOKENS).tensor_split(nproc)
    logits = (q @ k.mT)[0, 0]
    full = logits.softmax(-1) @ v[0, 0]
    found = {}
    for portion in [p for p in (0.1, 0.2, 0.3, 0.5, 1.0) if p < nproc - 1]:
        by_rank = []
        for rank, own in enumerate(shards):
            sees = torch.zeros(TOKENS, dtype=torch.bool)
            sees[own] = True
            for side, near in ((rank - 1, -1), (rank + 1, 1)):
                if 0 <= side < nproc:
                    count = math.ceil(Fraction(str(portion)) * len(shards[side]))
                    sees[shards[side][-count:] if near < 0 else shards[side][:count]] = True
            part = logits[own].masked_fill(~sees, -math.inf).softmax(-1) @ v[0, 0]
            by_rank.append(((part - full[own]).norm() / full[own].norm()).item())
        found[portion] = max(by_rank)
    return found


@pytest.mark.parametrize("nproc", RANKS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_auto_takes_the_smallest_portion_within_its_budget(nproc: int, budget: float) -> None:
    want = {}
    for layer in range(len(SHARPNESS)):
        fits = [portion for portion, found in errors(layer, nproc).items() if found <= budget]
        want[layer] = min(fits, default=nproc - 1)
    for chosen in results(nproc)["choices"]:
        assert chosen[budget] == want


@pytest.mark.parametrize("nproc", RANKS)
def test_auto_sees_farther_where_attention_is_global(nproc: int) -> None:
    chosen = results(nproc)["choices"][0]
    local, _, everywhere = chosen[0.05].values()
    assert local < everywhere == nproc - 1
    assert all(chosen[tight][layer] >= chosen[loose][layer] for layer in range(3) for tight, loose in [BUDGETS[::2]])
    assert len({tuple(portions.values()) for portions in chosen.values()}) > 1, "the budget must matter"


@pytest.mark.parametrize(("nproc", "name"), [(nproc, name) for nproc, name in CASES if "auto" in name])
def test_all_ranks_choose_alike_in_a_model(nproc: int, name: str) -> None:
    portions = [rank["portions"] for rank in results(nproc)["cases"][name]]
    assert portions == [portions[0]] * nproc
    assert all(0.0 < portion < math.inf for portion in portions[0]), "every layer has chosen"


def test_a_ring_beside_it_is_refused() -> None:
    assert "ring cannot share an attention" in results(4)["beside a ring"]


@pytest.mark.parametrize(
    ("knobs", "text"),
    [
        ({"portion": 0}, "PartialPatch: portion=0; use a number above 0 or auto"),
        ({"portion": -0.3}, "portion=-0.3"),
        ({"portion": math.nan}, "portion=nan"),
        ({"portion": True}, "portion=True"),
        ({"portion": "all"}, "portion='all'; use a number above 0 or auto"),
        ({"far": 0.0}, "PartialPatch: far=0.0; use a number above 0 and up to 1"),
        ({"far": 1.5}, "far=1.5"),
        ({"error_budget": -1.0}, "PartialPatch: error_budget=-1.0; use a number of 0 or more"),
        ({"error_budget": math.inf}, "error_budget=inf"),
        ({"error_budget": "small"}, "error_budget='small'"),
        ({"warmup_steps": 0}, "PartialPatch: warmup_steps=0"),
        ({"order": 2}, "PartialPatch: order=2"),
        ({"degree": 0}, "PartialPatch: degree=0; use a positive integer, or None"),
    ],
)
def test_knobs_that_mean_nothing_are_refused(knobs: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        mesh_for([PartialPatch(**knobs)], 1)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("partial-patch:portion=auto,error_budget=0.02", PartialPatch(portion="auto", error_budget=0.02)),
        ("partial-patch:portion=1,warmup_steps=4", PartialPatch(portion=1.0, warmup_steps=4)),
    ],
)
def test_it_is_read_from_text(text: str, want: PartialPatch) -> None:
    assert parse_strategy(text) == want
