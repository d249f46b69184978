"""Trains heads that guess ahead of a frozen model: the places of masks in a text, what they see, and their losses."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from partsong.parallel.text.cache_names import cache_name, returned_cache
from partsong.reasoning.local.gated_lora import GatedLora
from partsong.reasoning.local.mask_head import MaskHead, embed, read
from partsong_zoo.training.thread_training import mask_for

__all__ = ["AnchoredTexts", "HeadLosses", "anchor", "head_losses", "look_ahead"]


@dataclass(frozen=True, slots=True)
class AnchoredTexts:
    """Holds texts, and the tokens that masks follow.

    Attributes:
        ids: token ids, int64 `[texts, length]`, with any padding at the end.
        lengths: how many tokens each text has, int64 `[texts]`.
        anchors: places of tokens, int64 `[texts, anchors]`; -1 for none.
    """

    ids: Tensor
    lengths: Tensor
    anchors: Tensor

    def to(self, device: torch.device | str) -> AnchoredTexts:
        """Copies the texts to a device."""
        return AnchoredTexts(*(getattr(self, field.name).to(device) for field in fields(self)))


def anchor(
    ids: Tensor, starts: Tensor, lengths: Tensor, num: int, generator: torch.Generator | None = None
) -> AnchoredTexts:
    """Draws anchors: places from the last token of the prompt on, with at least two tokens after.

    Args:
        ids: token ids, int64 `[texts, length]`.
        starts: where the answers begin, int64 `[texts]`.
        lengths: how many tokens the texts have, int64 `[texts]`.
        num: how many anchors a text gets at most.
        generator: source of the draws.

    >>> texts = anchor(torch.zeros(1, 9, dtype=torch.int64), torch.tensor([5]), torch.tensor([9]), 4)
    >>> sorted(texts.anchors[0].tolist())
    [-1, 4, 5, 6]
    """
    places = torch.arange(ids.shape[1])
    is_open = (places >= starts[:, None] - 1) & (places < lengths[:, None] - 2)
    order = torch.rand(ids.shape, generator=generator).masked_fill_(~is_open, 2.0)
    picked = order.argsort(dim=1)[:, :num]
    return AnchoredTexts(ids, lengths, torch.where(is_open.gather(1, picked), picked, -1))


@dataclass(frozen=True, slots=True)
class HeadLosses:
    """Holds the losses of a head, each a mean over its masks.

    Attributes:
        base: cross-entropy of the model's own head on the masks' states.
        sampler: cross-entropy of the sampler.
        latent: squared distance of a mask's state from that of the token at its position.
        near: how much of the probability the model and the sampler share, 1 - total variation; no loss.
    """

    base: Tensor
    sampler: Tensor
    latent: Tensor
    near: Tensor

    @property
    def total(self) -> Tensor:
        """Returns the sum of the losses."""
        return self.base + self.sampler + self.latent


def look_ahead(model: PreTrainedModel, masks: GatedLora, texts: AnchoredTexts) -> tuple[Tensor, Tensor]:
    """Computes the states of a text's tokens, and those of masks after its anchors.

    A mask sees the text up to its anchor and the earlier masks of the same anchor. Since no token sees a mask,
    tokens are computed first, without gradients; the masks then read their keys.

    Args:
        model: the model, with the masks attached and eager or sdpa attention.
        masks: the masks.
        texts: the texts, on the model's device; where there is no anchor, its states mean nothing.

    Returns:
        States that the model's head reads, `[texts, length, hidden size]` without gradient, and
        `[texts, anchors, masks, hidden size]`.
    """
    decoder: Any = model.get_decoder()
    with torch.no_grad():
        tokens = decoder(input_ids=texts.ids, use_cache=True)
    num, device = len(masks.masks), texts.ids.device
    rows, length = texts.ids.shape
    anchors = texts.anchors.clamp(min=0).repeat_interleave(num, dim=1)
    numbers = torch.arange(num, device=device).repeat(texts.anchors.shape[1])
    group = torch.arange(anchors.shape[1], device=device) // num
    of_text = torch.arange(length, device=device) <= anchors[:, :, None]
    of_group = (group == group[:, None]) & (numbers <= numbers[:, None])
    sees = torch.cat((of_text, of_group.expand(rows, -1, -1)), dim=2)[:, None]
    with masks.at(numbers):
        states = decoder(
            input_ids=torch.zeros_like(anchors),
            position_ids=anchors + 1 + numbers,
            attention_mask=mask_for(model, sees),
            **{cache_name(decoder): returned_cache(tokens)},
            use_cache=True,
        ).last_hidden_state
    return tokens.last_hidden_state, states.view(rows, -1, num, states.shape[2])


def head_losses(model: PreTrainedModel, head: MaskHead, texts: AnchoredTexts) -> HeadLosses:
    """Computes the losses of a head.

    Mask i of an anchor has the position of the i-th token after it, and guesses the next one. What it
    is to learn is the model's own distribution there: on texts that the model has drawn, this is on average the
    cross-entropy of their tokens, and varies less.

    Args:
        model: the model, frozen, with the head's masks attached.
        head: the head.
        texts: the texts.

    Source: arXiv 2507.11851, sections 3.2 to 3.4.
    """
    states, ahead = look_ahead(model, head.masks, texts)
    num = ahead.shape[2]
    places = texts.anchors[:, :, None] + 1 + torch.arange(num, device=ahead.device)
    is_real = (places + 1 < texts.lengths[:, None, None]) & (texts.anchors >= 0)[:, :, None]
    text, group, mask = is_real.nonzero(as_tuple=True)
    place = places[text, group, mask]
    ahead, target = ahead[text, group, mask], states[text, place].detach()
    drafted = head.sampler(ahead, embed(model, texts.ids[text, place]))
    # Half-precision logits would round the probabilities that matter most, those near 1.
    wanted, plain, sampled = (_logprobs(read(model, each)) for each in (target, ahead, drafted))
    wanted = wanted.exp()
    return HeadLosses(
        base=-(wanted * plain).sum(-1).mean(),
        sampler=-(wanted * sampled).sum(-1).mean(),
        latent=F.mse_loss(ahead.float(), target.float()),
        near=torch.minimum(wanted, sampled.exp()).sum(-1).mean().detach(),
    )


def _logprobs(logits: Tensor) -> Tensor:
    return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(dim=-1)
