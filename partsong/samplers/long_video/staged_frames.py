"""Runs one rank's share of a model's blocks on a few frames of a long video, which see kept keys of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter
from partsong.parallel.adapters.row import IMAGE, TEXT
from partsong.parallel.attention_call import AttentionCall, attend_locally
from partsong.parallel.clip.tokens import token_frames
from partsong.parallel.cuts.staged_blocks import PartLayout, StagedBlocks
from partsong.parallel.ranks.mesh import Mesh
from partsong.samplers.long_video.frame_rotary import FrameRotary

__all__ = ["FrameContext", "FrameLoop", "KeysAround", "StagedFrames"]

#: Keys and values `[B, H, L, D]` of other frames, and the offset in frames of their own positions.
KeysAround = Sequence[tuple[Tensor, Tensor, int]]


class FrameContext(Protocol):
    """Describes which keys of other frames the current frames see, and which of their own are kept."""

    def around(self, layer: int, k: Tensor, v: Tensor) -> KeysAround:
        """Returns keys and values of the frames around, for one attention of the model.

        Args:
            layer: number of the attention.
            k: keys of the current frames.
            v: their values.
        """
        ...


class FrameLoop(Protocol):
    """Describes the sampling loop that a rank's blocks are part of."""

    @property
    def keys(self) -> FrameContext:
        """Returns the keys of other frames that the current ones see."""
        ...

    def sends(self, step: int, index: int) -> int:
        """Returns the bytes the rank at `index` of the pipeline sends in a step, as the loop counts steps."""
        ...

    def kept(self) -> str | None:
        """Says what is kept of other frames on this rank; None where the strategy leaves no choice."""
        ...


class StagedFrames(StagedBlocks):
    """Runs the blocks of one rank inside a loop, which chooses the frames that are seen; see `StagedBlocks`.

    Raises:
        UnsupportedError: the model's frames cannot share keys.
    """

    parts_name = "videos"

    def __init__(self, module: nn.Module, adapter: Adapter, mesh: Mesh, layers: tuple[int, ...] | None = None) -> None:
        self.rotary = FrameRotary(module, adapter)
        assert adapter.frames is not None
        #: Dim of the frames in latents and in the model's output, or of the tokens of all of them.
        self.frames_dim, self.counts_tokens = adapter.frames.dim, adapter.frames.argument is not None
        super().__init__(module, adapter, mesh, layers)
        #: The current loop, or the last one, for `Plan.explain`.
        self.loop: FrameLoop | None = None
        #: Bytes that each stage sends in one call, by its number of frames.
        self.sent: dict[int, tuple[int, ...]] = {}

    def owns(self, layer: int) -> bool:
        """Says whether this rank computes an attention, by the number of one of its calls."""
        mine = tuple(f"{self.blocks[number].name}." for number in self.own)
        return self.layers[layer % len(self.layers)][0].startswith(mine)

    def widened(self, named: Mapping[str, Any], sample: Tensor, frames: int) -> dict[str, Any]:
        """Returns the arguments of a call with another sample and its number of frames."""
        assert self.adapter.frames is not None
        count = self.adapter.frames.argument
        return {**named, self.adapter.sample: sample, **({} if count is None else {count: frames})}

    def layout(self, named: Mapping[str, Any]) -> PartLayout:
        """Returns the layout of a call, and remembers what each stage sends for its number of frames."""
        layout = super().layout(named)
        passed = [sum(tensor.nbytes for tensor in tensors) for tensors in layout.inputs[None][1:]]
        answer = layout.owners.nbytes * (self.pipe.size - 1)
        self.sent[token_frames(self.adapter, self.module, dict(named))] = (*passed, answer)
        return layout

    def work(self, named: Mapping[str, Any], layout: PartLayout, part: int | None, received: Tensor | None) -> Tensor:
        """Runs this rank's blocks on the current frames; see `StagedBlocks.work`."""
        self.rotary.begin(named)
        return super().work(named, layout, part, received)

    def _around(self, number: int, names: tuple[str, ...]) -> Callable[..., Any]:
        """Gives a block its input contiguous, as in a message, so results have the same bits on any number of ranks."""
        run = super()._around(number, names)

        def run_contiguous(forward: Callable[..., Any], named: dict[str, Any]) -> Any:
            return run(forward, named | {name: named[name].contiguous() for name in names})

        return run_contiguous

    def predict(self, batch: int, tokens: dict[str, int], itemsize: int, index: int, step: tuple[int, bool]) -> int:
        """Returns the bytes the rank at `index` sends in one call of the model per block, as the loop counts steps."""
        assert self.loop is not None
        return self.loop.sends(step[0], index)

    def kept(self) -> str | None:
        """Says what the loop keeps of other frames on this rank."""
        return None if self.loop is None else self.loop.kept()

    def attend(self, call: AttentionCall) -> Tensor:
        """Computes attention of the current frames and their text to themselves and to the frames around."""
        assert self.loop is not None
        own = list(zip(call.runs[0], _parts(call), strict=True))
        around = self.loop.keys.around(call.layer, *next((k, v) for (stream, _), (k, v) in own if stream == IMAGE))
        k = torch.cat([call.k, *(self.rotary.turned(keys, frames) for keys, _, frames in around)], dim=2)
        v = torch.cat([call.v, *(values for _, values, _ in around)], dim=2)
        masks = None
        if call.masks is not None and len(own) > 1:
            # It hides padding of the text; all frames around are seen.
            (mask,) = call.masks
            masks = (F.pad(mask, (0, k.shape[2] - mask.shape[-1]), value=float(mask.dtype == torch.bool)),)
        return attend_locally(replace(call, k=k, v=v, sizes=(k.shape[2],), index=0, masks=masks))

    def _masks(self, mask: Tensor, sizes: tuple[int, ...], layer: int) -> tuple[Tensor, ...]:
        """Drops a causal model's own mask over frames, which lets the frames of one block see each other."""
        if TEXT in self.layers[layer][1]:
            return super()._masks(mask, sizes, layer)
        # Layers share a mask, and looking at it makes a GPU's host wait, so that happens once per mask and forward.
        known: dict[str, bool] = self._seen_masks.setdefault(mask, {})  # type: ignore[assignment]
        if "hides nothing" not in known:
            known["hides nothing"] = mask.dtype == torch.bool and bool(mask.all())
        if not known["hides nothing"]:
            raise UnsupportedError(
                f"{self.layers[layer][0]}: masks some of the current tokens; give as many latent frames per block as "
                "the model has in one of its causal blocks"
            )
        return (mask,)


def _parts(call: AttentionCall) -> list[tuple[Tensor, Tensor]]:
    """Returns keys and values of each stream in an attention."""
    lengths = [length for _, length in call.runs[0]]
    return list(zip(call.k.split(lengths, dim=2), call.v.split(lengths, dim=2), strict=True))
