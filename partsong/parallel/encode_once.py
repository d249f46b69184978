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


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeOnce(Strategy):
    """Encodes prompts only on the first rank, and sends the embeddings to the others. Exact.

    Only the first rank needs the text encoders, which weigh as much as the denoiser in many models. The others may hold
    none: `partsong.load_pipeline` leaves them out there. On a GPU the encoders stay in the host's memory, and visit the
    GPU only while they encode.

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
        self._offloads: list[Any] = []
        self._is_fresh = True

    @property
    def known(self) -> bool:
        """Says whether a prompt has been encoded."""
        return self.calls > 0

    def attach(self, hooks: HookSet, clock: StepClock) -> None:
        """Replaces the method, and keeps the encoders off the GPU between calls."""
        self._methods.replace(self.pipe, "encode_prompt", self._around, self._around)
        hooks.on_remove(self._detach)
        clock.on_begin(self._begin)
        if self.device.type != "cpu":
            self._offload()

    def _offload(self) -> None:
        from accelerate import cpu_offload_with_hook

        self._offloads += [cpu_offload_with_hook(encoder, self.device)[1] for encoder in self._encoders()]

    def _encoders(self) -> list[nn.Module]:
        parts = (getattr(self.pipe, name) for name in text_encoders(self.pipe.components))
        return [part for part in parts if isinstance(part, nn.Module)]

    def _detach(self) -> None:
        self._methods.restore()
        for hook in self._offloads:
            hook.remove()

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
        finally:
            for hook in self._offloads:
                hook.offload()

    def predict(self, rank: int) -> int:
        """Returns the bytes a rank sends for the prompts of this generation: all come from the first."""
        return self.sent if rank == 0 else 0

    def describe(self) -> list[str]:
        """Describes what one rank does for all."""
        return [f"the prompts of {self.axis.size} ranks are encoded on the first"] if self.known else []
