"""Marks each thread's keys and values by a thought embedding, since other threads have the same positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from partsong.errors import ArgumentError, UnsupportedError

__all__ = ["ThoughtEmbeddings"]


class ThoughtEmbeddings(nn.Module):
    """Holds a vector for the keys and one for the values of each layer and mark, the same for all heads.

    They are added before the rotary embedding: a key of a token with mark j at position t is R_t (k + T_j), its value
    v + T'_j. All begin at zero, which changes nothing.

    Args:
        layers: how many layers the model has.
        head_dim: channels of its keys.
        num_marks: how many marks there are: 0 for text outside threads, and 1 ... for threads.

    Source: ParaThinker, arXiv 2509.04475, section 3.

    >>> thoughts = ThoughtEmbeddings(layers=2, head_dim=8, num_marks=9)
    >>> tuple(thoughts.keys.shape)
    (2, 9, 8)
    """

    def __init__(self, layers: int, head_dim: int, num_marks: int = 32) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.zeros(layers, num_marks, head_dim))
        self.values = nn.Parameter(torch.zeros(layers, num_marks, head_dim))
        self._marks: Tensor | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, num_marks: int = 32) -> ThoughtEmbeddings:
        """Makes zero embeddings that fit a model, with its dtype and on its device."""
        config: Any = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(config.num_hidden_layers, head_dim, num_marks).to(model.device, model.dtype)

    @contextmanager
    def at(self, marks: Sequence[Sequence[int]] | Tensor) -> Iterator[None]:
        """Sets the marks of the next forward's tokens.

        Args:
            marks: `[batch, tokens]`.

        Raises:
            ArgumentError: there is no embedding for a mark.
        """
        numbers = torch.as_tensor(marks, device=self.keys.device)
        num_marks = self.keys.shape[1]
        if numbers.numel() and (int(numbers.min()) < 0 or int(numbers.max()) >= num_marks):
            raise ArgumentError(
                f"marks from {int(numbers.min())} to {int(numbers.max())}, but there are thought embeddings for 0 to "
                f"{num_marks - 1}: use fewer threads"
            )
        self._marks = numbers
        try:
            yield
        finally:
            self._marks = None

    def attach(self, model: nn.Module) -> list[RemovableHandle]:
        """Hooks the embeddings into a model's layers; each handle's ``remove()`` takes one out.

        Raises:
            UnsupportedError: the model's layers have no key and value projections of their own.
            ArgumentError: the model has another number of layers.
        """
        layers = [m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int) and hasattr(m, "v_proj")]
        if not layers:
            raise UnsupportedError(f"{type(model).__name__} has no layers with k_proj and v_proj to add thoughts to")
        if len(layers) != len(self.keys):
            raise ArgumentError(f"the model has {len(layers)} layers and the thought embeddings {len(self.keys)}")
        handles: list[RemovableHandle] = []
        for module in layers:
            layer: Any = module
            # A norm of the keys comes before the rotary embedding, too; the thought is added after it.
            keys = layer.k_norm if hasattr(layer, "k_norm") else layer.k_proj
            handles.append(keys.register_forward_hook(self._adder(self.keys, layer.layer_idx)))
            handles.append(layer.v_proj.register_forward_hook(self._adder(self.values, layer.layer_idx)))
        return handles

    def _adder(self, table: Tensor, layer: int) -> Any:
        def add(_module: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
            if self._marks is None:
                return out
            by_head = out.view(*out.shape[:2], -1, table.shape[2])
            return (by_head + table[layer][self._marks].unsqueeze(-2)).view(out.shape)

        return add
