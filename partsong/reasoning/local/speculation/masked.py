"""Guesses with a masked diffusion model: all next tokens at once, from one look at a text that ends in masks.

Speculative diffusion decoding (arXiv 2408.05636). Every position is drawn independently, with the noise of the model
whose text it is, so a guess costs one forward however long it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from partsong.errors import UnsupportedError
from partsong.kernels.keyed_draw import likely_draws
from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.drafter import DraftText, Observation
from partsong.kernels.speculation.rates import Rates
from partsong.knobs import Count, Knobs
from partsong.reasoning.local.loading import load
from partsong.reasoning.local.model import LocalModel
from partsong.reasoning.local.speculation.vocabulary import check_same_vocabulary

__all__ = ["Masked", "MaskedDrafter"]

#: How likely a guess is assumed to be right before anything is observed, if those before it are.
_PRIOR = 0.6


@dataclass(frozen=True, kw_only=True, slots=True)
class Masked(Knobs):
    """Guesses with a masked diffusion model of the same vocabulary, several tokens in one forward.

    Attributes:
        model: a zoo name such as "lists-mdlm", a folder, a hub id, or a loaded model. Its configuration has a
            ``mask_token_id`` and ``partsong_adapter: "mdlm"``: a decoder that was trained without its causal mask.
        length: how many tokens are guessed.
    """

    model: str | Path | PreTrainedModel = "lists-mdlm"
    length: Count = 6

    def build(self, model: LocalModel, tokenizer: Any) -> MaskedDrafter:
        """Loads the masked model.

        Raises:
            ArgumentError: there is no such model.
            UnsupportedError: it is not a masked model of this kind, has another vocabulary, or is on another device.
        """
        loaded = load(self.model, tokenizer if isinstance(self.model, torch.nn.Module) else None, None, model.device)
        config: Any = loaded.module.config
        if getattr(config, "partsong_adapter", None) != "mdlm" or getattr(config, "mask_token_id", None) is None:
            raise UnsupportedError(
                f"{loaded.name} cannot draft as a masked model: its configuration names no mask_token_id with "
                f'partsong_adapter "mdlm"; a causal model drafts as assistant:model=...'
            )
        check_same_vocabulary(loaded, model, tokenizer)
        return MaskedDrafter(loaded.module, length=self.length)


class MaskedDrafter:
    """Drafts by `Masked`; see `Drafter`.

    Args:
        module: the masked model.
        length: how many tokens are guessed.
    """

    layers: tuple[int, ...] = ()
    masks: int = 0

    def __init__(self, module: PreTrainedModel, *, length: int) -> None:
        self._module, self._length, self._config = module, length, module.config
        self._rates: WeakKeyDictionary[DraftText, Rates] = WeakKeyDictionary()
        self._proposed: WeakKeyDictionary[DraftText, list[int]] = WeakKeyDictionary()

    def propose(self, texts: Sequence[DraftText], rooms: Sequence[int]) -> list[DraftTree]:
        """Draws each of the next positions from the masked model's distribution."""
        longest: int = self._config.max_position_embeddings
        sizes = {
            text: min(room, self._length, longest - len(text.tokens))
            for text, room in zip(texts, rooms, strict=True)
            if text.plain and room > 0 and len(text.tokens) < longest
        }
        drafts = dict(zip(sizes, self._guesses(sizes), strict=True)) if sizes else {}
        self._proposed = WeakKeyDictionary(drafts)
        return [self._chain(text, drafts.get(text, [])) for text in texts]

    def observe(self, text: DraftText, seen: Observation) -> None:
        """Learns how often guesses of each depth are right."""
        for depth, (guess, token) in enumerate(
            zip(self._proposed.get(text, ()), seen.match.tokens, strict=False), start=1
        ):
            self._rates[text].see(depth, guess == token)
            if guess != token:
                break

    def forget(self, text: DraftText) -> None:
        """Forgets a text."""
        self._rates.pop(text, None)

    def _chain(self, text: DraftText, guesses: list[int]) -> DraftTree:
        prior = dict.fromkeys(range(1, self._length + 1), _PRIOR)
        rates = self._rates.setdefault(text, Rates(prior))
        return DraftTree.chain(guesses, [rates[depth] for depth in range(1, len(guesses) + 1)])

    def _guesses(self, sizes: dict[DraftText, int]) -> list[list[int]]:
        """Runs once on all texts, each followed by masks; shorter ones are padded on the right."""
        longest = max(len(text.tokens) + size for text, size in sizes.items())
        mask = self._config.mask_token_id
        rows = [[*text.tokens, *[mask] * size] for text, size in sizes.items()]
        ids = torch.tensor([row + [mask] * (longest - len(row)) for row in rows], device=self._module.device)
        logits = self._logits(ids, [len(row) for row in rows])
        logits[..., mask] = -torch.inf
        places = [(index, text, step) for index, (text, size) in enumerate(sizes.items()) for step in range(size)]
        own = torch.stack([logits[index, len(text.tokens) + step] for index, text, step in places])
        draws = [replace(text.draw, place=text.draw.place + step) for _, text, step in places]
        drawn = iter(likely_draws(own, draws, 1))
        return [[next(drawn)[0] for _ in range(size)] for size in sizes.values()]

    def _logits(self, ids: Tensor, lengths: list[int]) -> Tensor:
        """Computes logits `[texts, tokens, vocabulary]`; every token of a text sees all others of it."""
        real = torch.arange(ids.shape[1], device=ids.device) < torch.tensor(lengths, device=ids.device)[:, None]
        hidden = torch.zeros(len(ids), 1, *ids.shape[1:] * 2, dtype=self._module.dtype, device=ids.device)
        hidden.masked_fill_(~real[:, None, None], torch.finfo(hidden.dtype).min)
        return self._module(input_ids=ids, attention_mask=hidden, use_cache=False).logits
