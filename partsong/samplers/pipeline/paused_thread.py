"""Runs a function in a thread of its own that pauses wherever the function asks for an answer.

Exactly one thread runs at any time: the driver waits while the thread runs, and the thread waits for the driver's
answer. So only the driver decides what runs when, and only the driver talks to other ranks.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from partsong.accelerator import current, is_on_host

__all__ = ["Closed", "Returned", "PausedThread"]


@dataclass(frozen=True, slots=True)
class Returned:
    """Says that the function has ended.

    Attributes:
        value: what it returned; None where it was closed.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


class Closed(BaseException):
    """Unwinds a thread that is closed; no pipeline catches it."""


class PausedThread:
    """Runs one function from pause to pause.

    Args:
        function: is called in the thread, with the caller's torch modes and context variables.
        device: on which it computes.
        name: of the thread.

    Example:
        >>> thread = PausedThread(lambda: thread.pause("name?") + "!", torch.device("cpu"), "example")
        >>> thread.send(), thread.send("Ada")
        ('name?', Returned(value='Ada!'))
    """

    def __init__(self, function: Callable[[], Any], device: torch.device, name: str) -> None:
        self._functions, self._device, self._name = [function], device, name
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._closing = False
        self._thread: threading.Thread | None = None

    def send(self, answer: Any = None) -> Any:
        """Answers the pause, lets the function run to its next one, and returns that or `Returned`.

        Args:
            answer: what `pause` returns; nothing the first time.

        Raises:
            BaseException: whatever the function raised.
        """
        if self._thread is None:
            run = functools.partial(contextvars.copy_context().run, self._run, _modes(self._device))
            self._thread = threading.Thread(target=run, name=self._name, daemon=True)
            self._thread.start()
        else:
            self._answers.put(answer)
        event = self._events.get()
        if isinstance(event, (_Failed, Returned)):
            self._thread.join()
        if isinstance(event, _Failed):
            raise event.error
        return event

    def pause(self, event: Any) -> Any:
        """Hands over to the driver until it answers; in the function's own thread."""
        assert threading.current_thread() is self._thread, "what was paused was called from outside"
        if not self._closing:
            self._events.put(event)
            answer = self._answers.get()
        if self._closing:
            raise Closed
        return answer

    def close(self) -> None:
        """Ends the function at its pause; may be called again, and after its end."""
        self._closing = True
        if self._thread is not None and self._thread.is_alive():
            self._answers.put(None)
            self._thread.join()

    def _run(self, modes: list[Callable[[], AbstractContextManager[Any]]]) -> None:
        event: Returned | _Failed
        try:
            with ExitStack() as entered:
                for mode in modes:
                    entered.enter_context(mode())
                event = Returned(self._functions.pop()())  # not held any longer: it may hold this thread
        except Closed:
            event = Returned(None)
        except BaseException as error:  # noqa: BLE001 - the driver raises it
            event = _Failed(error)
        self._events.put(event)


def _modes(device: torch.device) -> list[Callable[[], AbstractContextManager[Any]]]:
    """Lists the caller's torch modes, which a new thread has to enter itself."""
    modes: list[Callable[[], AbstractContextManager[Any]]] = [
        functools.partial(torch.inference_mode, torch.is_inference_mode_enabled()),
        functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()),
    ]
    if torch.is_autocast_enabled(device.type):
        modes.append(functools.partial(torch.autocast, device.type, torch.get_autocast_dtype(device.type)))
    if not is_on_host(device):
        modes.append(functools.partial(current, torch.device(device.type, torch.accelerator.current_device_index())))
    return modes
