"""The diffusion helpers: plain versions against torch and the blocks of diffusers, Triton against the plain versions.

Triton runs on the GPU, or in its interpreter (TRITON_INTERPRET=1, which `tests/conftest.py` sets where there is none).
New memory is filled with NaN, so an element that no kernel writes fails its test.
"""

from __future__ import annotations

import itertools
import os
from functools import partial
from importlib import import_module
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import embeddings, normalization
from diffusers.models.transformers import transformer_flux, transformer_wan
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map_only

from partsong.kernels import norms
from partsong.kernels.call import missing_triton
from tests import covering

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = pytest.mark.skipif(
    bool(missing_triton()) or not (INTERPRETED or torch.cuda.is_available()), reason="no triton, or nothing to run it"
)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
on_triton = partial(pytest.param, "triton", marks=TRITON)
EXACT = [("naive", torch.float64), on_triton(torch.float32)]
EVERY = [*EXACT, *(("naive", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16))]
# The interpreter's bfloat16 arithmetic is silently wrong, but every load is widened before anything is computed.
EVERY += [on_triton(torch.float16), on_triton(torch.bfloat16)]
every_backend = pytest.mark.parametrize(("backend", "dtype"), EVERY)
exact_backend = pytest.mark.parametrize(("backend", "dtype"), EXACT)
both_backends = pytest.mark.parametrize("backend", ["naive", on_triton()])
few = settings(max_examples=12 if covering.FULL else 6, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def unwritten_is_nan():
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def run(backend, function, *arguments, **options):
    """What the public function gives when `backend` computes it."""
    if backend == "naive":
        return function(*arguments, **options)
    device = "cpu" if INTERPRETED else "cuda"
    arguments, options = tree_map_only(Tensor, lambda x: x.to(device), (arguments, options))
    with torch.no_grad(), mock.patch.object(norms, "_implementation", lambda name, *_, row=1: load(name)):
        return tree_map_only(Tensor, Tensor.cpu, function(*arguments, **options))


def load(name):
    return import_module(f"partsong.kernels.{name}")


def close(result, expected, tolerance) -> None:
    """No element of a tensor, or of each of two, differs by more than `tolerance` times the largest, or 1."""
    for a, b in [(result, expected)] if isinstance(result, Tensor) else zip(result, expected, strict=True):
        assert a.shape == b.shape
        error = (a.detach().double() - b.detach().double()).abs().max() / b.detach().abs().max().clamp(min=1.0)
        assert error <= tolerance, f"{error:.1e}"  # NaN fails, too


def noise(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "rows of a larger image": lambda x: F.pad(x, (0,) * (2 * x.dim() - 6) + (1, 2))[:, :, 1 : 1 + x.shape[2]],
    "batch inside": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "every other element": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
}


SHAPES = [((2, 6, 5, 7), 3), ((1, 40, 3, 2, 2), 4), ((2, 1100, 3), 1), ((1, 5, 4, 4), 5), ((1, 8, 70, 66), 2)]


def grouped():
    """Backends with types, layouts and shapes: every two of them meet."""
    for number, layout, shape in covering.chosen(itertools.product(range(len(EVERY)), LAYOUTS, SHAPES)):
        values, marks = getattr(EVERY[number], "values", EVERY[number]), getattr(EVERY[number], "marks", ())
        yield pytest.param(*values, layout, *shape, marks=marks)


@pytest.mark.parametrize(("backend", "dtype", "layout", "shape", "groups"), grouped())
def test_group_norm_equals_torch(backend, dtype, layout, shape, groups) -> None:
    x, weight, bias = LAYOUTS[layout](noise(*shape, dtype=dtype)), *noise(2, shape[1], seed=1, dtype=dtype)
    mean, var = run(backend, norms.group_norm_stats, x, groups)
    flat = x.double().reshape(shape[0], groups, -1)
    assert mean.dtype is var.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    close((mean, var), (flat.mean(dim=2), flat.var(dim=2, correction=0)), min(TOLERANCE[dtype], 2e-6))
    for affine in ((weight, bias), (weight, None), (None, bias)):
        result = run(backend, norms.group_norm_apply, x, mean, var, *affine, 1e-5)
        assert result.dtype is dtype
        if layout in ("contiguous", "channels last"):
            assert all(a == b for a, b, n in zip(result.stride(), x.stride(), shape, strict=True) if n > 1)
        wide = [None if v is None else v.double() for v in affine]
        close(result, F.group_norm(x.double(), groups, *wide, 1e-5), TOLERANCE[dtype])


@exact_backend
def test_statistics_survive_a_large_mean(backend, dtype) -> None:
    x = (1e4 + noise(2, 2, 20, 1001)).to(dtype)
    flat = x.double().flatten(1)
    for image in (x, LAYOUTS["channels last"](x)):
        mean, var = run(backend, norms.group_norm_stats, image, 1)
        close(mean[:, 0] / 1e4, flat.mean(dim=1) / 1e4, 1e-7)
        close(var[:, 0], flat.var(dim=1, correction=0), max(TOLERANCE[dtype], 1e-9))
    squares = x.float().square().flatten(1).mean(dim=1) - x.float().flatten(1).mean(dim=1) ** 2
    assert (squares - flat.var(dim=1)).abs().max() > 0.1, "the formula that cancels would have done"


def test_a_rank_without_rows_has_no_nan() -> None:
    mean, var = norms.group_norm_stats(torch.zeros(2, 6, 0, 5), 3)
    assert mean.tolist() == var.tolist() == [[0.0] * 3] * 2
    assert norms.group_norm_stats(torch.zeros(0, 6, 4), 3)[0].shape == (0, 3)
    assert norms.group_norm_apply(torch.zeros(2, 6, 0), mean, var, None, None, 1e-5).shape == (2, 6, 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("cuts", [(0, 7), (0, 3, 7), (0, 1, 1, 6, 7), (0, 0, 7)])
def test_merged_patches_are_the_whole(dtype, offset, cuts) -> None:
    x = (offset + noise(2, 6, 7, 5)).to(dtype)
    patches = [x[:, :, a:b] for a, b in itertools.pairwise(cuts)]
    stats = [norms.group_norm_stats(patch, 3) for patch in patches]
    counts = [patch.shape[2] for patch in patches]
    # What a rank without rows says about them must not matter.
    means = [mean if n else mean * torch.nan for n, (mean, _) in zip(counts, stats, strict=True)]
    result = norms.merge_group_norm_stats(counts, torch.stack(means), [var for _, var in stats])
    expected = norms.group_norm_stats(x.double(), 3)
    assert result[0].dtype is dtype
    close(result[0] / max(offset, 1.0), expected[0] / max(offset, 1.0), max(TOLERANCE[dtype] / 4, 1e-12))
    # A mean of 1e4 in float32 is known to 5e-4 only.
    close(result[1], expected[1], 1e-3 if offset and dtype is torch.float32 else TOLERANCE[dtype])


def test_statistics_in_half_precision_are_rounded_once() -> None:
    half = [tuple((5 + noise(2, 3, seed=seed)).bfloat16() for seed in pair) for pair in ((1, 2), (3, 4), (5, 6))]
    wide = [tuple(v.float() for v in pair) for pair in half]
    means, variances = zip(*half, strict=True)
    wide_means, wide_variances = zip(*wide, strict=True)
    result = norms.merge_group_norm_stats([2, 0, 5], means, variances)
    expected = norms.merge_group_norm_stats([2, 0, 5], wide_means, wide_variances)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(result, expected, strict=True))
    result, expected = norms.corrected_group_norm_stats(*half), norms.corrected_group_norm_stats(*wide)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(result, expected, strict=True))


