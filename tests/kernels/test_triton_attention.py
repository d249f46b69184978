"""The Triton kernel in its interpreter against float64 einsum: every mask kind, segments, start values, splits."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partsong.kernels import BlockCausal, Causal, Segment, Streams, Tree, attention, force_backend
from partsong.kernels.backends import triton_attention
from partsong.kernels.call import Call, missing_triton
from tests import covering
from tests.kernels.oracle import difference, inputs, oracle

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}

pytestmark = [
    pytest.mark.skipif(bool(missing_triton()), reason=missing_triton() or "it is there"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU is here: test_attention runs on it"),
]


@pytest.fixture(autouse=True)
def unwritten_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs start as NaN: an element the kernel leaves out shows."""
    real = torch.empty

    def filled(*args: Any, **options: Any) -> torch.Tensor:
        tensor = real(*args, **options)
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    def like(x: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch.full_like(x, math.nan, **options)

    monkeypatch.setattr(triton_attention.torch, "empty", filled)
    monkeypatch.setattr(triton_attention.torch, "empty_like", like)


def run(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with force_backend("triton"):
        return attention(*args, **options)


def visible(mask: Any, length: int, keys: int, segments: list[Segment] | None = None) -> torch.Tensor:
    """The mask written out element by element, from its definition."""
    keep = torch.zeros(1, 1, length, keys, dtype=torch.bool)
    positions, streams = list(range(keys)), [-1] * keys
    if segments is not None:
        positions = [(s.position or 0) + j for s in segments for j in range(s.length)]
        streams = [s.stream for s in segments for _ in range(s.length)]
    for i in range(length):
        for j in range(keys):
            if isinstance(mask, Causal):
                ok = positions[j] <= i + mask.offset
            elif isinstance(mask, BlockCausal):
                ok = positions[j] // mask.block <= (i + mask.offset) // mask.block
            elif isinstance(mask, Streams):
                stream = streams[j] if mask.key is None else int(mask.key[j])
                ok = stream in (-1, int(mask.query[i]))
                ok = ok and (mask.offset is None or positions[j] <= i + mask.offset)
            else:
                ok = bool(mask.enter[j] <= mask.query[i] < mask.leave[j])
            keep[0, 0, i, j] = ok
    return keep


def a_tree(nodes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Enter and leave numbers of a random tree, its nodes in an order other than depth-first."""
    draw = torch.Generator().manual_seed(seed)
    parents = [-1] + [int(torch.randint(0, i, (), generator=draw)) for i in range(1, nodes)]
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    enter, leave, count = [0] * nodes, [0] * nodes, 0

    def walk(node: int) -> None:
        nonlocal count
        enter[node], count = count, count + 1
        for child in children.get(node, []):
            walk(child)
        leave[node] = count

    walk(0)
    return torch.tensor(enter), torch.tensor(leave)


def masks(length: int, keys: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(3)
    enter, leave = a_tree(keys, 4)
    chosen = torch.randint(0, keys, (length,), generator=draw)
    return {
        "full": None,
        "causal": Causal(),
        "causal, decoding": Causal(offset=keys - length),
        "causal, nothing yet": Causal(offset=-length // 2),
        "block causal": BlockCausal(8, offset=3),
        "streams": Streams(
            torch.randint(0, 3, (length,), generator=draw), torch.randint(-1, 4, (keys,), generator=draw)
        ),
        "causal streams": Streams(
            torch.randint(0, 2, (length,), generator=draw), torch.randint(-1, 2, (keys,), generator=draw), offset=20
        ),
        "tree": Tree(enter[chosen], enter, leave),
    }


def each_mask(dtype: torch.dtype, *usual: str) -> list[Any]:
    """All masks in a type; those but `usual` are left to ``--full``, since masks are computed alike in every type."""
    return [pytest.param(name, dtype, marks=() if name in usual else pytest.mark.full) for name in masks(1, 1)]


HALF = ("causal streams", "tree")


@pytest.mark.parametrize(("name", "dtype"), each_mask(torch.float32, *masks(1, 1)) + each_mask(torch.float16, *HALF))
def test_mask_kinds(name: str, dtype: torch.dtype) -> None:
    length, keys = 19, 75
    q, k, v = inputs(2, 2, 1, length, keys, 24, dtype=dtype)
    mask = masks(length, keys)[name]
    keep = None if mask is None else visible(mask, length, keys)
    assert difference(run(q, k, v, mask=mask), oracle(q, k, v, mask=keep)) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("name", "dtype"), each_mask(torch.bfloat16, *HALF))
def test_bfloat16(name: str, dtype: torch.dtype) -> None:
    # The interpreter would compute garbage from it: operands are widened when they are loaded.
    length, keys = 20, 50
    q, k, v = inputs(1, 4, 2, length, keys, 24, dtype=dtype)
    mask = masks(length, keys)[name]
    keep = None if mask is None else visible(mask, length, keys)
    bias = torch.randn(1, 1, 1, keys, generator=torch.Generator().manual_seed(1))
    result = run(q, k, v, mask=mask, bias=bias)
    assert result[0].dtype is torch.bfloat16
    assert difference(result, oracle(q, k, v, mask=keep, bias=bias)) <= TOLERANCE[torch.bfloat16]


def test_bfloat16_goes_on_from_a_start_and_in_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "num_splits", lambda call, config: 3)
    q, k, v = inputs(1, 4, 2, 3, 200, 16, dtype=torch.bfloat16)
    expected = oracle(q, k, v)
    out, lse = run(q, k[:, :, :90], v[:, :, :90])
    result = run(q, segments=table(k[:, :, 90:], v[:, :, 90:], [31]), init=(out.float(), lse))
    assert result[0].dtype is torch.float32
    assert difference(result, expected) <= TOLERANCE[torch.bfloat16]
    # The log-sum-exp never was in half precision.
    assert (result[1] - expected[1]).abs().max() <= 1e-5


@pytest.mark.parametrize(("dtype", "upcast"), [(torch.bfloat16, True), (torch.float16, False), (torch.float32, False)])
def test_operands_are_widened_in_the_interpreter_only(
    dtype: torch.dtype, upcast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {}

    class Recorder:
        def __getitem__(self, grid: object) -> Any:
            return lambda *args, **given: options.update(given)

    monkeypatch.setattr(triton_attention._device_code(), "attention_kernel", Recorder())
    q, k, v = inputs(1, 1, 1, 2, 3, 16, dtype=dtype)
    run(q, k, v)
    assert (options["UPCAST"], options["PRECISION"]) == (upcast, "ieee")
    monkeypatch.setattr(triton_attention, "interpreted", lambda: False)
    call = Call(q, (Segment(k, v, position=0),), None, None, 0.25)
    triton_attention.run(call, triton_attention.Config(block_m=16, block_n=16, num_warps=4, num_stages=1))
    assert (options["UPCAST"], options["PRECISION"]) == (False, "tf32x3" if dtype is torch.float32 else "ieee")


@pytest.mark.parametrize("name", masks(1, 1))
def test_mask_kinds_with_key_padding(name: str) -> None:
    length, keys = 21, 50
    q, k, v = inputs(2, 2, 1, length, keys, 16, dtype=torch.float32)
    padding = torch.ones(2, 1, 1, keys, dtype=torch.bool)
    padding[0, ..., 37:], padding[1, ..., :40] = False, False
    mask = masks(length, keys)[name]
    keep = padding if mask is None else visible(mask, length, keys) & padding
    given = padding if mask is None else (mask, padding)
    assert difference(run(q, k, v, mask=given), oracle(q, k, v, mask=keep)) <= 2e-6


@pytest.mark.parametrize("width", [1, 32, 40, 64, 72, 128, 256])
def test_head_sizes(width: int) -> None:
    q, k, v = inputs(1, 2, 2, 9, 35, width, dtype=torch.float32)
    assert difference(run(q, k, v), oracle(q, k, v)) <= 2e-6


@pytest.mark.parametrize("form", ["row", "per head", "full", "column"])
def test_bias(form: str) -> None:
    q, k, v = inputs(2, 4, 2, 18, 41, 16, dtype=torch.float32)
    shape = {"row": (2, 1, 1, 41), "per head": (1, 4, 1, 41), "full": (2, 4, 18, 41), "column": (2, 1, 18, 1)}[form]
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    bias = bias.masked_fill(bias < -1.2, -math.inf)
    assert difference(run(q, k, v, bias=bias), oracle(q, k, v, bias=bias)) <= 2e-6


def table(k: torch.Tensor, v: torch.Tensor, cuts: list[int], **columns: list[Any]) -> list[Segment]:
    """Segments in memory of their own, of different layouts."""
    edges = [0, *cuts, k.shape[2]]
    tensor = []
    for index, (low, high) in enumerate(itertools.pairwise(edges)):
        own = [x[:, :, low:high].clone() for x in (k, v)]
        if index % 2:
            own = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in own]
        tensor.append(Segment(*own, **{name: column[index] for name, column in columns.items()}))
    return tensor


@pytest.mark.parametrize("backend", ["triton", "naive", "cpu_flash"])
@pytest.mark.parametrize("name", ["full", "causal", "block causal", "tree"])
def test_segments_are_their_concatenation(backend: str, name: str) -> None:
    length, keys = 19, 90
    q, k, v = inputs(2, 2, 1, length, keys, 16, dtype=torch.float32)
    biases = [0.0, math.log(8), -0.5, -math.inf, 0.0]
    segments = table(k, v, [5, 38, 38, 71], bias=biases)
    row = torch.cat([torch.full((s.length,), b) for s, b in zip(segments, biases, strict=True)])
    mask = masks(length, keys)[name]
    keep = None if mask is None else visible(mask, length, keys)
    with force_backend(backend):
        result = attention(q, mask=mask, segments=segments)
    assert difference(result, oracle(q, k, v, mask=keep, bias=row)) <= 2e-6


@pytest.mark.parametrize("backend", ["triton", "naive", "cpu_flash"])
def test_segments_at_positions_and_in_streams(backend: str) -> None:
    length, keys = 30, 80
    q, k, v = inputs(1, 4, 4, length, keys, 16, dtype=torch.float32)
    segments = table(k, v, [33, 50], stream=[-1, 0, 1], position=[0, 33, 33])
    mask = Streams(torch.arange(length) % 2, offset=25)
    with force_backend(backend):
        result = attention(q, mask=mask, segments=segments)
    assert difference(result, oracle(q, k, v, mask=visible(mask, length, keys, segments))) <= 2e-6


def test_a_start_value_goes_on_in_float32() -> None:
    q, k, v = inputs(2, 4, 2, 20, 60, 16, dtype=torch.float16)
    out, lse = run(q, k[:, :, :25], v[:, :, :25], mask=Causal())
    result = run(q, k[:, :, 25:], v[:, :, 25:], init=(out.float(), lse))
    keep = torch.ones(20, 60, dtype=torch.bool)
    keep[:, :25] = visible(Causal(), 20, 25)[0, 0]
    assert result[0].dtype is torch.float32
    assert difference(result, oracle(q, k, v, mask=keep[None, None])) <= 2e-3
    empty = (torch.zeros(2, 4, 20, 16), torch.full((2, 4, 20), -math.inf))
    assert difference(run(q.float(), k.float(), v.float(), init=empty), oracle(q.float(), k.float(), v.float())) <= 2e-6


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("segmented", [False, True])
def test_splits_over_the_keys(splits: int, segmented: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "num_splits", lambda call, config: splits)
    length, keys = 3, 170
    q, k, v = inputs(2, 4, 1, length, keys, 16, dtype=torch.float32)
    mask = Causal(offset=keys - length - 40)
    start = attention(*inputs(2, 4, 1, length, 11, 16, dtype=torch.float32, seed=9))
    keys_given = {"segments": table(k, v, [7, 100, 101])} if segmented else {"k": k, "v": v}
    result = run(q, **keys_given, mask=mask, init=start)
    with force_backend("naive"):
        expected = attention(q.double(), k.double(), v.double(), mask=mask, init=[x.double() for x in start])
    assert difference(result, expected) <= 2e-6


@pytest.fixture
def by_descriptors(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Asks for the copy engine; every launch notes whether it was used."""
    rule, room, used = triton_attention.config_for, triton_attention._make_room_for_descriptors, []
    monkeypatch.setattr(triton_attention, "config_for", lambda call: dataclasses.replace(rule(call), tma=True))
    monkeypatch.setattr(
        triton_attention, "_make_room_for_descriptors", lambda device: (used.append(True), room(device))
    )
    return used


def without_descriptors(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention, "fits_copy_engine", lambda segments: False)
        return run(*args, **options)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("causal", dtype) for dtype in (torch.float32, torch.bfloat16)),
        *each_mask(torch.float16, "full", "block causal", "causal streams", "tree"),
    ],
)
def test_descriptors_read_the_same_numbers(name: str, dtype: torch.dtype, by_descriptors: list[bool]) -> None:
    length, keys = 17, 50
    q, k, v = inputs(1, 2, 1, length, keys, 24, dtype=dtype)
    mask = masks(length, keys)[name]
    start = (torch.randn(1, 2, length, 24), torch.randn(1, 2, length))
    for way in ({"k": k, "v": v, "init": start}, {"segments": table(k, v, [5, 38, 38], bias=[0.0, 0.3, 0.0, -0.5])}):
        result, expected = run(q, mask=mask, **way), without_descriptors(q, mask=mask, **way)
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert len(by_descriptors) == 2


