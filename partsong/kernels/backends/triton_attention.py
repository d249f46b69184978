"""Starts the Triton kernel: turns a `Call` into kernel arguments, tile sizes and splits over the keys.

It also runs on CPU tensors in Triton's interpreter (``TRITON_INTERPRET=1`` before triton is first imported), for tests.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partsong.kernels.backends.cuda import is_aligned
from partsong.kernels.call import Call, Segment, missing_triton, refusal
from partsong.kernels.masks import BlockCausal, Causal, ChosenBlocks, Streams, Tree
from partsong.kernels.tuned import tuned

__all__ = ["Config", "config_for", "fits_copy_engine", "interpreted", "num_splits", "run", "supports", "usable"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_SIZE = 256
#: Compute capabilities with 99 KiB of shared memory for a block: RTX 3090, 4090, 5090, A10, L4, L40 and others.
DESKTOP = ((8, 6), (8, 9), (12, 0), (12, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Sets the tile sizes of one launch, and how it reads keys and values.

    Attributes:
        block_m: rows per program.
        block_n: keys per step.
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
        tma: whether the copy engine of Hopper and newer reads keys and values, where it can (`fits_copy_engine`); else
            and elsewhere threads do, with the same numbers. Off unless a tuned table says otherwise: it makes every
            launch allocate memory for descriptors and every program write some, and no GPU has shown yet that it pays.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def usable() -> tuple[bool, str]:
    """Whether this backend can run on this machine, and why (not)."""
    if missing_triton():
        return False, f"{missing_triton()} (it comes with the CUDA build of torch)"
    if interpreted():
        return True, "Triton's interpreter (TRITON_INTERPRET=1): for tests, not for speed"
    if not torch.cuda.is_available():
        return False, "no CUDA device"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return False, "it needs compute capability 8.0 or newer"
    return True, "partsong's Triton kernel"


def supports(call: Call) -> tuple[bool, str]:
    """Whether this call can be computed correctly, and why (not)."""
    q = call.q
    if not (q.is_cuda or (interpreted() and q.is_cpu)):
        return False, f"the tensors are on {q.device.type}, not cuda"
    ok, reason = usable()
    if not ok:
        return False, reason
    if reason := refusal(call, _DTYPES, MAX_HEAD_SIZE):
        return False, reason
    if isinstance(call.mask, ChosenBlocks):
        return False, "it has no masks of chosen blocks"
    if q.shape[0] * call.k.shape[1] > 65535:
        return False, f"batch x key heads = {q.shape[0] * call.k.shape[1]} is more than a CUDA grid takes (65535)"
    return True, "partsong's Triton kernel"


def fits_copy_engine(segments: Sequence[Segment]) -> bool:
    """Says whether the copy engine can read these keys and values: sm_90 and later, aligned separate rows."""
    tensors = [x for segment in segments for x in (segment.k, segment.v)]
    # A descriptor cannot say that rows overlap, as those of an expanded dim do.
    rows = all(x.stride(3) == 1 and x.stride(2) >= x.shape[3] for x in tensors)
    return rows and _alignment(segments) > 1 and _has_copy_engine(tensors[0].device)


def run(call: Call, config: Config | None = None) -> tuple[Tensor, Tensor]:
    """Computes attention for any call that is not empty; `config` overrides the tile sizes."""
    config = config or config_for(call)
    q, init = _unit_stride(call.q), call.init
    batch, heads, length, width = q.shape
    splits = num_splits(call, config)
    out = _empty_like(q, q.dtype if init is None else init[0].dtype)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    # In a context of its own, which ends with the launch, the program's allocator for Triton stays as it is.
    launch = functools.partial(contextvars.copy_context().run, _launch) if config.tma else _launch
    # Triton starts kernels on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(q):
        if splits == 1:
            launch(call, q, config, 1, out[None], lse)
            return out, lse
        parts = torch.empty(splits, batch, heads, length, width, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(splits, batch, heads, length, dtype=torch.float32, device=q.device)
        launch(call, q, config, splits, parts, part_lse)
        _combine(parts, part_lse, out, lse)
    return out, lse


def config_for(call: Call) -> Config:
    """Chooses tile sizes: the measured winner for this GPU and class of shapes, else a rule of thumb."""
    q = call.q
    rows = q.shape[2] * (q.shape[1] // call.k.shape[1])
    if interpreted():
        return Config(block_m=16 if rows <= 16 else 32, block_n=32, num_warps=4, num_stages=1)
    measured = tuned("attention_triton", call)
    if measured is not None:
        return Config(**measured)
    wide, full = q.shape[3] > 128, q.dtype is torch.float32
    if rows <= 16:
        return Config(
            block_m=16,
            block_n=(32 if wide else 64) if full else 64 if wide else 128,
            num_warps=8 if full else 4,
            num_stages=2,
        )
    if full:  # three products for one, and their operands, in registers
        return Config(block_m=16 if wide else 32, block_n=32, num_warps=8, num_stages=1 if wide else 2)
    if q.shape[3] > 64 and _bias_kind(call) == _device_code().BIAS_FULL:  # whose tiles are in float32
        return Config(block_m=64, block_n=64, num_warps=8, num_stages=2)
    if _is_desktop(q.device):
        return _desktop_config(call)
    if wide:
        return Config(block_m=64, block_n=64, num_warps=8, num_stages=2)
    if rows <= 64:
        return Config(block_m=64, block_n=64, num_warps=4, num_stages=3)
    return Config(block_m=128, block_n=64, num_warps=8 if q.shape[3] > 64 else 4, num_stages=3)


def _desktop_config(call: Call) -> Config:
    """Chooses tiles of half precision for GPUs with 99 KiB of shared memory for a block."""
    width = call.q.shape[3]
    if width > 128:
        return Config(block_m=64, block_n=32, num_warps=8, num_stages=2)
    if _bias_kind(call) == _device_code().BIAS_FULL:  # whose tiles are in float32
        return Config(block_m=64, block_n=64, num_warps=8, num_stages=2)
    return Config(block_m=128, block_n=32 if width > 64 else 64, num_warps=8, num_stages=3)


def _is_desktop(device: torch.device) -> bool:
    """Says whether it is a GeForce or a relative, from Ampere on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) in DESKTOP


