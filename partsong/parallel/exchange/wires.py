"""Encodes keys and values as messages of fewer bytes, and decodes them alike on every rank.

A wire turns a block `[L, ..., H, D]` of L tokens into a message, one piece of memory of bytes, and back. Those that
round to 8 bits carry the values themselves. The others carry the *residual*: the difference from a base that both
ends hold already, such as the values of the previous step. Both ends, the sender too, add the decoded message to it,
so their bases stay equal bit for bit, and a message's rounding error is part of the next residual.

All numbers are computed in single precision and scales take two bytes.

Source: residual messages with one bit and by low rank are those of CompactFusion (Cobalt-27/CompactFusion); 8 bits for
each token and head those of cache-dit. The one formula for 1, 2 and 4 bits is partsong's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Literal, Protocol

import torch
from torch import Tensor

from partsong.kernels.call import triton_refusal

__all__ = [
    "EIGHT_BIT",
    "WIRES",
    "Wire",
    "WireName",
    "as_bytes",
    "border_wire_of",
    "bytes_sent",
    "message_room",
    "rounding",
    "wire_of",
]

WireName = Literal["none", "fp8", "int8", "4bit", "2bit", "1bit", "lowrank"]

#: Columns of the two factors of a residual of low rank.
RANK = 8
#: Numbers that a CPU rounds at a time: with a megabyte, intermediate values stay in its cache.
PART = 1 << 18
#: Scales have eight bits of mantissa, and the exponents of single precision.
_SCALE = torch.bfloat16
_TINY = torch.finfo(torch.float32).tiny


class Wire(Protocol):
    """Describes how a block of keys and values is written into a message."""

    @property
    def is_residual(self) -> bool:
        """Says whether it carries differences from a base that both ends hold."""
        ...

    def size(self, shape: tuple[int, ...]) -> int:
        """Returns the bytes of a message for a block `[L, ..., H, D]`; 0 for one without numbers."""
        ...

    def encode(self, values: Tensor, last: Tensor | None = None) -> Tensor:
        """Encodes a block as a message, `[size]` of bytes.

        Args:
            values: values or residuals `[L, ..., H, D]`.
            last: the message before this one, if there was one.
        """
        ...

    def decode(self, message: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Reads a block `[L, ..., H, D]` from a message, in single precision."""
        ...


