"""Copies blocks to a device in chunks, between which the copying yields to exchanges between ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from partsong.accelerator import is_on_host
from partsong.parallel.ranks.traffic import Exchange

__all__ = ["ChunkCopies"]


class ChunkCopies:
    """Copies one block after another; exchanges on the same bus go first.

    The chunks of a block come in equal parts: some when its copying begins, and some after each exchange that is
    posted meanwhile, as many of them as there were the last time this block was copied. On a GPU the copies have a
    stream of their own, which waits for each exchange before it goes on, so that neither the host nor the compute
    stream waits for a copy that is not needed yet. On a CPU chunks are copied at the same points by the rank itself,
    once it has waited for the exchange, and none while another one is under way.

    Args:
        device: where blocks are copied to.

    Attributes:
        copied: bytes so far; may be reset.
    """

    def __init__(self, device: torch.device) -> None:
        self.copied = 0
        self._device = device
        self._stream = None if is_on_host(device) else torch.Stream(device)
        self._arrived: torch.Event | None = None
        self._left: deque[tuple[Tensor, Tensor]] = deque()
        self._under_way: list[Exchange] = []
        self._place: int | None = None
        self._exchanges = self._each = 0
        #: Exchanges that were posted while a block was copied, by the place of the block.
        self._seen: dict[int | None, int] = {}

    def begin(self, place: int, chunks: Sequence[tuple[Tensor, Tensor]], free: torch.Event | None) -> None:
        """Begins to copy a block.

        Args:
            place: of the block.
            chunks: where each chunk goes on the device, and where it comes from.
            free: tells when the device has done with what was there; None on a CPU.
        """
        self._seen[self._place] = self._exchanges
        self._place, self._exchanges = place, 0
        self._left.extend(chunks)
        self._each = -(-len(chunks) // (self._seen.get(place, 0) + 1))
        if self._stream is not None and free is not None:
            self._stream.wait_event(free)
        self._take_turn()

    def note(self, exchange: Exchange, on_device: bool) -> None:
        """Yields to an exchange that was posted, and goes on after it; see `BusTraffic.watch`."""
        self._exchanges += 1
        if self._stream is not None and on_device:
            exchange.precede(self._stream)
            self._take_turn()
        else:
            self._under_way.append(exchange)
            exchange.then(self._take_turn)

    def finish(self) -> None:
        """Copies what is left of a block that is needed now, and lets the device wait for all of it."""
        self._copy(len(self._left))
        if self._arrived is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._arrived)

    def forget(self) -> None:
        """Gives up the chunks that are left, as after an error."""
        self._left.clear()
        self._under_way.clear()

    def _take_turn(self) -> None:
        self._under_way = [exchange for exchange in self._under_way if not exchange.done]
        if not self._under_way:
            self._copy(min(self._each, len(self._left)))

    def _copy(self, number: int) -> None:
        if not number:
            return
        if self._stream is None:
            self._copy_here(number)
            return
        with self._stream:
            self._copy_here(number)
            if not self._left:
                self._arrived = torch.Event(self._device)
                self._arrived.record()

    def _copy_here(self, number: int) -> None:
        for _ in range(number):
            to, chunk = self._left.popleft()
            to.copy_(chunk, non_blocking=True)
            self.copied += to.nbytes