def num_splits(call: Call, config: Config) -> int:
    """Returns into how many parts to cut the keys, so that few queries fill the GPU; 1 where the rows suffice."""
    q, key_heads = call.q, call.k.shape[1]
    rows = q.shape[2] * (q.shape[1] // key_heads)
    programs = -(-rows // config.block_m) * q.shape[0] * key_heads
    tiles = -(-call.num_keys // config.block_n)
    units = _multiprocessors(q.device.index or 0) if q.is_cuda else 4
    # A split of fewer than four tiles costs more in merging than it gains.
    return max(1, min(units // programs, tiles // 4, 64)) if programs < units else 1


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _has_copy_engine(device: torch.device) -> bool:
    if device.type != "cuda":
        return interpreted()  # which knows descriptors too
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def _launch(call: Call, q: Tensor, config: Config, splits: int, out: Tensor, lse: Tensor) -> None:
    kernel = _device_code()

    batch, heads, length, width = q.shape
    segments = [_make_readable(segment) for segment in call.segments]
    first, key_heads = segments[0], segments[0].k.shape[1]
    # One segment without a bias needs no table: its address and strides are arguments, with their alignment known.
    segmented = len(segments) > 1 or bool(first.bias) or bool(first.position) or first.stream >= 0
    order, offset, block = _order(call)
    group, query_ids, key_ids, leaves = _ids(call)
    bias_kind, bias, bias_strides = _bias(call)
    init_out, init_lse = (q, lse) if call.init is None else (_unit_stride(call.init[0]), call.init[1].contiguous())
    tma = config.tma and fits_copy_engine(segments)
    upcast = interpreted() and q.dtype is torch.bfloat16
    grid = (-(-length * (heads // key_heads) // config.block_m), batch * key_heads, splits)
    if tma:
        _make_room_for_descriptors(q.device)
    kernel.attention_kernel[grid](
        q, first.k, first.v, _table(segments) if segmented else q, bias, query_ids, key_ids, leaves, init_out, init_lse,
        out, lse, *q.stride()[:3], *first.k.stride()[:3], *first.v.stride()[:3], *bias_strides,
        _batch_stride(query_ids), _batch_stride(key_ids), *init_out.stride()[:3], *out.stride()[:4],
        call.scale * 1.4426950408889634, length, call.num_keys, key_heads, len(segments), offset, block, batch,
        WIDTH=width, BLOCK_D=max(16, 1 << (width - 1).bit_length()), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        GROUP_SIZE=heads // key_heads, SEGMENTED=segmented, ORDER=order, GROUP=group,
        KEY_IDS=isinstance(call.mask, Tree) or (isinstance(call.mask, Streams) and call.mask.key is not None),
        BIAS=bias_kind, INIT=call.init is not None, SPLITS=splits, ALIGN=_alignment(segments) if segmented else 1,
        TMA=tma, UPCAST=upcast, PRECISION=precision(q.dtype), num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip


def _make_room_for_descriptors(device: torch.device) -> None:
    """Gives Triton an allocator of memory for descriptors, for the rest of this context."""
    triton: Any = importlib.import_module("triton")

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    triton.set_allocator(allocate)


def precision(dtype: torch.dtype) -> str:
    """Says how float32 products are formed: three TF32 products on tensor cores, plain float32 where there are none."""
    plain = interpreted() or torch.version.hip is not None
    return "ieee" if plain or dtype is not torch.float32 else "tf32x3"


def _device_code() -> Any:
    # Not imported with this module: its decorators need triton.
    from partsong.kernels.backends import triton_attention_kernel

    return triton_attention_kernel


def _combine(parts: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    kernel = _device_code()

    splits, batch, heads, length, width = parts.shape
    rows = batch * heads * length
    kernel.combine_kernel[(rows,)](
        parts, part_lse, out, lse, *out.stride()[:3], heads, length, rows,
        WIDTH=width, BLOCK_D=max(16, 1 << (width - 1).bit_length()), SPLITS=splits,
        BLOCK_S=1 << (splits - 1).bit_length(), num_warps=4,
    )  # fmt: skip


def _order(call: Call) -> tuple[int, int, int]:
    kernel = _device_code()

    mask = call.mask
    if isinstance(mask, BlockCausal):
        return kernel.ORDER_BLOCK, mask.offset, mask.block
    if isinstance(mask, Causal | Streams) and mask.offset is not None:
        return kernel.ORDER_CAUSAL, mask.offset, 1
    return kernel.ORDER_NONE, 0, 1


def _ids(call: Call) -> tuple[int, Any, Any, Any]:
    kernel = _device_code()

    mask, none = call.mask, call.q
    if isinstance(mask, Streams):
        key = none if mask.key is None else _int32(mask.key, call)
        return kernel.GROUP_STREAMS, _int32(mask.query, call), key, none
    if isinstance(mask, Tree):
        # One stride serves both tables of the keys.
        enter, leave = torch.broadcast_tensors(_int32(mask.enter, call), _int32(mask.leave, call))
        return kernel.GROUP_TREE, _int32(mask.query, call), enter.contiguous(), leave.contiguous()
    return kernel.GROUP_NONE, none, none, none


def _int32(ids: Tensor, call: Call) -> Tensor:
    return torch.atleast_2d(ids).to(call.q.device, torch.int32).contiguous()


def _batch_stride(ids: Tensor) -> int:
    return ids.stride(0) if ids.dim() == 2 and ids.shape[0] > 1 else 0


def _bias(call: Call) -> tuple[int, Tensor, tuple[int, ...]]:
    bias = call.bias
    if bias is None:
        return _bias_kind(call), call.q, (0, 0, 0, 0)
    strides = tuple(0 if size == 1 else step for size, step in zip(bias.shape, bias.stride(), strict=True))
    return _bias_kind(call), bias, strides


def _bias_kind(call: Call) -> int:
    kernel = _device_code()

    if call.bias is None:
        return kernel.BIAS_NONE
    return kernel.BIAS_ROW if call.bias.shape[1] == call.bias.shape[2] == 1 else kernel.BIAS_FULL


def _table(segments: list[Segment]) -> Tensor:
    rows = []
    for segment in segments:
        k, v = segment.k, segment.v
        logit = struct.unpack("<i", struct.pack("<f", segment.bias))[0]
        rows.append(
            [k.data_ptr(), v.data_ptr(), *k.stride()[:3], *v.stride()[:3], segment.length, segment.position or 0,
             segment.stream, logit]
        )  # fmt: skip
    table = torch.tensor(rows, dtype=torch.int64)
    return table.pin_memory().to(segments[0].k.device, non_blocking=True) if segments[0].k.is_cuda else table


def _alignment(segments: Sequence[Segment]) -> int:
    """Counts the elements in 16 bytes if all rows of all segments start at multiples of that, else returns 1."""
    aligned = all(is_aligned(x) for segment in segments for x in (segment.k, segment.v))
    return 16 // segments[0].k.element_size() if aligned else 1


def _make_readable(segment: Segment) -> Segment:
    if segment.k.stride(3) == segment.v.stride(3) == 1:
        return segment
    return Segment(_unit_stride(segment.k), _unit_stride(segment.v), segment.bias, segment.position, segment.stream)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _empty_like(q: Tensor, dtype: torch.dtype) -> Tensor:
    """Makes room for the output in q's memory layout."""
    dense = torch.empty_like(q, dtype=dtype)  # a dense result even where q overlaps itself
    return dense if dense.stride(3) == 1 else torch.empty(q.shape, dtype=dtype, device=q.device)