def test_shares_made_in_inference_mode_serve_outside() -> None:
    means = torch.zeros(2, 1, 1)
    with torch.inference_mode():
        norms.merge_group_norm_stats([3, 8], means, means + 1)
    norms.merge_group_norm_stats([3, 8], means, (means + 1).requires_grad_())[1].sum().backward()


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_correction_is_that_of_the_moments(offset) -> None:
    """Mean and mean square are each moved by the own patch's change."""
    before, after = (offset + 2 * noise(64, 8, 4, 6, seed=seed) for seed in (1, 2))
    own_before, own_after = before[:, :, :2], after[:, :, :2]
    stats = [norms.group_norm_stats(x, 4) for x in (before, own_before, own_after)]
    mean, square = (whole + new - old for whole, old, new in zip(*[(m, v + m * m) for m, v in stats], strict=True))
    moments = mean, square - mean * mean
    close(norms.corrected_group_norm_stats(*stats), moments, 1e-8)
    narrow = [tuple(v.float() for v in pair) for pair in stats]
    close(norms.corrected_group_norm_stats(*narrow), moments, 1e-4)


def test_correction_at_its_ends() -> None:
    stale, fresh = norms.group_norm_stats(noise(2, 6, 9), 3), norms.group_norm_stats(noise(2, 6, 9, seed=1), 3)
    close(norms.corrected_group_norm_stats(stale, stale, fresh), fresh, 1e-14)  # one patch: nothing is stale
    close(norms.corrected_group_norm_stats(stale, fresh, fresh), stale, 1e-14)  # nothing has changed
    one = torch.ones(1, 1)  # a variance of 1 + 3 - 5
    assert norms.corrected_group_norm_stats((one, one), (one, 5 * one), (one, 3 * one))[1].item() == 3.0


