"""Lets the processor behave as a device with streams that are as late as they may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from partsong.parallel.offload_weights import chunk_copies, host_weights

__all__ = ["LazyStream", "lazy_device"]


class LazyStream(TorchDispatchMode):
    """Copies what it was given only when another stream waits for an event that comes after it.

    Attributes:
        log: what was asked of the stream, in order.
    """

    made: list[LazyStream]

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.log: list[str] = []
        self.queue: list[Callable[[], Any]] = []
        LazyStream.made.append(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.copy_.default, f"{func} on the copy stream"
        self.log.append("copy")
        self.queue.append(lambda: func(*args, **(kwargs or {})))
        return args[0]

    def wait_event(self, event: Any) -> None:
        self.log.append("waits for the room")

    def run(self, number: int) -> None:
        """Carries out what was queued up to a number of copies."""
        for work in self.queue[:number]:
            work()
        self.queue[:number] = [lambda: None] * number


class _Event:
    """Marks a place in the queue of the copy stream, where it is recorded there."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.place = 0

    def record(self, stream: Any = None) -> None:
        if stream is None:
            self.place = len(LazyStream.made[-1].queue)
            LazyStream.made[-1].log.append("event")


class _Compute:
    def wait_event(self, event: _Event) -> None:
        LazyStream.made[-1].run(event.place)


@contextmanager
def lazy_device() -> Iterator[list[LazyStream]]:
    """Lets plans within it take the processor for a device with a copy stream; yields the streams that they make."""
    LazyStream.made = []
    with ExitStack() as stack:
        for module in (chunk_copies, host_weights):
            stack.enter_context(mock.patch.object(module, "is_on_host", return_value=False))
        stack.enter_context(mock.patch.object(host_weights, "synchronize"))
        stack.enter_context(mock.patch.object(torch, "Stream", LazyStream))
        stack.enter_context(mock.patch.object(torch, "Event", _Event))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", return_value=_Compute()))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", Tensor.clone))
        yield LazyStream.made