@pytest.mark.parametrize(("width", "used"), [(64, True), (72, True), (256, True), (20, False), (1, False)])
def test_descriptors_need_aligned_rows(width: int, used: bool, by_descriptors: list[bool]) -> None:
    q, k, v = inputs(1, 2, 2, 9, 35, width, dtype=torch.float16)
    assert difference(run(q, k, v), oracle(q, k, v)) <= 2e-3
    assert bool(by_descriptors) == used


@pytest.mark.parametrize("layout", ["bshd", "heads expanded", "rows expanded", "width strided", "offset"])
def test_descriptors_of_any_layout(layout: str, by_descriptors: list[bool]) -> None:
    q, k, v = inputs(2, 4, 4, 18, 33, 16, dtype=torch.float16)
    if layout == "bshd":
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    elif layout == "heads expanded":
        k, v = k[:, :1].expand(-1, 4, -1, -1), v[:1].expand(2, -1, -1, -1)
    elif layout == "rows expanded":
        k = k[:, :, :1].expand(-1, -1, 33, -1)
    elif layout == "width strided":
        k = k.mT.contiguous().mT  # copied, as threads need it too
    else:
        k, v = (torch.cat([x.new_zeros(2, 4, 33, 4), x], dim=3)[..., 4:] for x in (k, v))
    assert difference(run(q, k, v), oracle(q, k, v)) <= 2e-3
    assert bool(by_descriptors) == (layout not in ("rows expanded", "offset"))


