"""Moves tensors between the ranks of one axis; the active ledger counts every byte.

Everything is built on `exchange`, which posts point-to-point messages together. It takes uneven sizes, needs no copy of
the rank's own part, and on gloo is several times faster than list ``all_gather``. Every call has its own tag, which
keeps messages apart when many are pending. Ranks post in the same order, so their tags agree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from partsong import ledger
from partsong.accelerator import Stopwatch, accelerator, is_on_host
from partsong.errors import ArgumentError, DistributedError
from partsong.parallel.ranks.health import note_broken_off, operation, watch
from partsong.parallel.ranks.host_messages import post, tag_of
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.ranges import named_range
from partsong.parallel.ranks.shards import offsets
from partsong.parallel.ranks.stops import stopped_together

__all__ = [
    "Messages",
    "Pending",
    "agree",
    "all_gather",
    "all_to_all",
    "broadcast",
    "exchange",
    "fused_all_to_all",
    "fused_sum",
    "gather_tokens",
    "halo_exchange",
    "largest",
    "ring_exchange",
]

_HOST = torch.device("cpu")
#: Messages that were dropped while they were pending. gloo's thread never comes back from one whose memory is gone.
_dropped: list[tuple[Sequence[dist.Work], Sequence[Tensor]]] = []
#: Bytes to and from each peer index.
_Amounts = tuple[Mapping[int, int], Mapping[int, int]]


class Pending:
    """Holds pending messages and keeps their tensors alive; call `wait` before you read a received tensor.

    Messages that are dropped, as after an error, keep their tensors until they have come.
    """

    def __init__(
        self,
        name: str,
        works: Sequence[dist.Work] = (),
        tensors: Sequence[Tensor] = (),
        finish: Sequence[Callable[[], Any]] = (),
        peers: Sequence[int] = (),
    ) -> None:
        self.name, self._peers = name, peers
        self._works, self._tensors, self._finish = works, tensors, list(finish)

    def __del__(self) -> None:
        if self._works and not self.done:
            _dropped[:] = [each for each in _dropped if not all(work.is_completed() for work in each[0])]
            _dropped.append((self._works, self._tensors))

    def then(self, finish: Callable[[], Any]) -> None:
        """Calls a function once all messages have been received and sent; never if there are none."""
        self._finish.append(finish)

    @property
    def done(self) -> bool:
        """Says whether `wait` would return at once."""
        return all(work.is_completed() for work in self._works)

    @property
    def works(self) -> Sequence[dist.Work]:
        """Returns the handles of the messages, for a thread that waits instead of `wait`; none once that has waited."""
        return self._works

    def precede(self, stream: torch.Stream) -> None:
        """Lets what is put on a stream from now on wait for the messages, where a device carries them out."""
        with stream:
            for work in self._works:
                work.wait()

    def wait(self) -> None:
        """Waits until all messages have been received and sent; may be called again.

        Raises:
            DistributedError: a peer died, stopped, or posted something else.
        """
        if not self._works:
            return
        clock = None
        if ledger.active() is not None:
            clock = Stopwatch(self._tensors[0].device if self._tensors else _HOST)
        with named_range(f"wait for {self.name}"), operation(self.name, self._peers):
            for work in self._works:
                work.wait()
        if clock is not None:
            ledger.count(seconds_waiting=clock.stop())
        note_broken_off("")  # the others have gone on with this rank
        for finish in self._finish:
            finish()
        self._works, self._tensors, self._finish = [], [], []


class Messages:
    """Holds messages to and from peers of an axis, which may be posted any number of times from the same memory.

    Args:
        axis: the ranks taking part.
        sends: contiguous tensor for each peer index; empty ones are not sent.
        recvs: contiguous tensor to fill from each peer index; empty ones are not received.
        name: what errors call them.
    """

    def __init__(self, axis: Axis, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], *, name: str) -> None:
        self.axis, self.sends, self.recvs, self.name = axis, sends, recvs, name
        self._peers = [axis.ranks[peer] for parts in (recvs, sends) for peer, part in parts.items() if part.numel()]
        self._ops: list[dist.P2POp] = []
        self._posts: list[Callable[[], dist.Work]] = []
        self._tensors: list[Tensor] = []
        if axis.is_fused and not axis.dry:  # without tags the same operations can be posted again
            self._build(0, [])

    def post(self) -> Pending:
        """Posts all messages and returns at once."""
        axis = self.axis
        if axis.doubts and not axis.dry:
            _check_stops(axis)
        count = next(axis.calls)
        if ledger.active() is not None:
            _count(self.sends.values(), self.recvs.values())
        if axis.network is not None:
            sent, received = ({axis.ranks[p]: t.nbytes for p, t in part.items()} for part in (self.sends, self.recvs))
            return Pending(self.name, [axis.network.post(sent, received, lane=axis.lane)])
        if axis.dry or axis.size == 1 or not self._peers:
            return Pending(self.name)
        finish: list[Callable[[], Any]] = []
        if not axis.is_fused:
            self._build(tag_of(self.name, count), finish)
        label = f"{self.name} on axis {axis.name} (exchange {count})"
        with named_range(label), operation(label, self._peers):
            works = dist.batch_isend_irecv(self._ops) if axis.is_fused else [each() for each in self._posts]
        if axis.is_fused:
            watch(works, label, self._peers)
        pending = Pending(label, works, self._tensors, finish, self._peers)
        return axis.traffic.note(pending, on_device=axis.is_fused)

    def _build(self, tag: int, finish: list[Callable[[], Any]]) -> None:
        axis, self._ops, self._posts, self._tensors = self.axis, [], [], []
        for kind, parts in ((dist.irecv, self.recvs), (dist.isend, self.sends)):
            for peer, tensor in ((peer, part) for peer, part in parts.items() if part.numel()):
                assert tensor.is_contiguous(), "a message must be contiguous"
                if not (axis.is_fused or is_on_host(tensor.device)):
                    # gloo has no point-to-point for device memory: several ranks on one GPU go through the host.
                    wire = tensor.cpu() if kind is dist.isend else torch.empty_like(tensor, device="cpu")
                    if kind is dist.irecv:
                        finish.append(partial(tensor.copy_, wire))
                    tensor = wire
                self._tensors.append(tensor)
                if axis.is_fused:
                    self._ops.append(dist.P2POp(kind, tensor, axis.ranks[peer], axis.group, tag))
                    continue
                self._posts.append(partial(post, axis, tensor, peer, tag, is_sent=kind is dist.isend))


def exchange(
    axis: Axis, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor], *, name: str = "exchange"
) -> Pending:
    """Posts messages to and from peers of an axis and returns at once; arguments are those of `Messages`."""
    return Messages(axis, sends, recvs, name=name).post()


def fused_all_to_all(
    axis: Axis, send: Tensor, sent: Sequence[int], recv: Tensor, received: Sequence[int], *, name: str
) -> Pending:
    """Sends a part of one tensor to every rank and fills another with what they send; posts once, returns at once.

    Args:
        axis: the ranks taking part; it `is_fused`.
        send: contiguous and flat, the parts of all ranks one after the other, this one's own too.
        sent: how many numbers each rank gets.
        recv: contiguous and flat, to be filled in the order of ranks.
        received: how many numbers come from each rank.
        name: what errors call it.
    """

    def amounts() -> _Amounts:
        unit, peers = send.element_size(), [peer for peer in range(axis.size) if peer != axis.index]
        return {peer: sent[peer] * unit for peer in peers}, {peer: received[peer] * unit for peer in peers}

    def post() -> Any:
        return dist.all_to_all_single(recv, send, list(received), list(sent), group=axis.group, async_op=True)

    return _posted(axis, post, (send, recv), amounts, name)


def fused_sum(axis: Axis, part: Tensor, sent: int, *, name: str) -> None:
    """Adds up the tensors of all ranks in place, to the same bits on all of them; on an axis that `is_fused`.

    Args:
        axis: the ranks taking part.
        part: contiguous; this rank's tensor, then the sum.
        sent: how many numbers a rank sends for it.
        name: what errors call it.
    """

    def amounts() -> _Amounts:
        moved = sent * part.element_size()  # as around a ring
        return {(axis.index + 1) % axis.size: moved}, {(axis.index - 1) % axis.size: moved}

    _posted(axis, lambda: dist.all_reduce(part, group=axis.group, async_op=True), (part,), amounts, name).wait()


def _posted(
    axis: Axis,
    post: Callable[[], Any],
    tensors: Sequence[Tensor],
    amounts: Callable[[], _Amounts],
    name: str,
) -> Pending:
    """Posts one operation; the bytes to and from peers are worked out where somebody counts them."""
    if axis.doubts and not axis.dry:
        _check_stops(axis)
    count = next(axis.calls)
    if ledger.active() is not None or axis.network is not None:
        sent, received = amounts()
        messages = sum(map(bool, sent.values()))
        ledger.count(bytes_sent=sum(sent.values()), bytes_received=sum(received.values()), messages=messages)
    if axis.network is not None:
        sent, received = ({axis.ranks[peer]: number for peer, number in way.items()} for way in amounts())
        return Pending(name, [axis.network.post(sent, received, lane=axis.lane)])
    if axis.dry:
        return Pending(name)
    peers = [rank for place, rank in enumerate(axis.ranks) if place != axis.index]
    label = f"{name} on axis {axis.name} (exchange {count})"
    with named_range(label), operation(label, peers):
        works = [post()]
    watch(works, label, peers)
    return axis.traffic.note(Pending(label, works, tensors, (), peers), on_device=axis.is_fused)


def _count(sends: Collection[Tensor], recvs: Collection[Tensor]) -> None:
    ledger.count(
        bytes_sent=sum(t.nbytes for t in sends),
        bytes_received=sum(t.nbytes for t in recvs),
        messages=sum(t.numel() > 0 for t in sends),
    )


def _check_stops(axis: Axis) -> None:
    """Refuses further messages on an axis whose ranks have not stopped at the same one when a call failed."""
    if not stopped_together(axis):
        raise DistributedError(
            f"a call failed on rank {axis.ranks[axis.index]}, and not all ranks of axis {axis.name} stopped at the "
            "same point, so their messages no longer match; open a new mesh, or start the ranks again"
        )
    axis.doubts.clear()


def ring_exchange(axis: Axis, send: Tensor, recv: Tensor, *, name: str = "ring exchange") -> Pending:
    """Sends to the next rank of the axis and receives from the previous one."""
    after, before = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    return exchange(axis, {after: send}, {before: recv}, name=name)


def all_to_all(axis: Axis, sends: Sequence[Tensor], recvs: Sequence[Tensor], *, name: str = "all-to-all") -> Pending:
    """Sends one tensor to every peer and receives one from each, of any sizes.

    Args:
        axis: the ranks taking part.
        sends: one contiguous tensor per rank of the axis; this rank's own is ignored, so write it in place yourself.
        recvs: one contiguous tensor per rank, to be filled.
        name: what errors call it.
    """
    peers = [peer for peer in range(axis.size) if peer != axis.index]
    return exchange(axis, {p: sends[p] for p in peers}, {p: recvs[p] for p in peers}, name=name)


def all_gather(axis: Axis, buffer: Tensor, sizes: Sequence[int], *, name: str = "all-gather") -> Pending:
    """Fills a preallocated buffer with every rank's rows; returns at once.

    Args:
        axis: the ranks taking part.
        buffer: contiguous `[sum(sizes), ...]`, in which this rank's rows are in place already.
        sizes: rows of each rank.
        name: what errors call it.
    """
    if axis.is_fused and len(set(sizes)) == 1:
        own = buffer.narrow(0, sizes[0] * axis.index, sizes[0])

        def amounts() -> _Amounts:
            others = dict.fromkeys((peer for peer in range(axis.size) if peer != axis.index), own.nbytes)
            return others, others

        def post() -> Any:
            return dist.all_gather_into_tensor(buffer, own, group=axis.group, async_op=True)

        return _posted(axis, post, (buffer,), amounts, name)
    rows = buffer.split(list(sizes))
    return all_to_all(axis, [rows[axis.index]] * axis.size, rows, name=name)


def halo_exchange(axis: Axis, rows: Tensor, halo: int, dim: int, *, name: str = "halo exchange") -> Pending:
    """Swaps border slices with the two neighbours along the axis (no wrap-around).

    Args:
        axis: the ranks taking part, in spatial order.
        rows: tensor whose dim `dim` is ``halo + own + halo``. The own part is set, and `wait` fills the halos, except
            those at the outer ends.
        halo: width of the border; 0 < halo <= own.
        dim: the split dimension.
        name: what errors call it.

    Raises:
        ArgumentError: the own part is narrower than the halo.
    """
    own = rows.shape[dim] - 2 * halo
    if not 0 < halo <= own:
        raise ArgumentError(f"halo={halo} on a rank with {own} rows; use a halo from 1 to the number of rows")
    sends, recvs, ghosts = {}, {}, []
    for peer, give, take in ((axis.index - 1, halo, 0), (axis.index + 1, own, own + halo)):
        if 0 <= peer < axis.size:
            sends[peer] = rows.narrow(dim, give, halo).contiguous()
            target = rows.narrow(dim, take, halo)
            recvs[peer] = torch.empty_like(target, memory_format=torch.contiguous_format)
            ghosts.append(partial(target.copy_, recvs[peer]))
    pending = exchange(axis, sends, recvs, name=name)
    for ghost in ghosts:
        pending.then(ghost)
    return pending


def broadcast(axis: Axis, tensor: Tensor, *, name: str = "broadcast") -> Tensor:
    """Overwrites `tensor` in place with the one of the axis' first rank, and returns it."""
    if axis.size == 1:
        return tensor
    if axis.index == 0:
        exchange(axis, dict.fromkeys(range(1, axis.size), tensor.contiguous()), {}, name=name).wait()
    else:
        whole = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        exchange(axis, {}, {0: whole}, name=name).wait()
        tensor.copy_(whole)
    return tensor


