"""The scaling law against the losses it was fitted to, and prices against models that are really built."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config

from benchmarks.parscale_cost import HARDWARE, Hardware, cost_table, stream_parameters
from partsong.errors import ArgumentError
from partsong.evals.bench.parscale import bench_parscale_model, run
from partsong.reasoning.parscale.cost import LAWS, Shape, equivalent_parameters, predicted_loss
from partsong.reasoning.parscale.model import ParScale
from partsong.reasoning.parscale.weights import StreamWeights
from tests.reasoning.parscale_reference import tiny

#: Parameters without embeddings of the published models, in billions, and their losses for P = 1, 2, 4, 8
#: (arXiv 2505.10475).
PARAMETERS = (
    (0.535813376, 0.693753856, 1.088376320, 1.571472384, 2.774773760, 4.353203200),
    (0.538195842, 0.696738818, 1.092762882, 1.577522690, 2.784937986, 4.368529922),
    (0.540577412, 0.699722756, 1.097148164, 1.583571460, 2.795100164, 4.383854084),
    (0.545340552, 0.705690632, 1.105918728, 1.595669000, 2.815424520, 4.414502408),
)
LOSSES = {
    "stack-v2-python": (
        (1.1722, 1.1496, 1.1131, 1.0817, 1.0451, 1.0213),
        (1.1507, 1.1262, 1.0940, 1.0623, 1.0244, 1.0025),
        (1.1354, 1.1124, 1.0808, 1.0490, 1.0126, 0.9906),
        (1.1231, 1.0997, 1.0688, 1.0383, 1.0016, 0.9794),
    ),
    "pile": (
        (2.1113, 2.0671, 2.0027, 1.9539, 1.8876, 1.8451),
        (2.0772, 2.0363, 1.9730, 1.9266, 1.8610, 1.8137),
        (2.0544, 2.0128, 1.9509, 1.9040, 1.8394, 1.7938),
        (2.0364, 1.9933, 1.9318, 1.8856, 1.8218, 1.7772),
    ),
}


@pytest.mark.parametrize(("name", "explained"), [("stack-v2-python", 0.9978), ("pile", 0.9987)])
def test_the_laws_explain_the_published_losses(name: str, explained: float) -> None:
    seen = np.array(LOSSES[name])
    found = np.array(
        [
            [predicted_loss(n * 1e9, num, LAWS[name]) for n in row]
            for num, row in zip((1, 2, 4, 8), PARAMETERS, strict=True)
        ]
    )
    rest = 1 - ((found - seen) ** 2).sum() / ((seen - seen.mean()) ** 2).sum()
    assert rest == pytest.approx(explained, abs=1e-4)
    assert abs(found - seen).max() < 0.011


@pytest.mark.parametrize(("name", "eight"), [("stack-v2-python", 1.82), ("pile", 1.70)])
def test_eight_streams_are_worth_as_many_parameters(name: str, eight: float) -> None:
    law = LAWS[name]
    assert equivalent_parameters(1.0, 1, law) == 1.0
    assert equivalent_parameters(1.0, 8, law) == pytest.approx(eight, abs=0.01)
    wide = equivalent_parameters(2e9, 4, law)
    assert predicted_loss(2e9, 4, law) == pytest.approx(predicted_loss(wide, 1, law), abs=1e-12)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_a_built_model(tied: bool) -> None:
    model = tiny("llama", tie_word_embeddings=tied)
    shape = Shape.of(model.config)
    matrices = [each.numel() for name, each in model.named_parameters() if each.ndim == 2]
    assert shape.parameters + shape.embeddings == sum(matrices)
    for num in (2, 4):
        weights = StreamWeights.new(model, num, prefix_length=5)
        assert stream_parameters(shape, num, 5) == sum(each.numel() for each in weights.parameters())
    assert stream_parameters(shape, 1, 5) == 0
    assert shape.widened(2.5).parameters == pytest.approx(2.5 * shape.parameters)


def test_memory_is_that_of_tensors_and_time_that_of_the_roofline() -> None:
    model: Any = tiny("llama").float()
    where = Hardware(flops_per_second=1e9, bytes_per_second=1e9)
    one, _, four, wide = cost_table(
        model.config,
        streams=(1, 4),
        batch=2,
        prompt=6,
        new_tokens=4,
        hardware=where,
        bytes_per_number=4,
        prefix_length=5,
    )
    weights = StreamWeights.new(model, 4, prefix_length=5)
    matrices = sum(each.numel() for each in model.parameters() if each.ndim == 2)
    with ParScale(model, weights) as parscale, torch.no_grad():
        cache = parscale.cache()
        model(torch.zeros(2, 10, dtype=torch.long), past_key_values=cache)
    kept = sum(each.numel() for layer in cache.layers for each in (layer.keys, layer.values) if each is not None)
    streams = sum(each.numel() for each in weights.parameters())
    assert four["memory_bytes"] == 4 * (matrices + streams + kept)
    assert four["parameters"] == matrices + streams
    assert four["memory_added"] == pytest.approx(four["memory_bytes"] / one["memory_bytes"] - 1)
    # A step of the base: two rows through all matrices, attending half way through the answer.
    inside, head = Shape.of(model.config).parameters, 61 * 32
    flops = 2 * (2 * inside + 4 * 2 * 32 * 8) + 2 * 2 * head
    moved = 4 * (matrices - head) + 2 * 2 * 16 * 4 * 2 * (8 + 1)
    assert one["token_seconds"] == pytest.approx(max(flops, moved) / 1e9)
    assert wide["parameters"] > 1.5 * inside and wide["predicted_loss"] == four["predicted_loss"]


def test_streams_add_less_memory_than_parameters_at_batch_one() -> None:
    """A model of 1.6 billion parameters, where the paper speaks of 22 times less memory and 6 times less latency."""
    config = Qwen2Config(
        hidden_size=2048, num_hidden_layers=28, intermediate_size=6144, num_attention_heads=16, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    rows = cost_table(config, streams=(1, 8), prompt=64, new_tokens=64, hardware=HARDWARE["a100-80gb"])
    eight, wide = rows[2:]
    assert 15 < wide["memory_added"] / eight["memory_added"] < 25
    assert wide["token_added"] / eight["token_added"] > 6
    many = cost_table(config, streams=(1, 8), batch=512, prompt=64, new_tokens=64, hardware=HARDWARE["a100-80gb"])
    assert many[2]["token_added"] > many[3]["token_added"], "with many texts at once arithmetic is what is short"


def test_a_benchmark_has_a_row_for_every_side() -> None:
    rows = run(repeats=2, streams=(1, 2, 8), prompt=6, new_tokens=3, heads=4, layers=1)
    assert [row["name"] for row in rows] == [
        "base",
        "streams 1",
        "streams 2",
        "parameters 2",
        "streams 8",
        "parameters 8",
    ]
    assert all(row["drift"] < 1e-4 and len(row["seconds_all"]) == 2 for row in rows)
    assert rows[0]["memory_bytes"] == rows[1]["memory_bytes"] and rows[0]["parameters"] == rows[1]["parameters"]
    assert rows[0]["ratio_to_serial"] == 1.0
    assert rows[2]["memory_added"] > 0 and rows[5]["parameters"] > rows[0]["parameters"]
    model = bench_parscale_model(4, 1)
    added = rows[2]["parameters"] - sum(each.numel() for each in model.parameters())
    assert added == stream_parameters(Shape.of(model.config), 2, 48)


def test_mistaken_arguments_are_refused() -> None:
    config = tiny("llama").config
    mistakes: tuple[dict[str, Any], ...] = ({"batch": 0}, {"streams": ()}, {"streams": (1, 0)}, {"prompt": -1})
    for mistake in mistakes:
        with pytest.raises(ArgumentError):
            cost_table(config, **mistake)
    with pytest.raises(ArgumentError, match="parameters=0; use a number above 0"):
        predicted_loss(0, 1, LAWS["pile"])
    with pytest.raises(ArgumentError, match="no law 'x'"):
        run(law="x")
    with pytest.raises(ArgumentError, match="repeats=0; use a positive integer"):
        run(repeats=0)
    assert math.isfinite(predicted_loss(1e6, 1, LAWS["pile"]))
