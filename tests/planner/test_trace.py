"""Traces of shallow models against traces of whole ones, and their bytes against `predict`."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from partsong import (
    CfgParallel,
    DisplacedPatch,
    OffloadWeights,
    Ring,
    ShardedWeights,
    SyncPatch,
    TensorParallel,
    TokenRing,
    Ulysses,
)
from partsong.errors import UnsupportedError
from partsong.parallel import predict, predict_memory
from partsong.parallel.plan.remembered_shapes import RememberedShapes
from partsong.parallel.ranks.mesh import HOST_LANE
from partsong.planner import MODELS, subject_named, trace
from partsong.planner.calls import Size
from partsong.planner.operators import OperatorWork
from partsong.planner.shallow import runs_of, shallow
from tests import covering
from tests.parallel.test_real_sizes import SIZES

MIXES = {
    "ulysses": (Ulysses(),),
    "ring": (Ring(),),
    "token-ring": (TokenRing(),),
    "sync-patch": (SyncPatch(),),
    "displaced-patch": (DisplacedPatch(),),
    "tensor-parallel": (TensorParallel(),),
    "sharded-weights": (ShardedWeights(),),
    "ulysses offload-weights": (Ulysses(), OffloadWeights(resident=0.3)),
    "ulysses tensor-parallel": (Ulysses(degree=2), TensorParallel(degree=2)),
    "cfg-parallel ring": (CfgParallel(degree=2), Ring(degree=2)),
}
#: Each mix once, alone or in a composition, of pictures and of a video; the whole product is left to make test-full.
DEFAULT = {
    ("pixart-sigma", "displaced-patch"),
    ("sd3.5-large", "cfg-parallel ring"),
    ("qwen-image", "sharded-weights"),
    ("cogvideox-5b", "token-ring"),
    ("pixart-sigma", "sync-patch"),
    ("pixart-sigma", "ulysses offload-weights"),
    ("flux-schnell", "ulysses tensor-parallel"),
}
#: Those whose bytes are compared with the prediction by default: tokens, batch and columns, and frames.
COUNTED = {("pixart-sigma", "displaced-patch"), ("sd3.5-large", "cfg-parallel ring"), ("cogvideox-5b", "token-ring")}
COUNTED |= {("flux-schnell", "ulysses tensor-parallel")}
#: Mixes that have no form on a model, by what the support table and the strategies say.
REFUSED = {
    ("sd-1.5", "ulysses tensor-parallel"),
    ("sdxl", "ulysses tensor-parallel"),
    ("sana-1.6b", "displaced-patch"),
}
CASES = [
    pytest.param(model, mix, marks=() if (model, mix) in DEFAULT else pytest.mark.full)
    for model, mix in itertools.product(MODELS, MIXES)
    if (model, mix) not in REFUSED
]


def inputs_of(name: str) -> dict[str, Any]:
    row, subject = MODELS[name], subject_named(name)
    batch = row.branches if row.joined else 1
    return subject.call(Size(height=row.height, width=row.width, frames=row.frames, batch=batch))


def totals(parts: tuple[trace.CallPart, ...]) -> Counter[str]:
    """What happens in a call, of each kind."""
    sums: Counter[str] = Counter()
    for part in parts:
        for event in part.events:
            if isinstance(event, OperatorWork):
                sums[event.kind] += part.times
                sums["flops"] += int(event.flops) * part.times
                sums["bytes"] += event.bytes * part.times
            elif isinstance(event, trace.Post):
                sums["messages"] += len(event.sent) * part.times
                sums["sent"] += sum(event.sent.values()) * part.times
                sums["copied"] += sum(event.received.values()) * part.times if event.lane == HOST_LANE else 0
            else:
                sums["waits"] += part.times
    return sums


@pytest.mark.parametrize(("model", "mix"), CASES)
def test_three_blocks_stand_for_all(model: str, mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, inputs = subject_named(model), inputs_of(model)
    short = trace.trace_calls(subject.denoiser, MIXES[mix], 4, inputs)
    monkeypatch.setattr(trace, "runs_of", lambda module: [])
    whole = trace.trace_calls(subject.denoiser, MIXES[mix], 4, inputs)
    for one, other in ((short.first, whole.first), (short.steady, whole.steady)):
        mine, theirs = totals(one), totals(other)
        keys = ("flops", "sent", "messages", "copied", "waits", "matmul", "attention")
        assert {key: mine[key] for key in keys} == {key: theirs[key] for key in keys}
        assert (mine["copied"] > 0) == any(strategy.offloads for strategy in MIXES[mix])
        # Layers that pad their tokens do so once more in the first block.
        assert mine["bytes"] == pytest.approx(theirs["bytes"], rel=1e-3)
    assert short.working == pytest.approx(whole.working, rel=0.05)
    assert short.weights == whole.weights


@pytest.mark.parametrize(("model", "mix"), [case for case in CASES if covering.FULL or case.values in COUNTED])
def test_bytes_are_those_that_predict_counts(model: str, mix: str) -> None:
    subject, inputs = subject_named(model), inputs_of(model)
    told = predict(subject.denoiser, *MIXES[mix], ranks=4, **inputs)
    short = trace.trace_calls(subject.denoiser, MIXES[mix], 4, inputs)
    steady, first = told.bytes_by_step[len(told.bytes_by_step) // 2][0], told.bytes_by_step[0][0]
    assert totals(short.steady)["sent"] + short.checks[1] == steady
    assert totals(short.first)["sent"] + short.checks[0] == first
    assert max(short.checks) < first / 100, "what ranks compare is little beside what they exchange"


@pytest.mark.parametrize(
    "mix",
    [
        "displaced-patch",
        "ulysses offload-weights",
        *(pytest.param(mix, marks=pytest.mark.full) for mix in ("ulysses", "sharded-weights")),
    ],
)
def test_memory_is_that_of_the_whole_model(mix: str) -> None:
    subject, inputs = subject_named("pixart-sigma"), inputs_of("pixart-sigma")
    short = trace.trace_calls(subject.denoiser, MIXES[mix], 4, inputs)
    whole = predict_memory(subject.denoiser, *MIXES[mix], ranks=4, **inputs)
    assert short.weights == whole.weights
    assert short.working == pytest.approx(whole.working, rel=0.1)


@pytest.mark.parametrize("pair", sorted(REFUSED))
def test_what_has_no_form_is_refused(pair: tuple[str, str]) -> None:
    model, mix = pair
    with pytest.raises(UnsupportedError):
        trace.trace_calls(subject_named(model).denoiser, MIXES[mix], 4, inputs_of(model))


@pytest.mark.parametrize(("model", "equal"), [("FluxTransformer2DModel", True), ("ConsisIDTransformer3DModel", False)])
def test_blocks_that_do_more_than_their_equals_are_noticed(model: str, equal: bool) -> None:
    """ConsisID attends to a face behind every other block."""
    size = SIZES[model]
    assert trace.blocks_are_equal(size.build(), size.inputs(1), RememberedShapes()) == equal


def test_blocks_come_back_in_order() -> None:
    model = subject_named("flux-dev").denoiser
    before = list(model.modules())
    with shallow(runs_of(model)):
        assert len(list(model.modules())) < len(before) / 4
    assert list(model.modules()) == before
