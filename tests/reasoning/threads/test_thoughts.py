"""Thought embeddings against biases of the projections, which do the same where all tokens have one mark."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from partsong.errors import ArgumentError, UnsupportedError
from partsong.reasoning.local.thoughts import ThoughtEmbeddings
from tests.reasoning.test_local_models import tiny

IDS = torch.tensor([[5, 9, 3, 30, 7, 21]])


def with_bias(keys: torch.Tensor, values: torch.Tensor) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A Qwen2, whose key and value projections have biases, and the same one with something added to these."""
    plain = tiny("qwen2", initializer_range=0.4)
    changed: Any = copy.deepcopy(plain)
    for layer, block in enumerate(changed.model.layers):
        heads = changed.config.num_key_value_heads
        block.self_attn.k_proj.bias.data += keys[layer].repeat(heads)
        block.self_attn.v_proj.bias.data += values[layer].repeat(heads)
    return plain, changed


@torch.no_grad()
def test_one_mark_for_all_is_a_bias() -> None:
    generator = torch.Generator().manual_seed(3)
    thoughts = ThoughtEmbeddings(2, 8, num_marks=3).double()
    for table in thoughts.parameters():
        table.data = torch.randn(table.shape, generator=generator, dtype=torch.float64)
    plain, changed = with_bias(thoughts.keys[:, 2], thoughts.values[:, 2])
    before = plain(IDS).logits
    handles = thoughts.attach(plain)
    with thoughts.at(torch.full_like(IDS, 2)):
        marked = plain(IDS).logits
    wanted = changed(IDS).logits
    assert (wanted - before).abs().max() > 0.1
    assert (marked - wanted).abs().max() < 1e-12 * wanted.abs().max()
    # Outside, and without the hooks, the model is what it was.
    assert torch.equal(plain(IDS).logits, before)
    for handle in handles:
        handle.remove()
    with thoughts.at(torch.full_like(IDS, 2)):
        assert torch.equal(plain(IDS).logits, before)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_each_token_has_the_thought_of_its_mark(family: str) -> None:
    """By the last token's keys: changing the thought of a mark no token has changes nothing, of one it has it does."""
    model, thoughts = tiny(family), ThoughtEmbeddings.of(tiny(family), num_marks=4)
    marks = [[0, 1, 1, 2, 2, 0]]
    thoughts.attach(model)
    with thoughts.at(marks):
        before = model(IDS).logits
        thoughts.keys.data[:, 3] = thoughts.values.data[:, 3] = 1.0
        assert torch.equal(model(IDS).logits, before)
        thoughts.values.data[:, 2] = 1.0
        after = model(IDS).logits
    assert torch.equal(after[:, :3], before[:, :3])
    assert (after[:, 3:] - before[:, 3:]).abs().amax(-1).min() > 1e-6


def test_zero_thoughts_change_nothing_and_learn() -> None:
    model = tiny("llama")
    thoughts, before = ThoughtEmbeddings.of(model, num_marks=3), model(IDS).logits.detach()
    thoughts.attach(model)
    with thoughts.at([[0, 1, 1, 2, 2, 0]]):
        logits = model(IDS).logits
    assert torch.equal(logits.detach(), before)
    logits.square().sum().backward()
    for table in (thoughts.keys, thoughts.values):
        assert table.grad is not None
        assert all(float(table.grad[:, mark].abs().max()) > 0 for mark in range(3))


def test_what_does_not_fit_is_refused() -> None:
    thoughts = ThoughtEmbeddings(3, 8, num_marks=3)
    with pytest.raises(ArgumentError, match="2 layers and the thought embeddings 3"):
        thoughts.attach(tiny("llama"))
    gpt = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=2, n_head=2, n_embd=16, vocab_size=32))
    with pytest.raises(UnsupportedError, match="k_proj and v_proj"):
        thoughts.attach(gpt)
    words = "marks from 0 to 3, but there are thought embeddings for 0 to 2"
    with pytest.raises(ArgumentError, match=words), thoughts.at([[0, 3]]):
        raise AssertionError
