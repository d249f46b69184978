"""Heads and columns over ranks: other strategies beside it, uneven shares, weights that come back, refusals, sums."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from partsong import ArgumentError, StepCache, TensorParallel, UnsupportedError, parse_strategy
from partsong.parallel import mesh_for, predict
from partsong.parallel.ranks.launch import launch
from partsong.parallel.tensor_parallel.parts import find_parts
from tests import covering
from tests.parallel import tensor_worker as worker


@functools.cache
def mixes() -> dict[tuple[str, str], list[dict[str, Any]]]:
    return launch(worker.mixes, 4, 4, worker.MIXES, CASES)


#: By default models take turns with what is beside it.
USUAL = {
    *(("Flux", "Ulysses"), ("Flux fused", "alone"), ("SD3", "alone"), ("SD3", "Ulysses"), ("SD3", "DisplacedPatch")),
    *(("Wan", "Ring"), ("Lumina2", "CfgParallel")),
}
CASES = [case for case in itertools.product(worker.MODELS, worker.MIXES) if covering.FULL or case in USUAL]


@pytest.mark.parametrize(("name", "mix"), CASES)
def test_equals_one_rank(name: str, mix: str) -> None:
    tells_all = not worker.FAMILIES[name.removesuffix(" fused")].ragged
    worker.check_mix(mixes()[name, mix], tells_all=tells_all)


def test_a_rank_holds_its_share_of_the_weights() -> None:
    """By hand: what is cut shrinks to the share, what is not stays."""
    model = worker.build("SD3")
    cut = sum(columns.layer.weight.numel() for part in find_parts(model) for columns in (*part.first, *part.last))
    biases = sum(columns.layer.bias.numel() for part in find_parts(model) for columns in part.first)
    whole = sum(parameter.numel() for parameter in model.parameters())
    for mix, share in (("alone", 4), ("Ulysses", 2)):
        want = (whole - (cut + biases) * (1 - 1 / share)) / whole
        assert mixes()["SD3", mix][0]["held"] == pytest.approx(want)


@pytest.mark.parametrize("mix", ["alone", "Ulysses"])
def test_predict_needs_no_ranks(mix: str) -> None:
    call = worker.calls("SD3")[0]
    dry = predict(worker.build("SD3"), *worker.MIXES[mix], ranks=4, **call)
    assert dry.bytes_by_step[:2] == mixes()["SD3", mix][0]["steps"]


def test_explain_says_what_is_shared_out() -> None:
    said = mixes()["Flux", "Ulysses"][0]["said"]
    assert "the columns of 3 attention and 2 feed-forward layers over 2 ranks (tensor)" in said
    assert "tokens over 2 ranks (ulysses)" in said


def test_heads_that_do_not_divide_are_shared_unevenly() -> None:
    ranks = launch(worker.uneven, 3, 3)
    counted = [rank["counted"] for rank in ranks]
    assert all(rank["error"] <= 1e-10 and rank["predicted"] == counted for rank in ranks)
    assert ranks[0]["held"] > ranks[2]["held"]


def test_weights_may_be_cast_under_a_plan() -> None:
    whole = {name: tuple(parameter.shape) for name, parameter in worker.build("SD3").named_parameters()}
    for rank in launch(worker.moved, 2, 2):
        assert rank["types"] == {torch.float32}
        assert rank["whole"] == whole
        assert rank["cut"] != whole


def test_refusals_name_the_layer_and_leave_nothing_behind() -> None:
    said = launch(worker.refusals, 4, 4)
    assert len(set(said["heads"])) == len(set(said["tokens"])) == 1
    assert "has 3 heads" in said["heads"][0]
    assert "choose a degree of at most 3" in said["heads"][0]
    assert "do not divide by 2 ranks" in said["tokens"][0]
    assert "hooks" not in said["heads"][0] + said["tokens"][0]


@pytest.mark.parametrize("nproc", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_sums_have_the_same_bits_on_every_rank(nproc: int) -> None:
    ranks = launch(worker.sums, nproc, nproc)
    for numel, (total, counted, predicted, want) in ranks[0].items():
        assert all(rank[numel][0] == total for rank in ranks)
        assert total == pytest.approx(want, rel=1e-5)
        assert counted == predicted


def test_does_not_run_beside_strategies_that_leave_blocks_out() -> None:
    with pytest.raises(UnsupportedError, match="StepCache"):
        mesh_for((TensorParallel(), StepCache()), 2)
    with pytest.raises(ArgumentError, match="degree"):
        parse_strategy("tensor-parallel:degree=0")


def test_layers_that_somebody_has_wrapped_stay_whole() -> None:
    model = worker.build("SD3")
    before = len(list(find_parts(model)))
    attention = model.transformer_blocks[0].attn
    attention.to_q = nn.Sequential(attention.to_q)
    assert len(list(find_parts(model))) == before - 1
