"""Encodes prompts on one rank and sends the embeddings to the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from partsong.errors import UnsupportedError
from partsong.model_folders import text_encoders
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.hooks.gradients import check_gradients
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.hooks.replaced_method import ReplacedMethods
from partsong.parallel.protocols import Coder
from partsong.parallel.ranks.mesh import AXES, Axis, Mesh
from partsong.parallel.ranks.trees import broadcast_error, broadcast_tree
from partsong.parallel.strategy import Strategy

__all__ = ["EncodeOnce"]

_NAME = "embeddings of the prompt"
#: Share of a device's memory that stays free beside the encoders, for what a picture needs while it is made.
ROOM = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeOnce(Strategy):
    """Encodes prompts only on the first rank, and sends the embeddings to the others. Exact.

    Only the first rank needs the text encoders, which weigh as much as the denoiser in many models. The others may hold
    none: `partsong.load_pipeline` leaves them out there. The encoders stay on the first rank's GPU if a quarter of its
    memory is free beside them. Otherwise their layers lie in pinned memory of the host, and visit the GPU one after the
    other while they encode, the next one while one computes.

    It has no axis of its own and works beside every strategy. Ranks that no other strategy takes become ``data`` ranks,
    which share out the samples of a batch.

    Use it when the text encoders are large, such as T5, and the ranks are short of memory.

    Example:
        >>> EncodeOnce().kind
        'exact'
    """

    denoises: ClassVar[bool] = False
    uses_all_ranks: ClassVar[bool] = True

    def codes(self, target: Any, mesh: Mesh) -> Coder | None:
        """Returns its work on a pipeline's text encoders; None where there is one rank.

        Raises:
            UnsupportedError: the pipeline encodes its prompt in the middle of its call.
        """
        axis = mesh.axis(*AXES)
        if isinstance(target, nn.Module) or not hasattr(target, "encode_prompt"):
            raise UnsupportedError(
                f"EncodeOnce: {type(target).__name__} has no encode_prompt(), so its embeddings cannot be sent; drop it"
            )
        return None if axis.size == 1 else SharedPrompts(target, axis, mesh.device)


class SharedPrompts(Coder):
    """Runs a pipeline's `encode_prompt` on the first rank.

    Args:
        pipe: the pipeline.
        axis: all ranks.
        device: where the embeddings are wanted.
    """

    decodes = False

    def __init__(self, pipe: Any, axis: Axis, device: torch.device) -> None:
        self.pipe, self.axis, self.device = pipe, axis, device
        self.sent, self.calls = 0, 0
        self._methods = ReplacedMethods()
        self._moved: list[tuple[nn.Module, torch.device]] = []
        self._offloaded: list[nn.Module] = []
        self._is_fresh = True

    @property
    def known(self) -> bool:
        """Says whether a prompt has been encoded."""
        return self.calls > 0

    def attach(self, hooks: HookSet, clock: StepClock) -> None:
        """Replaces the method, and places the encoders of the first rank."""
        self._methods.replace(self.pipe, "encode_prompt", self._around, self._around)
        hooks.on_remove(self._detach)
        clock.on_begin(self._begin)
        if self.device.type != "cpu" and self.axis.index == 0:
            self._place(*getattr(torch, self.device.type).mem_get_info(self.device))

    def _place(self, free: int, total: int) -> None:
        """Keeps the encoders on the device, given its free and its whole memory, or brings their layers one by one."""
        encoders = self._encoders()
        missing = sum(w.nbytes for part in encoders for w in part.parameters() if w.device != self.device)
        if free - missing >= ROOM * total:
            self._moved += [(part, part.device) for part in encoders]
            for part in encoders:
                part.to(self.device)
            return
        from diffusers.hooks import apply_group_offloading

        for part in encoders:
            has_streams = self.device.type in ("cuda", "xpu")
            apply_group_offloading(part, self.device, offload_type="leaf_level", use_stream=has_streams)
            self._offloaded.append(part)

    def _encoders(self) -> list[nn.Module]:
        parts = (getattr(self.pipe, name) for name in text_encoders(self.pipe.components))
        return [part for part in parts if isinstance(part, nn.Module)]

    def _detach(self) -> None:
        self._methods.restore()
        for part, device in self._moved:
            part.to(device)
        if self._offloaded:
            from diffusers.hooks import HookRegistry

            for part in self._offloaded:
                HookRegistry.check_if_exists_or_initialize(part).remove_hook("group_offloading", recurse=True)
        self._moved, self._offloaded = [], []

    def _begin(self) -> None:
        """Begins a generation: prompts encoded just before belong to it, earlier ones do not."""
        self._is_fresh = True

    def _around(self, encode: Callable[..., Any]) -> Callable[..., Any]:
        def encode_once(*args: Any, **kwargs: Any) -> Any:
            if self._is_fresh:
                self.sent, self._is_fresh = 0, False
            self.calls += 1
            embeddings = self._encode(encode, args, kwargs) if self.axis.index == 0 else None
            embeddings, sent = broadcast_tree(self.axis, embeddings, self.device, name=_NAME)
            self.sent += sent
            return embeddings

        return encode_once

    def _encode(self, encode: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            check_gradients(type(self.pipe).__name__, self._encoders(), {"prompt": args, **kwargs}, "EncodeOnce")
            return encode(*args, **kwargs)
        except Exception as error:
            broadcast_error(self.axis, error, self.device, name=_NAME)
            raise

    def predict(self, rank: int) -> int:
        """Returns the bytes a rank sends for the prompts of this generation: all come from the first."""
        return self.sent if rank == 0 else 0

    def describe(self) -> list[str]:
        """Describes what one rank does for all."""
        return [f"the prompts of {self.axis.size} ranks are encoded on the first"] if self.known else []
