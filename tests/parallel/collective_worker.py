"""Runs on every rank: each collective against what one process computes, and the ledger's counts against arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from partsong.errors import PartsongError
from partsong.ledger import Ledger
from partsong.parallel import Mesh
from partsong.parallel.ranks.collectives import (
    agree,
    all_gather,
    all_to_all,
    broadcast,
    exchange,
    gather_tokens,
    halo_exchange,
    ring_exchange,
)
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.shards import offsets

Outcome = tuple[bool, int, int]  # right, bytes that should have been sent, bytes that should have been received


def _data(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(50 + rank), dtype=dtype)


def ring(axis: Axis) -> Outcome:
    me, n = axis.index, axis.size
    sizes = [3 + rank for rank in range(n)]
    before = (me - 1) % n
    got = torch.empty(sizes[before], 2)
    if n == 1:
        return True, 0, 0
    ring_exchange(axis, _data(me, sizes[me], 2), got).wait()
    return torch.equal(got, _data(before, sizes[before], 2)), sizes[me] * 8, sizes[before] * 8


def uneven_all_to_all(axis: Axis) -> Outcome:
    me, n = axis.index, axis.size

    def message(source: int, target: int) -> torch.Tensor:
        return _data(10 * source + target, (source + 2 * target) % 4, 3)  # 0 to 3 rows, none for some pairs

    sends = [message(me, peer) for peer in range(n)]
    recvs = [torch.full_like(message(peer, me), 9.0) for peer in range(n)]
    all_to_all(axis, sends, recvs).wait()
    right = all(torch.equal(recvs[p], message(p, me)) for p in range(n) if p != me)
    right &= bool((recvs[me] == 9.0).all())  # the own part is the caller's business
    sent, received = (
        sum(12 * message(*pair).shape[0] for pair in pairs)
        for pairs in ([(me, p) for p in range(n) if p != me], [(p, me) for p in range(n) if p != me])
    )
    return right, sent, received


def uneven_all_gather(axis: Axis) -> Outcome:
    me, n = axis.index, axis.size
    sizes = [(2, 0, 3, 1)[rank] for rank in range(n)]
    buffer = torch.zeros(sum(sizes), 2, dtype=torch.float64)
    start = offsets(sizes)[me]
    buffer[start : start + sizes[me]] = _data(me, sizes[me], 2, dtype=torch.float64)
    all_gather(axis, buffer, sizes).wait()
    want = torch.cat([_data(rank, sizes[rank], 2, dtype=torch.float64) for rank in range(n)])
    return torch.equal(buffer, want), sizes[me] * 16 * (n - 1), (sum(sizes) - sizes[me]) * 16


def halo(axis: Axis, width: int, dim: int) -> Outcome:
    """Neighbours' borders arrive, the outer ends stay as they were."""
    me, n = axis.index, axis.size
    sizes = [2 + rank for rank in range(n)]
    whole = torch.randn(*(sum(sizes) if d == dim else 3 for d in range(3)), generator=torch.Generator().manual_seed(7))
    edge = torch.full_like(whole.narrow(dim, 0, width), -7.0)
    padded = torch.cat([edge, whole, edge], dim)
    mine = padded.narrow(dim, offsets(sizes)[me], sizes[me] + 2 * width).clone()
    want = mine.clone()
    for start in ([0] if me > 0 else []) + ([width + sizes[me]] if me < n - 1 else []):
        mine.narrow(dim, start, width).zero_()
    halo_exchange(axis, mine, width, dim).wait()
    unit = width * 9 * 4
    neighbours = (me > 0) + (me < n - 1)
    return torch.equal(mine, want), unit * neighbours, unit * neighbours


def halo_refused(axis: Axis) -> Outcome:
    refused = 0
    for rows, width in ((torch.zeros(5), 2), (torch.zeros(4), 0), (torch.zeros(2), 2)):
        try:
            halo_exchange(axis, rows, width, 0)
        except PartsongError:
            refused += 1
    return refused == 3, 0, 0


