"""Weights in the host's memory: the same bits, what is copied when, the memory of the device, and what is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from partsong import (
    ArgumentError,
    LayerPipeline,
    OffloadWeights,
    ShardedWeights,
    TensorParallel,
    TimeParallel,
    Ulysses,
    UnsupportedError,
    parse_strategy,
)
from partsong.parallel import Mesh, mesh_for, parallelize, predict
from partsong.parallel.hooks.samples import sample_of
from partsong.parallel.offload_weights import host_weights
from partsong.parallel.offload_weights.chunk_copies import ChunkCopies
from partsong.parallel.ranks.launch import launch
from tests import covering
from tests.parallel import offload_worker as worker
from tests.parallel.families import FAMILIES
from tests.parallel.lazy_device import lazy_device
from tests.parallel.tensor_worker import build, calls

MODELS = ("Flux", "Wan", "SD3", "Lumina2")
DTYPES = (torch.float64, torch.float32)
ALL = [(name, mix, dtype) for mix in worker.MIXES for name in ("Flux", "Wan", "UNet") for dtype in DTYPES]
ROWS = ("Ulysses", "CfgParallel", "DataParallel", "DisplacedPatch", "SyncPatch")
LEGAL = [(name, mix, dtype) for name, mix, dtype in ALL if (mix in ROWS if name == "UNet" else mix != "SyncPatch")]
#: Models and types take turns with what is beside.
USUAL = {
    ("UNet" if mix == "SyncPatch" else ("Flux", "Wan")[turn % 2], mix, DTYPES[turn % 2])
    for turn, mix in enumerate(worker.MIXES)
}
CASES = [case for case in LEGAL if covering.FULL or case in USUAL]


def blocks_of(model: Any) -> list[nn.Module]:
    """The blocks, by hand."""
    lists = (part for part in model.children() if isinstance(part, nn.ModuleList))
    return [block for blocks in lists for block in blocks if sum(1 for _ in block.parameters()) > 2]


def _bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_one_rank_gives_the_same_bits_from_less_memory(name: str, share: float) -> None:
    model = build(name)
    if share:
        model.to(torch.float32)
    named = [{key: worker._cast(value, model.dtype) for key, value in call.items()} for call in calls(name)]
    before, whole = dict(model.named_parameters()), {key: each.clone() for key, each in model.state_dict().items()}
    with torch.no_grad():
        want = [sample_of(model(**call)) for call in named]
        sizes = sorted((_bytes(block) for block in blocks_of(model)), reverse=True)
        with parallelize(model, OffloadWeights(resident=share, chunk_mb=0.003)) as plan:
            got = [sample_of(model(**call)) for call in named]
            held: Any = plan.denoisers[0].shards
            saved = model.state_dict()
            # Weights begin at multiples of 256 bytes in their room.
            more = 256 * sum(1 for _ in model.parameters())
            assert held.resident <= share * sum(sizes)
            assert held.resident + held.rooms <= share * sum(sizes) + sum(sizes[:2]) + more
            assert sum(sizes) - held.resident <= held.copied <= sum(sizes) - held.resident + more
            assert f"{held.copied:,} bytes are copied to the device in each call" in str(plan.explain())
        again = sample_of(model(**named[0]))
    assert all(map(torch.equal, got, want))
    assert all(torch.equal(saved[key], each) for key, each in whole.items())
    assert all(torch.equal(each, whole[key]) for key, each in model.state_dict().items())
    assert all(before[key] is each for key, each in model.named_parameters())
    assert torch.equal(again, want[0])
    assert not any("_apply" in vars(part) for part in model.modules())


@functools.cache
def mixes() -> dict[tuple[str, str, torch.dtype], list[dict[str, Any]]]:
    return launch(worker.mixes, 2, CASES)


@pytest.mark.parametrize(("name", "mix", "dtype"), CASES)
def test_two_ranks_give_the_bits_of_the_mix_without_it(name: str, mix: str, dtype: torch.dtype) -> None:
    for rank in mixes()[name, mix, dtype]:
        assert rank["same"]
        assert 0 < rank["copied"] == rank["whole"]


def test_chunks_are_dealt_out_between_the_exchanges() -> None:
    for rank in launch(worker.turns, 2, 2):
        assert rank["beside"] == 0, "no chunk is copied while an exchange is under way"
        first, second = rank["first"], rank["second"]
        # In the first step nobody knows how many exchanges there will be: a block is copied before the first of them.
        assert len(set(second)) > len(set(first))
        assert len(first) == len(second)


class Wire:
    """An exchange that a test ends."""

    def __init__(self) -> None:
        self.done, self.finish = False, list[Any]()

    def then(self, finish: Any) -> None:
        self.finish.append(finish)

    def precede(self, stream: Any) -> None:
        stream.log.append("waits for the exchange")

    def end(self) -> None:
        self.done = True
        for each in self.finish:
            each()


def _chunks(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.zeros(4), torch.full((4,), float(place))) for place in range(number)]


def test_a_copy_yields_at_the_border_of_a_chunk() -> None:
    copies, chunks = ChunkCopies(torch.device("cpu")), _chunks(6)
    first, second = Wire(), Wire()
    copies.begin(0, [], None)
    copies.note(first, False)
    copies.note(second, False)
    first.end()
    second.end()
    copies.begin(1, [], None)
    copies.begin(0, chunks, None)  # two exchanges are expected, so chunks come in three parts
    assert copies.copied == 2 * 16
    first, second = Wire(), Wire()
    copies.note(first, False)
    copies.note(second, False)
    first.end()
    assert copies.copied == 2 * 16, "the second one is under way"
    second.end()
    assert copies.copied == 4 * 16
    copies.finish()
    assert copies.copied == 6 * 16
    assert all(torch.equal(to, chunk) for to, chunk in chunks)


def test_a_stream_waits_for_exchanges_and_the_host_for_nothing() -> None:
    with lazy_device() as streams:
        copies, chunks = ChunkCopies(torch.device("cpu")), _chunks(4)
        copies.begin(0, [], None)
        copies.note(Wire(), True)
        copies.begin(1, [], None)
        copies.begin(0, chunks, torch.Event())
        copies.note(Wire(), True)
        assert streams[0].log == [
            *("waits for the exchange", "waits for the room", "copy", "copy"),
            *("waits for the exchange", "copy", "copy", "event"),
        ]
        assert not any(to.any() for to, _ in chunks)
        copies.finish()
        assert all(torch.equal(to, chunk) for to, chunk in chunks)


@pytest.mark.parametrize("name", MODELS)
def test_no_weight_is_read_before_it_has_arrived(name: str) -> None:
    model, named = build(name), calls(name)
    with torch.no_grad(), lazy_device() as streams:
        want = [sample_of(model(**call)) for call in named]
        with parallelize(model, OffloadWeights(resident=0.2, chunk_mb=0.003)):
            got = [sample_of(model(**call)) for call in named]
        assert all(map(torch.equal, got, want))
        assert streams[-1].log.count("copy") > 10


def test_blocks_are_copied_in_the_order_of_their_calls() -> None:
    """A UNet calls its blocks in another order than it lists them, and a transformer may leave one out."""
    with Mesh() as mesh:
        want, _ = worker.answers("UNet", torch.float64, mesh)
        got, held = worker.answers("UNet", torch.float64, mesh, OffloadWeights())
        assert all(map(torch.equal, got, want))
        assert held.copied == sum(block.size for block in held.blocks), "each block once"
    model, call = build("SD3"), calls("SD3")[0]
    skips: list[list[int] | None] = [None, [1], [0], None]
    with torch.no_grad():
        wanted = [sample_of(model(**call, skip_layers=skip)) for skip in skips]
        with parallelize(model, OffloadWeights()):
            got = [sample_of(model(**call, skip_layers=skip)) for skip in skips]
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("free", [0.0, 0.5, 3.0])
def test_as_much_stays_as_half_of_what_the_first_call_has_left(free: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = build("SD3"), calls("SD3")[0]
    whole = sum(_bytes(block) for block in blocks_of(model))
    monkeypatch.setattr(host_weights, "memory_left", lambda device: int(free * whole))
    with torch.no_grad():
        want = sample_of(model(**call))
        with parallelize(model, OffloadWeights(resident="auto", chunk_mb=0.003)) as plan:
            held: Any = plan.denoisers[0].shards
            outputs, copied, rooms = [], [], []
            for _ in range(3):
                outputs.append(sample_of(model(**call)))
                copied.append(held.copied)
                rooms.append(held.rooms)
        assert all(torch.equal(output, want) for output in (*outputs, sample_of(model(**call))))
    assert held.resident <= min(1.0, free / 2) * whole
    assert held.resident > (min(1.0, free / 2) - 0.1) * whole
    assert copied[1] == copied[2] == sum(block.size for block in held.blocks) <= copied[0]
    assert (copied[1] < copied[0]) == (rooms[1] < rooms[0]) == (free > 0)


def test_a_call_after_an_error_is_right() -> None:
    model, call = build("SD3"), calls("SD3")[0]

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        want = sample_of(model(**call))
        with parallelize(model, OffloadWeights(chunk_mb=0.003)):
            hook = model.transformer_blocks[1].attn.register_forward_pre_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                model(**call)
            hook.remove()
            assert torch.equal(sample_of(model(**call)), want)
        assert torch.equal(sample_of(model(**call)), want)


def test_a_plan_may_begin_and_run_in_inference_mode() -> None:
    model, call = build("Wan"), calls("Wan")[0]
    with torch.inference_mode():
        want = sample_of(model(**call))
        with parallelize(model, OffloadWeights()):
            assert torch.equal(sample_of(model(**call)), want)
    assert torch.equal(sample_of(model(**call)).detach(), want)


@pytest.mark.parametrize(
    "other", [TensorParallel(), ShardedWeights(), LayerPipeline(), TimeParallel()], ids=lambda each: type(each).__name__
)
def test_refuses_what_cuts_the_same_weights_or_has_a_loop(other: Any) -> None:
    with pytest.raises(UnsupportedError, match=type(other).__name__):
        mesh_for((OffloadWeights(), Ulysses(degree=1), other), 2)


def test_refuses_models_and_calls_that_cannot_be() -> None:
    class Packed(nn.Parameter):
        pass

    model = build("SD3")
    linear = model.transformer_blocks[0].attn.to_q
    linear.weight = Packed(linear.weight.data, requires_grad=False)
    with pytest.raises(UnsupportedError, match="weights of type Packed cannot be offloaded"):
        parallelize(model, OffloadWeights())
    with pytest.raises(UnsupportedError, match="outside of that block; use enable_model_cpu_offload"):
        parallelize(FAMILIES["DiT"].build(8), OffloadWeights())
    model = build("SD3")
    with parallelize(model, OffloadWeights()), pytest.raises(UnsupportedError, match="gradient of its weights"):
        model(**calls("SD3")[0])


def test_needs_no_rank_to_be_predicted_and_has_a_name() -> None:
    strategy = parse_strategy("offload-weights:resident=0.5,chunk_mb=4")
    assert strategy == OffloadWeights(resident=0.5, chunk_mb=4.0)
    assert parse_strategy("offload-weights:resident=auto") == OffloadWeights(resident="auto")
    with pytest.raises(ArgumentError, match="resident=1.5"):
        OffloadWeights(resident=1.5).validate()
    model, call = build("Wan"), calls("Wan")[0]
    told = predict(model, Ulysses(), strategy, ranks=2, **call)
    alone = predict(model, Ulysses(), ranks=2, **call)
    assert told.bytes_by_step == alone.bytes_by_step
    assert "bytes are copied to the device in each call" in str(told)
