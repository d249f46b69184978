"""Stock modules as text models: their own forward, in parts, in any rows, masked as asked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from partsong.errors import ArgumentError, UnsupportedError
from partsong.samplers.text.families import ADAPTERS, DECODERS
from partsong.samplers.text.runner import StockTextModel

VOCAB, LENGTH = 31, 12
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": 3,
}  # fmt: skip
EXTRA: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "use_qk_norm": True},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.25},
    "phi3": {"sliding_window": None},
}


def decoder(kind: str, attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **EXTRA.get(kind, {}))
    module = AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()
    for parameter in module.parameters():
        # The usual 0.02 would leave the residual stream what it was.
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    if getattr(module.config, "_experts_implementation", None) == "grouped_mm":
        module.set_experts_implementation("eager")
    return module


def runner(module: PreTrainedModel, adapter: str = "mdlm") -> StockTextModel:
    return StockTextModel(module, ADAPTERS[adapter], mask_token_id=VOCAB - 1)


def logits_of(model: StockTextModel, hidden: Tensor) -> Tensor:
    logits = hidden @ model.head.weight.T * model.head.logit_scale
    return logits if model.head.bias is None else logits + model.head.bias


def batch(rows: int = 2, seed: int = 1) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    return tokens, torch.arange(LENGTH).expand(rows, -1)


@pytest.mark.parametrize("kind", DECODERS)
def test_every_decoder(kind: str) -> None:
    """Its own causal logits; then the same in parts over a store, in block-causal order."""
    module = decoder(kind)
    model = runner(module)
    tokens, order = batch()
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(2, -1, -1)
    with torch.no_grad():
        expected = module(tokens).logits
    logits = logits_of(model, model.forward(tokens, order, order, causal, None))
    assert (logits - expected).abs().max() <= 1e-10 * expected.abs().max()

    block = order // 4
    visible = block[:, :, None] >= block[:, None, :]
    whole = model.forward(tokens, order, order, visible, None)
    assert (whole - model.forward(tokens, order, order, causal, None)).abs().max() > 1e-3
    store, parts = model.key_store(2, LENGTH), []
    for part in (slice(0, 8), slice(8, 12)):
        parts.append(model.forward(tokens[:, part], order[:, part], order[:, part], visible[:, part], store))
    assert (torch.cat(parts, 1) - whole).abs().max() <= 1e-10 * whole.abs().max()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_any_partition_of_a_causal_text(attention: str) -> None:
    """Tokens in any cut, slots in any order, another row's tokens in between."""
    model = runner(decoder("qwen3", attention))
    tokens, order = batch(3)
    causal = order[:, :, None] >= order[:, None, :]
    whole = model.forward(tokens, order, order, causal, None)
    generator = torch.Generator().manual_seed(2)
    store = model.key_store(3, LENGTH)
    place = torch.stack([torch.randperm(LENGTH, generator=generator) for _ in range(3)])
    seen = torch.zeros_like(causal).scatter_(2, place[:, None].expand(-1, LENGTH, -1), causal)
    hidden = torch.zeros_like(whole)
    for begin, end, rows in ((0, 5, [0, 1, 2]), (5, 6, [2, 0]), (5, 6, [1]), (6, 12, [1, 2, 0])):
        some = torch.tensor(rows)
        now, at, where, what = (x[some, begin:end] for x in (tokens, order, place, seen))
        part = model.forward(now, at, where, what, store, None if rows == [0, 1, 2] else some)
        hidden[some, begin:end] = part
    # Eager attention takes its softmax in float32.
    assert (hidden - whole).abs().max() <= (1e-10 if attention == "sdpa" else 1e-6) * whole.abs().max()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["qwen3", "bert", "modernbert"])
def test_ragged_rows_equal_each_alone(kind: str, attention: str) -> None:
    lengths = torch.tensor([12, 7, 3])
    model = runner(decoder(kind, attention)) if kind == "qwen3" else masked_lm(kind, attention)
    tokens, order = batch(3)
    inside = order < lengths[:, None]
    # A row's tail sees nothing at all and must neither be nan nor be seen.
    visible = inside[:, :, None] & inside[:, None, :]
    store = model.key_store(3, LENGTH)
    slots = order if store is None else torch.where(inside, order, LENGTH)
    together = model.forward(tokens, order, slots, visible, store)
    assert together.isfinite().all()
    for row, length in enumerate(lengths.tolist()):
        text, place = tokens[row : row + 1, :length], order[row : row + 1, :length]
        expected = model.forward(text, place, place, torch.ones(1, length, length, dtype=torch.bool), None)
        difference = (together[row, :length] - expected[0]).abs().max()
        assert difference <= (1e-10 if attention == "sdpa" else 1e-6) * expected.abs().max()


