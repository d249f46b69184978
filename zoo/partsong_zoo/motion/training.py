"""Builds what the recipe trains for the `motion` models, and draws its data. Importing this module loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partsong_zoo.motion.attention import TrainingAttention, lookback_blocks
from partsong_zoo.motion.drawing import paint
from partsong_zoo.motion.grammar import describe, parse, training_scene
from partsong_zoo.motion.layouts import CHOICES, LayoutReadout, draw_layouts
from partsong_zoo.motion.model import (
    TEXT_LENGTH,
    TEXT_WIDTH,
    VOCABULARY,
    build_causal_transformer,
    build_text_encoder,
    build_transformer,
    draw_sigmas,
    encode_text,
    token_ids,
)
from partsong_zoo.motion.world import Mover, MovingScene, layout


def draw_clips(rng: np.random.Generator, num: int, frames: int) -> Tensor:
    """Draws videos that training may show: `[num, 3, frames, 32, 32]` in [-1, 1]."""
    array = np.stack([paint(layout(training_scene(rng), rng), frames) for _ in range(num)])
    return torch.from_numpy(array).permute(0, 4, 1, 2, 3).float() / 127.5 - 1.0


# --- the text encoder -------------------------------------------------------------------------------------------------


class Comprehension(nn.Module):
    """Trains the text encoder with read-outs that tell, at every word, the facts of the object it describes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = build_text_encoder()
        self.heads = nn.ModuleList(nn.Linear(TEXT_WIDTH, len(choices)) for choices in CHOICES)

    def forward(self, captions: list[str]) -> tuple[Tensor, float]:
        """Computes the loss over all facts at all words, and the fraction of words that tell all of them."""
        ids = token_ids(captions).to(next(self.parameters()).device)
        comma = ids == VOCABULARY[","]
        words = (ids > 2) & ~comma
        item_of = comma.cumsum(dim=1)
        targets = torch.zeros(len(captions), 2, len(CHOICES), dtype=torch.long)
        for row, caption in enumerate(captions):
            for index, item in enumerate(parse(caption).items):
                words_of = (item.colour, item.shape, item.size, item.motion, item.speed)
                places = [c.index(word) for c, word in zip(CHOICES, words_of, strict=True)]
                targets[row, index] = torch.tensor(places)
        rows = torch.arange(len(captions))[:, None].expand_as(ids)
        facts = targets.to(ids.device)[rows.to(ids.device), item_of][words]
        features = encode_text(self.encoder, ids)[words]
        loss, right = torch.zeros((), device=ids.device), torch.ones(len(facts), dtype=torch.bool, device=ids.device)
        for index, head in enumerate(self.heads):
            logits = head(features)
            loss = loss + F.cross_entropy(logits, facts[:, index])
            right &= logits.argmax(dim=-1) == facts[:, index]
        return loss, float(right.float().mean())


# --- the transformers -------------------------------------------------------------------------------------------------


