"""Carries a few numbers from ranks and devices to the host, which goes on meanwhile and reads them a step later."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partsong.parallel.ranks.collectives import Pending, all_gather
from partsong.parallel.ranks.mesh import Axis

__all__ = ["Later", "agree_later", "on_device"]


class Later:
    """Holds numbers that are on their way to the host.

    On a GPU they are copied on a stream of their own, so that neither the host nor the stream at work waits for them.

    Args:
        numbers: any shape; nobody may write into it any more.
        pending: the messages that fill it; None where it is filled already.
    """

    def __init__(self, numbers: Tensor, pending: Pending | None = None) -> None:
        self._numbers, self._pending = numbers, pending
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            stream = torch.cuda.Stream(numbers.device)
            stream.wait_stream(torch.cuda.current_stream(numbers.device))
            with torch.cuda.stream(stream):
                if pending is not None:
                    pending.wait()
                host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
                host.copy_(numbers, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()
            numbers.record_stream(stream)  # their memory may not be given away while they are copied
            self._numbers, self._pending = host, None

    def read(self) -> list:
        """Returns the numbers, nested as the tensor was; waits where they have not come yet."""
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
    """Makes a small tensor of Python's numbers, without a wait for what the device has still to do.

    Args:
        values: numbers, or rows of numbers.
        device: where it is wanted.
        dtype: of the tensor; None takes what `torch.tensor` takes.
    """
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
