"""Weights of whole blocks over ranks: other strategies beside it, memory, weights that come back, errors, refusals."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from partsong import ShardedWeights, StepCache, TensorParallel, Ulysses, UnsupportedError
from partsong.parallel import ADAPTERS, mesh_for, predict
from partsong.parallel.cuts.block_units import find_units
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import sharded_worker as worker
from tests.parallel import tensor_worker
from tests.parallel.families import FAMILIES
from tests.parallel.unets import UNETS


@functools.cache
def mixes() -> dict[tuple[str, str], list[dict[str, Any]]]:
    return launch(tensor_worker.mixes, 4, 4, worker.MIXES, CASES)


#: By default models take turns with what is beside it.
USUAL = {
    *(("Flux", "Ulysses"), ("Wan", "alone"), ("Wan", "Ulysses"), ("Flux", "DisplacedPatch")),
    *(("Lumina2", "CfgParallel x Ring"), ("Wan", "DataParallel x Ulysses")),
}
CASES = [case for case in itertools.product(worker.MODELS, worker.MIXES) if covering.FULL or case in USUAL]


@functools.cache
def blocks() -> list[dict[str, Any]]:
    return launch(worker.gathered_blocks, 2, 2)


@pytest.mark.parametrize(("name", "mix"), CASES)
def test_equals_one_rank(name: str, mix: str) -> None:
    tensor_worker.check_mix(mixes()[name, mix], tells_all=not FAMILIES[name].ragged)


def test_a_rank_holds_its_share_of_the_weights() -> None:
    """By hand: rows of the blocks' weights are dealt out, the first ranks take the longer shares."""
    model = worker.build("Flux")
    inside = [*model.transformer_blocks.parameters(), *model.single_transformer_blocks.parameters()]
    whole = sum(weight.numel() for weight in model.parameters())
    for rank, result in enumerate(mixes()["Flux", "Ulysses"]):
        share = sum(_rows(len(weight), 4, rank) * weight[0].numel() for weight in inside)
        outside = whole - sum(weight.numel() for weight in inside)
        assert result["held"] == pytest.approx((share + outside) / whole)


def _rows(total: int, ranks: int, rank: int) -> int:
    most = -(-total // ranks)
    return max(0, min(most, total - rank * most))


@pytest.mark.parametrize("mix", ["alone", "Ulysses"])
def test_predict_needs_no_ranks(mix: str) -> None:
    dry = predict(worker.build("Wan"), *worker.MIXES[mix], ranks=4, **worker.calls("Wan")[0])
    assert dry.bytes_by_step[:2] == mixes()["Wan", mix][0]["steps"]


def test_a_unet_is_never_whole() -> None:
    for rank in blocks():
        assert max(rank["errors"]) <= 1e-10
        assert rank["freed"] > 0
        assert 1 <= rank["most"] < rank["units"] / 2, "blocks are gathered one ahead and freed behind"


def test_undo_leaves_nothing_of_torch_behind() -> None:
    for rank in blocks():
        assert not rank["classes"]
        assert not rank["marks"]
        assert rank["same"]
        assert rank["again"]
    assert all(launch(worker.releases, 2, 2))


def test_explain_says_what_is_shared_out() -> None:
    said = mixes()["Flux", "Ulysses"][0]["said"]
    assert "the weights of 3 blocks over all 4 ranks" in said
    assert "tokens over 4 ranks (ulysses)" in said


def test_weights_may_be_cast_under_a_plan() -> None:
    for rank in launch(worker.moved, 2, 2):
        assert rank["error"] < 1e-5
        assert rank["types"] == {torch.float32}


def test_calls_may_leave_blocks_out() -> None:
    for rank in launch(worker.without_a_layer, 2, 2):
        assert max(rank) <= 1e-10


def test_weights_come_back_after_an_error_on_all_ranks() -> None:
    for rank in launch(worker.after_an_error, 2, 2):
        assert rank["same"]
        assert rank["clean"]


def test_after_an_error_on_one_rank_the_model_refuses_further_calls() -> None:
    for rank in launch(worker.after_an_error_on_one, 3, 3):
        assert "load the model again" in rank["said"]
        assert rank["clean"]
        assert rank["seconds"] < 10


def test_ranks_make_as_many_calls_whatever_the_branches() -> None:
    for index, rank in enumerate(launch(worker.repeated, 2, 2)):
        assert rank[False] == ([[0, 2], [1]][index], [0.0, 10.0, 20.0])
        assert rank[True] == ([[0, 2], [1, 1]][index], [0.0, 10.0, 20.0])


def test_blocks_are_found_by_structure() -> None:
    flux = worker.build("Flux")
    assert find_units(flux, ADAPTERS["FluxTransformer2DModel"]) == [
        *flux.transformer_blocks,
        *flux.single_transformer_blocks,
    ]
    unet = UNETS["SD"].model(torch.float32)
    units = find_units(unet, ADAPTERS["UNet2DConditionModel"])
    assert {type(unit).__name__ for unit in units} >= {"ResnetBlock2D", "BasicTransformerBlock"}
    outside = set(unet.parameters()).difference(*(unit.parameters() for unit in units))
    assert sum(weight.numel() for weight in outside) < 0.2 * sum(weight.numel() for weight in unet.parameters())


@pytest.mark.parametrize("other", [StepCache(), TensorParallel()], ids=lambda other: type(other).__name__)
def test_refuses_what_leaves_blocks_out_or_cuts_them_too(other: Any) -> None:
    with pytest.raises(UnsupportedError, match=type(other).__name__):
        mesh_for((ShardedWeights(), Ulysses(degree=1), other), 2)


def test_refuses_weights_that_are_no_plain_tensors() -> None:
    class Packed(nn.Parameter):
        pass

    model = worker.build("SD3")
    linear = model.transformer_blocks[0].attn.to_q
    linear.weight = Packed(linear.weight.data, requires_grad=False)
    with pytest.raises(UnsupportedError, match="weights of type Packed"):
        predict(model, ShardedWeights(), ranks=2, **worker.calls("SD3")[0])
