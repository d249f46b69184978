"""Maps where a picture attends to its prompt, from the attention in one call of the model."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from partsong.errors import UnsupportedError

__all__ = ["ObjectMask"]


class ObjectMask(TorchFunctionMode):
    """Collects, from every attention inside it, how much each position of the picture attends to the prompt.

    In a joint attention of picture and text this is the weight on the text's tokens. In cross-attention all weight is
    on text, so the first token is left out, to which positions attend when they attend to nothing in the text.

    Args:
        size: height and width of the picture in latents.
        num_text: tokens of the text.
        text_first: in a joint attention, they come before the picture's tokens.

    Example:
        >>> # with ObjectMask((16, 16), num_text=78) as mask: model(...)
        >>> # mask.weights(batch=1)  # [1, 1, 16, 16], from 0 to 1
    """

    def __init__(self, size: tuple[int, int], num_text: int, *, text_first: bool = False) -> None:
        super().__init__()
        self.size, self.num_text, self.text_first = size, num_text, text_first
        self._maps: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | (kwargs or {})
            self._note(named["query"], named["key"], named.get("attn_mask"))
        return func(*args, **(kwargs or {}))

    def _note(self, query: Tensor, key: Tensor, keys_mask: Tensor | None) -> None:
        """Adds the map of one attention from query and key `[B, H, L, D]` and a mask of keys, `[B, 1, 1, L]`."""
        length, keys = query.shape[-2], key.shape[-2]
        joint = length == keys and self._side(length - self.num_text) is not None
        cross = keys == self.num_text and self._side(length) is not None
        side = self._side(length - self.num_text) if joint else self._side(length) if cross else None
        if side is None:
            return
        first = self.num_text if joint and self.text_first else 0
        picture = query[:, :, first : first + side[0] * side[1]].float()
        scores = picture @ key.float().transpose(-1, -2) / math.sqrt(query.shape[-1])
        if keys_mask is not None and keys_mask.shape[-2] == 1:
            scores = scores.masked_fill(~keys_mask, -math.inf) if keys_mask.dtype == torch.bool else scores + keys_mask
        weights = scores.softmax(-1)
        text = weights[..., : self.num_text] if first else weights[..., side[0] * side[1] :]
        paid = text.sum(-1) if joint else 1 - weights[..., 0]
        self._maps.append(F.interpolate(paid.mean(1, keepdim=True).unflatten(-1, side), self.size, mode="bilinear"))

    def _side(self, length: int) -> tuple[int, int] | None:
        """Returns height and width of the picture at a level of `length` tokens; None where there is no such level."""
        scale = math.sqrt(math.prod(self.size) / length) if length > 0 else 0.0
        if scale == 0.0:
            return None
        side = tuple(math.ceil(edge / scale - 1e-6) for edge in self.size)
        return (side[0], side[1]) if side[0] * side[1] == length else None

    def weights(self, batch: int) -> Tensor:
        """Returns the map of the last `batch` samples (those with the prompt), `[batch, 1, H, W]`, from 0 to 1.

        Raises:
            UnsupportedError: no attention was seen.
        """
        if not self._maps:
            raise UnsupportedError(
                "mask='attention': no attention to the prompt was seen; use the model's default attention processors "
                "and the native attention backend, or mask='none'"
            )
        mean = torch.stack(self._maps).mean(0)[-batch:]
        low, high = mean.amin((-2, -1), keepdim=True), mean.amax((-2, -1), keepdim=True)
        return (mean - low) / (high - low).clamp_min(torch.finfo(mean.dtype).tiny)