class Animator(nn.Module):
    """Joins a transformer and its text encoder, which are trained together.

    Args:
        heads: Attention heads of 32 channels.
        depth: Transformer blocks.
        block: Latent frames per block of a causal transformer; 0 for one that sees all frames.
    """

    def __init__(self, heads: int = 6, depth: int = 6, block: int = 0) -> None:
        super().__init__()
        self.text = build_text_encoder()
        self.transformer: Any
        self.transformer = build_causal_transformer(heads, depth, block) if block else build_transformer(heads, depth)
        self.attention = TrainingAttention()
        for layer in self.transformer.blocks:
            layer.attn1.set_processor(self.attention)
            layer.attn2.set_processor(self.attention)
        self.readout = LayoutReadout(self.transformer)

    def forward(
        self,
        noisy: Tensor,
        sigma: Tensor,
        ids: Tensor,
        nulls: Tensor,
        lookback: int | None = None,
        sees: Tensor | None = None,
    ) -> Tensor:
        """Computes the velocity `[batch, 4, latents, 8, 8]`.

        Args:
            noisy: Noisy latents, `[batch, 4, latents, 8, 8]`.
            sigma: Their noise levels, `[batch]`, or of a causal transformer `[batch, latents]`.
            ids: Captions, `[batch, 24]`.
            nulls: How many zeros pad each text, `[batch]`.
            lookback: How many blocks before itself a block of a causal transformer sees; all if None.
            sees: Which blocks each of its blocks sees instead, `[blocks, blocks]`.
        """
        tokens = encode_text(self.text, ids)
        tokens = torch.cat([tokens, torch.zeros_like(tokens[:, :1])], dim=1)
        bias = torch.where(ids == 0, -torch.inf, 0.0)
        self.attention.text_bias = torch.cat([bias, nulls.float().log()[:, None]], dim=1)[:, None, None]
        block = self.transformer.config.get("num_frame_per_block", 1)
        if lookback is not None:
            sees = lookback_blocks(noisy.shape[2] // block, lookback)
        self.attention.sees = None
        if sees is not None:
            tokens_of_block = block * noisy.shape[3] * noisy.shape[4] // 4
            each = sees.to(noisy.device).repeat_interleave(tokens_of_block, dim=0)
            self.attention.sees = each.repeat_interleave(tokens_of_block, dim=1)
        apart = {"enable_diffusion_forcing": True} if sigma.ndim == 2 else {}
        return self.transformer(noisy, sigma * 1000.0, tokens, **apart, return_dict=False)[0]


def count_nulls(ids: Tensor) -> Tensor:
    """Counts the zeros that pad each text `[batch]` to `TEXT_LENGTH`."""
    return TEXT_LENGTH - (ids != 0).sum(dim=1)


def draw_nulls(ids: Tensor, rng: np.random.Generator) -> Tensor:
    """Draws how many zeros pad each text `[batch]`: to `TEXT_LENGTH` for most, up to 512 (a stock default) for some."""
    natural = count_nulls(ids).cpu().numpy()
    many = np.exp(rng.uniform(np.log(32), np.log(512), len(ids))).astype(np.int64)
    return torch.from_numpy(np.where(rng.random(len(ids)) < 0.75, natural, many)).to(ids.device)


# --- what they see ----------------------------------------------------------------------------------------------------


#: A scene, and where its objects begin.
Clip = tuple[MovingScene, list[Mover]]


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Holds windows cut from clips.

    Attributes:
        clean: Latents `[num, 4, length, 8, 8]`.
        ids: Captions, `[num, 24]`.
        movers: The objects of each.
        firsts: The number of each one's first latent frame.
    """

    clean: Tensor
    ids: Tensor
    movers: list[list[Mover]]
    firsts: list[int]

    def layouts(self) -> Tensor:
        """Computes which share of every place has which facts: `[num, sum(KINDS), length, 4, 4]`."""
        length = self.clean.shape[2]
        drawn = [draw_layouts(movers, first, length) for movers, first in zip(self.movers, self.firsts, strict=True)]
        return torch.from_numpy(np.stack(drawn)).to(self.clean.device)


class ClipPool:
    """Holds encoded clips and what they show.

    Args:
        latents: `[clips, 4, latents, 8, 8]`, normalised, half precision.
        clips: What they show.
        dropped: How many latents of each clip come before those that are held.
        device: Where training runs.
    """

    def __init__(self, latents: Tensor, clips: list[Clip], dropped: int, device: torch.device) -> None:
        assert len(latents) == len(clips), "one scene per clip"
        self.latents, self.clips, self.dropped, self.device = latents, clips, dropped, device

    def draw(self, rng: np.random.Generator, num: int, length: int, dropout: float) -> Windows:
        """Draws windows from anywhere.

        Args:
            rng: Draws them.
            num: How many.
            length: Their latent frames.
            dropout: The odds of an empty caption.
        """
        picked = [int(index) for index in rng.integers(len(self.latents), size=num)]
        first = [int(start) for start in rng.integers(self.latents.shape[2] - length + 1, size=num)]
        clean = torch.stack([self.latents[i, :, s : s + length] for i, s in zip(picked, first, strict=True)]).float()
        captions = [describe(self.clips[index][0], rng) for index in picked]
        ids = token_ids(["" if rng.random() < dropout else caption for caption in captions])
        return Windows(
            clean=clean.to(self.device),
            ids=ids.to(self.device),
            movers=[self.clips[index][1] for index in picked],
            firsts=[self.dropped + start for start in first],
        )


def window_length(progress: float, rng: np.random.Generator) -> int:
    """Draws the latent frames of a step's windows: short ones teach how things look, long ones how they move."""
    if progress < 0.2:
        return 4
    if progress < 0.45:
        return 8
    return int(rng.choice((16, 16, 16, 12, 8, 8, 8)))


def draw_noise(clean: Tensor, rng: np.random.Generator) -> Tensor:
    """Draws noise of the shape of `clean`."""
    return torch.from_numpy(rng.standard_normal(clean.shape, dtype=np.float32)).to(clean.device)


def blend(clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Blends latents `[batch, ...]` and noise at levels `sigma` `[batch]`."""
    level = sigma[:, None, None, None, None]
    return (1 - level) * clean + level * noise


def flow_loss(
    model: Animator,
    windows: Windows,
    rng: np.random.Generator,
    layout_weight: float,
    lookback: int | None = None,
) -> tuple[Tensor, str]:
    """Computes the loss of rectified flow, with that of telling what the clean clips have where.

    Args:
        model: What is trained.
        windows: What it is trained on.
        rng: Draws noise, its levels and the texts' padding.
        layout_weight: Weight of the layouts.
        lookback: How many blocks before itself a block of a causal transformer sees; all if None.

    Returns:
        The loss, and a note of both parts.
    """
    clean, ids = windows.clean, windows.ids
    sigma, noise = draw_sigmas(len(clean), rng).to(clean.device), draw_noise(clean, rng)
    velocity = model(blend(clean, noise, sigma), sigma, ids, draw_nulls(ids, rng), lookback)
    error = (velocity.float() - (noise - clean)).square().mean()
    what = model.readout.loss(windows.layouts())
    return error + layout_weight * what, f"error {float(error.detach()):.4f} what {float(what.detach()):.3f}"


def draw_lookback(rng: np.random.Generator) -> int | None:
    """Draws how many earlier blocks a step's blocks see (None: all), for streams that keep only some of them."""
    return (None, None, 2, 1)[int(rng.integers(4))]