def agree(axis: Axis, values: Sequence[float], *, name: str = "agreement") -> list[list[float]]:
    """Gathers every rank's numbers in rank order, so that all ranks reach the same verdict."""
    if axis.dry:
        number = torch.empty(len(values), dtype=torch.float64, device="meta")
        peers = dict.fromkeys((peer for peer in range(axis.size) if peer != axis.index), number)
        exchange(axis, peers, peers, name=name).wait()
        return [list(values)] * axis.size
    # Without an index it is the current one, which a mesh has set.
    device = accelerator() if axis.is_fused else "cpu"
    table = torch.zeros(axis.size, len(values), dtype=torch.float64, device=device)
    table[axis.index] = torch.tensor(list(values), dtype=torch.float64)
    all_gather(axis, table, [1] * axis.size, name=name).wait()
    return table.tolist()


def gather_tokens(axis: Axis, part: Tensor, sizes: Sequence[int], dim: int, *, name: str = "gather") -> Tensor:
    """Concatenates every rank's `part` along `dim`; parts may differ in length.

    The result may be a transposed view whose memory runs along `dim` first, so that rows arrive in place.
    """
    if axis.size == 1:
        return part
    # In a prediction nothing arrives from the others, so there are no values to gather.
    moved = (part.to("meta") if axis.dry else part).movedim(dim, 0)
    whole = moved.new_empty((sum(sizes), *moved.shape[1:]))
    start = offsets(sizes)[axis.index]
    whole[start : start + sizes[axis.index]] = moved
    all_gather(axis, whole, sizes, name=name).wait()
    return whole.movedim(0, dim)


def largest(axis: Axis, number: int) -> int:
    """Returns the largest of the ranks' numbers, so that what each decides from it is the same."""
    return int(max(row[0] for row in agree(axis, [number], name="sizes of the ranks")))