@dataclass(frozen=True, slots=True)
class EightBits:
    """Rounds to 8 bits, with a scale for each token and head: the largest value becomes the largest number.

    Attributes:
        dtype: int8, or 8-bit floating point with 3 bits of mantissa.
    """

    dtype: torch.dtype
    is_residual: bool = False

    @property
    def _most(self) -> float:
        return 127.0 if self.dtype == torch.int8 else torch.finfo(self.dtype).max

    def size(self, shape: tuple[int, ...]) -> int:
        """Returns D + 2 bytes for each token and head."""
        return math.prod(shape[:-1]) * (shape[-1] + _SCALE.itemsize)

    def encode(self, values: Tensor, last: Tensor | None = None) -> Tensor:
        """Writes the scales, then the rounded values."""
        if values.numel() and (fused := _fused(values.device, self.dtype)) is not None:
            message = torch.empty(self.size(tuple(values.shape)), dtype=torch.uint8, device=values.device)
            rows = values.reshape(-1, values.shape[-1])
            fused.round_rows(rows.contiguous(), *self._split(message, values.shape), self._most)
            return message
        values = values.float()
        # A scale that is rounded down would push the largest value out of range.
        scale = (values.abs().amax(-1) * (1.00390625 / self._most)).to(_SCALE)
        whole = values / scale.float().clamp_min(_TINY)[..., None]
        whole = whole.round_() if self.dtype == torch.int8 else whole
        return torch.cat([as_bytes(scale), as_bytes(whole.clamp_(-self._most, self._most).to(self.dtype))])

    def decode(self, message: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Reads the values."""
        scale, whole = self._split(message, shape)
        if len(message) and (fused := _fused(message.device, self.dtype)) is not None:
            return fused.read_rows(scale, whole).view(shape)
        values = whole.view(shape).float()
        return values.mul_(scale.view(*shape[:-1], 1).float())

    def _split(self, message: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns views of a message: the scale `[R]` of each row, and the rows `[R, D]`."""
        count = math.prod(shape[:-1])
        scale, whole = message.split([count * _SCALE.itemsize, count * shape[-1]])
        return scale.view(_SCALE), whole.view(self.dtype).view(count, shape[-1])


@dataclass(frozen=True, slots=True)
class FewBits:
    """Rounds residuals to a few bits, with the mean size of their token and of their channel as scale.

    The scale of a residual is the mean of absolute residuals of its channel, times that of its token, over that of
    all. Levels lie evenly around zero, at the distance with the least error on normal numbers. With one bit they are
    plus and minus the mean, which keeps the norm from growing; with the largest value it would explode.

    Attributes:
        bits: 1, 2 or 4.
        distance: from one level to the next, in units of the scale.
    """

    bits: int
    distance: float
    is_residual: bool = True

    def size(self, shape: tuple[int, ...]) -> int:
        """Returns the bytes of the levels, channels packed to whole bytes, and of a scale per token and per channel."""
        tokens, rest, channels = _matrix(shape)
        if tokens * channels == 0:
            return 0
        return rest * (tokens * self._width(channels) + _SCALE.itemsize * (tokens + channels))

    def _width(self, channels: int) -> int:
        return -(-channels * self.bits // 8)

    def encode(self, values: Tensor, last: Tensor | None = None) -> Tensor:
        """Writes the scales of channels and tokens, then the levels."""
        if not values.numel():
            return _nothing(values.device)
        tokens, rest, channels = _matrix(tuple(values.shape))
        if (fused := _fused(values.device)) is not None:
            return self._encode_fused(fused, values.reshape(tokens, rest, channels).contiguous())
        parts = values.reshape(tokens, rest, channels).split(_part(values, rest * channels))
        means, total = [], torch.zeros(rest, channels, device=values.device)
        for part in parts:
            size = part.float().abs()
            means.append(size.mean(2))
            total += size.sum(0)
        by_token = torch.cat(means)
        by_channel = self._by_channel(total, by_token)
        by_token = by_token.to(_SCALE)
        scales = by_token.split(_part(values, rest * channels))
        packed = [self._codes(part, scale, by_channel) for part, scale in zip(parts, scales, strict=True)]
        return torch.cat([as_bytes(by_channel), as_bytes(by_token), *packed])

    @staticmethod
    def _by_channel(total: Tensor, by_token: Tensor) -> Tensor:
        return (total / (len(by_token) * by_token.mean(0)[:, None].clamp_min(_TINY))).to(_SCALE)

    def _encode_fused(self, fused: ModuleType, values: Tensor) -> Tensor:
        by_token, total = fused.token_and_channel_means(values)
        by_channel, by_token = self._by_channel(total, by_token), by_token.to(_SCALE)
        tokens, rest, channels = values.shape
        packed = torch.empty(tokens, rest, self._width(channels), dtype=torch.uint8, device=values.device)
        fused.round_few_bits(values, by_token, by_channel, packed, self.bits, self.distance)
        return torch.cat([as_bytes(by_channel), as_bytes(by_token), packed.view(-1)])

    def _codes(self, values: Tensor, by_token: Tensor, by_channel: Tensor) -> Tensor:
        """Returns the packed numbers of the nearest levels."""
        if self.bits == 1:
            return _pack((values >= 0).view(torch.uint8), 1).view(-1)
        most, step = 1 << self.bits, self._step(by_channel).clamp_min(_TINY)
        codes = values.float() / by_token.float()[:, :, None].clamp_min(_TINY)
        codes = codes.div_(step).add_(most / 2).clamp_(0, most - 1).to(torch.uint8)
        return _pack(codes, self.bits).view(-1)

    def _step(self, by_channel: Tensor) -> Tensor:
        return by_channel.float() * self.distance

    def decode(self, message: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Reads the residuals."""
        if not len(message):
            return torch.zeros(shape, device=message.device)
        tokens, rest, channels = _matrix(shape)
        sizes = (rest * channels * _SCALE.itemsize, rest * tokens * _SCALE.itemsize)
        by_channel, by_token, packed = message.split([*sizes, len(message) - sum(sizes)])
        if (fused := _fused(message.device)) is not None:
            scales = by_token.view(_SCALE), by_channel.view(_SCALE)
            packed = packed.view(tokens, rest, -1)
            return fused.read_few_bits(packed, *scales, channels, self.bits, self.distance).view(shape)
        step = self._step(by_channel.view(_SCALE).view(rest, channels))
        out = torch.empty(tokens, rest, channels, device=message.device)
        blocks = (packed.view(tokens, rest, -1), by_token.view(_SCALE).view(tokens, rest, 1), out)
        size = _part(out, rest * channels)
        for codes, scale, part in zip(*(block.split(size) for block in blocks), strict=True):
            levels = _unpack(codes, self.bits)[:, :, :channels]
            torch.mul(levels.mul_(scale.float()), step, out=part)
        return out.view(shape)


@dataclass(frozen=True, slots=True)
class LowRank:
    """Writes the residuals of each sample, of keys and of values, as the product of two thin matrices.

    They come from two subspace iterations that start from the last message's factor, or from a random one.

    Attributes:
        rank: columns of the factors.
    """

    rank: int = RANK
    is_residual: bool = True

    def _columns(self, tokens: int, channels: int) -> int:
        return min(self.rank, tokens, channels)

    def size(self, shape: tuple[int, ...]) -> int:
        """Returns two bytes for each number of the factors, `[tokens, rank]` and `[channels, rank]`."""
        tokens, rest, channels = _matrix(shape)
        return rest * self._columns(tokens, channels) * (tokens + channels) * _SCALE.itemsize

    def encode(self, values: Tensor, last: Tensor | None = None) -> Tensor:
        """Writes the channels' factor, then the tokens' factor, whose columns are orthonormal."""
        if not values.numel():
            return _nothing(values.device)
        tokens, rest, channels = _matrix(tuple(values.shape))
        columns = self._columns(tokens, channels)
        matrix = values.float().reshape(tokens, rest, channels).transpose(0, 1)
        if last is None or len(last) != self.size(tuple(values.shape)):
            draw = torch.Generator().manual_seed(0)
            right = torch.randn(channels, columns, generator=draw).to(matrix.device).expand(rest, -1, -1)
        else:
            right = self._factors(last, tokens, rest, channels)[0]
        for _ in range(2):
            left = torch.linalg.qr(matrix @ right)[0]
            right = matrix.mT @ left
        return torch.cat([as_bytes(right.to(_SCALE)), as_bytes(left.to(_SCALE))])

    def _factors(self, message: Tensor, tokens: int, rest: int, channels: int) -> tuple[Tensor, Tensor]:
        columns = self._columns(tokens, channels)
        counts = [rest * count * columns * _SCALE.itemsize for count in (channels, tokens)]
        right, left = (part.view(_SCALE).view(rest, -1, columns).float() for part in message.split(counts))
        return right, left

    def decode(self, message: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Reads the product."""
        if not len(message):
            return torch.zeros(shape, device=message.device)
        right, left = self._factors(message, *_matrix(shape))
        return (left @ right.mT).transpose(0, 1).reshape(shape)


@dataclass(frozen=True, slots=True)
class FourBits:
    """Rounds residuals to 15 levels, with a scale for each token and head: the largest becomes 7, and 0 stays 0."""

    is_residual: bool = True

    def size(self, shape: tuple[int, ...]) -> int:
        """Returns half a byte for each number, and two for each token and head."""
        return math.prod(shape[:-1]) * (-(-shape[-1] // 2) + _SCALE.itemsize)

    def encode(self, values: Tensor, last: Tensor | None = None) -> Tensor:
        """Writes the scales, then the rounded residuals."""
        values = values.float()
        scale = (values.abs().amax(-1) / 7).to(_SCALE)
        codes = values.div(scale.float().clamp_min_(_TINY)[..., None]).round_().add_(8).clamp_(1, 15)
        return torch.cat([as_bytes(scale), _pack(codes.to(torch.uint8), 4).view(-1)])

    def decode(self, message: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Reads the residuals."""
        count = math.prod(shape[:-1])
        scale, packed = message.split([count * _SCALE.itemsize, len(message) - count * _SCALE.itemsize])
        levels = _unpack(packed.view(*shape[:-1], -1), 4)[..., : shape[-1]].sub_(0.5)  # whole, where FewBits has halves
        return levels.mul_(scale.view(_SCALE).view(*shape[:-1], 1).float())


#: Wires that carry the values themselves, in 8 bits.
EIGHT_BIT: Mapping[str, Wire] = MappingProxyType({"fp8": EightBits(torch.float8_e4m3fn), "int8": EightBits(torch.int8)})
# These distances have the least mean square error on normal numbers, in units of their mean size, 0.798 deviations.
RESIDUAL: Mapping[str, Wire] = MappingProxyType(
    {"4bit": FewBits(4, 0.42), "2bit": FewBits(2, 1.248), "1bit": FewBits(1, 2.0), "lowrank": LowRank()}
)
WIRES: Mapping[str, Wire] = MappingProxyType({**EIGHT_BIT, **RESIDUAL})
#: The wires of border rows for residual wires: more bits, since these few numbers spread through convolutions.
FOUR_BIT = FourBits()


def wire_of(name: WireName) -> Wire | None:
    """Returns a wire by name; None for ``"none"``, which sends values as they are."""
    return WIRES.get(name)


def rounding(name: str, what: str, after: int = 0) -> str | None:
    """Returns a line of `Plan.explain` about what a wire compresses, and after how many steps; None if nothing."""
    if name == "none":
        return None
    return f"{f'after {after} steps, ' if after else ''}{what} travel by the wire {name}"


def border_wire_of(name: WireName) -> Wire | None:
    """Returns the wire for border rows, which keeps at least 4 bits; None for ``"none"``."""
    return FOUR_BIT if name in RESIDUAL else wire_of(name)


def bytes_sent(wire: Wire | None, shape: tuple[int, ...], itemsize: int) -> int:
    """Returns the bytes of a message for a block `[L, ..., H, D]` whose numbers take `itemsize` bytes."""
    return math.prod(shape) * itemsize if wire is None else wire.size(shape)


def message_room(wire: Wire, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Allocates the message for a block of some shape."""
    return torch.empty(wire.size(shape), dtype=torch.uint8, device=device)


@functools.cache
def _fused(device: torch.device, dtype: torch.dtype = torch.int8) -> ModuleType | None:
    """Returns the kernels that write and read messages where they can run; on a CPU torch's operators do."""
    if triton_refusal(device) or (dtype != torch.int8 and torch.cuda.get_device_capability(device) < (8, 9)):
        return None  # older GPUs round to no floating point of 8 bits
    from partsong.kernels import wires_triton

    return wires_triton


def _matrix(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns a block's tokens, its matrices (of samples, keys and values) and their channels, all heads together."""
    return shape[0], math.prod(shape[1:-2]), shape[-2] * shape[-1]


def _part(values: Tensor, width: int) -> int:
    """Returns how many tokens are rounded at a time, given the numbers in each: all, but for the cache of a CPU."""
    return max(1, PART // width if values.is_cpu else len(values))


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor, in one piece of memory."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _nothing(device: torch.device) -> Tensor:
    """Returns the message of a block without numbers."""
    return torch.empty(0, dtype=torch.uint8, device=device)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Packs numbers below ``2 ** bits`` along the last dim; number i of a byte takes its bits from ``i * bits`` on."""
    per_byte = 8 // bits
    if codes.shape[-1] % per_byte:
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_byte))
    # One wide integer holds the numbers of a byte, 8 bits each. Every shift halves the gaps between them.
    wide = codes.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[per_byte])
    shift = 8 - bits
    while shift < 8 * per_byte - 8:
        wide = wide | (wide >> shift)
        shift *= 2
    return (wide & 0xFF).to(torch.uint8)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Returns the levels ``0.5, -0.5, 1.5, ...`` of packed numbers, centred at zero, in single precision."""
    table = _levels(bits, packed.device)
    return table.index_select(0, packed.reshape(-1).int()).view(*packed.shape[:-1], -1)


@functools.cache
def _levels(bits: int, device: torch.device) -> Tensor:
    """Returns the levels that each of the 256 bytes holds."""
    shifts = torch.arange(0, 8, bits)
    codes = (torch.arange(256)[:, None] >> shifts) & ((1 << bits) - 1)
    return (codes.float() - ((1 << bits) - 1) / 2).to(device)
