"""The stage `exchange`: messages of many sizes between ranks, beside torch's own call."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from partsong.evals.gpu.findings import Equipment, Finding, at_least, at_most, holds, stated
from partsong.parallel import Mesh, launch
from partsong.parallel.ranks.collectives import agree, exchange, fused_all_to_all
from partsong.parallel.ranks.mesh import Axis

__all__ = ["exchanges"]

REPEATS = 9
#: What an exchange by NVLink has to reach: GB/s with the largest message, microseconds with the smallest.
NVLINK = {"H100": (300.0, 40.0), "H200": (300.0, 40.0)}


def exchanges(equipment: Equipment) -> Iterator[Finding]:
    """Times messages from 1 KB to 64 MB, or to 1 MB on a CPU."""
    sizes = tuple(1 << power for power in equipment.pick(range(10, 27, 4), (10, 20)))
    nproc = max(2, min(equipment.gpus, 8))
    rows = launch(_on_ranks, nproc, equipment.device, sizes)
    is_linked = equipment.gpus > 1 and torch.cuda.can_device_access_peer(0, 1)
    known = next((bounds for part, bounds in NVLINK.items() if part in equipment.name and is_linked), None)
    for size, (ours, theirs, same) in zip(sizes, rows, strict=True):
        name = f"{size} bytes to each of {nproc} ranks"
        yield holds(f"{name} arrive", same, "the same" if same else "other bits", "the same")
        yield at_most(f"{name}: microseconds", round(1e6 * ours, 1), known[1] if known and size == sizes[0] else None)
        yield at_most(f"{name}: seconds by those of all_to_all_single", ours / theirs, 1.5 if equipment.gpus else None)
        rate = (nproc - 1) * size / ours / 1e9
        yield at_least(f"{name}: GB/s", round(rate, 3), known[0] if known and size == sizes[-1] else None)
    yield stated("ranks", nproc)


def _on_ranks(device: str, sizes: Sequence[int]) -> list[tuple[float, float, bool]]:
    with Mesh(ulysses=int(os.environ["WORLD_SIZE"]), device=device) as mesh:
        return [_measured(mesh, mesh.axis("ulysses"), size) for size in sizes]


def _measured(mesh: Mesh, axis: Axis, size: int) -> tuple[float, float, bool]:
    """Returns the seconds of our exchange and of torch's, and whether both bring the same."""
    send = torch.arange(axis.size * size, device=mesh.device).add_(axis.index).to(torch.uint8)
    ours, theirs = torch.zeros_like(send), torch.zeros_like(send)
    sizes = [size] * axis.size

    def exchanged() -> None:
        if axis.is_fused:
            fused_all_to_all(axis, send, sizes, ours, sizes, name="exchange").wait()
            return
        sends, recvs = send.split(size), ours.split(size)
        recvs[axis.index].copy_(sends[axis.index])
        others = [peer for peer in range(axis.size) if peer != axis.index]
        exchange(axis, {peer: sends[peer] for peer in others}, {peer: recvs[peer] for peer in others}).wait()

    def by_torch() -> None:
        if axis.is_fused:
            dist.all_to_all_single(theirs, send, group=axis.group)
        else:  # gloo's works in the host's memory
            there, given = theirs.cpu(), send.cpu()
            dist.all_to_all_single(there, given, group=axis.group)
            theirs.copy_(there)

    seconds = [_seconds(mesh, axis, call) for call in (exchanged, by_torch)]
    return seconds[0], seconds[1], all(row[0] for row in agree(axis, [float(torch.equal(ours, theirs))]))


def _seconds(mesh: Mesh, axis: Axis, call: Callable[[], Any]) -> float:
    """Returns the median over repeats of the slowest rank's time."""
    seconds = []
    for _ in range(REPEATS + 2):
        agree(axis, [0.0])
        start = time.perf_counter()
        call()
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(max(row[0] for row in agree(axis, [time.perf_counter() - start])))
    return statistics.median(seconds[2:])