def from_rank_zero(axis: Axis) -> Outcome:
    me, n = axis.index, axis.size
    tensor = _data(me, 4, 6)[:, ::2]  # not contiguous
    result = broadcast(axis, tensor)
    right = result is tensor and torch.equal(tensor, _data(0, 4, 6)[:, ::2])
    return right, 48 * (n - 1) * (me == 0), 48 * (me > 0)


def agreement(axis: Axis) -> Outcome:
    table = agree(axis, [float(axis.index), 0.1 * axis.index])
    others = axis.size - 1
    return table == [[float(r), 0.1 * r] for r in range(axis.size)], 16 * others, 16 * others


def gather(axis: Axis, dim: int) -> Outcome:
    me, n = axis.index, axis.size
    sizes = [(3, 1, 0, 2)[rank] for rank in range(n)]
    shapes = [[size if d == dim % 3 else 2 for d in range(3)] for size in sizes]
    got = gather_tokens(axis, _data(me, *shapes[me]), sizes, dim)
    want = torch.cat([_data(rank, *shape) for rank, shape in enumerate(shapes)], dim)
    return torch.equal(got, want), sizes[me] * 16 * (n - 1), (sum(sizes) - sizes[me]) * 16


def many_in_flight(axis: Axis) -> Outcome:
    """Sixty-four exchanges of different sizes at once, waited for in another order on every rank."""
    me, n = axis.index, axis.size
    after, before = (me + 1) % n, (me - 1) % n
    count = 64
    if n == 1:
        return True, 0, 0
    got = [torch.empty(1 + (37 * i) % 101) for i in range(count)]
    pending = [
        exchange(axis, {after: _data(1000 * me + i, got[i].numel())}, {before: got[i]}, name=("even", "odd")[i % 2])
        for i in range(count)
    ]
    for i in torch.randperm(count, generator=torch.Generator().manual_seed(me)).tolist():
        pending[i].wait()
        pending[i].wait()  # a second wait is free
    right = all(torch.equal(got[i], _data(1000 * before + i, got[i].numel())) for i in range(count))
    right &= all(p.done for p in pending)
    volume = sum(4 * tensor.numel() for tensor in got)
    return right, volume, volume


CASES: dict[str, Callable[[Axis], Outcome]] = {
    "ring": ring,
    "all-to-all": uneven_all_to_all,
    "all-gather": uneven_all_gather,
    "halo 1, dim 0": lambda axis: halo(axis, 1, 0),
    "halo 2, dim 1": lambda axis: halo(axis, 2, 1),
    "halo 2, dim 2": lambda axis: halo(axis, 2, 2),
    "halo refused": halo_refused,
    "broadcast": from_rank_zero,
    "agree": agreement,
    "gather, dim 0": lambda axis: gather(axis, 0),
    "gather, dim 1": lambda axis: gather(axis, 1),
    "gather, last dim": lambda axis: gather(axis, -1),
    "many in flight": many_in_flight,
}


def run(nproc: int) -> dict[str, list[dict[str, Any]]]:
    """All cases on all ranks: whether right, and counted against expected bytes."""
    results = {}
    with Mesh(ring=nproc) as mesh:
        axis = mesh.axis("ring")
        for name, case in CASES.items():
            with Ledger() as ledger:
                right, sent, received = case(axis)
            total = ledger.summary()
            row = [float(right), sent, total["bytes_sent"], received, total["bytes_received"]]
            keys = ("right", "sent", "counted_sent", "received", "counted_received")
            results[name] = [dict(zip(keys, values, strict=True)) for values in agree(axis, row)]
    return results


def dropped(nproc: int) -> list[list[float]]:
    """What ranks say to each other after messages that nobody waited for, as after an error."""
    with Mesh(data=nproc) as mesh:
        axis = mesh.axis("data")
        peer = 1 - axis.index
        for turn in range(40):
            sent = torch.full((1 << 18,), float(turn))
            exchange(axis, {peer: sent}, {peer: torch.empty_like(sent)}, name="what nobody waits for")
            del sent
            _ = [torch.empty(1 << 18) for _ in range(3)]  # takes the memory of what was dropped
        return agree(axis, [axis.index])
