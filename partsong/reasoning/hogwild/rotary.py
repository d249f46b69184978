"""Applies a local model's rotary position embedding to queries and keys that the model itself does not rotate.

A model whose tokens are all at position 0 rotates none of them. Attention may then rotate a query differently for every
block of keys it reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.reasoning.local.model import LocalModel

__all__ = ["Rotary", "rotary_of"]


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotates queries and keys as a model does.

    Position p rotates elements i and i + n of the first 2n of a head by the angle ``p * frequencies[i]``. The elements
    after these are unchanged (Su et al., arXiv 2104.09864, in the order of dims of GPT-NeoX).

    Attributes:
        frequencies: `[n]`, float64, radians per position.
        layers: for each layer, whether it rotates queries and keys; some models have layers without positions.

    >>> rotary = Rotary(torch.tensor([1.0, 0.1], dtype=torch.float64), (True,))
    >>> x = torch.randn(3, 4, dtype=torch.float64)
    >>> there = rotary.turned(x, *rotary.tables(torch.tensor(5), x.dtype))
    >>> bool(torch.allclose(rotary.turned(there, *rotary.tables(torch.tensor(-5), x.dtype)), x))
    True
    """

    frequencies: Tensor
    layers: tuple[bool, ...]

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Computes cosines and sines, each `[*positions.shape, n]`, for vectors of a dtype.

        Angles are computed in float64: in float32 a frequency times a position in the thousands is off by 1e-4.

        Args:
            positions: integers; negative ones rotate back.
            dtype: the vectors' type; tables for types narrower than float32 are float32.
        """
        angles = positions.double()[..., None] * self.frequencies
        wide = torch.promote_types(dtype, torch.float32)
        return angles.cos().to(wide), angles.sin().to(wide)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates vectors.

        Args:
            x: `[..., head_dim]`.
            cos: broadcasts against `[..., n]`.
            sin: broadcasts likewise.

        Returns:
            The rotated vectors, with the dtype of x, and the shape that x and the tables broadcast to.
        """
        half = len(self.frequencies)
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        parts = [first * cos - second * sin, second * cos + first * sin]
        if rest.shape[-1]:
            parts.append(rest.expand(*parts[0].shape[:-1], -1))
        return torch.cat(parts, dim=-1).to(x.dtype)


def rotary_of(model: LocalModel) -> Rotary:
    """Reads the rotary embedding of a model.

    Raises:
        UnsupportedError: the model has none, or several.
    """
    config = model._module.config
    frequencies = [
        each.inv_freq for each in model._module.modules() if isinstance(getattr(each, "inv_freq", None), Tensor)
    ]
    if len(frequencies) != 1:
        what = f"{len(frequencies)} different ones" if frequencies else "another kind of position, or none"
        raise UnsupportedError(
            f"sharing keys at several positions needs one rotary position embedding, and {config.model_type} has "
            f"{what}: use a model such as Llama, Mistral or Qwen"
        )
    # The list says 1 where a layer is rotary, whatever its name says.
    layers = getattr(config, "no_rope_layers", None) or [1] * model.layers
    return Rotary(frequencies[0].double(), tuple(map(bool, layers)))
