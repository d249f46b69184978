"""Video pipelines give the serial video on every rank; frames and tokens are cut in turn; what cannot be is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from partsong import DynamicSequence, Ring, Ulysses
from partsong.errors import UnsupportedError
from partsong.parallel import ADAPTERS, Strategy, predict
from partsong.parallel.ranks.agreement import NUMBERS_PER_VALUE
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import video_worker as worker
from tests.parallel.families import FAMILIES
from tests.parallel.video_pipelines import VIDEO_PIPES

RANKS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def pipelines() -> dict[tuple[str, str], list[dict[str, Any]]]:
    return launch(worker.pipelines, 2, NAMED)


@pytest.fixture(scope="module")
def scenarios() -> dict[str, list[Any]]:
    return launch(worker.scenarios, 2)


@functools.cache
def shapes(nproc: int) -> dict[tuple[str, str], list[dict[str, Any]]]:
    return launch(worker.shapes, nproc, nproc, [(how, name) for ranks, how, name in CASES if ranks == nproc])


#: By default guidance is shared out with every other pipeline.
NAMED = [
    (label, name)
    for label in worker.STRATEGIES
    for place, name in enumerate(worker.names(label))
    if covering.FULL or label != "CfgParallel" or place % 2
]


@pytest.mark.parametrize(("label", "name"), NAMED)
def test_every_rank_returns_the_serial_video(pipelines: dict[Any, Any], label: str, name: str) -> None:
    rows = pipelines[label, name]
    assert len(rows) == 2
    for row in rows:
        assert row["error"] <= 1e-10
        assert row["sent"] == row["predicted"] > 0
        assert row["steps"] == worker.steps_of(name)
        assert row["restored"]


def test_guidance_shared_out_halves_the_calls(pipelines: dict[Any, Any]) -> None:
    for name in (name for label, name in NAMED if label == "CfgParallel"):
        if VIDEO_PIPES[name].calls == 2:  # every rank makes both calls in the first step, and one in each of the others
            assert [row["forwards"] for row in pipelines["CfgParallel", name]] == [worker.steps_of(name) + 1] * 2


#: By default more ranks than cores cut what divides otherwise there.
USUAL = {
    1: ("odd frames and tokens",),
    2: worker.SHAPES,
    3: ("odd frames and tokens", "fewer frames than ranks"),
    4: ("as many tokens as ranks",),
}
CASES = [
    (nproc, how, name)
    for nproc in RANKS
    for how in (("alone", "with CfgParallel", "with DataParallel") if nproc == 4 else ("alone",))
    for name in worker.SHAPES
    if covering.FULL or name in USUAL[nproc]
]


@pytest.mark.parametrize(("nproc", "how", "name"), CASES)
def test_dynamic_sequence_equals_serial_in_every_shape(nproc: int, how: str, name: str) -> None:
    rows = shapes(nproc)[how, name]
    assert len(rows) == nproc
    for row in rows:
        assert row["error"] <= 1e-10
        assert row["sent"] == row["predicted"]
        assert (row["sent"] > 0) == (nproc > 1)
        assert row["clean"]


def test_dynamic_sequence_tells_what_it_cuts() -> None:
    assert (
        "5 frames and 15 image tokens over 3 ranks (ulysses)" in shapes(3)["alone", "odd frames and tokens"][0]["told"]
    )


#: Shares of 12 frames, 36 tokens and 12 heads are even on 2, 3 and 4 ranks.
FRAMES, SIDE, TOKENS, BATCH = 12, 12, 36, 2
HEADS = {"num_attention_heads": 12, "attention_head_dim": 8}


def sent(family: str, strategy: Strategy, ranks: int, outputs: int, **config: Any) -> int:
    """Bytes that a rank sends in one call, but for its output and for the numbers by which ranks compare latents.

    Args:
        family: of the model.
        strategy: what cuts it.
        ranks: how many.
        outputs: numbers of its output per token.
        config: of the model.
    """
    model, named = FAMILIES[family].build(6), FAMILIES[family].call(6, BATCH, torch.float64)
    model = type(model)(**{**model.config, **HEADS, **config}).double()
    named["hidden_states"] = torch.zeros(BATCH, 4, FRAMES, SIDE, SIDE).double()
    said = predict(model, strategy, ranks=ranks, **named).bytes_per_step
    assert len(set(said)) == 1, "even shares"
    compared = 8 * NUMBERS_PER_VALUE * (ranks - 1)
    return said[0] - compared - BATCH * FRAMES * TOKENS // ranks * outputs * 8 * (ranks - 1)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.full)])
def test_volumes_are_those_of_the_page(ranks: int) -> None:
    unit = BATCH * FRAMES * TOKENS * 96 * 8 // ranks * (ranks - 1) // ranks
    for pairs in (1, 3):
        config = {"num_layers": pairs, "video_length": FRAMES, "cross_attention_dim": 96}
        assert sent("Latte", DynamicSequence(), ranks, 32, **config) == (2 * pairs - 1) * unit
        assert sent("Latte", Ulysses(), ranks, 32, **config) == 4 * pairs * unit
        assert sent("Latte", Ring(), ranks, 32, **config) == 2 * ranks * pairs * unit
    # Two attentions that are both taken apart, here over all tokens of all frames.
    assert sent("Wan", Ulysses(), ranks, 16, num_layers=2) == 8 * unit


def test_dynamic_sequence_shares_the_ranks_with_no_other_cut() -> None:
    named = worker.latte_call(worker.SHAPES["as many of each"])
    with pytest.raises(UnsupportedError, match="mesh axis ring"):
        predict(worker.latte(4), DynamicSequence(degree=2), Ring(degree=2), ranks=4, **named)
    with pytest.raises(UnsupportedError, match="both use the mesh axis 'ulysses'"):
        predict(worker.latte(4), DynamicSequence(degree=2), Ulysses(degree=2), ranks=4, **named)


def test_predict_says_where_shapes_alone_are_not_enough() -> None:
    model, named = FAMILIES["Mochi"].model(6, torch.float32), FAMILIES["Mochi"].call(6, 1, torch.float32)
    with pytest.raises(UnsupportedError, match="MochiTransformer3DModel does something that takes more than shapes"):
        predict(model, Ulysses(), ranks=2, **named)


def test_dynamic_sequence_is_refused_where_blocks_are_not_told_apart() -> None:
    for model, adapter in ADAPTERS.items():
        reason = DynamicSequence().refuses(adapter)
        assert (reason is None) == (model == "LatteTransformer3DModel")
        # What it advises must work there.
        assert reason is None or Ulysses().refuses(adapter) in (None, reason)
        assert reason is None or any(f"use {name}" in reason for name in ("Ulysses", "ClipParallel", "CfgParallel"))


REFUSED = {
    "no such blocks": "DynamicSequence on WanTransformer3DModel: it has no blocks for space and others for time",
    "few tokens": "1 tokens of a frame cannot be cut over 2 ranks",
    "text with holes": "a mask leaves out text tokens in front of others",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_all_ranks_alike(scenarios: dict[str, list[Any]], name: str) -> None:
    first, second = scenarios[name]
    assert first == second
    assert first.startswith("UnsupportedError")
    assert REFUSED[name] in first


@pytest.mark.parametrize("strategy", ["Ulysses", "Ring", "TokenRing", "DisplacedPatch"])
def test_frames_that_see_the_past_alone(scenarios: dict[str, list[Any]], strategy: str) -> None:
    assert max(scenarios[f"causal frames, {strategy}"]) <= 1e-10


def test_a_sample_without_text(scenarios: dict[str, list[Any]]) -> None:
    assert max(scenarios["no text"]) <= 1e-10


@pytest.mark.parametrize("name", ["Mochi, old keys", "Mochi, near keys", "Latte, old keys"])
def test_old_keys_are_those_of_the_same_sample_and_frame(scenarios: dict[str, list[Any]], name: str) -> None:
    for still, moving in scenarios[name]:
        assert still <= 1e-10, "nothing has changed, so nothing is stale"
        assert moving > 1e-6, "stale keys must show"
