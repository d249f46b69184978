"""diffusers and PyTorch with partsong's attention, and what holds for every door: undone, it was never there."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys

import pytest
import torch

from partsong.errors import ArgumentError, UnsupportedError
from partsong.kernels import force_backend, install_torch
from partsong.kernels.install import install
from partsong.kernels.install_diffusers import diffusers_attention
from tests.kernels.oracle import difference, inputs, oracle


@pytest.fixture(autouse=True)
def _no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def flux():
    from diffusers import FluxTransformer2DModel

    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    model = FluxTransformer2DModel(
        **sizes, in_channels=4, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8)
    )
    generator = torch.Generator().manual_seed(1)
    call = {
        "hidden_states": torch.randn(2, 9, 4, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, 32, generator=generator),
        "pooled_projections": torch.randn(2, 32, generator=generator),
        "timestep": torch.tensor([0.5, 0.7]),
        "img_ids": torch.zeros(9, 3),
        "txt_ids": torch.zeros(5, 3),
    }
    return model, call


def wan():
    from diffusers import WanTransformer3DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 32, "freq_dim": 16}
    model = WanTransformer3DModel(**sizes, in_channels=4, out_channels=4, text_dim=16, cross_attn_norm=True)
    generator = torch.Generator().manual_seed(1)
    call = {
        "hidden_states": torch.randn(2, 4, 3, 8, 6, generator=generator),
        "encoder_hidden_states": torch.randn(2, 7, 16, generator=generator),
        "timestep": torch.tensor([500, 100]),
    }
    return model, call


@pytest.mark.parametrize("make", [flux, wan])
def test_diffusers_models(make) -> None:
    from diffusers.models.attention_dispatch import attention_backend

    model, call = make()
    model, call = model.eval().double(), {k: x.double() if x.is_floating_point() else x for k, x in call.items()}
    expected = model(**call).sample
    with install(diffusers=True):
        model.set_attention_backend("partsong")
        assert float((model(**call).sample - expected).abs().max()) <= 1e-10
        model.reset_attention_backend()
        with attention_backend("partsong"):
            assert float((model(**call).sample - expected).abs().max()) <= 1e-10


def test_diffusers_forgets() -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    def state():
        names = AttentionBackendName
        tables = [dict(getattr(_AttentionBackendRegistry, table)) for table in ("_backends", "_constraints")]
        return [list(names), dict(names._value2member_map_), *tables, _AttentionBackendRegistry._active_backend]

    before = state()
    model, call = flux()
    installed = install(diffusers=True)
    assert AttentionBackendName("partsong").name == "PARTSONG"
    with pytest.raises(ArgumentError, match="already"):
        install(diffusers=True)
    model.set_attention_backend("partsong")
    installed.undo()
    assert state() == before
    with pytest.raises(KeyError):
        model(**call)
    model.reset_attention_backend()
    model(**call)


def test_diffusers_masks() -> None:
    q, k, v = inputs(2, 2, 2, 5, 7, 8)
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    keep = torch.rand(2, 7, generator=torch.Generator().manual_seed(0)) < 0.6
    bias = torch.randn(2, 1, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    causal = torch.ones(5, 7, dtype=torch.bool).tril()
    for options, truth in [
        ({"attn_mask": keep}, {"mask": keep[:, None, None]}),
        ({"attn_mask": bias}, {"bias": bias}),
        ({"is_causal": True}, {"mask": causal}),
    ]:
        out, lse = diffusers_attention(*rows, **options, scale=0.3, return_lse=True)
        expected = oracle(q, k, v, **truth, scale=0.3)
        assert difference((out.transpose(1, 2), lse.transpose(1, 2)), expected) <= 1e-12
    for options, reason in [
        ({"dropout_p": 0.1}, "dropout"),
        ({"_parallel_config": object()}, "context parallelism"),
        ({"is_causal": True, "attn_mask": keep}, "is_causal next to"),
    ]:
        with pytest.raises(UnsupportedError, match=reason):
            diffusers_attention(*rows, **options)


def test_diffusers_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models import attention_dispatch

    monkeypatch.setattr(attention_dispatch._AttentionBackendRegistry, "_constraints", ["another form"])
    with pytest.raises(UnsupportedError, match="does not have the form of"):
        install(diffusers=True)
    assert "partsong" not in attention_dispatch.AttentionBackendName._value2member_map_


def test_what_was_installed_before_a_refusal_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AttentionInterface

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="finds no CUDA device"):
        install(transformers=True, torch_sdpa=True)
    assert "partsong" not in AttentionInterface._global_mapping
    with pytest.raises(ArgumentError, match="install into what"):
        install()


class Original:
    """The kernel that was there: PyTorch's for the CPU, with the nine results of the one for CUDA."""

    def __init__(self) -> None:
        self.calls = 0

    def call_boxed(self, keyset, query, key, value, dropout_p, is_causal, return_debug_mask, *, scale):
        self.calls += 1
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(query, key, value, is_causal=is_causal, scale=scale)
        seed = torch.zeros(2, dtype=torch.uint64)
        return out, lse, None, None, query.shape[2], key.shape[2], seed, seed[0], query.new_empty(0)


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch):
    """The real registry and dispatcher of PyTorch, where the operator's CUDA kernel is a CPU one."""
    original = Original()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.library, "get_kernel", lambda name, key: original, raising=False)
    monkeypatch.setattr(install_torch, "_KEY", "CPU")
    with install(torch_sdpa=True):
        yield original