@exact_backend
def test_layer_norm_equals_that_of_dit_sd3_and_flux(backend, dtype) -> None:
    x, condition = noise(3, 5, 24), noise(3, 24, seed=1)
    zero = normalization.AdaLayerNormZero(24).double().requires_grad_(False)
    shift, scale = (v.to(dtype) for v in zero.linear(F.silu(condition)).chunk(6, dim=1)[:2])
    result = run(backend, norms.adaptive_layer_norm, x.to(dtype), shift, scale)
    close(result, zero(x, emb=condition)[0], TOLERANCE[dtype])


FORMS = ("[B, C]", "[B, 1, C]", "[B, L, C]", "[1, C]", "[1, 1, C]", "[1, L, C]")


@pytest.mark.parametrize(
    ("backend", "dtype", "form"),
    [  # by default forms take turns with backends and types
        pytest.param(*getattr(each, "values", each), form, marks=[*getattr(each, "marks", ()), *later])
        for row, each in enumerate(EVERY)
        for column, form in enumerate(FORMS)
        for later in [[pytest.mark.full] * ((row + column) % 2)]
    ],
)
def test_layer_norm_takes_every_form_of_modulation(backend, dtype, form) -> None:
    sizes = {"B": 2, "L": 5, "C": 33, "1": 1}
    shape = [sizes[letter] for letter in form.strip("[]").split(", ")]
    # Chunks of one projection, so rows lie further apart than they are long.
    shift, scale, gate = noise(*shape[:-1], 99, dtype=dtype).chunk(3, dim=-1)
    x, residual = noise(2, 5, 33, seed=1, dtype=dtype), noise(5, 2, 33, seed=2, dtype=dtype).transpose(0, 1)
    weight, bias = noise(33, seed=3, dtype=dtype), noise(33, seed=4, dtype=dtype)
    full = [(v[:, None] if v.dim() == 2 else v).double() for v in (shift, scale, gate)]

    def expected(stream):
        normed = F.layer_norm(stream, (33,), weight.double(), bias.double(), 1e-6)
        return normed * (1 + full[1]) + full[0]

    affine = {"weight": weight, "bias": bias}
    result = run(backend, norms.adaptive_layer_norm, x, shift, scale, **affine)
    assert result.dtype is dtype
    close(result, expected(x.double()), TOLERANCE[dtype])
    stream, normed = run(backend, norms.residual_adaptive_layer_norm, x, residual, gate, shift, scale, **affine)
    assert stream.dtype is normed.dtype is dtype
    close(stream, residual.double() + full[2] * x.double(), TOLERANCE[dtype])
    close(normed, expected(stream.double()), TOLERANCE[dtype])


@both_backends
def test_the_stream_decides_the_dtype(backend) -> None:
    x, residual = noise(1, 3, 8, dtype=torch.float32), (1e3 + noise(1, 3, 8, seed=1)).half()
    gate, shift, scale = noise(1, 3, 24, seed=2, dtype=torch.float32).chunk(3, dim=2)
    stream, normed = run(backend, norms.residual_adaptive_layer_norm, x, residual, gate, shift, scale)
    assert normed.dtype is torch.float16
    assert torch.equal(stream, (residual + gate * x).half())
    close(normed, norms.adaptive_layer_norm(stream.float(), shift, scale), 5e-4)


