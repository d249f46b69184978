"""Quantised models under each strategy give what they give alone, or are refused with the layer and a way out."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import nn

from partsong.errors import UnsupportedError
from partsong.parallel.ranks.launch import launch
from partsong.parallel.tensor_parallel.quantised_weights import check_layers, cut_weight
from tests import covering

torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed: make test-full brings it")
from tests.parallel import quantised_worker  # noqa: E402 - it needs torchao

#: Every quantiser meets every strategy on one model.
USUAL = ("int8 | SD3", "int8 by groups | Flux", "int4 by groups | Wan", "fp8 | Flux", "int8 dynamic | SD3", "GGUF")
CASES = [
    (name, strategy)
    for name in (quantised_worker.NAMES if covering.FULL else USUAL)
    for strategy in quantised_worker.STRATEGIES
]


@functools.cache
def everything() -> tuple[dict[quantised_worker.Case, list[float | str]], dict[str, list[float | str]]]:
    return launch(quantised_worker.everything, 2, CASES)


def outcomes() -> dict[quantised_worker.Case, list[float | str]]:
    return everything()[0]


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_is_the_serial_quantised_model_or_refused(name: str, strategy: str) -> None:
    found = outcomes()
    for rank, outcome in enumerate(found[name, strategy]):
        if "dynamic" in name and strategy == "TensorParallel":
            assert re.search(
                r"blocks\.0\.attn1? quantises its inputs while it runs.*quantise the weights only", str(outcome)
            )
            continue
        assert isinstance(outcome, float), outcome
        # Inputs that are quantised too turn rounding into steps, on one rank as well.
        steps = found[name, "moved"][rank]
        assert outcome <= (4 * float(steps) if "dynamic" in name else 1e-12 if "fp8" in name else 5e-6)


def test_models_are_whole_again_afterwards() -> None:
    found = outcomes()
    assert all(error == 0 for name, _ in CASES for error in found[name, "alone"])


def test_pipeline_that_diffusers_quantises() -> None:
    found = everything()[1]
    assert found["kind"] == ["Int8Tensor"] * 2
    assert set(found) == {"kind", "Ulysses", "TensorParallel", "PatchPipeline"}
    for strategy in found.keys() - {"kind"}:
        for outcome in found[strategy]:
            assert isinstance(outcome, float), f"{strategy}: {outcome}"
            assert outcome <= 5e-6


def test_groups_stay_whole() -> None:
    layer = nn.Sequential(nn.Linear(64, 8))
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig(granularity=torchao.PerGroup(16)))
    weight = layer[0].weight
    two = cut_weight(weight, [(0, 16), (32, 32)], 1, "attn")
    whole = weight.dequantize()
    assert torch.equal(two.dequantize(), torch.cat([whole[:, :16], whole[:, 32:]], dim=1))
    with pytest.raises(UnsupportedError, match="attn has a Int8Tensor whose groups .* at inputs 0 to 24; take smaller"):
        cut_weight(weight, [(0, 24)], 1, "attn")


class Linear4bit(nn.Linear):
    """Stands for the layer of bitsandbytes by its name, all that is asked: the package needs a GPU."""


def test_packed_weights_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="0 is a Linear4bit of bitsandbytes, .* quantise with torchao or GGUF"):
        check_layers(nn.Sequential(Linear4bit(4, 4)))
