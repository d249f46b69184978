"""Makes the calls of the denoiser that a client asks for, one by one, under one plan."""

from __future__ import annotations

from typing import Any

import torch

from partsong.errors import ArgumentError
from partsong.parallel.adapters import adapter_for
from partsong.parallel.hooks.samples import sample_of
from partsong.serving.messages import DenoiseCall, JobWork
from partsong.serving.ranks.call_body import CallBody, on_device, read_call, write_prediction
from partsong.serving.ranks.served_model import ServedModel, denoiser_arguments

__all__ = ["Session"]


class Session:
    """Holds the ranks for one client, so that what strategies keep between steps is of its generation alone.

    The timesteps of the calls tell the steps: a smaller one is the next step, an equal one the next branch of guidance,
    and a larger one begins another generation.

    Args:
        model: whose denoiser is called; it has the session's setting.
        work: the session.

    Attributes:
        work: the session.
    """

    def __init__(self, model: ServedModel, work: JobWork) -> None:
        self.work, self._model = work, model
        self._timestep = adapter_for(model.denoiser).timestep
        self._last: dict[str, Any] = {}  # of the last call, on the device
        self._known = denoiser_arguments(model.denoiser)

    def read(self, call: DenoiseCall) -> CallBody:
        """Reads the arguments of a call.

        Raises:
            ArgumentError: they are none of this denoiser's; nothing has changed then.
        """
        body, name = read_call(call.body), type(self._model.denoiser).__name__
        for each in (*body.named, *body.unchanged):
            if each not in self._known:
                raise ArgumentError(f"{name} takes no {each!r} from a client; it takes {', '.join(self._known)}")
        for each in body.unchanged:
            if each not in self._last or each in body.named:
                why = "given too" if each in body.named else "no part of this session's last call"
                raise ArgumentError(f"{each!r} is said to be unchanged, and is {why}")
        sample = body.named.get(self._model.sample)
        if not isinstance(sample, torch.Tensor) or not sample.is_floating_point() or not sample.ndim:
            raise ArgumentError(f"send the latents of {name} as the tensor {self._model.sample!r}, of floating numbers")
        if self._timestep in self._known and self._timestep not in (*body.named, *body.unchanged):
            raise ArgumentError(f"send the {self._timestep!r} of each call: it tells the steps")
        return body

    def answer(self, body: CallBody, *, writes: bool) -> bytes:
        """Calls the denoiser; returns its prediction in the type of the latents, where this rank writes it."""
        denoiser, given = self._model.denoiser, body.named[self._model.sample].dtype
        weight = next(denoiser.parameters())
        moved = {  # a timestep of fewer digits would be another one
            name: on_device(value, weight.device, None if name == self._timestep else given, weight.dtype)
            for name, value in body.named.items()
        }
        self._last = {**{name: self._last[name] for name in body.unchanged}, **moved}
        with torch.no_grad():
            output = denoiser(**self._last)
        return write_prediction(sample_of(output).to(given)) if writes else b""
