"""The backends that are not ours: flex_attention for real on the CPU, xformers and FlashAttention-3 by stand-ins."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad

from partsong.errors import UnsupportedError
from partsong.kernels import BlockCausal, Causal, Segment, Streams, Tree, attention, call, dispatch, force_backend
from partsong.kernels.backends import flash3, flex, xformers
from partsong.kernels.call import Call
from partsong.kernels.masks import SHARED
from tests.kernels.oracle import TOLERANCE, difference, inputs, oracle

ROWS = {"flex": (flex, True), "xformers": (xformers, False), "flash3": (flash3, False)}


@pytest.fixture(autouse=True)
def _rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (module, native) in ROWS.items():
        row = dispatch.Backend(name=name, usable=module.usable, supports=module.supports, run=module.run, native=native)
        monkeypatch.setitem(dispatch.BACKENDS, name, row)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """flex_attention without tracing its rules first, which takes most of a second each."""
    # Not an attribute of torch.nn.attention.flex_attention by that path: the package exports a function of this name.
    module = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


def ids(*shape: int, low: int = 0, high: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def a_tree(keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A binary tree in depth-first order: enter and leave of its nodes."""
    enter, leave = torch.arange(keys), torch.zeros(keys, dtype=torch.int64)

    def walk(node: int, end: int) -> None:
        if node < end:
            leave[node] = end
            half = node + 1 + (end - node - 1) // 2
            walk(node + 1, half)
            walk(half, end)

    walk(0, keys)
    return enter, leave


def kinds(queries: int, keys: int, batch: int) -> dict[str, tuple[object, torch.Tensor]]:
    """Mask kinds and what they mean, written out by comparisons of their own."""
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None]
    query, key = ids(batch, queries), ids(keys, low=SHARED, seed=1)
    stream = (key[None, None] == SHARED) | (key[None, None] == query[:, :, None])
    enter, leave = a_tree(keys)
    node = ids(queries, high=keys, seed=2)
    below = (enter[None] <= node[:, None]) & (node[:, None] < leave[None])
    return {
        "causal": (Causal(2), (j <= i + 2)[None]),
        "empty rows": (Causal(-3), (j <= i - 3)[None]),
        "blocks": (BlockCausal(5, 3), (j // 5 <= (i + 3) // 5)[None]),
        "streams": (Streams(query.int(), key), stream),
        "causal streams": (Streams(query, key[None], offset=1), stream & (j <= i + 1)),
        "tree": (Tree(node[None], enter, leave), below[None]),
    }


KINDS = list(kinds(1, 1, 1))


@pytest.mark.parametrize(("there", "reason"), [("3.3.0", "it needs triton 3.6 or newer, found 3.3.0"), ("3.10.1", "")])
def test_an_old_triton_is_refused_with_its_version(there: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(call, "triton_version", lambda: there)
    assert call.missing_triton.__wrapped__() == reason


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 4, 2, 9, 14, 16), (1, 3, 3, 131, 300, 5)])
def test_flex_masks(uncompiled, kind, shape) -> None:
    q, k, v = inputs(*shape)
    mask, dense = kinds(shape[3], shape[4], shape[0])[kind]
    with force_backend("flex"):
        result = attention(q, k, v, mask=mask)
    assert difference(result, oracle(q, k, v, mask=dense[:, None])) <= TOLERANCE[torch.float64]
    assert (result[0][result[1].isinf()] == 0).all()


@pytest.mark.parametrize("backend", ["flex", "naive", "cpu_flash"])
def test_a_query_in_no_stream_sees_the_shared_keys(uncompiled, backend) -> None:
    q, k, v = inputs(1, 2, 2, 3, 6, 8)
    query, key = torch.tensor([0, -2, -1]), torch.tensor([SHARED, 0, 1, SHARED, 0, 2])
    with force_backend(backend):
        result = attention(q, k, v, mask=Streams(query, key))
    dense = (key == SHARED)[None] | (key[None] == query[:, None])
    assert difference(result, oracle(q, k, v, mask=dense)) <= 1e-12


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("form", [(2, 6, 7, 11), (1, 6, 1, 11), (2, 1, 7, 1), None])
def test_flex_biases_and_dtypes(uncompiled, dtype, form) -> None:
    q, k, v = inputs(2, 6, 2, 7, 11, 16, dtype=dtype)
    bias = None
    if form is not None:
        bias = torch.randn(form, generator=torch.Generator().manual_seed(3)).to(dtype)
        bias.view(-1)[::3] = -math.inf
    with force_backend("flex"):
        out, lse = attention(q, k, v, bias=bias, scale=0.3)
    assert difference((out, lse), oracle(q, k, v, bias=bias, scale=0.3)) <= TOLERANCE[dtype]
    assert out.dtype is dtype
    assert lse.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert lse.is_contiguous()