class Recorder:
    """Keeps what a module's attention is called with, and what goes in and out of its submodules."""

    def __init__(self, home, module, names) -> None:
        self.home, self.attend, self.attention, self.into, self.out = home, home.dispatch_attention_fn, [], {}, {}
        for name in names:
            module.get_submodule(name).register_forward_hook(partial(self.keep, name))

    def keep(self, name, _, arguments, out) -> None:
        self.into[name], self.out[name] = arguments[0], out

    def __call__(self, q, k, v, **options):
        self.attention.append((q, k))
        return self.attend(q, k, v, **options)

    def run(self, module, *args, **kwargs):
        with mock.patch.object(self.home, "dispatch_attention_fn", self), torch.no_grad():
            return module(*args, **kwargs)


def every_turning():
    """Backends with types, the two layouts of pairs and kinds of norm: every two of them meet."""
    for number, *rest in covering.chosen(itertools.product(range(len(EVERY)), [False, True], ["head", "token", None])):
        values, marks = getattr(EVERY[number], "values", EVERY[number]), getattr(EVERY[number], "marks", ())
        yield pytest.param(*values, *rest, marks=marks)


def roughen(module) -> None:
    """Norm weights start as ones, which would hide a weight that is left out."""
    for parameter in module.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter)


@both_backends
@pytest.mark.parametrize("per_token", [False, True])
def test_equals_a_block_of_wan(backend, per_token) -> None:
    block = transformer_wan.WanTransformerBlock(24, 32, 2, cross_attn_norm=True).eval()
    roughen(block)
    names = ("attn1", "attn2", "ffn", "attn1.to_q", "attn1.to_k", "attn2.to_q", "attn2.to_k")
    recorder = Recorder(transformer_wan, block, names)
    cos, sin = transformer_wan.WanRotaryPosEmbed(12, (1, 2, 2), 64)(torch.zeros(1, 4, 3, 4, 2))
    x, text = noise(2, 6, 24, dtype=torch.float32), noise(2, 5, 24, seed=1, dtype=torch.float32)
    time = noise(2, 6, 6, 24, seed=2, dtype=torch.float32) if per_token else noise(2, 6, 24, dtype=torch.float32)
    result = recorder.run(block, x, text, time, (cos, sin))
    table = block.scale_shift_table.detach()
    shift, scale, gate, shift2, scale2, gate2 = (table + time).unbind(-2)
    into, out, seam = recorder.into, recorder.out, norms.residual_adaptive_layer_norm
    close(run(backend, norms.adaptive_layer_norm, x, shift, scale), into["attn1"], 2e-6)
    affine = {"weight": block.norm2.weight.detach(), "bias": block.norm2.bias.detach()}
    stream, normed = run(backend, seam, out["attn1"], x, gate, None, None, **affine)
    close(normed, into["attn2"], 2e-6)
    stream, normed = run(backend, seam, out["attn2"], stream, None, shift2, scale2)
    close(normed, into["ffn"], 2e-6)
    close(run(backend, seam, out["ffn"], stream, gate2, None, None)[0], result, 2e-6)
    for name, tables, number in (("attn1", (cos, sin), 0), ("attn2", (None, None), 1)):
        q, k = (out[f"{name}.to_{letter}"].unflatten(2, (2, 12)) for letter in "qk")
        weights = [getattr(block, name).get_parameter(f"norm_{letter}.weight").detach() for letter in "qk"]
        turned = run(backend, norms.rms_norm_rotary, q, k, *weights, *tables, interleaved=True, norm="token")
        close(turned, recorder.attention[number], 2e-6)