OPERATOR = torch.ops.aten._scaled_dot_product_flash_attention


@pytest.mark.parametrize("backend", ["cpu_flash", "naive"])  # naive has a memory layout of its own
@pytest.mark.parametrize("causal", [False, True])
def test_torch_sdpa_keeps_the_operators_form(replaced, causal, backend) -> None:
    assert torch.nn.attention.current_flash_attention_impl() == "partsong"
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(2, 4, 2, 6, 6, 8))
    with force_backend(backend):
        result = OPERATOR(q, k, v, is_causal=causal, scale=0.3)
    mask = torch.ones(6, 6, dtype=torch.bool).tril() if causal else None
    assert difference(result[:2], oracle(q, k, v, mask=mask, scale=0.3)) <= 1e-12
    promised = OPERATOR(*(x.to("meta", torch.float16) for x in (q, k, v)), is_causal=causal)
    assert len(result) == len(promised) == 9
    assert result[0].stride() == promised[0].stride()
    assert result[1].stride() == promised[1].stride()
    assert result[2:6] == promised[2:6] == (None, None, 6, 6)
    assert [(x.dtype, x.shape) for x in result[6:8]] == [(x.dtype, x.shape) for x in promised[6:8]]
    assert replaced.calls == 0


def test_torch_sdpa_hands_on_what_it_does_not_compute(replaced, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(1, 2, 2, 5, 7, 8)
    OPERATOR(q, k, v, 0.1)
    OPERATOR(q, k, v, return_debug_mask=True)
    OPERATOR(q, k, v, is_causal=True)  # 5 queries, 7 keys: aligned at the last key, unlike `Causal()`
    assert replaced.calls == 3
    seen = []

    def chosen(*arguments, **options):  # as if `attention` chose the operator that is replaced
        seen.append(torch.is_grad_enabled())
        return OPERATOR(*arguments, scale=options["scale"])[:2]

    monkeypatch.setattr(install_torch, "attention", chosen)
    with torch.enable_grad():
        result = OPERATOR(q, k, v)
    assert seen == [False]
    assert replaced.calls == 4
    assert difference(result[:2], oracle(q, k, v)) <= 1e-12


def test_torch_sdpa_forgets_and_brings_back_what_was_active(monkeypatch: pytest.MonkeyPatch) -> None:
    _registry = pytest.importorskip("torch.nn.attention._registry", reason="the installed torch has none")

    class Handle:
        def remove(self) -> None:
            removed.append(self)

    removed: list[Handle] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.library, "get_kernel", lambda name, key: Original(), raising=False)
    monkeypatch.setattr(install_torch, "_KEY", "CPU")
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "other", Handle)
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_ACTIVE", None)
    _registry.activate_flash_attention_impl("other")
    installed = install(torch_sdpa=True)
    assert len(removed) == 1
    with pytest.raises(ArgumentError, match="already"):
        install(torch_sdpa=True)
    installed.undo()
    assert torch.nn.attention.current_flash_attention_impl() == "other"
    assert "partsong" not in torch.nn.attention.list_flash_attention_impls()
    q, k, v = inputs(1, 1, 1, 2, 2, 8)
    with pytest.raises(NotImplementedError):
        OPERATOR(q, k, v)


def test_torch_without_the_registry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "_registry", raising=False)
    with pytest.raises(UnsupportedError, match="no registry"):
        install(torch_sdpa=True)


def test_importing_the_kernels_loads_none_of_them() -> None:
    code = """import sys, partsong.kernels, partsong.kernels.install
import partsong.kernels.norms, partsong.kernels.token_head
print(sorted({'triton', 'transformers', 'diffusers', 'xformers', 'kernels'} & set(sys.modules)))"""
    process = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert process.stdout.strip() == "[]"


def test_the_example_runs() -> None:
    with torch.enable_grad():
        # By its full name: partsong.kernels has a function called `install`.
        result = doctest.testmod(importlib.import_module("partsong.kernels.install"))
    assert result.attempted > 5
    assert result.failed == 0
