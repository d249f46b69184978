"""Asks this machine's accelerator, whoever made it, for what torch calls by another name on each of them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Stopwatch", "accelerator", "current", "devices", "forked_random", "is_on_host", "memory_in_use", "memory_left",
    "random_state", "set_random_state", "synchronize", "total_memory",
]  # fmt: skip


def accelerator() -> str:
    """Returns the type of this machine's accelerator, such as "cuda", "xpu" or "mps", and "cpu" where it has none.

    Cards of AMD are "cuda" to torch, too.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if device is None else device.type


def devices() -> list[tuple[str, int]]:
    """Lists this machine's accelerators, each by the name of its model and its bytes."""
    kind = accelerator()
    each = [torch.device(kind, index) for index in range(0 if kind == "cpu" else torch.accelerator.device_count())]
    return [(_name(device), total_memory(device)) for device in each]


def _name(device: torch.device) -> str:
    return "Apple GPU" if device.type == "mps" else torch.get_device_module(device).get_device_name(device)


def is_on_host(device: torch.device) -> bool:
    """Says whether the processor itself computes what is on a device, so that nothing is queued for another.

    >>> is_on_host(torch.device("cpu")), is_on_host(torch.device("xpu", 1))
    (True, False)
    """
    return device.type in ("cpu", "meta")


def current(device: torch.device) -> AbstractContextManager[None]:
    """Makes a device the current one of this thread inside; a new thread begins on the first."""
    return nullcontext() if is_on_host(device) or device.index is None else torch.accelerator.device_index(device.index)


def synchronize(device: torch.device) -> None:
    """Waits until a device has computed what it was given."""
    if not is_on_host(device):
        torch.accelerator.synchronize(device)


class Stopwatch:
    """Times work on a device, beginning now: when the device does it, and not when its host asks for it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._start = device, _now(device)

    def stop(self) -> float | Callable[[], float]:
        """Ends the time and returns the seconds; of an accelerator what reads them once it has come this far."""
        start, end = self._start, _now(self._device)
        if isinstance(end, float):
            return end - start

        def read() -> float:
            end.synchronize()
            return start.elapsed_time(end) / 1e3

        return read


def _now(device: torch.device) -> Any:
    if is_on_host(device):
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def total_memory(device: torch.device) -> int:
    """Returns the bytes of a device that one process may use at most."""
    if is_on_host(device):
        import psutil

        return psutil.virtual_memory().total
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return torch.get_device_module(device).get_device_properties(device).total_memory


def random_state(device: torch.device) -> Tensor | None:
    """Returns the state of a device's default generator; None on the host, whose generator torch keeps apart."""
    return None if is_on_host(device) else torch.get_device_module(device).get_rng_state(device)


def set_random_state(state: Tensor | None, device: torch.device) -> None:
    """Sets a device's default generator to a state of `random_state`."""
    if state is not None:
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def forked_random(device: torch.device) -> Iterator[None]:
    """Lets random numbers be drawn inside, on the host and on a device, as if none had been drawn."""
    host, other = torch.get_rng_state(), random_state(device)
    try:
        yield
    finally:
        torch.set_rng_state(host)
        set_random_state(other, device)


def memory_in_use(device: torch.device) -> int:
    """Returns the bytes that this process holds: of an accelerator's memory, or of the host's on a CPU."""
    if is_on_host(device):
        return _this_process().memory_info().rss
    return int(torch.accelerator.memory_allocated(device))


def memory_left(device: torch.device) -> int:
    """Returns the bytes of a device that this process has never used so far; 0 on the host.

    >>> memory_left(torch.device("cpu"))
    0
    """
    if is_on_host(device):
        return 0
    return max(0, total_memory(device) - int(torch.accelerator.max_memory_allocated(device)))


@functools.cache
def _this_process() -> Any:
    import psutil

    return psutil.Process()
