"""Answers the samplers of any order with the `tiles` transformer, from the keys that it has kept.

Importing this module loads torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from partsong.parallel.text.cache_names import cache_name
from partsong_zoo.shapes.model import TEXT_LENGTH
from partsong_zoo.tiles.model import HIDDEN, PAD, code_logits, embed

__all__ = ["CaptionedTiles"]


class KeptKeys:
    """Keeps the keys of the captions and of the tokens that were last known, for as long as they stay."""

    def __init__(self) -> None:
        self.cache, self.known, self.codes = DynamicCache(), torch.empty(0), torch.empty(0)

    def begin(self, model: Any, words: Tensor, known: Tensor, codes: Tensor, limit: int) -> int:
        """Drops the keys of what has changed, and returns how many tokens still have keys.

        Args:
            model: of `build_model`.
            words: ids of captions, int64 `[rows, P]`; they are read at the first call.
            known: int64 `[rows, K]`, the places of the tokens to be known now, in their order.
            codes: int64 `[rows, K]`, what stands there.
            limit: of how many tokens keys may be used, since all places that are asked for see the same ones.
        """
        num = 0
        if self.known.dim() < 2:
            read_captions(model, words, self.cache)
        else:
            num = min(limit, known.shape[1], self.known.shape[1])
            same = (self.known[:, :num] == known[:, :num]) & (self.codes[:, :num] == codes[:, :num])
            num = int(same.long().cumprod(1).sum(1).min())
            if num < self.known.shape[1]:
                self.cache.crop(num - self.known.shape[1])
        self.known, self.codes = known, codes
        return num


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CaptionedTiles:
    """Holds captions for a `tiles` transformer, and answers what samplers ask (a `PictureModel`).

    With guidance every picture has a second row without its caption, and its logits go beyond those of the caption.
    How far rises with the number of known tokens, from not at all to `guidance`, because the first tokens decide the
    most and would all turn out alike. Called, it keeps the keys of what it has read, as far as the next call knows the
    same tokens.

    Attributes:
        model: of `build_model`.
        words: ids of captions, int64 `[B, P]`, padded with 0.
        guidance: weight of the caption's logits against those without it, at the last token; 1 is no guidance.
        silent: ids of the empty caption.
        kept: keys of the last call.
    """

    model: Any
    words: Tensor
    guidance: float = 1.0
    silent: tuple[int, ...] = (1, 3)
    kept: KeptKeys = field(default_factory=KeptKeys, repr=False)

    @property
    def grid(self) -> int:
        """Returns how many tokens a side has."""
        return self.model.config.partsong_grid

    @property
    def batch(self) -> int:
        """Returns how many pictures there are."""
        return len(self.words)

    def reader(self) -> TileReader:
        """Returns a reader that has seen nothing but the captions."""
        return TileReader(self)

    def prefix(self) -> Tensor:
        """Returns the captions of all rows: those of the pictures, and with guidance as many empty ones."""
        if self.guidance == 1.0:
            return self.words
        silent = torch.zeros_like(self.words)
        silent[:, : len(self.silent)] = torch.tensor(self.silent, device=self.words.device)
        return torch.cat([self.words, silent])

    def rows(self, tensor: Tensor) -> Tensor:
        """Repeats what belongs to pictures for the rows without a caption."""
        return tensor if self.guidance == 1.0 else torch.cat([tensor, tensor])

    def guided(self, logits: Tensor, seen: Tensor) -> Tensor:
        """Returns logits `[B, Q, V]` from those of all rows.

        Args:
            logits: `[rows, Q, V]`.
            seen: int64 `[B, Q]`, how many tokens are known where they are asked for.
        """
        if self.guidance == 1.0:
            return logits
        captioned, silent = logits.chunk(2)
        share = seen / max(self.grid**2 - 1, 1)
        scale = (1 + (self.guidance - 1) * share.clamp(max=1.0)).to(logits.dtype)[..., None]
        return silent + scale * (captioned - silent)

    def __call__(self, tokens: Tensor, rank: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        """Answers as an `AnyOrderModel`: each place from the tokens of rank below `seen`."""
        num = int(seen.max())
        known = rank.argsort(1)[:, :num]
        words, places = self.prefix(), self.rows(places)
        known, codes = self.rows(known), self.rows(tokens.gather(1, known))
        old = self.kept.begin(self.model, words, known, codes, int(seen.min()))
        steps = torch.arange(old, num, device=seen.device)
        limit = torch.cat([(steps + 1).expand(len(words), -1), self.rows(seen)], 1)
        sees = torch.zeros(*limit.shape, limit.shape[1], dtype=torch.bool, device=words.device)
        sees[:, :, : num - old] = steps < limit[:, :, None]
        sees[:, num - old :, num - old :] = torch.eye(places.shape[1], dtype=torch.bool, device=words.device)
        codes, at = torch.cat([codes, torch.full_like(places, -1)], 1), torch.cat([known, places], 1)
        inputs, at = embed(self.model, codes[:, old:], at[:, old:]), TEXT_LENGTH + at[:, old:]
        hidden = forward(self.model, inputs, at, visible(words, old, sees), self.kept.cache)
        self.kept.cache.crop(-places.shape[1])
        return self.guided(code_logits(self.model, hidden[:, num - old :]), seen)


class TileReader:
    """Reads groups of tokens (a `GroupReader`).

    Args:
        asking: the model and its captions.
    """

    def __init__(self, asking: CaptionedTiles) -> None:
        self.asking, self.words = asking, asking.prefix()
        self.cache, self.known = DynamicCache(), 0

    def ask(self, tokens: Tensor, places: Tensor, asked: Tensor, *, mutual: bool) -> Tensor:
        """Reads the tokens of the last group and returns logits of the next one; see `GroupReader`."""
        model, num, questions = self.asking.model, places.shape[1], asked.shape[1]
        if not self.known and not num:
            read_captions(model, self.words, self.cache)
        sees = torch.zeros(num + questions, num + questions, dtype=torch.bool, device=asked.device)
        sees[:, :num] = True
        sees[num:, num:] = True if mutual else torch.eye(questions, dtype=torch.bool, device=asked.device)
        at = self.asking.rows(torch.cat([places, asked], 1))
        codes = self.asking.rows(torch.cat([tokens, torch.full_like(asked, -1)], 1))
        mask = visible(self.words, self.known, sees.expand(len(self.words), -1, -1))
        hidden = forward(model, embed(model, codes, at), TEXT_LENGTH + at, mask, self.cache)
        self.known += num
        # Questions leave nothing behind: their places are read again as tokens.
        self.cache.crop(-questions)
        seen = torch.full_like(asked, self.known)
        return self.asking.guided(code_logits(model, hidden[:, num:]), seen)


def read_captions(model: Any, words: Tensor, cache: DynamicCache) -> None:
    """Reads captions, whose words all see each other, into an empty cache."""
    at = torch.arange(words.shape[1], device=words.device).expand_as(words)
    sees = torch.zeros(len(words), words.shape[1], 0, dtype=torch.bool, device=words.device)
    forward(model, embed(model, words), at, visible(words, 0, sees), cache)


def visible(words: Tensor, known: int, sees: Tensor) -> Tensor:
    """Makes the additive mask of new inputs: captions and known tokens are seen by all, the inputs as `sees` says.

    Args:
        words: ids of captions, int64 `[B, P]`.
        known: how many tokens are in the cache behind the captions.
        sees: bool `[B, new, new]`.

    Returns:
        Float `[B, 1, new, P + known + new]`.
    """
    before = torch.cat([words != PAD, words.new_ones(len(words), known, dtype=torch.bool)], 1)
    whole = torch.cat([before[:, None].expand(-1, sees.shape[1], -1), sees], 2)
    return torch.zeros(whole.shape, device=words.device).masked_fill(~whole, HIDDEN)[:, None]


def forward(model: Any, inputs: Tensor, at: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
    """Runs the transformer on new inputs behind what the cache holds; returns the states behind its last norm."""
    out = model.model(
        inputs_embeds=inputs,
        position_ids=at,
        attention_mask=mask.to(inputs.dtype),
        **{cache_name(model.model): cache},
        use_cache=True,
    )
    return out.last_hidden_state
