"""`attention` against float64 einsum: shapes, masks, layouts, dtypes, on every backend."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partsong.errors import UnsupportedError
from partsong.kernels import (
    Causal,
    Segment,
    attention,
    available,
    dispatch,
    force_backend,
    merge,
)
from partsong.kernels.backends import naive
from partsong.kernels.call import Call
from tests.kernels.oracle import TOLERANCE, difference, inputs, oracle

DTYPES = list(TOLERANCE)
REASONS = {name: reason for name, _, reason in available()}
USABLE = {name for name, ok, _ in available() if ok}


def device_of(backend: str) -> str:
    if backend in ("naive", "cpu_flash"):
        return "cpu"
    if backend not in USABLE or not torch.cuda.is_available():
        pytest.skip(f"{backend}: {REASONS[backend]}")
    return "cuda"


@pytest.fixture(params=["naive", "cpu_flash", "gluon", "cudnn", "triton", "flash", "efficient"])
def backend(request: pytest.FixtureRequest) -> str:
    device_of(request.param)
    return request.param


def run(backend: str, q, k, v, **options):
    """The forced backend, on its device; a refusal with a reason skips the case on GPU kernels only."""
    device = device_of(backend)
    move = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    try:
        with force_backend(backend):
            return attention(q.to(device), k.to(device), v.to(device), **move)
    except UnsupportedError as error:
        if device == "cpu":
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(2, 4, 4, 37, 53, 16), (1, 6, 2, 65, 700, 64), (3, 8, 1, 1, 19, 40), (1, 2, 2, 33, 1, 5)]
)
def test_equals_einsum(backend, dtype, shape) -> None:
    q, k, v = inputs(*shape, dtype=dtype)
    out, lse = run(backend, q, k, v)
    assert difference((out, lse), oracle(q, k, v)) <= TOLERANCE[dtype]
    assert out.dtype is dtype
    assert lse.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert lse.is_contiguous()


@st.composite
def cases(draw):
    batch, key_heads, group = draw(st.integers(0, 2)), draw(st.integers(0, 3)), draw(st.integers(1, 3))
    length, keys, width = draw(st.integers(0, 9)), draw(st.integers(0, 12)), draw(st.sampled_from([0, 1, 3, 8, 16]))
    full = [batch, key_heads * group, length, keys]
    dims = draw(st.integers(2, 4))
    form = [n if draw(st.booleans()) else 1 for n in full][4 - dims :]
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    mask = bias = None
    if draw(st.booleans()):
        mask = torch.rand(form, generator=generator) < draw(st.sampled_from([0.0, 0.2, 0.7]))
    if draw(st.booleans()):
        bias = torch.randn([n if draw(st.booleans()) else 1 for n in full], generator=generator, dtype=torch.float64)
        bias = bias.masked_fill(bias < -1.5, -math.inf)
    scale = draw(st.sampled_from([None, 0.0, -0.5, 1.0]))
    return inputs(batch, key_heads * group, key_heads, length, keys, width, seed=seed), mask, bias, scale


@pytest.mark.parametrize("name", ["naive", "cpu_flash"])
@settings(max_examples=150, deadline=None, derandomize=True)
@given(case=cases(), cuts=st.lists(st.integers(0, 12), max_size=5))
def test_any_shape_and_mask(name, case, cuts) -> None:
    (q, k, v), mask, bias, scale = case
    expected = oracle(q, k, v, mask=mask, bias=bias, scale=scale)
    with force_backend(name if q.shape[3] else "naive"):
        whole = attention(q, k, v, mask=mask, bias=bias, scale=scale)
        assert difference(whole, expected) <= 1e-12
        # The same keys in up to six pieces, some of them empty.
        edges = [0, *sorted(min(cut, k.shape[2]) for cut in cuts), k.shape[2]]
        parts = []
        for low, high in itertools.pairwise(edges):
            local = {"mask": mask, "bias": bias}
            local = {
                key: x if x is None or x.shape[-1] == 1 != k.shape[2] else x[..., low:high] for key, x in local.items()
            }
            parts.append(attention(q, k[:, :, low:high], v[:, :, low:high], scale=scale, **local))
        assert difference(merge(parts), expected) <= 1e-12
    assert (whole[0][expected[1].isinf()] == 0).all()


@pytest.mark.parametrize("form", ["bool", "float", "float row", "column"])
def test_empty_rows(backend, form) -> None:
    dtype = torch.float32 if backend in ("naive", "cpu_flash", "efficient") else torch.float16
    q, k, v = inputs(2, 4, 4, 40, 700, 16, dtype=dtype)
    keep = torch.rand(40, 700, generator=torch.Generator().manual_seed(1)) < 0.5
    keep[:, :600] = False  # whole tiles of the fused kernels
    keep[[0, 7]] = False
    options = {"mask": keep}
    if form == "float":
        options = {"bias": torch.zeros(40, 700).masked_fill(~keep, -math.inf)}
    elif form == "float row":
        options = {"bias": torch.full((2, 1, 1, 700), -math.inf)}
        options["bias"][1] = 0.5
    elif form == "column":
        options = {"mask": keep[:, 650:651]}
    result = run(backend, q, k, v, **options)
    expected = oracle(q, k, v, **options)
    assert difference(result, expected) <= TOLERANCE[dtype]
    empty = expected[1].isinf()
    assert empty.any()
    assert not result[0].cpu()[empty].any()


@pytest.mark.parametrize("name", ["naive", "cpu_flash"])
@pytest.mark.parametrize("form", ["mask of three dims", "expanded", "transposed", "float16", "mask and bias"])
def test_mask_forms(name, form) -> None:
    q, k, v = inputs(2, 3, 3, 11, 13, 8)
    generator = torch.Generator().manual_seed(3)
    options = {
        "mask of three dims": {"mask": torch.rand(3, 11, 13, generator=generator) < 0.6},
        "expanded": {"mask": (torch.rand(2, 1, 1, 13, generator=generator) < 0.6).expand(2, 3, 11, 13)},
        "transposed": {"bias": torch.randn(2, 3, 13, 11, generator=generator).mT},
        "float16": {"bias": torch.randn(11, 13, generator=generator).half()},
        "mask and bias": {
            "mask": torch.rand(2, 1, 1, 13, generator=generator) < 0.6,
            "bias": torch.randn(3, 11, 1, generator=generator),
        },
    }[form]
    with force_backend(name):
        assert difference(attention(q, k, v, **options), oracle(q, k, v, **options)) <= 1e-12


@pytest.mark.parametrize("name", ["naive", "cpu_flash"])
@pytest.mark.parametrize("form", ["causal", "mask", "bias", "segments", "init", "layout"])
def test_bfloat16(name, form) -> None:
    # Against float64 of the same rounded inputs. The log-sum-exp is float32, but PyTorch's kernel takes a quick e^x.
    q, k, v = inputs(2, 6, 2, 65, 300, 64, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(4)
    keep = torch.rand(2, 1, 1, 300, generator=generator) < 0.6
    bias = torch.randn(6, 65, 300, generator=generator)
    row = torch.cat([torch.full((100,), math.log(3)), torch.zeros(200)])
    given, truth = {
        "causal": ({"mask": Causal(offset=235)}, {"mask": torch.ones(65, 300).tril(235).bool()}),
        "mask": ({"mask": keep}, {"mask": keep}),
        "bias": ({"bias": bias}, {"bias": bias}),
        "segments": ({"segments": parts_of(k, v, [100], [math.log(3), 0.0])}, {"bias": row}),
        "init": ({}, {}),
        "layout": ({}, {}),
    }[form]
    with force_backend(name):
        if form == "segments":
            result = attention(q, **given)
        elif form == "init":
            start = attention(q, k[:, :, :90], v[:, :, :90])
            result = attention(q, k[:, :, 90:], v[:, :, 90:], init=(start[0].float(), start[1]))
        else:
            if form == "layout":
                k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
            result = attention(q, k, v, **given)
    expected = oracle(q, k, v, **truth)
    assert result[0].dtype is (torch.float32 if form == "init" else torch.bfloat16)
    assert difference(result, expected) <= TOLERANCE[torch.bfloat16]
    assert (result[1] - expected[1]).abs().max() <= (1e-5 if name == "naive" else 1e-4)


def test_bias_of_half_precision_inputs_is_not_rounded() -> None:
    q, k, v = inputs(1, 2, 2, 20, 30, 16, dtype=torch.bfloat16)
    bias = torch.full((1, 30), 3.003)
    _, lse = attention(q, k, v, bias=bias)
    assert (lse - 3.003 - attention(q, k, v)[1]).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", ["bshd", "packed", "width strided", "heads expanded", "offset"])
def test_layouts(backend, layout, dtype) -> None:
    q, k, v = inputs(2, 4, 4, 21, 34, 16, dtype=dtype)
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif layout == "packed":
        k, v = torch.cat([k, v], dim=-1).chunk(2, dim=-1)
    elif layout == "width strided":
        q, k, v = (x.mT.contiguous().mT for x in (q, k, v))
    elif layout == "heads expanded":
        k, v = k[:, :1].expand(-1, 4, -1, -1), v[:1].expand(2, -1, -1, -1)
    else:
        q, k = q[:, 1:, 3:], k[:, 1:, ::2]
        v = v[:, 1:, ::2]
    assert difference(run(backend, q, k, v), oracle(q, k, v)) <= TOLERANCE[dtype]


def test_bshd_storage_costs_no_copy_and_is_kept() -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(1, 3, 3, 8, 9, 16, torch.float32))
    with force_backend("cpu_flash"):
        out, _ = attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()
    assert out.transpose(1, 2).flatten(2).data_ptr() == out.data_ptr()


def parts_of(k, v, cuts, biases):
    edges = [0, *cuts, k.shape[2]]
    pairs = zip(itertools.pairwise(edges), biases, strict=True)
    return [Segment(k[:, :, low:high], v[:, :, low:high], bias=bias) for (low, high), bias in pairs]


@pytest.mark.parametrize("path", ["together", "apart"])
@pytest.mark.parametrize("masked", [False, True])
def test_segments_add_their_bias_to_every_key(path, masked) -> None:
    q, k, v = inputs(2, 4, 2, 7, 12, 8)
    segments = parts_of(k, v, [5, 5, 9], [0.0, 3.0, math.log(8), -math.inf])
    row = torch.tensor([0.0] * 5 + [math.log(8)] * 4 + [-math.inf] * 3, dtype=torch.float64)
    mask = torch.rand(7, 12, generator=torch.Generator().manual_seed(5)) < 0.4 if masked else None
    expected = oracle(q, k, v, mask=mask, bias=row)
    if path == "together":
        result = attention(q, mask=mask, segments=segments)
    else:
        additive = None if mask is None else torch.zeros(1, 1, 7, 12).masked_fill(~mask, -math.inf).double()
        placed = tuple(Segment(s.k, s.v, s.bias, position=0) for s in segments)
        used = Call(q, placed, None, additive, 8**-0.5).used()
        assert used is not None and len(used.segments) == 2
        result = dispatch._compute_by_segment(used)
    assert difference(result, expected) <= 1e-12


@pytest.mark.parametrize("cuts", [[4], []])
def test_segments_that_are_all_left_out(cuts) -> None:
    q, k, v = inputs(1, 2, 2, 3, 4, 8)
    segments = parts_of(k, v, cuts, [-math.inf] * (1 + len(cuts)))
    for result in (attention(q, segments=segments), attention(q, segments=[])):
        assert not result[0].any()
        assert (result[1] == -math.inf).all()
    start = attention(q, k, v)
    assert difference(attention(q, segments=segments, init=start), start) == 0.0


def test_a_pooled_key_with_log_r_stands_for_r_keys() -> None:
    q, k, v = inputs(1, 2, 2, 5, 6, 8)
    repeated = [torch.cat([x[:, :, :3], x[:, :, 3:].repeat_interleave(4, dim=2)], dim=2) for x in (k, v)]
    result = attention(q, segments=parts_of(k, v, [3], [0.0, math.log(4)]))
    assert difference(result, oracle(q, *repeated)) <= 1e-12


def test_init_is_a_ring_step() -> None:
    q, k, v = inputs(1, 4, 2, 9, 20, 8)
    cuts = [(0, 7), (7, 7), (7, 16), (16, 20)]
    total = None
    for low, high in cuts:
        before = None if total is None else [x.clone() for x in total]
        result = attention(q, k[:, :, low:high], v[:, :, low:high], init=total)
        if before is not None:
            assert all(torch.equal(a, b) for a, b in zip(total, before, strict=True))
        total = result
    assert difference(total, oracle(q, k, v)) <= 1e-12
    parts = [attention(q, k[:, :, low:high], v[:, :, low:high]) for low, high in cuts]
    assert difference(total, merge(parts)) <= 1e-12


def test_init_in_float32_keeps_float32() -> None:
    q, k, v = inputs(1, 2, 2, 9, 20, 8, dtype=torch.bfloat16)
    out, lse = attention(q, k[:, :, :10], v[:, :, :10])
    total = attention(q, k[:, :, 10:], v[:, :, 10:], init=(out.float(), lse))
    assert total[0].dtype is torch.float32
    assert difference(total, oracle(q, k, v)) <= 1e-2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_that_need_no_gradient(mode) -> None:
    q, k, v = inputs(1, 2, 2, 9, 20, 8, dtype=torch.float32)
    q.requires_grad_()
    with mode(), force_backend("cpu_flash"):
        assert difference(attention(q, k, v), oracle(q, k, v)) <= 2e-6


def test_gradients_go_through_out_and_lse() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(1, 4, 2, 3, 5, 4))
    assert torch.autograd.gradcheck(lambda *x: attention(*x), (q, k, v))
    with force_backend("cpu_flash"), pytest.raises(UnsupportedError, match="gradient"):
        attention(q, k, v)


def test_gradients_go_through_init() -> None:
    (q, k, v), (start, _, _) = inputs(1, 2, 2, 3, 5, 4), inputs(1, 2, 2, 3, 5, 4, seed=1)
    lse = torch.randn(1, 2, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *init: attention(q, k, v, init=init), (start.requires_grad_(), lse))
    call = Call(q, (Segment(k, v, position=0),), None, None, 0.5, init=(start, lse))
    assert call.needs_gradient
    assert not call.plain().needs_gradient  # what is merged afterwards is no business of the kernel


def test_naive_ignores_autocast_and_slices_long_queries(monkeypatch) -> None:
    q, k, v = inputs(1, 2, 2, 23, 11, 8, dtype=torch.float32)
    mask = torch.rand(23, 11, generator=torch.Generator().manual_seed(2)) < 0.3
    monkeypatch.setattr(naive, "MAX_LOGITS", 100)
    with force_backend("naive"), torch.autocast("cpu", dtype=torch.bfloat16):
        result = attention(q, k, v, mask=mask)
    assert difference(result, oracle(q, k, v, mask=mask)) <= 2e-6


def test_meta_tensors_give_shapes() -> None:
    q, k, v = (x.to("meta") for x in inputs(1, 4, 2, 9, 20, 8, dtype=torch.bfloat16))
    out, lse = attention(q, k, v)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:3], torch.float32)
