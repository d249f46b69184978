"""Calls PyTorch's flex_attention: mask kinds become a rule per element and a list of tiles, no mask is written out.

It is compiled on CUDA. On the CPU it runs uncompiled, as a check of the same rules: compiled there, it returns no
log-sum-exp.

Every mask kind is one or both of two comparisons of integers, so that few graphs are compiled and none of them holds
an offset, a block size or an id:

    order:     key[j] <= query[i]                  positions (`Causal`), or positions // block (`BlockCausal`)
    interval:  enter[j] <= query[i] < leave[j]     as `Tree` has it; a stream is [id, id + 1), a shared key all of them

The smallest and largest number of a tile decide for all of it, so the list of tiles costs a 16384th of the mask.
Where a tile's numbers are mixed it may be listed needlessly, which costs time and nothing else.

Source: Flex Attention, Dong et al., arXiv 2412.05496.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from partsong.kernels.call import Call, Segment
from partsong.kernels.masks import SHARED, BlockCausal, Causal, ChosenBlocks, Mask, Streams
from partsong.kernels.merge import merge

__all__ = ["run", "supports", "usable"]

_CUDA_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: The smallest head size its CUDA kernel takes.
MIN_HEAD_SIZE = 16
#: Queries and keys per tile of a block mask; what flex_attention itself takes.
TILE = 128
#: Smallest side of the tiles that its CUDA kernel multiplies.
MIN_SIDE = 16
#: Graphs of one function that are kept: dtypes x head sizes x masks x biases, each with fixed and with free lengths.
MAX_GRAPHS = 256

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def usable() -> tuple[bool, str]:
    """Whether this backend can run on this machine, and why (not)."""
    if not torch.cuda.is_available():
        return True, "torch's flex_attention, uncompiled on the CPU: for tests, not for speed"
    return True, "torch's flex_attention, compiled on CUDA"


def supports(call: Call) -> tuple[bool, str]:
    """Whether this call can be computed correctly, and why (not)."""
    q = call.q
    if not (q.is_cpu or q.is_cuda):
        return False, f"the tensors are on {q.device.type}, not cuda or cpu"
    if q.is_cuda and find_spec("triton") is None:
        return False, "triton is not installed (it comes with the CUDA build of torch)"
    if q.is_cuda and q.dtype not in _CUDA_DTYPES:
        return False, f"on CUDA it computes float16, bfloat16 and float32, not {q.dtype}"
    least = MIN_HEAD_SIZE if q.is_cuda else 1
    if q.shape[3] < least:
        return False, f"its head size is at least {least}, found {q.shape[3]}"
    if q.is_cuda and isinstance(call.mask, ChosenBlocks) and _side(call.mask) < MIN_SIDE:
        return False, f"on CUDA blocks are multiples of {MIN_SIDE}, found {call.mask.size}"
    if call.needs_gradient:
        return False, "an input requires a gradient, which this backend does not give (use torch.no_grad())"
    return True, f"torch's flex_attention, {'compiled' if q.is_cuda else 'uncompiled'}"


def run(call: Call) -> tuple[Tensor, Tensor]:
    """Computes attention for any call that is not empty: each segment where it lies, then the merge."""
    parts = [] if call.init is None else [call.init]
    for segment, part in zip(call.segments, call.by_segment(), strict=True):
        out, lse = _attend_segment(part)
        parts.append((out, lse + segment.bias if segment.bias else lse))
    return merge(parts)


def _attend_segment(call: Call) -> tuple[Tensor, Tensor]:
    """Computes attention for a call with one segment that has no bias of its own."""
    from torch.nn.attention.flex_attention import AuxRequest

    # On the CPU it refuses tensors that require a gradient even where none is asked for, so they are detached.
    q, k, v = (x.detach() if x.stride(3) == 1 else x.detach().contiguous() for x in (call.q, call.k, call.v))
    with torch.autocast(q.device.type, enabled=False):
        out, auxiliary = _function(q.device.type)(
            q,
            k,
            v,
            score_mod=None if call.bias is None else _bias_as_score_mod(call.bias.detach()),
            block_mask=None if call.mask is None else _block_mask(call.mask, call.segments[0], q),
            scale=call.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            kernel_options=_kernel_options(call.mask) if q.is_cuda else None,
            return_aux=AuxRequest(lse=True),
        )
    return out, auxiliary.lse.contiguous()


def _side(mask: ChosenBlocks) -> int:
    """Returns the side of the kernel's tiles, of which a block holds a whole number."""
    return math.gcd(mask.size, TILE // 2)


def _kernel_options(mask: Mask | None) -> dict[str, int] | None:
    """Returns sides of tiles where its own choice, of up to `TILE`, need not fit into a block."""
    if not isinstance(mask, ChosenBlocks) or mask.size % TILE == 0:
        return None
    return {"BLOCK_M": _side(mask), "BLOCK_N": _side(mask)}


@functools.cache
def _function(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    if device == "cpu":
        return flex_attention
    # Without it, the ninth graph is the last, and the calls after it run uncompiled, with all their logits in memory.
    known = "recompile_limit" in inspect.signature(torch.compile).parameters
    options: dict[str, Any] = {"recompile_limit": MAX_GRAPHS} if known else {}
    return torch.compile(flex_attention, **options)


def _bias_as_score_mod(bias: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Turns the bias into a change of each score; where a dim has size 1, every index reads its only entry."""
    in_batch, in_head, in_query, in_key = (int(size > 1) for size in bias.shape)

    def add(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + bias[batch * in_batch, head * in_head, query * in_query, key * in_key]

    return add


@dataclass(frozen=True, slots=True)
class _Tests:
    """Holds the comparisons a mask kind comes down to.

    Attributes:
        order: (query `[1, Lq]`, key `[1, Lk]`) or None.
        interval: (query `[B or 1, Lq]`, enter `[B or 1, Lk]`, leave `[B or 1, Lk]`) or None.
    """

    order: tuple[Tensor, Tensor] | None = None
    interval: tuple[Tensor, Tensor, Tensor] | None = None

    def rule(self) -> Rule:
        """Returns the tests as flex_attention's ``mask_mod``: whether query i of sample b sees key j."""
        ordered = None if self.order is None else _order(*(numbers[0] for numbers in self.order))
        inside = None if self.interval is None else _interval(*self.interval)
        if ordered is not None and inside is not None:
            return lambda b, h, i, j: ordered(b, h, i, j) & inside(b, h, i, j)
        rule = ordered or inside
        assert rule is not None
        return rule

    def tiles(self) -> tuple[Tensor, Tensor]:
        """Finds the tiles that may hold a visible key, and those that hold no other: bool `[B or 1, queries, keys]`."""
        some, every = [], []
        if self.order is not None:
            (low_query, high_query), (low_key, high_key) = (_bounds(numbers) for numbers in self.order)
            some.append(low_key[:, None] <= high_query[..., None])
            every.append(high_key[:, None] <= low_query[..., None])
        if self.interval is not None:
            (low_query, high_query), (low_enter, high_enter), (low_leave, high_leave) = (
                _bounds(numbers) for numbers in self.interval
            )
            some += [low_enter[:, None] <= high_query[..., None], low_query[..., None] < high_leave[:, None]]
            every += [high_enter[:, None] <= low_query[..., None], high_query[..., None] < low_leave[:, None]]
        return functools.reduce(torch.logical_and, some), functools.reduce(torch.logical_and, every)


def _order(query: Tensor, key: Tensor) -> Rule:
    return lambda b, h, i, j: key[j] <= query[i]


def _interval(query: Tensor, enter: Tensor, leave: Tensor) -> Rule:
    of_query, of_enter, of_leave = (int(numbers.shape[0] > 1) for numbers in (query, enter, leave))

    def inside(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        number = query[b * of_query, i]
        return (enter[b * of_enter, j] <= number) & (number < leave[b * of_leave, j])

    return inside


def _bounds(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the least and largest number of each tile, `[..., L]` to `[..., tiles]`; the last number is repeated."""
    length = numbers.shape[-1]
    where = torch.arange(-(-length // TILE) * TILE, device=numbers.device).clamp(max=length - 1)
    low, high = torch.aminmax(numbers[..., where].unflatten(-1, (-1, TILE)), dim=-1)
    return low, high


def _block_mask(mask: Mask, segment: Segment, q: Tensor) -> Any:
    position = segment.position or 0
    if isinstance(mask, ChosenBlocks):
        return _of_chosen_blocks(mask, q.shape[2], segment.length)
    if isinstance(mask, Causal | BlockCausal):
        return _by_position(mask, position, q.shape[2], segment.length, q.device)
    order = None
    if isinstance(mask, Streams):
        shape = (1, segment.length)
        key = torch.full(shape, segment.stream, device=q.device) if mask.key is None else _rows(mask.key, q)
        shared = key == SHARED
        # A shared key's interval holds every id, also that of a query in no stream, which sees only the shared keys.
        every = torch.iinfo(torch.int64)
        enter, leave = torch.where(shared, every.min, key), torch.where(shared, every.max, key + 1)
        interval = (_rows(mask.query, q), enter, leave)
        if mask.offset is not None:
            order = _positions(mask.offset, position, q.shape[2], segment.length, q.device)
    else:
        interval = (_rows(mask.query, q), _rows(mask.enter, q), _rows(mask.leave, q))
    return _build_block_mask(_Tests(order, interval), q.shape[2], segment.length)


def _of_chosen_blocks(mask: ChosenBlocks, num_queries: int, num_keys: int) -> Any:
    """Builds the block mask of chosen blocks, every one of which is visible as a whole."""
    chosen, size = mask.chosen, mask.size
    of_batch, of_head = (int(count > 1) for count in chosen.shape[:2])

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return chosen[b * of_batch, h * of_head, i // size, j // size]

    ragged = torch.zeros_like(chosen)
    # The kernel reads past the end of a last tile that is cut short, so that one is always tested.
    for dim, length in ((-2, num_queries), (-1, num_keys)):
        if length % size:
            ragged.select(dim, -1).fill_(True)
    return _listed(chosen & ragged, chosen & ~ragged, size, visible, num_queries, num_keys)


@functools.lru_cache(maxsize=8)
def _by_position(
    mask: Causal | BlockCausal, position: int, num_queries: int, num_keys: int, device: torch.device
) -> Any:
    """Builds the block mask of a kind that is all numbers, and keeps it for the other layers of a model.

    Masks with ids are computed again: their tensors may have changed in place.
    """
    with torch.inference_mode(False):  # the cached mask must serve calls outside of inference mode too
        order = _positions(mask.offset, position, num_queries, num_keys, device)
        if isinstance(mask, BlockCausal):
            order = (order[0] // mask.block, order[1] // mask.block)
        return _build_block_mask(_Tests(order), num_queries, num_keys)


def _positions(
    offset: int, position: int, num_queries: int, num_keys: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    query = torch.arange(offset, offset + num_queries, device=device)
    return query[None], torch.arange(position, position + num_keys, device=device)[None]


def _rows(ids: Tensor, q: Tensor) -> Tensor:
    return torch.atleast_2d(ids).to(q.device, torch.int64)


def _build_block_mask(tests: _Tests, num_queries: int, num_keys: int) -> Any:
    """Builds the block mask: for each tile of queries, the tiles of keys to test and those visible as a whole."""
    some, every = (tiles[:, None] for tiles in tests.tiles())
    # The kernel reads past the end of a last tile that is cut short, so that one is always tested.
    for dim, length in ((-2, num_queries), (-1, num_keys)):
        if length % TILE:
            every.select(dim, -1).fill_(False)
    return _listed(some & ~every, every, TILE, tests.rule(), num_queries, num_keys)


def _listed(tested: Tensor, every: Tensor, size: int, rule: Rule, num_queries: int, num_keys: int) -> Any:
    """Lists for each tile of queries the tiles of keys to test by a rule, and those visible as a whole."""
    from torch.nn.attention.flex_attention import BlockMask

    def count_and_order(tiles: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.argsort(tiles.int(), dim=-1, descending=True, stable=True)
        return tiles.sum(dim=-1, dtype=torch.int32), order.int()

    return BlockMask.from_kv_blocks(
        *count_and_order(tested),
        *count_and_order(every),
        BLOCK_SIZE=size,
        mask_mod=rule,
        seq_lengths=(num_queries, num_keys),
    )
