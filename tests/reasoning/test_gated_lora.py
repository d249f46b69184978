"""Masks behind tokens: what they see, that tokens do not see them, and how heads are trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from partsong.errors import ArgumentError, UnsupportedError
from partsong.kernels.speculation.draft import DraftTree
from partsong.reasoning.local.gated_lora import GatedLora
from partsong.reasoning.local.mask_head import MaskHead
from partsong.reasoning.local.model import FAMILIES, LocalModel
from partsong_zoo.training.head_losses import AnchoredTexts, anchor, head_losses, look_ahead
from tests.reasoning.heads import Rows, random_head
from tests.reasoning.local_models import llama
from tests.reasoning.test_local_models import tiny

PROMPT = [5, 9, 3, 17, 4, 4, 11, 8]
DRAFTS = [DraftTree.chain([6, 7, 20]), DraftTree((3, 9, 12), (0, 0, 1))]


def with_masks(num: int) -> list[DraftTree]:
    return [replace(draft, masks=(num,) * (1 + len(draft))) for draft in DRAFTS]


def logits_of(rows: Rows, masks: int) -> list[torch.Tensor]:
    """The logits after a prompt and at the nodes of two rows' drafts, with masks behind all of them."""
    after = [rows.read(PROMPT, masks)[0], rows.read([*PROMPT, 7], masks)[0]]
    return [*after, rows.verify([2, 15], with_masks(masks) if masks else DRAFTS)[0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tokens_do_not_see_masks(dtype: torch.dtype) -> None:
    module: Any = llama(hidden_size=64)
    module = module.to(dtype)
    plain = logits_of(Rows(module, None), 0)
    seen = [logits_of(Rows(module, random_head(module, seed)), 3) for seed in (1, 2)]
    # Whatever masks are like, the logits of tokens are the same to the last bit.
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))
    # That there are masks changes no more than the number of rows in a product does.
    for one, other in zip(plain, seen[0], strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-11 if dtype == torch.float64 else 2e-3)


def ahead_of(rows: Rows, tokens: list[int], masks: int = 3) -> torch.Tensor:
    return rows.read(tokens, masks)[1][1:]


def test_masks_behind_every_node_see_what_masks_behind_the_same_text_see() -> None:
    module = llama()
    head = random_head(module)
    rows = Rows(module, head)
    rows.read(PROMPT)
    rows.read([*PROMPT, 7])
    _, states = rows.verify([2, 15], with_masks(3))
    for begin, token, draft, own in zip((PROMPT, [*PROMPT, 7]), (2, 15), with_masks(3), states, strict=True):
        for node in range(1 + len(draft)):
            path = [draft.tokens[each - 1] for each in draft.ancestors(node)[1:]]
            fresh = ahead_of(Rows(module, head), [*begin, token, *path])
            assert torch.allclose(own[draft.masks_after(node)], fresh, rtol=0, atol=1e-10)


def test_the_layout_of_training_gives_the_states_of_the_engine() -> None:
    module = llama()
    # Eager attention rounds its weights to float32.
    module.set_attn_implementation("sdpa")
    head = random_head(module)
    engine = Rows(llama(), head)
    texts = torch.tensor([[*PROMPT, 2, 6, 7], [*PROMPT[::-1], 1, 0, 0]])
    handles = head.masks.attach(module)
    batch = AnchoredTexts(texts, torch.tensor([11, 9]), torch.tensor([[7, 9, 4], [3, 6, -1]]))
    states, ahead = look_ahead(module, head.masks, batch)
    stock = module.model(input_ids=texts).last_hidden_state
    assert torch.allclose(states, stock, rtol=0, atol=1e-12) and not states.requires_grad
    for text, places in enumerate(batch.anchors.tolist()):
        for place, own in zip(places, ahead[text], strict=True):
            if place >= 0:
                expected = ahead_of(engine, texts[text, : place + 1].tolist())
                assert torch.allclose(own, expected, rtol=0, atol=1e-10)
    for handle in handles:
        handle.remove()


def test_masks_of_rank_zero_see_the_model_itself() -> None:
    module = llama()
    head = random_head(module, rank=0)
    fed = torch.cat((module.get_input_embeddings()(torch.tensor(PROMPT)), head.masks.masks))
    expected = module.model(inputs_embeds=fed[None]).last_hidden_state[0, len(PROMPT) :]
    assert torch.allclose(ahead_of(Rows(module, head), PROMPT), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])
def test_every_family_can_look_ahead(family: str) -> None:
    """Masks in the engine see what embeddings in their places see, with changes that hooks make in a stock model."""
    module = tiny(family)
    head = random_head(module)
    engine = Rows(module, head)
    head.masks.attach(module)
    with head.masks.at(dict(zip(range(len(PROMPT), len(PROMPT) + 3), range(3), strict=True))):
        out = module(input_ids=torch.tensor([[*PROMPT, 0, 0, 0]]), output_hidden_states=True)
    states, logits = out.hidden_states[-1][0], out.logits[0]
    after, ahead = engine.read(PROMPT, 3)
    assert torch.allclose(ahead, states[len(PROMPT) - 1 :], rtol=0, atol=1e-6)
    assert torch.allclose(after, logits[len(PROMPT) - 1], rtol=0, atol=1e-6)
    assert torch.allclose(engine.model.read(ahead), logits[len(PROMPT) - 1 :], rtol=0, atol=1e-6)


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="GPT2LMHeadModel has no linear layers that masks could change"):
        random_head(tiny("gpt2"))


