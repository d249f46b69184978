"""Answers other libraries' calls of attention: one mask, bool or float, and values with a head size of their own."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from partsong.errors import UnsupportedError
from partsong.kernels.attend import attention
from partsong.kernels.masks import Causal

__all__ = ["NAME", "attend", "unsupported"]

#: What other libraries know partsong's attention by.
NAME = "partsong"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    causal: Causal | None,
    scale: float | None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Calls `partsong.kernels.attention` with the arguments of ``scaled_dot_product_attention``.

    Args:
        q: `[B, Hq, Lq, D]`.
        k: `[B, Hkv, Lk, D]`.
        v: `[B, Hkv, Lk, Dv]`, where Dv may differ from D.
        mask: bool (True = attend) or float (added to the logits), or None.
        causal: additionally this mask.
        scale: factor on q.k, None is ``D ** -0.5``.
        bias: float, added to the logits too.

    Returns:
        out `[B, Hq, Lq, Dv]` and lse `[B, Hq, Lq]`, as `attention` gives them.

    Raises:
        ArgumentError: shapes, dtypes or masks that do not fit.
    """
    keep = mask
    if isinstance(mask, Tensor) and mask.is_floating_point():
        keep, bias = None, mask if bias is None else mask + bias
    scale, width = q.shape[3] ** -0.5 if scale is None else scale, v.shape[3]
    # Zeros change neither q.k nor the columns that are kept.
    if width < q.shape[3]:
        v = pad(v, (0, q.shape[3] - width))
    elif width > q.shape[3]:
        q, k = (pad(x, (0, width - x.shape[3])) for x in (q, k))
    both = (causal, keep) if causal is not None and keep is not None else None
    out, lse = attention(q, k, v, mask=both or (keep if causal is None else causal), bias=bias, scale=scale)
    return out[..., :width], lse


def unsupported(library: str, what: str, instead: str) -> UnsupportedError:
    """Returns the error for a request of another library that these kernels would have to ignore."""
    return UnsupportedError(f"{library} asked partsong's attention for {what}, which it does not compute: {instead}")