@both_backends
def test_equals_the_attention_of_flux(backend) -> None:
    attention = transformer_flux.FluxAttention(24, heads=3, dim_head=8, eps=1e-6)
    roughen(attention)
    recorder = Recorder(transformer_flux, attention, ("to_q", "to_k"))
    cos, sin = transformer_flux.FluxPosEmbed(10000, [2, 2, 4])(torch.arange(15).view(5, 3))
    recorder.run(attention, noise(2, 5, 24, dtype=torch.float32), image_rotary_emb=(cos, sin))
    q, k = (recorder.out[name].unflatten(2, (3, 8)) for name in ("to_q", "to_k"))
    weights = attention.norm_q.weight.detach(), attention.norm_k.weight.detach()
    close(run(backend, norms.rms_norm_rotary, q, k, *weights, cos, sin, interleaved=True), recorder.attention[0], 2e-6)


@pytest.mark.parametrize(("backend", "dtype", "interleaved", "norm"), every_turning())
def test_rotary_equals_diffusers(backend, dtype, interleaved, norm) -> None:
    q, k = noise(2, 5, 3, 6, dtype=dtype), noise(2, 3, 5, 6, seed=1, dtype=dtype).transpose(1, 2)[:, :, :2]
    weights = [None, None]
    if norm is not None:
        weights = [noise(6 * (x.shape[2] if norm == "token" else 1), seed=2, dtype=dtype) for x in (q, k)]
    angle = noise(5, 6, seed=3)  # all columns differ, which tables of models do not, but their code allows
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    turned = run(backend, norms.rms_norm_rotary, q, k, *weights, cos, sin, interleaved=interleaved, norm=norm, eps=1e-3)
    for x, weight, result in zip((q, k), weights, turned, strict=True):
        wide = x.double()
        if norm is not None:
            shape = x.shape[2 if norm == "token" else 3 :]
            wide = F.rms_norm(wide, shape, weight.double().view(shape), 1e-3)
        pairs = {"use_real_unbind_dim": -1 if interleaved else -2, "sequence_dim": 1}
        expected = embeddings.apply_rotary_emb(wide, (cos, sin), **pairs)  # which computes in float32
        assert result.dtype is dtype
        close(result, expected, max(TOLERANCE[dtype], 1e-6))


@TRITON
@few
@given(st.tuples(*[st.integers(1, 4)] * 3), st.lists(st.integers(1, 7), max_size=3), st.randoms(), st.booleans())
def test_group_norm_in_triton_equals_plain(sizes, spatial, random, affine) -> None:
    batch, groups, width = sizes
    shape, dtype = [batch, groups * width, *spatial], random.choice([torch.float32, torch.float16])
    order = random.sample(range(len(shape)), len(shape))
    x = noise(*[shape[dim] for dim in order], dtype=dtype).permute([order.index(dim) for dim in range(len(shape))])
    vectors = [noise(shape[1], seed=seed, dtype=dtype) if affine else None for seed in (1, 2)]
    with mock.patch.multiple(load("norms_triton"), TILE=64, PART=128, PARTS=16):  # many tiles and parts to merge
        stats = run("triton", norms.group_norm_stats, x, groups)
        result = run("triton", norms.group_norm_apply, x, *stats, *vectors, 1e-3)
    close(stats, norms.group_norm_stats(x, groups), 2e-6)
    close(result, norms.group_norm_apply(x, *stats, *vectors, 1e-3), TOLERANCE[dtype])


@TRITON
@few
@given(st.tuples(*[st.integers(1, 4)] * 3), st.integers(1, 9), st.sampled_from(["head", "token", None]), st.randoms())
def test_rotary_in_triton_equals_plain(sizes, half, norm, random) -> None:
    length, heads, key_heads = sizes
    q, k = noise(2, length, heads, 2 * half).float(), noise(2, key_heads, length, 2 * half).float().transpose(1, 2)
    cos, sin = noise(2, 2, length, 1, half).float().unbind(0)
    tables = random.choice([(cos, sin), (cos[:1].repeat(1, 1, 1, 2), sin[:1].repeat(1, 1, 1, 2)), (None, None)])
    if tables[0] is None:
        q, k = q[..., 1:], k[..., 1:]  # any head size will do, then
    rotary = partial(norms.rms_norm_rotary, interleaved=random.random() < 0.5, norm=norm)
    with mock.patch.object(load("token_norms_triton"), "TILE", 8):  # few heads to a program, but for norm "token"
        close(run("triton", rotary, q, k, None, None, *tables), rotary(q, k, None, None, *tables), 2e-6)