def test_a_store_forgets_rows_and_goes_on() -> None:
    model = runner(decoder("llama"))
    tokens, order = batch(3)
    causal = order[:, :, None] >= order[:, None, :]
    whole = model.forward(tokens, order, order, causal, None)
    store = model.key_store(3, LENGTH)
    assert store is not None
    model.forward(tokens[:, :6], order[:, :6], order[:, :6], causal[:, :6], store)
    kept = torch.tensor([2, 0])
    store.keep(kept)
    hidden = model.forward(tokens[kept, 6:], order[kept, 6:], order[kept, 6:], causal[kept, 6:], store)
    assert (hidden - whole[kept, 6:]).abs().max() <= 1e-10 * whole.abs().max()


def masked_lm(kind: str, attention: str = "sdpa") -> StockTextModel:
    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if k not in ("head_dim", "num_key_value_heads", "pad_token_id")}
    # Local layers of ModernBERT reach 2 tokens to either side, which is less than the text.
    more = {"local_attention": 4, "global_attn_every_n_layers": 2, "pad_token_id": 0} if kind == "modernbert" else {}
    config = AutoConfig.for_model(kind, **sizes, **more)
    module = AutoModelForMaskedLM.from_config(config, attn_implementation=attention).double().eval()
    for parameter in module.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return runner(module, kind)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_encoders(kind: str, attention: str) -> None:
    model = masked_lm(kind, attention)
    tokens, order = batch()
    with torch.no_grad():
        expected = model.module(tokens).logits
    everything = torch.ones(2, LENGTH, LENGTH, dtype=torch.bool)
    logits = logits_of(model, model.forward(tokens, order, order, everything, None))
    assert model.head.bias is not None and model.key_store(2, LENGTH) is None
    assert (logits - expected).abs().max() <= (1e-10 if attention == "sdpa" else 1e-6) * expected.abs().max()


def test_flops() -> None:
    width, inner, experts = 16, 8, 4
    projections = width * (16 + 8 + 8) + 16 * width
    dense = runner(decoder("llama"))
    per_token = 2 * 2 * (projections + 3 * width * 24)
    assert dense.flops(5, 7) == 5 * (per_token + 2 * 4 * 7 * 4 * 4)
    mixed = runner(decoder("qwen3_moe"))
    per_token = 2 * 2 * (projections + width * experts + 2 * 3 * width * inner)
    assert mixed.flops(1, 0) == per_token


def llama(**more: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more)).eval()


@pytest.mark.parametrize(
    ("module", "adapter", "says"),
    [
        (lambda: decoder("qwen2", "flex_attention"), "mdlm", "attention is 'flex_attention'"),
        (lambda: AutoModelForCausalLM.from_config(AutoConfig.for_model("mistral", **SIZES, sliding_window=4)).eval(),
         "causal", "a sliding window of 4"),
        (lambda: llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "mdlm",
         "'dynamic' changes with the length"),
        (lambda: llama(), "bert", "adapter 'bert' runs bert, modernbert"),
        (lambda: llama().train(), "mdlm", "training mode"),
        (lambda: llama().base_model, "mdlm", "no output embedding"),
    ],
)  # fmt: skip
def test_models_that_would_run_wrong_are_refused(module, adapter: str, says: str) -> None:
    with pytest.raises((UnsupportedError, ArgumentError), match=says):
        runner(module(), adapter)


def test_float64_experts_are_refused_before_they_fail() -> None:
    module = decoder("qwen3_moe")
    module.set_experts_implementation("grouped_mm")
    with pytest.raises(UnsupportedError, match="set_experts_implementation"):
        runner(module)


def test_calls_that_do_not_fit() -> None:
    model = runner(decoder("llama"))
    tokens, order = batch()
    store = model.key_store(2, LENGTH)
    sight = torch.ones(2, LENGTH, LENGTH, dtype=torch.bool)
    with pytest.raises(ArgumentError, match=rf"visible bool \[B, Q, {LENGTH}\]"):
        model.forward(tokens, order, order, sight[:, :, :5], store)
    with pytest.raises(ArgumentError, match="visible torch.float32"):
        model.forward(tokens, order, order, sight.float(), store)
    with pytest.raises(ArgumentError, match="slots are given for 2 rows and 1 take part"):
        model.forward(tokens, order, order, sight, store, torch.tensor([1]))
    encoder = masked_lm("bert")
    with pytest.raises(UnsupportedError, match="keeps no keys"):
        encoder.forward(tokens, order, order, sight, store)
    assert dataclasses.replace(model.adapter, name="other").keeps_keys