def test_an_untrained_head_is_the_model_on_masks() -> None:
    """At first the changes are zero, and the sampler passes on what it reads."""
    module = llama()
    head = MaskHead.of(module, {"a": 0}, num_masks=3, rank=2, alpha=2.0)
    fed = torch.cat((module.get_input_embeddings()(torch.tensor(PROMPT)), head.masks.masks))
    expected = module.model(inputs_embeds=fed[None]).last_hidden_state[0, len(PROMPT) :]
    states = ahead_of(Rows(module, head), PROMPT)
    assert torch.allclose(states, expected, rtol=0, atol=1e-10)
    assert torch.equal(head.sampler(states, torch.randn_like(states)), states)


def test_the_latent_loss_moves_masks_and_nothing_else() -> None:
    module = llama()
    module.set_attn_implementation("eager")
    module.requires_grad_(False)
    head = random_head(module)
    head.masks.attach(module)
    batch = anchor(torch.tensor([[*PROMPT, 2, 6, 7, 1]]), torch.tensor([8]), torch.tensor([12]), 3)
    losses = head_losses(module, head, batch)
    losses.latent.backward()
    assert all(each.grad is not None and bool(each.grad.any()) for each in head.masks.parameters())
    assert all(each.grad is None for each in (*head.sampler.parameters(), *module.parameters()))
    # The loss falls along its gradient: it is the mask that comes nearer to the token, not the other way round.
    with torch.no_grad():
        for each in head.masks.parameters():
            assert each.grad is not None
            each -= 1e-3 * each.grad
        after = head_losses(module, head, batch)
    assert float(after.latent) < losses.latent.item()


def test_losses_are_those_of_the_definition() -> None:
    module = llama()
    module.set_attn_implementation("eager")
    head = random_head(module, num_masks=2)
    head.masks.attach(module)
    text = torch.tensor([[*PROMPT, 2, 6]])
    batch = AnchoredTexts(text, torch.tensor([10]), torch.tensor([[6, 7]]))
    states, ahead = look_ahead(module, head.masks, batch)
    real = module.lm_head(states[0]).softmax(-1)
    base, sampler, latent = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    # Mask i behind place a stands at place a + i and guesses the token at a + i + 1, which must be there.
    for group, number, place in ((0, 0, 7), (0, 1, 8), (1, 0, 8)):
        state = ahead[0, group, number]
        drafted = head.sampler(state, module.get_input_embeddings()(text[0, place]))
        base.append(-(real[place] * module.lm_head(state).log_softmax(-1)).sum())
        sampler.append(-(real[place] * module.lm_head(drafted).log_softmax(-1)).sum())
        latent.append((state - states[0, place]).pow(2).mean())
    losses = head_losses(module, head, batch)
    for name, terms in (("base", base), ("sampler", sampler), ("latent", latent)):
        assert torch.allclose(getattr(losses, name).double(), torch.stack(terms).mean(), atol=1e-6)
    assert torch.allclose(losses.total, losses.base + losses.sampler + losses.latent)


def test_anchors_are_places_with_something_to_guess() -> None:
    ids, starts, lengths = torch.zeros(3, 12, dtype=torch.int64), torch.tensor([4, 6, 9]), torch.tensor([12, 8, 10])
    places = anchor(ids, starts, lengths, 5).anchors
    # From the prompt's last token to the third last of the text.
    assert [
        {*row} - {-1} <= {*range(first, last + 1)}
        for row, first, last in zip(places.tolist(), (3, 5, 8), (9, 5, 7), strict=True)
    ] == [True] * 3
    assert (places[0] >= 0).sum() == 5 and (places[1] >= 0).sum() == 1 and (places[2] >= 0).sum() == 0


def test_masks_of_another_model_are_refused() -> None:
    model = LocalModel(llama())
    with pytest.raises(ArgumentError, match=r"trained for another model: its layer layers\.0\.mlp"):
        model.take_masks(random_head(llama(intermediate_size=40)).masks)
    model.take_masks(random_head(llama()).masks)
    with pytest.raises(ArgumentError, match="masks already"):
        model.take_masks(random_head(llama()).masks)


def test_removed_masks_leave_no_trace() -> None:
    module = llama()
    handles = random_head(module).masks.attach(module)
    for handle in handles:
        handle.remove()
    hooked = [each for each in module.modules() if each._forward_hooks]
    assert not hooked


def test_changes_are_scaled_by_alpha_over_rank() -> None:
    linear = nn.Linear(4, 3, bias=False)
    lora = GatedLora({"linear": (4, 3)}, width=4, num_masks=2, rank=2, alpha=6.0)
    lora.up["linear"].data.normal_()
    x = torch.randn(1, 5, 4)
    linear.register_forward_hook(lora._adder("linear"))
    for rows in ({1: 0, 2: 1}, {0: 0, 4: 1}):
        with lora.at(rows):
            changed = linear(x)[0]
        expected = x[0] @ linear.weight.T
        for row in rows:
            expected[row] += 3.0 * lora.up["linear"] @ (lora.down["linear"] @ x[0, row])
        assert torch.allclose(changed, expected, atol=1e-6)