def test_descriptors_and_splits(monkeypatch: pytest.MonkeyPatch, by_descriptors: list[bool]) -> None:
    monkeypatch.setattr(triton_attention, "num_splits", lambda call, config: 3)
    q, k, v = inputs(2, 4, 1, 3, 200, 16, dtype=torch.float32)
    result = run(q, segments=table(k, v, [70, 141]), mask=Causal(offset=160))
    assert difference(result, oracle(q, k, v, mask=visible(Causal(offset=160), 3, 200))) <= 2e-6
    assert by_descriptors


def test_room_for_descriptors_is_asked_for_by_the_launch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import _allocation

    before, result = _allocation._allocator.get(), []
    launch = triton_attention._launch

    def watched(*args: Any) -> None:
        launch(*args)
        result.append(_allocation._allocator.get()(256, 128, None))

    monkeypatch.setattr(triton_attention, "_launch", watched)
    q, k, v = inputs(1, 1, 1, 4, 8, 16, dtype=torch.float16)
    call = Call(q, (Segment(k, v, position=0),), None, None, 0.25)
    config = dataclasses.replace(triton_attention.config_for(call), tma=True)
    triton_attention.run(call, config)
    assert result[0].numel() * result[0].element_size() == 256
    assert _allocation._allocator.get() is before