def test_flex_reads_segments_where_they_lie(uncompiled) -> None:
    q, k, v = inputs(2, 4, 2, 6, 15, 8)
    pieces = [
        Segment(k[:, :, :4], v[:, :, :4]),
        Segment(k[:, :, 4:9], v[:, :, 4:9], bias=math.log(3), stream=0),
        Segment(k[:, :, 9:], v[:, :, 9:], stream=1),
    ]
    query = ids(2, 6, high=2)
    bias = torch.randn(1, 4, 6, 15, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    owner = torch.tensor([SHARED] * 4 + [0] * 5 + [1] * 6)
    dense = (owner == SHARED) | (owner == query[..., None])
    weight = (owner == 0).double() * math.log(3)
    init = oracle(q, k.flip(2), v)
    with force_backend("flex"):
        whole = attention(q, segments=pieces, mask=Streams(query), bias=bias)
        onto = attention(q, segments=pieces, mask=Streams(query), bias=bias, init=init)
    assert difference(whole, oracle(q, k, v, mask=dense[:, None], bias=bias + weight)) <= 1e-12
    twice = oracle(
        q,
        torch.cat([k, k.flip(2)], 2),
        torch.cat([v, v], 2),
        bias=torch.cat([(bias + weight).masked_fill(~dense[:, None], -math.inf), torch.zeros(2, 4, 6, 15)], -1),
    )
    assert difference(onto, twice) <= 1e-12


def test_flex_traced_as_it_is_called() -> None:
    """The real entrance on the CPU, strided inputs, a gradient that nobody asks for, autocast left out."""
    q, k, v = inputs(1, 2, 2, 9, 14, 16, dtype=torch.float32)
    expected = oracle(q, k, v, mask=torch.ones(9, 14, dtype=torch.bool).tril())
    parameter = torch.nn.Parameter(q.mT.contiguous().mT)
    with torch.no_grad(), force_backend("flex"), torch.autocast("cpu", dtype=torch.bfloat16):
        result = attention(parameter, k, v, mask=Causal())
    assert difference(result, expected) <= TOLERANCE[torch.float32]
    with pytest.raises(UnsupportedError, match="gradient"), force_backend("flex"):
        attention(parameter, k, v)


def test_flex_compiles_once_per_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA compiles, traced on the CPU: another offset or block size is no new graph."""
    from torch._dynamo.testing import CompileCounter
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(flex_attention, backend=counter, fullgraph=True)
    monkeypatch.setattr(flex, "_function", lambda device: compiled)
    q, k, v = inputs(1, 2, 1, 9, 14, 16)
    i, j = torch.arange(9)[:, None], torch.arange(14)[None]
    stream, (enter, leave) = ids(9, seed=4), a_tree(14)
    cases = [
        (Causal(5), j <= i + 5, 1),
        (Causal(2), j <= i + 2, 1),
        (BlockCausal(4, 1), j // 4 <= (i + 1) // 4, 1),
        (Streams(stream, j[0] % 3), j % 3 == stream[:, None], 2),
        (Tree(stream, enter, leave), (enter <= stream[:, None]) & (stream[:, None] < leave), 2),
    ]
    for mask, dense, graphs in cases:
        with force_backend("flex"):
            assert difference(attention(q, k, v, mask=mask), oracle(q, k, v, mask=dense)) <= 1e-12
        assert counter.frame_count == graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "keys"), [(16, 24), (13, 22), (3, 9)])
def test_flex_tiles(monkeypatch: pytest.MonkeyPatch, kind, queries, keys) -> None:
    """No visible key is in a tile that is skipped, no hidden one in a tile that is not tested."""
    monkeypatch.setattr(flex, "TILE", 4)
    flex._by_position.cache_clear()
    q, k, v = inputs(2, 1, 1, queries, keys, 4)
    mask, dense = kinds(queries, keys, 2)[kind]
    listed = flex._block_mask(mask, Segment(k, v, position=0), q)
    flex._by_position.cache_clear()  # tiles of 4 are for this test alone

    def spread(count: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        kept = torch.zeros(order.shape, dtype=torch.bool)
        first = torch.arange(order.shape[-1]) < count[..., None]
        kept.scatter_(-1, order.long(), first)
        return kept.repeat_interleave(4, -2).repeat_interleave(4, -1)[:, 0]

    tested = spread(listed.kv_num_blocks, listed.kv_indices)
    whole = spread(listed.full_kv_num_blocks, listed.full_kv_indices)
    assert not whole[:, queries:].any()
    assert not whole[:, :, keys:].any()
    tested, whole = tested[:, :queries, :keys], whole[:, :queries, :keys]
    assert not (tested & whole).any()
    assert not (dense & ~(tested | whole)).any()
    assert not (whole & ~dense).any()
    if kind in ("causal", "empty rows", "blocks"):  # these numbers grow along a tile, so the list is exact
        padded = pad(dense, (0, -keys % 4, 0, -queries % 4)).unflatten(-1, (-1, 4)).unflatten(1, (-1, 4))
        some = padded.any(2).any(-1)
        assert torch.equal((tested | whole)[:, ::4, ::4], some)


def plain(q, k, v, causal: bool, scale: float = 0.3) -> Call:
    return Call(q, (Segment(k, v, position=0),), Causal() if causal else None, None, scale)


def check_rows_first(*tensors: torch.Tensor) -> None:
    """What both kernels demand: a head size that is a multiple of 8, unit stride in it, aligned rows."""
    for x in tensors:
        assert x.shape[-1] % 8 == 0
        assert x.stride(-1) == 1
        assert all(step % 8 == 0 for step in x.stride()[:-1])


def truth(q, k, v, causal: bool, scale: float):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if causal else None
    return oracle(q, k, v, mask=mask, scale=scale)


class LowerTriangularMask:
    pass


def partial_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    check_rows_first(query, key, value)
    grouped = query.dim() == 5
    if grouped:
        assert query.shape[2:4] == key.shape[2:4]
        assert key.stride(3) == value.stride(3) == 0
        assert query.stride(2) == query.stride(3) * query.shape[3]
        key, value = key[:, :, :, 0], value[:, :, :, 0]
    shape = query.shape
    q, k, v = (x.flatten(2, -2).transpose(1, 2) for x in (query, key, value))
    assert attn_bias is None or (isinstance(attn_bias, LowerTriangularMask) and q.shape[2] == k.shape[2])
    out, lse = truth(q, k, v, attn_bias is not None, scale)
    lse = pad(lse.float(), (0, -lse.shape[2] % 32), value=math.inf)
    return out.transpose(1, 2).reshape(shape).float(), lse.unflatten(1, shape[2:4]) if grouped else lse


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, *, return_attn_probs=False):
    check_rows_first(q, k, v)
    assert return_attn_probs
    out, lse = truth(*(x.transpose(1, 2) for x in (q, k, v)), causal, softmax_scale)
    return out.transpose(1, 2).to(q.dtype), lse.float()


@pytest.fixture(params=["xformers", "flash3"])
def loaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """A backend whose package is there: a stand-in."""
    fmha = SimpleNamespace(memory_efficient_attention_partial=partial_attention)
    ops = SimpleNamespace(fmha=fmha, LowerTriangularMask=LowerTriangularMask)
    monkeypatch.setattr(xformers, "_load", lambda: (ops, "a stand-in"))
    monkeypatch.setattr(flash3, "_load", lambda *settings: (flash_attn_func, "a stand-in"))
    return ROWS[request.param][0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 4, 4, 9, 21, 64), (2, 6, 2, 9, 9, 13), (1, 4, 1, 1, 5, 8)])
def test_adapters(loaded, dtype, shape) -> None:
    q, k, v = inputs(*shape, dtype=dtype)
    for causal in {False, shape[3] == shape[4]}:
        out, lse = loaded.run(plain(q, k, v, causal))
        assert difference((out, lse), truth(q, k, v, causal, 0.3)) <= TOLERANCE[dtype]
        assert out.dtype is dtype
        assert lse.dtype is torch.float32
        assert lse.is_contiguous()


def test_adapters_align_what_is_not(loaded) -> None:
    q, k, v = inputs(1, 2, 2, 9, 21, 16, dtype=torch.float16)
    slanted = q.mT.contiguous().mT, torch.cat([k, k[..., :1]], -1)[..., :16], v
    assert difference(loaded.run(plain(*slanted, False)), truth(q, k, v, False, 0.3)) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize("module", [xformers, flash3])
def test_adapters_refuse_with_a_reason(module, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(1, 2, 2, 5, 5, 8, dtype=torch.float16)
    assert module.supports(plain(q, k, v, True)) == (False, "the tensors are on cpu, not cuda")
    assert not module.usable()[0] or torch.cuda.is_available()
    with pytest.raises(UnsupportedError, match="the tensors are on cpu"), force_backend(module.__name__.split(".")[-1]):
        attention(q, k, v)


def on_cuda(q, bias=None):
    """The little that a refusal looks at."""
    fake = SimpleNamespace(is_cuda=True, dtype=q.dtype, shape=q.shape, device=SimpleNamespace(type="cuda"))
    return SimpleNamespace(q=fake, bias=bias, needs_gradient=False)


@pytest.mark.parametrize("module", [xformers, flash3])
def test_adapters_refuse_what_the_kernel_cannot_do(module) -> None:
    assert "not torch.float32" in module.supports(on_cuda(torch.empty(1, 1, 1, 8)))[1]
    half = torch.empty(1, 1, 1, 8, dtype=torch.float16)
    assert "no mask or bias" in module.supports(on_cuda(half, bias=half))[1]
    assert "from 1 to 256, found 264" in module.supports(on_cuda(half.new_empty(1, 1, 1, 264)))[1]


def test_flash3_loads_only_what_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    module = SimpleNamespace(flash_attn_func=flash_attn_func)
    kernels = SimpleNamespace(
        __spec__=object(),
        get_local_kernel=lambda path: asked.append(path) or module,
        get_kernel=lambda repository, version: asked.append((repository, version)) or module,
    )
    call = on_cuda(torch.empty(1, 1, 1, 8, dtype=torch.float16))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv(flash3.LOCAL, raising=False)
    monkeypatch.delenv(flash3.ALLOW, raising=False)
    flash3._load.cache_clear()

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 0))
    assert flash3.supports(call) == (False, "it is for Hopper (compute capability 9.x), found 8.0")
    flash3._load.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    assert flash3.ALLOW in flash3.supports(call)[1]
    assert not asked
    monkeypatch.setenv(flash3.LOCAL, "/somewhere")
    assert flash3.supports(call) == (True, "FlashAttention-3 from /somewhere")
    assert asked == [Path("/somewhere")]
    monkeypatch.delenv(flash3.LOCAL)
    monkeypatch.setenv(flash3.ALLOW, "1")
    assert flash3.supports(call)[0]
    assert flash3.supports(call)[0]
    assert asked[1:] == [(flash3.REPOSITORY, flash3.VERSION)]

    def offline(repository: str, version: int) -> None:
        raise ConnectionError("no network")

    flash3._load.cache_clear()
    monkeypatch.setattr(kernels, "get_kernel", offline)
    assert flash3.supports(call) == (False, f"{flash3.REPOSITORY} does not load: ConnectionError: no network")
    flash3._load.cache_clear()


def test_xformers_says_why_it_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    call = on_cuda(torch.empty(1, 1, 1, 8, dtype=torch.float16))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 0))
    complete = SimpleNamespace(memory_efficient_attention_partial=partial_attention)
    for ops, ok, reason in [
        (None, False, "xformers does not load"),
        (SimpleNamespace(fmha=SimpleNamespace()), False, "has no memory_efficient_attention_partial"),
        (SimpleNamespace(fmha=complete), True, "xformers' memory_efficient_attention_partial"),
    ]:
        xformers._load.cache_clear()
        monkeypatch.setitem(sys.modules, "xformers", SimpleNamespace(__spec__=object()))
        monkeypatch.setitem(sys.modules, "xformers.ops", ops)
        result = xformers.supports(call)
        assert result[0] is ok
        assert reason in result[1]
    xformers._load.cache_clear()
