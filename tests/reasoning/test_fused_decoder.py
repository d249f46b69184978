"""Fused decoders compute what transformers' modules do, with masks of trained heads and with what others hook in."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partsong.reasoning.local.answer_store import AnswerStore
from partsong.reasoning.local.fused_decoder import FUSED, fuse_decoder
from partsong.reasoning.local.gated_lora import GatedLora
from partsong.reasoning.local.model import LocalModel
from partsong.reasoning.local.packed_linear import JoinedLinear, PackedLinear, can_pack
from partsong.reasoning.local.prefix_tree import PrefixTree
from partsong.reasoning.local.shared_attention import AttentionStep, Chunk, branches_of
from tests.tiny_models.text import causal_model

LAYERS = (0, 1, 2, -1)


def tiny(family: str, **more: Any) -> Any:
    """A model whose norms are as exact as its type; transformers computes norms of float64 in float32."""
    model = causal_model(family, bos_token_id=2, **more)
    for norm in model.modules():
        if hasattr(norm, "variance_epsilon"):
            norm.forward = functools.partial(exact_norm, norm)
    with torch.no_grad():  # norms and biases that do something
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def fused(module: Any) -> LocalModel:
    """A fused copy in float64, which engines do not fuse by themselves."""
    module = copy.deepcopy(module)
    assert fuse_decoder(module.model)
    return LocalModel(module, owned=True)


def exact_norm(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def of_a_prompt(model: LocalModel, ids: list[int], masks: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and states after each token of a prompt, and of masks after it."""
    tree = PrefixTree(model.room_for, limit=100)
    leaf, _ = tree.place(ids)
    step = AttentionStep(
        AnswerStore(model.key_shape, model.dtype, model.device), [], branches_of([], model.device),
        [Chunk(leaf, 0, len(ids), 0, masks)],
    )  # fmt: skip
    count = len(ids) + masks
    named = {len(ids) + number: number for number in range(masks)}
    with torch.inference_mode():
        return model.look([*ids, *[0] * masks], range(count), range(count), step, masks=named, layers=LAYERS)


@pytest.mark.parametrize("family", FUSED)
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_stock_model(family: str, bias: bool) -> None:
    module = tiny(family, **{"attention_bias": True, "mlp_bias": True} if bias and family == "llama" else {})
    ids = torch.randint(3, 61, (9,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        wanted = module(torch.tensor([ids]), output_hidden_states=True)
    model = fused(module)
    assert sum(isinstance(each, JoinedLinear) for each in model.module.modules()) == 2 * model.layers
    logits, states = of_a_prompt(model, ids)
    assert (logits - wanted.logits[0]).abs().max() <= 1e-12 * wanted.logits.abs().max()
    for place, layer in enumerate(LAYERS):
        assert (states[:, place] - wanted.hidden_states[layer][0]).abs().max() <= 1e-12
    model.close()


@pytest.mark.skipif(not can_pack(torch.zeros(1))[0], reason="oneDNN cannot pack float32 here")
def test_a_packed_model_is_fused_and_the_given_one_is_not() -> None:
    module, ids = tiny("qwen3").float(), list(range(3, 20))
    before = {name: type(each) for name, each in module.named_modules()}
    packed, plain = LocalModel(module), LocalModel(module, pack=False)
    assert {name: type(each) for name, each in module.named_modules()} == before
    assert sum(isinstance(each, PackedLinear) for each in packed.module.modules()) == 4 * packed.layers + 1
    assert not any(isinstance(each, JoinedLinear | PackedLinear) for each in plain.module.modules())
    for got, wanted in zip(of_a_prompt(packed, ids), of_a_prompt(plain, ids), strict=True):
        assert torch.dist(got, wanted, float("inf")) <= 2e-6 * wanted.abs().max()
    for each in (packed, plain):
        each.close()


def test_masks_change_joined_layers_as_they_change_single_ones() -> None:
    module, ids = tiny("llama"), list(range(3, 12))
    masks = GatedLora.of(module, num_masks=3, rank=2, alpha=3.0).double()
    for up in masks.up.values():
        nn.init.normal_(up)
    plain, other = LocalModel(copy.deepcopy(module)), fused(module)
    for each in (plain, other):
        each.take_masks(masks)
    for got, wanted in zip(of_a_prompt(other, ids, 3), of_a_prompt(plain, ids, 3), strict=True):
        assert torch.dist(got, wanted, float("inf")) <= 1e-12 * wanted.abs().max()
    without, _ = of_a_prompt(other, ids)
    assert torch.dist(without, of_a_prompt(other, ids, 3)[0][: len(ids)], float("inf")) <= 1e-12
    for each in (plain, other):
        each.close()


def test_a_decoder_with_something_of_its_own_stays_as_it_is() -> None:
    hooked, other, gelu = tiny("llama"), tiny("olmo2"), tiny("llama", hidden_act="gelu")
    hooked.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    for module in (hooked, other, gelu):
        assert not fuse_decoder(module.model)
        assert not any(isinstance(each, JoinedLinear) for each in module.modules())
