"""Brings a few numbers from ranks and devices to the host, which continues meanwhile and reads them a step later."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partsong.accelerator import is_on_host
from partsong.parallel.ranks.collectives import Pending, all_gather
from partsong.parallel.ranks.mesh import Axis

__all__ = ["Later", "agree_later", "on_device"]


class Later:
    """Holds numbers that are being copied to the host.

    On a GPU they are copied on a stream of their own, so that neither the host nor the compute stream waits for them.

    Args:
        numbers: any shape; it must not be written to any more.
        pending: the messages that fill it; None if it is filled.
    """

    def __init__(self, numbers: Tensor, pending: Pending | None = None) -> None:
        self._numbers, self._pending = numbers, pending
        self._event: torch.Event | None = None
        if not is_on_host(numbers.device):
            stream = torch.Stream(numbers.device)
            stream.wait_stream(torch.accelerator.current_stream(numbers.device))
            with stream:
                if pending is not None:
                    pending.wait()
                host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
                host.copy_(numbers, non_blocking=True)
                self._event = torch.Event(numbers.device)
                self._event.record()
            numbers.record_stream(stream)  # their memory must not be reused while they are copied
            self._numbers, self._pending = host, None

    def read(self) -> list:
        """Returns the numbers, nested as the tensor was; waits until they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        if self._pending is not None:
            self._pending.wait()
        return self._numbers.tolist()


def agree_later(axis: Axis, numbers: Tensor, *, name: str) -> Later:
    """Gathers every rank's numbers, a row for each rank, and returns at once.

    Args:
        axis: the ranks; all of them call it in the same order.
        numbers: `[N]`, on the device where they were computed.
        name: what errors call the messages.
    """
    table = numbers.new_zeros(axis.size, len(numbers))
    table[axis.index] = numbers
    return Later(table, all_gather(axis, table, [1] * axis.size, name=name))


def on_device(values: Sequence, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Makes a small tensor from Python numbers, without waiting for the device's queue.

    Args:
        values: numbers, or rows of numbers.
        device: where it is wanted.
        dtype: of the tensor; None takes what `torch.tensor` takes.
    """
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
