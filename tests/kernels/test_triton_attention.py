"""The Triton kernel in its interpreter against float64 einsum: every mask kind, segments, start values, splits."""

from __future__ import annotations

import importlib.util
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
from tests.kernels.oracle import difference, inputs, oracle

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU is here: test_attention runs on it"),
]


@pytest.fixture(autouse=True)
def unwritten_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs start as NaN: an element the kernel leaves out shows."""
    real = torch.empty

    def filled(*args: Any, **options: Any) -> torch.Tensor:
        made = real(*args, **options)
        return made.fill_(math.nan) if made.is_floating_point() else made

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", masks(1, 1))
def test_mask_kinds(name: str, dtype: torch.dtype) -> None:
    length, keys = 43, 75
    q, k, v = inputs(2, 4, 2, length, keys, 24, dtype=dtype)
    mask = masks(length, keys)[name]
    keep = None if mask is None else visible(mask, length, keys)
    assert difference(run(q, k, v, mask=mask), oracle(q, k, v, mask=keep)) <= TOLERANCE[dtype]


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
    made = []
    for index, (low, high) in enumerate(itertools.pairwise(edges)):
        own = [x[:, :, low:high].clone() for x in (k, v)]
        if index % 2:
            own = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in own]
        made.append(Segment(*own, **{name: column[index] for name, column in columns.items()}))
    return made


@pytest.mark.parametrize("backend", ["triton", "naive", "cpu_flash"])
@pytest.mark.parametrize("name", ["full", "causal", "block causal", "tree"])
def test_segments_are_their_concatenation(backend: str, name: str) -> None:
    length, keys = 37, 90
    q, k, v = inputs(2, 4, 2, length, keys, 16, dtype=torch.float32)
    biases = [0.0, math.log(8), -0.5, -math.inf, 0.0]
    segments = table(k, v, [5, 38, 38, 71], bias=biases)
    row = torch.cat([torch.full((s.length,), b) for s, b in zip(segments, biases, strict=True)])
    mask = masks(length, keys)[name]
    keep = None if mask is None else visible(mask, length, keys)
    with force_backend(backend):
        found = attention(q, mask=mask, segments=segments)
    assert difference(found, oracle(q, k, v, mask=keep, bias=row)) <= 2e-6


@pytest.mark.parametrize("backend", ["triton", "naive", "cpu_flash"])
def test_segments_at_positions_and_in_streams(backend: str) -> None:
    length, keys = 30, 80
    q, k, v = inputs(1, 4, 4, length, keys, 16, dtype=torch.float32)
    segments = table(k, v, [33, 50], stream=[-1, 0, 1], position=[0, 33, 33])
    mask = Streams(torch.arange(length) % 2, offset=25)
    with force_backend(backend):
        found = attention(q, mask=mask, segments=segments)
    assert difference(found, oracle(q, k, v, mask=visible(mask, length, keys, segments))) <= 2e-6


def test_a_start_value_goes_on_in_float32() -> None:
    q, k, v = inputs(2, 4, 2, 20, 60, 16, dtype=torch.float16)
    out, lse = run(q, k[:, :, :25], v[:, :, :25], mask=Causal())
    found = run(q, k[:, :, 25:], v[:, :, 25:], init=(out.float(), lse))
    keep = torch.ones(20, 60, dtype=torch.bool)
    keep[:, :25] = visible(Causal(), 20, 25)[0, 0]
    assert found[0].dtype is torch.float32
    assert difference(found, oracle(q, k, v, mask=keep[None, None])) <= 2e-3
    empty = (torch.zeros(2, 4, 20, 16), torch.full((2, 4, 20), -math.inf))
    assert difference(run(q.float(), k.float(), v.float(), init=empty), oracle(q.float(), k.float(), v.float())) <= 2e-6


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("segmented", [False, True])
def test_splits_over_the_keys(splits: int, segmented: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "num_splits", lambda call, config: splits)
    length, keys = 3, 300
    q, k, v = inputs(2, 8, 2, length, keys, 16, dtype=torch.float32)
    mask = Causal(offset=keys - length - 40)
    start = attention(*inputs(2, 8, 2, length, 11, 16, dtype=torch.float32, seed=9))
    keys_given = {"segments": table(k, v, [7, 140, 141])} if segmented else {"k": k, "v": v}
    found = run(q, **keys_given, mask=mask, init=start)
    with force_backend("naive"):
        wanted = attention(q.double(), k.double(), v.double(), mask=mask, init=[x.double() for x in start])
    assert difference(found, wanted) <= 2e-6


def test_few_queries_are_split_and_many_are_not() -> None:
    q, k, v = inputs(1, 4, 4, 1, 2000, 16, dtype=torch.float32)
    from partsong.kernels.call import Call

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


@settings(max_examples=30, deadline=None, derandomize=True)
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
    wanted = oracle(q, k, v, mask=keep)
    assert difference(run(q, k, v, **options), wanted) <= 2e-6
    if not (isinstance(mask, Streams) and mask.key is None):
        assert difference(run(q, segments=table(k, v, cuts), **options), wanted) <= 2e-6
