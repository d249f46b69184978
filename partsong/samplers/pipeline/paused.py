"""Runs a pipeline's own call and pauses it wherever its denoiser is called.

Some loops need several generations side by side, or the denoiser's calls in another order than a pipeline makes them.
Here the pipeline's loop is turned inside out without being rewritten: it runs in a thread of its own, which stops at
every event below until the driver answers it (see `paused_thread`).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from partsong.accelerator import random_state, set_random_state
from partsong.parallel.hooks.arguments import ArgumentNames
from partsong.parallel.hooks.model_hooks import kept_arguments, signature_of
from partsong.parallel.hooks.replaced_method import Method, replace_method
from partsong.samplers.pipeline.paused_thread import Closed, PausedThread, Returned

__all__ = ["Denoise", "Event", "Finished", "PausedCall", "Stepped"]


@dataclass(frozen=True, slots=True)
class Denoise:
    """Says that the pipeline calls its denoiser; the answer is what the denoiser returns.

    Attributes:
        arguments: of the call, by name.
        positions: names of those that came by position.
    """

    arguments: dict[str, Any]
    positions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stepped:
    """Says that the scheduler has made a step; the answer is the latents to continue with, or its whole return value.

    Attributes:
        latents: what the scheduler made.
    """

    latents: Tensor


@dataclass(frozen=True, slots=True)
class Finished:
    """Says that the call has ended.

    Attributes:
        output: that of the pipeline; None where it should not decode.
    """

    output: Any


Event = Denoise | Stepped | Finished


class PausedCall:
    """Runs one call of a diffusers pipeline from event to event.

    The call works on a shallow copy of the pipeline: weights are shared, but the scheduler is its own, and so is the
    state of every random generator, the default ones included. Calls of one pipeline therefore never disturb each
    other, and each draws the same numbers as a plain call. Leaving the context ends the thread at any point.

    Args:
        pipe: a diffusers pipeline; left as it is.
        denoiser: name of the component to stop at, ``transformer`` or ``unet``.
        arguments: of the pipeline's call.
        decodes: False ends the call before it decodes its latents.
        note_positions: is called at every call of the denoiser with the names of the arguments that came by position.

    Attributes:
        pipe: the copy that is called.
        event: the event at which the call waits; None before the first `send`.

    Example:
        >>> # with PausedCall(pipe, "transformer", {"prompt": "a red circle"}) as call:
        >>> #     event = call.send()
        >>> #     while not isinstance(event, Finished):
        >>> #         answer = pipe.transformer(**event.arguments) if isinstance(event, Denoise) else event.latents
        >>> #         event = call.send(answer)
    """

    def __init__(
        self,
        pipe: Any,
        denoiser: str,
        arguments: Mapping[str, Any],
        *,
        decodes: bool = True,
        note_positions: Callable[[tuple[str, ...]], None] = lambda names: None,
    ) -> None:
        self.pipe = _copied(pipe)
        self.event: Event | None = None
        self._arguments = dict(arguments)
        self._random = _RandomState(self._arguments, _device(pipe))
        self._thread = PausedThread(lambda: self.pipe(**self._arguments), _device(pipe), "partsong-paused-call")
        self._note_positions = note_positions
        # Bypasses the pipeline's own __setattr__, which would register the copies in its configuration.
        parts = vars(self.pipe)
        parts[denoiser] = self._paused_denoiser(getattr(pipe, denoiser))
        parts["scheduler"] = copy.deepcopy(pipe.scheduler)
        replace_method(self.pipe.scheduler, "step", self._paused_step)
        if not decodes and getattr(pipe, "vae", None) is not None:
            self.replace("vae", decode=_stop)

    def replace(self, component: str, **members: Any) -> None:
        """Replaces members of this call's copy of a component; before the first `send`."""
        vars(self.pipe)[component] = _stand_in(getattr(self.pipe, component), **members)

    def send(self, answer: Any = None) -> Event:
        """Answers the current event, and lets the call run to the next one.

        Args:
            answer: see `Denoise` and `Stepped`; nothing the first time.

        Raises:
            BaseException: whatever the pipeline raised.
        """
        assert not isinstance(self.event, Finished), "the call has ended"
        try:
            with self._random.taken():
                event = self._thread.send(answer)
        except BaseException:
            self.event = Finished(None)
            raise
        self.event = event = Finished(event.value) if isinstance(event, Returned) else event
        return event

    def hand_back_random_state(self) -> None:
        """Leaves the caller's generators, and the default ones, as a plain call would have left them."""
        self._random.hand_back()

    def close(self) -> None:
        """Ends the call at its current event; may be called again, and after its end."""
        self._thread.close()
        self.event = Finished(None) if not isinstance(self.event, Finished) else self.event

    def __enter__(self) -> PausedCall:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _paused_denoiser(self, module: nn.Module) -> nn.Module:
        names = ArgumentNames(signature_of(module))

        def forward(*args: Any, **kwargs: Any) -> Any:
            positions = names.positions(args)
            self._note_positions(positions)
            return self._thread.pause(Denoise(kept_arguments(names.of(args, kwargs)), positions))

        # The user's own hooks and compiled code belong to the real module, which the driver calls.
        bare: dict[str, Any] = {"_forward_hooks": OrderedDict(), "_forward_pre_hooks": OrderedDict()}
        return _stand_in(module, forward=forward, _compiled_call_impl=None, **bare)

    def _paused_step(self, step: Method) -> Method:
        def step_and_pause(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            answer = self._thread.pause(Stepped(result[0]))
            others = answer[1:] if isinstance(answer, tuple) else result[1:]
            latents = answer[0] if isinstance(answer, tuple) else answer
            if isinstance(result, tuple):
                return (latents, *others)
            names = list(result)[1:]
            return type(result)(**{"prev_sample": latents, **dict(zip(names, others, strict=False))})

        return step_and_pause


def _stand_in(module: nn.Module, **members: Any) -> nn.Module:
    """Returns a copy of a module that shares its weights and configuration but has some members of its own."""
    copied = _copied(module)
    vars(copied).update(members)
    return copied


def _copied(owner: Any) -> Any:
    """Returns a copy with the same attributes; `copy.copy` of what is under a plan is refused."""
    copied = object.__new__(type(owner))
    vars(copied).update(vars(owner))
    return copied


def _stop(*args: Any, **kwargs: Any) -> None:
    raise Closed


def _device(pipe: Any) -> torch.device:
    """Returns a pipeline's device: its weights may be elsewhere, or not loaded, until they are needed."""
    return torch.device(getattr(pipe, "_execution_device", getattr(pipe, "device", "cpu")))


class _RandomState:
    """Holds the random generators of one call: clones of the caller's own, and a state for the default ones."""

    def __init__(self, arguments: dict[str, Any], device: torch.device) -> None:
        self._device = device
        self._state = self._read()
        given = arguments.get("generator")
        each = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
        self._clones: dict[torch.Generator, torch.Generator] = {g: g.clone_state() for g in dict.fromkeys(each)}
        if each:
            own = [self._clones[generator] for generator in each]
            arguments["generator"] = own if isinstance(given, (list, tuple)) else own[0]

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Sets the default generators to this call's state inside, and restores the caller's afterwards."""
        outer = self._read()
        self._write(self._state)
        try:
            yield
        finally:
            self._state = self._read()
            self._write(outer)

    def hand_back(self) -> None:
        self._write(self._state)
        for generator, clone in self._clones.items():
            generator.set_state(clone.get_state())

    def _read(self) -> tuple[Tensor, Tensor | None]:
        return torch.get_rng_state(), random_state(self._device)

    def _write(self, state: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(state[0])
        set_random_state(state[1], self._device)
