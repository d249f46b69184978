"""Defines the decoding loop's interface to language models, and describes each architecture in a row of data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from partsong.parallel.text.shard import VocabularyShard

__all__ = ["Head", "KeyStore", "MixingTextModel", "TextAdapter", "TextModel"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextAdapter:
    """Describes, as data, how a family of language models is decoded.

    Attributes:
        name: the family.
        attention: which tokens one may see. "full": all of its row; "block_causal": those of its own block and of
            earlier ones; "causal": itself and those before it.
        shifted: the distribution of the token at position p is read at p - 1 (models grown from causal ones).
        noise: what is fed at undecided positions: "mask", the mask token; "uniform", random tokens (DiffusionGemma);
            "none", nothing (causal models).
        block_size: tokens of the grid of "block_causal" attention; None where there is no grid.
        block_origin: where that grid begins: at the first token of the "sequence", or after the "prompt".
        transform: dotted path of a module between the last hidden state and the output embedding, or "".
        keeps_keys: keys and values of earlier forwards can be reused.
        needs_keys: finished text is read through a key store only, into which calls with ``clean=True`` write it.
    """

    name: str
    attention: Literal["full", "block_causal", "causal"]
    shifted: bool = False
    noise: Literal["mask", "uniform", "none"] = "mask"
    block_size: int | None = None
    block_origin: Literal["sequence", "prompt"] = "sequence"
    transform: str = ""
    keeps_keys: bool = True
    needs_keys: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Head:
    """Turns a hidden state into logits: ``logit_scale * (softcap * tanh(hidden @ weight.T / softcap) + bias)``.

    Attributes:
        weight: `[V, C]`, or the rows of the tokens that this rank holds.
        bias: `[V]` or None; of the same tokens.
        softcap: soft limit of the logits, or None.
        logit_scale: factor of the logits.
        shard: which tokens this rank holds; None where it holds all.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    logit_scale: float = 1.0
    shard: VocabularyShard | None = None

    @property
    def vocab_size(self) -> int:
        """Counts the tokens of all ranks."""
        return len(self.weight) if self.shard is None else self.shard.total


class KeyStore(Protocol):
    """Holds the keys and values of a batch: a slot for each position, and one more that is never visible."""

    def keep(self, rows: Tensor) -> None:
        """Forgets all rows but these (int64 `[n]`), which move together."""
        ...


class TextModel(Protocol):
    """Presents a language model to the decoding loop.

    Attributes:
        adapter: its row.
        mask_token_id: the token fed at undecided positions; None unless ``adapter.noise == "mask"``.
        eos_token_ids: tokens that end a text; may be empty.
        vocab_size: V, tokens of the head.
        max_positions: longest text it was made for; None where that is not known.
        device: where token ids are expected.
        head: turns the output of `forward` into logits.
    """

    adapter: TextAdapter
    mask_token_id: int | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_positions: int | None
    device: torch.device
    head: Head

    def key_store(self, rows: int, slots: int) -> KeyStore | None:
        """Allocates a store for `rows` rows of `slots` positions; None for a model that keeps no keys."""
        ...

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor,
        keys: KeyStore | None,
        rows: Tensor | None = None,
        *,
        clean: bool = False,
    ) -> Tensor:
        """Returns the last hidden states `[B, Q, C]` of some tokens of each row, as the head takes them.

        Their keys and values are written to `slots` before attention, so tokens of one call see each other.

        Args:
            tokens: int64 `[B, Q]`.
            positions: int64 `[B, Q]`, for rotary or learned positions.
            slots: int64 `[B, Q]`, where the keys go; the last slot of the store is scratch and may be written by
                several tokens. Without a store this is 0 ... Q - 1.
            visible: bool `[B, Q, S]`, the slots each token attends to (S: slots asked for, without the scratch slot;
                Q where there is no store).
            keys: from `key_store`.
            rows: int64 `[B]`, the rows of the store these are; None is all of them, in order.
            clean: whether the tokens are decided and only their keys are needed (for models that encode finished text
                differently).
        """
        ...

    def flops(self, queries: int, keys: int) -> float:
        """Counts operations, two per multiply-add, of `queries` tokens that see `keys` keys each, without the head."""
        ...


@runtime_checkable
class MixingTextModel(TextModel, Protocol):
    """Presents a language model that can read a mixture of a token and the mask, for rules that mix."""

    def forward_mixed(
        self,
        tokens: Tensor,
        mask_share: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor,
        keys: KeyStore | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Returns what `forward` does, for embeddings interpolated between token and mask.

        Args:
            tokens: int64 `[B, Q]`.
            mask_share: `[B, Q]`, from 0, the token, to 1, the mask.
            positions: this and all others as for `forward`.
            slots: as for `forward`.
            visible: as for `forward`.
            keys: as for `forward`.
            rows: as for `forward`.
        """
        ...
