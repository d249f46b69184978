"""Weights in 8 and 4 bits: how near they are, that rows do not see each other, names, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from partsong.errors import ArgumentError, UnsupportedError
from partsong.jobs.engines import EngineArguments, open_engine
from partsong.reasoning.local import quantized_linear
from partsong.reasoning.local.quantized_linear import QuantizedLinear, Weights, quantize_linears, why_not_quantized
from tests.reasoning.local_models import all_of, engine, llama, request, run

KINDS: tuple[Weights, ...] = ("int8", "int4")
able = pytest.mark.skipif(
    any(why_not_quantized(kind) for kind in KINDS), reason=f"{why_not_quantized('int8')}, {why_not_quantized('int4')}"
)


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    made = nn.Linear(inputs, outputs, bias=bias)
    made.weight.data.mul_(torch.rand(outputs, 1) * 3).add_(torch.randn(outputs, 1) * 0.01)
    return made


@able
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_off_by_half_a_step(kind: Weights) -> None:
    plain = linear(96, 48)
    weight = plain.weight.detach()
    rounded = QuantizedLinear(plain, kind)(torch.eye(96)).T
    parts = weight[:, None] if kind == "int8" else weight.view(48, -1, 32)
    largest = parts.abs().amax(-1)
    step = largest / 127 if kind == "int8" else (parts.amax(-1) - parts.amin(-1)) / 15
    # Scales and results are bfloat16, with eight bits.
    bound = (step / 2 + 2**-7 * largest).repeat_interleave(96 // parts.shape[1], 1)
    assert bool(((rounded - weight).abs() <= bound).all())
    assert not torch.equal(rounded, weight)


@able
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_zero_and_a_bias(kind: Weights) -> None:
    plain = linear(64, 32, bias=True)
    plain.weight.data.zero_()
    x = torch.randn(3, 64)
    assert torch.equal(QuantizedLinear(plain, kind)(x), plain.bias.expand(3, -1))


@able
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 32), (576, 192), (1536, 576)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_see_the_others(kind: Weights, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    layer = QuantizedLinear(linear(*sizes), kind)
    x = torch.randn(70, sizes[0]).to(dtype)
    alone = torch.cat([layer(row[None]) for row in x])
    assert alone.dtype is dtype
    for rows in (2, 3, 4, 5, 8, 16, 33, 70):
        assert torch.equal(layer(x[:rows]), alone[:rows])
        assert torch.equal(layer(x[None, -rows:]), alone[None, -rows:])


@able
@pytest.mark.parametrize("kind", KINDS)
def test_answers_and_logits_do_not_depend_on_the_batch(kind: Weights) -> None:
    asked = [request("abcabc " * (1 + n % 3), seed=n, temperature=0.8, logprobs=2, max_tokens=9) for n in range(6)]
    together = run(all_of(engine(weights=kind), asked))
    alone = [run(all_of(engine(weights=kind), [each]))[0] for each in asked]
    for one, other in zip(together, alone, strict=True):
        assert (one.text, one.tokens) == (other.text, other.tokens)
        assert one.logprobs is not None and other.logprobs is not None
        assert torch.allclose(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=1e-10)


@able
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_another_model_with_another_name(kind: Weights) -> None:
    module, asked = llama(), request("abc", logprobs=1, temperature=0.0)
    before = module(torch.tensor([[5, 6]])).logits
    rounded, plain = engine(module, weights=kind), engine(module)
    assert rounded.name == f"{plain.name}-{kind}" and plain.name.endswith("/float64")
    one, other = (run(all_of(each, [asked]))[0].logprobs for each in (rounded, plain))
    assert one is not None and other is not None and one[0] != other[0]
    assert torch.equal(module(torch.tensor([[5, 6]])).logits, before)
    assert not any(isinstance(each, QuantizedLinear) for each in module.modules())


@able
def test_drafts_change_no_answer() -> None:
    asked = [request("abcabcabc", seed=n, temperature=0.5, max_tokens=16) for n in range(4)]
    plain = run(all_of(engine(weights="int8"), asked))
    fast = run(all_of(engine(weights="int8", speculate=["ngram", "jacobi"]), asked))
    assert [each.text for each in fast] == [each.text for each in plain]
    assert sum(each.usage.drafted for each in fast) > 0


@able
def test_what_stays_as_it_is() -> None:
    hooked = linear(32, 16)
    hooked.register_forward_hook(lambda *call: None)
    module = nn.Sequential(linear(32, 16), linear(33, 16), linear(32, 17), hooked)
    assert quantize_linears(module, "int4") == 1
    assert [type(each) for each in module] == [QuantizedLinear, nn.Linear, nn.Linear, nn.Linear]
    assert quantize_linears(module, "int8") == 2
    with pytest.raises(ArgumentError, match="Sequential has no linear layer on a CPU that can be rounded"):
        quantize_linears(module, "int8")


def test_processors_without_such_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(weights: Weights) -> str:
        return "there are none for it"

    monkeypatch.setattr(quantized_linear, "why_not_quantized", lacking)
    with pytest.raises(UnsupportedError, match="weights='int4', but there are none for it; leave weights out"):
        engine(weights="int4")


def test_it_says_why_a_processor_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(weight: Any) -> Any:
        raise RuntimeError("no such instruction\nand more")

    tried = why_not_quantized.__wrapped__
    with monkeypatch.context() as patched:
        patched.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
        patched.setitem(quantized_linear._KINDS, "int4", broken)
        assert str(tried("int4")).endswith(": no such instruction")
        patched.setitem(quantized_linear._KINDS, "int4", lambda weight: lambda x: x[:, :32] * 0)
        assert "multiplies int4 weights wrongly" in str(tried("int4"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert "this processor has neither" in str(tried("int8"))


def test_unknown_weights_and_servers_are_refused() -> None:
    with pytest.raises(ArgumentError, match="weights='int3'; use"):
        engine(weights="int3")
    wrong: list[dict[str, Any]] = [
        {"base_url": "http://127.0.0.1:1", "model": "m"},
        {"pretrained": "m", "num_engines": 2},
    ]
    for more in wrong:
        with pytest.raises(ArgumentError, match="weights= are for one model in this process"):
            open_engine(EngineArguments(weights="int8", **more))
