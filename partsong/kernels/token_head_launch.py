"""Starts the Triton kernels of the token head. Import this file only where triton is."""

# Triton's functions are called with other types than they compute with.
# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
from torch import Tensor

from partsong.kernels.token_head_naive import Draw, Logits
from partsong.kernels.token_head_tiles import Tiles, tiles_for
from partsong.kernels.token_head_triton import COMBINED, combine_kernel, options_for, scan_kernel
from partsong.kernels.token_noise import GROUP
from partsong.kernels.token_state import TokenState

__all__ = ["scan"]


def scan(
    hidden: Tensor,
    weight: Tensor,
    logits: Logits,
    draw: Draw | None = None,
    *,
    first_token: int = 0,
    tiles: Tiles | None = None,
    programs: int | None = None,
) -> TokenState:
    """Goes once over the vocabulary; arguments and result as in `token_head_naive.scan`.

    There is at least one row, and no float64. `tiles` are the tile sizes, by default those of `tiles_for`. About
    `programs` programs are started, by default two for each multiprocessor.
    """
    (num_rows, width), num_tokens = hidden.shape, len(weight)
    capability, processors = _device(hidden.device)
    tiles = tiles or tiles_for(num_rows, hidden.dtype, drawn=draw is not None, capability=capability)
    row_tiles = triton.cdiv(num_rows, tiles.rows)
    token_tiles = triton.cdiv(first_token % GROUP + num_tokens, tiles.tokens)
    # Two programs for each multiprocessor: one's loads can run under the other's sums.
    splits = max((programs or 2 * processors) // row_tiles, 1)
    tiles_per_split = triton.cdiv(token_tiles, min(splits, token_tiles))
    num_splits = triton.cdiv(token_tiles, tiles_per_split)
    floats = _empty((4 if draw is None else 6, num_splits, num_rows), torch.float32, hidden.device)
    ints = _empty((1 if draw is None else 2, num_splits, num_rows), torch.int32, hidden.device)
    # Triton starts kernels on the current device, which need not be that of the tensors.
    with torch.cuda.device(hidden.device) if hidden.is_cuda else nullcontext():
        scan_kernel[(row_tiles, num_splits)](
            hidden,
            weight,
            None if logits.bias is None else logits.bias.contiguous(),
            draw and draw.keys,
            draw and draw.positions,
            floats,
            ints,
            num_rows,
            num_tokens,
            width,
            *hidden.stride(),
            *weight.stride(),
            first_token,
            tiles_per_split,
            logits.softcap,
            logits.scale,
            draw and draw.inverse_temperature,
            **options_for(tiles, width, hidden.dtype),
        )
        return _combine(floats, ints)


def _combine(floats: Tensor, ints: Tensor) -> TokenState:
    num_floats, num_splits, num_rows = floats.shape
    whole_floats = _empty((num_floats, num_rows), torch.float32, floats.device)
    whole_ints = _empty((len(ints), num_rows), torch.int64, floats.device)
    block = triton.next_power_of_2(num_splits)
    rows = max(COMBINED // block, 1)
    combine_kernel[(triton.cdiv(num_rows, rows),)](
        floats,
        ints,
        whole_floats,
        whole_ints,
        num_splits,
        num_rows,
        SPLITS=block,
        ROWS=rows,
        DRAWN=num_floats == 6,
        num_warps=4,
    )
    top, total, slope, second, *drawn = whole_floats.unbind()
    argmax, *token = whole_ints.unbind()
    token_logit, score = drawn or (top, top)
    return TokenState(
        top=top,
        total=total,
        slope=slope,
        argmax=argmax,
        second=second,
        token=token[0] if token else argmax,
        token_logit=token_logit,
        score=score,
    )


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates memory for results; the tests put NaN and impossible tokens there, so an unwritten element shows."""
    return torch.empty(shape, dtype=dtype, device=device)


def _device(device: torch.device) -> tuple[int, int]:
    """Returns major compute capability and number of multiprocessors; something small for the interpreter."""
    if device.type != "cuda":
        return 9, 4
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.multi_processor_count
