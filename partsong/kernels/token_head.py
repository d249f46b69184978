"""Computes tokens, confidence and entropy from hidden states without ever storing the logits.

Samplers of diffusion language models compute logits for all positions and softmax them in float64: gigabytes, of
which they keep four numbers per position. Here the head runs on the positions asked for only, in one pass over
the vocabulary, and what leaves it is a few numbers per row.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from torch import Tensor

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.kernels import token_head_naive
from partsong.kernels.call import triton_refusal
from partsong.kernels.masks import describe
from partsong.kernels.token_head_naive import Draw, Logits
from partsong.kernels.token_state import TokenState, TokenStats, merge_token_states
from partsong.knobs import Whole, check_value
from partsong.seeds import check_seed

__all__ = ["TokenNoise", "TokenState", "TokenStats", "merge_token_states", "token_ids", "token_state", "token_stats"]

_LOG = logging.getLogger("partsong.kernels")

#: Environment variable that forces a kernel, "naive" or "triton"; "auto" or empty leaves the choice free.
ENV = "PARTSONG_TOKEN_HEAD"

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Not uint8: PyTorch itself reads that as a mask, and a misreading would go unnoticed.
_POSITIONS = (torch.bool, torch.int8, torch.int16, torch.int32, torch.int64)

#: The kernels count tokens in 32 bits.
_FirstToken = Annotated[int, Whole(0, (1 << 30) - 1)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenNoise:
    """Holds the noise tokens are drawn with: a function of (seed, position, token id) and of nothing else.

    A row therefore draws the same token in any batch, for any subset of positions, tiling, shard of the
    vocabulary or device. The noise of a position is the same at every call, so derive a seed per decoding step:
    ``seeds.derive(seed, "step", step)``.

    Attributes:
        seed: one for all rows, or one per sample: B of them for hidden states `[B, L, C]`, N for `[N, C]`.
        positions: int64, hidden's shape without C: the position of each row within its sample. Default 0, 1, ...
            along L (along N for `[N, C]`). A decoder that passes only a window of the sequence gives them.
    """

    seed: int | list[int] | tuple[int, ...]
    positions: Tensor | None = None


class _Scan(Protocol):
    def __call__(
        self, hidden: Tensor, weight: Tensor, logits: Logits, draw: Draw | None = None, *, first_token: int = 0
    ) -> TokenState: ...


def token_stats(
    hidden: Tensor,
    weight: Tensor,
    positions: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 0.0,
    noise: TokenNoise | int | None = None,
) -> TokenStats:
    """Computes tokens, their probabilities and the entropy at some positions, in one pass over the vocabulary.

    The logits are ``logit_scale * (softcap * tanh(hidden @ weight.T / softcap) + bias)``, in float32 whatever the
    inputs are (float64 for float64 inputs); a model that rounds its logits to bfloat16 makes ties that do not exist
    here. No gradient flows.

    Args:
        hidden: final hidden states `[B, L, C]` or `[N, C]`, after the model's last norm; float16, bfloat16, float32
            or float64.
        weight: the head `[V, C]`, of hidden's dtype and device.
        positions: which rows: a bool mask of hidden's shape without C, or int indices `[M]` into the rows flattened
            (b * L + l), in any order, repetition allowed. Indices on an accelerator are not read by the host: one out
            of range fails on the device. A mask there costs one synchronisation. Default: all rows.
        bias: `[V]`, any float dtype. A -inf forbids a token, such as the mask token itself.
        softcap: soft limit of the logits, as Gemma's heads have (30 in DiffusionGemma).
        logit_scale: positive factor. 1 / T with `temperature` 1 gives every statistic at temperature T.
        temperature: that of the draw, 0 (the argmax) or at least 1e-6. `TokenStats` are at temperature 1 either way:
            `token_prob` is the model's probability of the token drawn, not the draw's.
        noise: required for a temperature above 0, unused at 0. An int is short for ``TokenNoise(seed=int)``.

    Returns:
        Fields `[M]` in the order of `positions` (of a mask: row by row); without `positions`, hidden's shape without C.

    Raises:
        ArgumentError: shapes, dtypes, devices, indices or numbers that do not fit.
        ArgumentTypeError: an argument of the wrong type.

    Source: Gumbel-max sampling, Maddison, Tarlow and Minka, arXiv 1411.0030; online softmax, Milakov and Gimelshein,
    arXiv 1805.02867.
    """
    return token_state(
        hidden,
        weight,
        positions,
        bias=bias,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        noise=noise,
    ).stats()


@torch.no_grad()
def token_state(
    hidden: Tensor,
    weight: Tensor,
    positions: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 0.0,
    noise: TokenNoise | int | None = None,
    first_token: int = 0,
) -> TokenState:
    """Computes what `token_stats` needs before its last step; states of other shards of the head merge with it.

    Arguments and errors are those of `token_stats`, and all shards are given the same but for three: `weight`
    `[V of the shard, C]` and `bias` `[V of the shard]` are this shard's rows of the head, and `first_token` is the id
    of the first of them.

    Returns:
        A state; ``merge_token_states(states).stats()`` are the statistics over all shards.
    """
    check_value("first_token", first_token, _FirstToken, "token_state: ")
    rows, form, draw = _read_call(hidden, weight, positions, bias, softcap, logit_scale, temperature, noise)
    state = _choose(rows)(rows, weight, form, draw, first_token=first_token)
    return state if positions is not None else state.reshape(*hidden.shape[:-1])


@torch.no_grad()
def token_ids(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 0.0,
    noise: TokenNoise | int | None = None,
) -> Tensor:
    """Draws tokens and computes nothing else: ``token_stats(...).token``, in less time.

    Arguments, errors and noise are those of `token_stats`.

    >>> token_ids(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist()
    [1]
    """
    rows, form, draw = _read_call(hidden, weight, None, bias, softcap, logit_scale, temperature, noise)
    scan = _choose(rows)
    tokens = token_head_naive.draw_tokens if scan is token_head_naive.scan else lambda *call: scan(*call).drawn()
    return tokens(rows, weight, form, draw).reshape(hidden.shape[:-1])


def _read_call(
    hidden: Tensor,
    weight: Tensor,
    positions: Tensor | None,
    bias: Tensor | None,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    noise: TokenNoise | int | None,
) -> tuple[Tensor, Logits, Draw | None]:
    """Checks the arguments; returns the requested rows `[N, C]`, the settings of their products, and their noise."""
    _check_head(hidden, weight, bias)
    softcap = None if softcap is None else _positive("softcap", softcap)
    logit_scale = _positive("logit_scale", logit_scale)
    # Below the least one a division by the temperature could overflow, and the draw is the argmax anyway.
    inverse = 1.0 / _positive("temperature", temperature, least=1e-6) if temperature else None
    shape = hidden.shape[:-1]
    index = None if positions is None else _row_index(positions, shape, hidden.device)
    rows = hidden.reshape(-1, hidden.shape[-1])
    draw = None
    if inverse is not None:
        keys, places = _noise_of_rows(noise, temperature, shape, hidden.device)
        if index is not None:
            keys, places = keys.index_select(0, index), places.index_select(0, index)
        draw = Draw(keys=keys, positions=places, inverse_temperature=inverse)
    if index is not None:
        rows = rows.index_select(0, index)
    return rows, Logits(bias=bias, softcap=softcap, scale=logit_scale), draw


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if not isinstance(x, Tensor) and not (name == "bias" and x is None):
            raise ArgumentTypeError(f"token_stats needs {name} to be a tensor, found {type(x).__name__}")
    found = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}"
    if hidden.dim() not in (2, 3) or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or not weight.numel():
        raise ArgumentError(
            f"token_stats needs hidden [B, L, C] or [N, C] and weight [V, C] with V and C at least 1; found {found}"
        )
    if hidden.dtype is not weight.dtype or hidden.dtype not in _FLOATS:
        raise ArgumentError(
            f"token_stats needs hidden and weight of one dtype out of float16, bfloat16, float32, float64; "
            f"found {hidden.dtype} and {weight.dtype}: cast them to one"
        )
    if bias is not None and not bias.is_floating_point():
        raise ArgumentTypeError(f"token_stats needs a float bias, found {bias.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError(f"token_stats needs bias [V] = [{len(weight)}], found {tuple(bias.shape)}")
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and x.device != hidden.device:
            raise ArgumentError(f"{name} is on {x.device} but hidden is on {hidden.device}; move it there")


def _positive(name: str, value: float, least: float = 0.0) -> float:
    try:
        fits = math.isfinite(value) and value > 0.0 and value >= least
    except TypeError as error:
        raise ArgumentTypeError(f"token_stats needs {name} to be a number, found {value!r}") from error
    if not fits:
        bound = f"of at least {least}, or 0 for the argmax" if least else "above 0"
        raise ArgumentError(f"token_stats needs a finite {name} {bound}; found {value}")
    return float(value)


def _row_index(positions: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
    """Returns int64 indices `[M]` into the flattened rows."""
    if not isinstance(positions, Tensor) or positions.dtype not in _POSITIONS:
        raise ArgumentTypeError(f"positions are a bool mask or int indices in a tensor, found {describe(positions)}")
    if positions.dtype is torch.bool:
        if positions.shape != shape:
            raise ArgumentError(
                f"a mask of positions has hidden's shape without C, {tuple(shape)}; found {tuple(positions.shape)}"
            )
        return positions.flatten().nonzero().squeeze(1).to(device)
    if positions.dim() != 1:
        raise ArgumentError(f"indices of positions are [M], into the rows flattened; found {tuple(positions.shape)}")
    num_rows = shape.numel()
    # The host reads only what is on the host; on a device the gather itself asserts.
    if positions.device.type == "cpu" and positions.numel() and not 0 <= positions.min() <= positions.max() < num_rows:
        raise ArgumentError(
            f"indices of positions lie in 0 <= index < {num_rows} rows; "
            f"found {int(positions.min())} to {int(positions.max())}"
        )
    return positions.to(device, torch.int64)


def _noise_of_rows(
    noise: TokenNoise | int | None, temperature: float, shape: torch.Size, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns key and position of every flattened row, int64 `[N]`."""
    if noise is None:
        raise ArgumentError(f"a draw at temperature {temperature} needs noise=: a seed, or TokenNoise(seed=...)")
    if not isinstance(noise, TokenNoise):
        noise = TokenNoise(seed=noise)
    places = noise.positions
    if isinstance(noise.seed, list | tuple):
        seeds = [_signed(check_seed(seed)) for seed in noise.seed]
        if len(seeds) != shape[0]:
            raise ArgumentError(f"noise has {len(seeds)} seeds but hidden has {shape[0]} samples: give one for each")
        keys = torch.tensor(seeds, dtype=torch.int64).to(device, non_blocking=True).repeat_interleave(shape[1:].numel())
    else:
        keys = torch.full((shape.numel(),), _signed(check_seed(noise.seed)), dtype=torch.int64, device=device)
        if places is None and len(shape) == 2 and shape[0] > 1:
            raise ArgumentError(
                f"one seed for {shape[0]} samples would give all of them the same noise: "
                f"give TokenNoise one seed per sample, or positions that tell the samples apart"
            )
    if places is None:
        return keys, torch.arange(shape[-1], device=device).repeat(shape[:-1].numel())
    if not isinstance(places, Tensor) or places.dtype is not torch.int64 or places.shape != shape:
        found = f"{places.dtype} {tuple(places.shape)}" if isinstance(places, Tensor) else type(places).__name__
        raise ArgumentError(f"TokenNoise needs positions int64 {tuple(shape)}, hidden's shape without C; found {found}")
    # The kernel knows no stride of it, and a view of every other position has one.
    return keys, places.reshape(-1).to(device).contiguous()


def _signed(seed: int) -> int:
    """Returns the int64 with the bits of a 64-bit word."""
    return seed - (1 << 64) if seed >> 63 else seed


def _choose(rows: Tensor) -> _Scan:
    """Picks the kernel for these rows and logs the choice once with its reason."""
    asked = os.environ.get(ENV) or "auto"
    if asked not in ("auto", "naive", "triton"):
        raise ArgumentError(f"{ENV} is auto, naive or triton, found {asked!r}")
    fits, reason = _triton_fits(rows) if asked == "auto" else (asked == "triton", f"{ENV}={asked}")
    _log_once("triton" if fits else "naive", reason)
    if fits and len(rows):
        from partsong.kernels import token_head_launch

        return token_head_launch.scan
    return token_head_naive.scan


def _triton_fits(rows: Tensor) -> tuple[bool, str]:
    """Whether the Triton kernel can compute these rows, and why (not)."""
    reason = "the kernel has no float64" if rows.dtype is torch.float64 else triton_refusal(rows.device)
    return not reason, reason or "Triton"


@functools.cache
def _log_once(name: str, reason: str) -> None:
    _LOG.debug("token head %s used: %s", name, reason)