def test_the_copy_engine_is_used_only_where_it_was_measured() -> None:
    assert not triton_attention.Config(block_m=64, block_n=64, num_warps=4, num_stages=2).tma
    q, k, v = inputs(1, 1, 1, 4, 8, 16, dtype=torch.float16)
    assert not triton_attention.config_for(Call(q, (Segment(k, v, position=0),), None, None, 0.25)).tma


def test_few_queries_are_split_and_many_are_not() -> None:
    q, k, v = inputs(1, 4, 4, 1, 2000, 16, dtype=torch.float32)
    few = Call(q, (Segment(k, v, position=0),), None, None, 1.0)
    many = Call(q.expand(64, -1, -1, -1), (Segment(k, v, position=0),), None, None, 1.0)
    assert triton_attention.num_splits(few, triton_attention.config_for(few)) == 1
    one_head = Call(q[:, :1], (Segment(k[:, :1], v[:, :1], position=0),), None, None, 1.0)
    assert triton_attention.num_splits(one_head, triton_attention.config_for(one_head)) == 4
    assert triton_attention.num_splits(many, triton_attention.config_for(many)) == 1
    assert difference(run(q[:, :1], k[:, :1], v[:, :1]), oracle(q[:, :1], k[:, :1], v[:, :1])) <= 2e-6


@st.composite
def cases(draw: Any) -> Any:
    batch, key_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    length, keys = draw(st.integers(1, 40)), draw(st.integers(1, 70))
    width = draw(st.sampled_from([3, 8, 16]))
    cuts = sorted(draw(st.lists(st.integers(0, keys), max_size=3)))
    name = draw(st.sampled_from(list(masks(1, 1))))
    return (batch, key_heads * group, key_heads, length, keys, width), cuts, name


@settings(max_examples=30 if covering.FULL else 5, deadline=None, derandomize=True)
@given(case=cases(), hidden=st.booleans())
def test_any_shape(case: Any, hidden: bool) -> None:
    shape, cuts, name = case
    q, k, v = inputs(*shape, dtype=torch.float32)
    mask = masks(shape[3], shape[4])[name]
    keep = torch.ones(1, 1, shape[3], shape[4], dtype=torch.bool)
    if mask is not None:
        keep = visible(mask, shape[3], shape[4])
    options: dict[str, Any] = {"mask": mask}
    if hidden:
        padding = (torch.arange(shape[4]) % 3 != 0)[None, None, None]
        options["mask"] = padding if mask is None else (mask, padding)
        keep = keep & padding
    expected = oracle(q, k, v, mask=keep)
    assert difference(run(q, k, v, **options), expected) <= 2e-6
    if not (isinstance(mask, Streams) and mask.key is None):
        assert difference(run(q, segments=table(k, v, cuts), **options), expected) <= 2e-6
