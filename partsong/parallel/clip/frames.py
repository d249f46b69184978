"""Cuts the frames of video models in which only a few modules look across frames, as in UNets with temporal layers.

All other modules take frames as a batch and stay as they are. In the mixing ones, convolutions over time get the
neighbours' border frames, group norms the statistics of all frames, positions the clip's place in the video, and
attention the frames in its key set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.kernels import group_norm_apply, group_norm_stats
from partsong.parallel.adapters import Adapter
from partsong.parallel.clip.attention import FrameAttention
from partsong.parallel.clip.blocks import check_blocks, frames_beyond
from partsong.parallel.exchange.borders import SyncBorders
from partsong.parallel.hooks.model_hooks import AroundHook, Attend, AttentionHook, HookSet, signature_of
from partsong.parallel.hooks.samples import map_sample
from partsong.parallel.ranks.collectives import gather_tokens
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.strategy import Cut

__all__ = ["ClipFrames"]


class ClipFrames(Cut):
    """Cuts the frames of a model whose temporal modules are named in its row.

    Args:
        module: the denoiser; its sample is `[B, C, F, H, W]`, or has frames before channels.
        adapter: its row.
        axis: the ranks, in the order of the video.
        attention: attends from the frames to those they see.
    """

    def __init__(self, module: nn.Module, adapter: Adapter, axis: Axis, attention: FrameAttention) -> None:
        assert adapter.frames is not None
        self.module, self.adapter, self.axis, self.frames = module, adapter, axis, adapter.frames
        self.attention = attention
        self.borders = SyncBorders(axis)
        self._mixing: dict[str, nn.Module] = {}
        self._reach = 1
        self._longest = math.inf
        # Bytes per video that go to one neighbour, and to every other rank.
        self._border_bytes: list[int] = []
        self._shared_bytes: list[int] = []
        self._frame_bytes = 0

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Returns the frames of each rank."""
        return {"frames": self.attention.layout.sizes}

    def describe(self, tokens: Mapping[str, int]) -> str:
        """Says what is cut."""
        return f"{self.attention.layout.keys.frames} frames"

    def attach(self, hooks: HookSet) -> None:
        """Puts the hooks on the model and on the layers that look across frames.

        Raises:
            UnsupportedError: the model holds a module that may look across frames in a way unknown here.
        """
        check_blocks(self.module, self.adapter)
        mixers = [name for name, child in self.module.named_modules() if type(child).__name__ in self.frames.mixers]
        for name, child in self._children(mixers):
            if type(child).__name__ == "Attention" and not getattr(child, "is_cross_attention", False):
                hooks.add(child, AttentionHook(self._attention(name), name), "clip")
                self._mixing[name] = child
            self._longest = min(self._longest, _positions(child))
            compute = self._computed(child) if self.axis.size > 1 else None
            if compute is not None:
                hooks.add(child, self._around(compute, child), "clip")
        for child in self.module.modules() if self.axis.size > 1 else ():
            if type(child).__name__ in self.frames.numbered:
                clock: Any = child.time_proj
                hooks.add(clock, self._around(self._number, clock), "clip")
        if not self._mixing:
            raise UnsupportedError(f"{self.adapter.model} has no attention over frames here; its layout has changed")
        hooks.add(self.module, AroundHook(self._run, signature_of(self.module)), "clip")

    def _children(self, mixers: list[str]) -> Iterator[tuple[str, nn.Module]]:
        for mixer in mixers:
            for name, child in self.module.get_submodule(mixer).named_modules(prefix=mixer):
                self._reach = max(self._reach, frames_beyond(name, child))
                yield name, child

    def _computed(self, child: nn.Module) -> Callable[..., Tensor] | None:
        """Returns how a layer is computed on a clip; None where nothing changes."""
        if isinstance(child, nn.GroupNorm):
            return self._normalise
        if hasattr(child, "pe"):
            return self._place
        return self._convolve if isinstance(child, nn.Conv3d) and child.kernel_size[0] > 1 else None

    def _around(self, compute: Callable[..., Tensor], layer: Any) -> AroundHook:
        return AroundHook(lambda forward, named: compute(layer, *named.values()), signature_of(layer))

    def begin_forward(self, sample: Tensor) -> None:
        """Distributes the frames of a call over the ranks.

        Raises:
            UnsupportedError: there are too few frames for the ranks, or more than the model has positions for, or the
                model was changed since the hooks were put on.
        """
        frames = sample.shape[self.frames.dim]
        if frames > self._longest:
            raise UnsupportedError(
                f"{self.adapter.model}: {frames} frames, and its temporal layers have positions for {self._longest}; "
                f"use at most {self._longest} frames or a motion adapter with a larger motion_max_seq_length"
            )
        for name, child in self._mixing.items():
            if self.module.get_submodule(name) is not child:
                raise UnsupportedError(
                    f"{self.adapter.model}: {name} was replaced since parallelize(), for example by FreeNoise; undo() "
                    "the plan, disable_free_noise() and parallelize again"
                )
        self.attention.begin(frames, len(sample), self._reach)
        self._border_bytes.clear()
        self._shared_bytes.clear()

    def _run(self, forward: Callable[..., Any], named: dict[str, Any]) -> Any:
        """Calls the model with this rank's frames."""
        self.attention.note_time(named[self.adapter.timestep])
        if self.axis.size == 1:
            return forward(**named)
        sample, dim, own = named[self.adapter.sample], self.frames.dim, self.attention.own
        for name in self.frames.folded:
            if named.get(name) is not None:
                named[name] = self._unfolded(named[name], name, len(sample), sample.shape[dim])
        named[self.adapter.sample] = sample.narrow(dim, own.start, own.stop - own.start)
        return map_sample(forward(**named), self._gather)

    def _unfolded(self, value: Any, name: str, batch: int, frames: int) -> Any:
        """Returns this rank's frames of tensors whose first dimension is batch x frames."""
        if not isinstance(value, Tensor):
            return type(value)(self._unfolded(part, name, batch, frames) for part in value)
        if len(value) != batch * frames:
            raise UnsupportedError(
                f"{self.adapter.model}: {name} has {len(value)} rows; the {batch} x {frames} frames of the sample need "
                f"{batch * frames}, one each (repeat_interleave it {frames} times along its first dimension)"
            )
        return value.unflatten(0, (batch, frames))[:, self.attention.own].flatten(0, 1)

    def _gather(self, clip: Tensor) -> Tensor:
        self._frame_bytes = clip[0].select(self.frames.dim - 1, 0).numel() * clip.element_size()
        sizes = self.attention.layout.sizes
        return gather_tokens(self.axis, clip, sizes, self.frames.dim, name="gather of the output frames").contiguous()

    def _normalise(self, norm: nn.GroupNorm, x: Tensor) -> Tensor:
        """Computes the group norm of `[B, C, F, H, W]` with the statistics of the whole video."""
        own = group_norm_stats(x, norm.num_groups)
        self._shared_bytes.append(2 * own[0].numel() * own[0].element_size() // self.attention.batch)
        mean, var = self.borders.statistics(0, own, self.attention.layout.sizes)
        return group_norm_apply(x, mean, var, norm.weight, norm.bias, norm.eps)

    def _convolve(self, conv: nn.Conv3d, x: Tensor) -> Tensor:
        """Convolves `[B, C, F, H, W]` with the neighbours' frames; only the ends of the video get zeros."""
        reach, rows, columns = (int(side) for side in conv.padding)
        first, last = x[:, :, :reach], x[:, :, x.shape[2] - reach :]
        self._border_bytes.append(first.numel() * first.element_size() // self.attention.batch)
        zeros = torch.zeros_like(first)
        before, after = (zeros if part is None else part for part in self.borders.ghosts(0, first, last))
        whole = torch.cat([before, x, after], dim=2)
        return F.conv3d(whole, conv.weight, conv.bias, conv.stride, (0, rows, columns), conv.dilation, conv.groups)

    def _place(self, positions: Any, x: Tensor) -> Tensor:
        """Adds the positions of this rank's frames in the whole video to `[B, F, C]`."""
        return x + positions.pe[:, self.attention.own]

    def _number(self, table: Any, numbers: Tensor) -> Tensor:
        """Embeds the numbers of this rank's frames in the whole video; the model itself would count them from 0."""
        return type(table).forward(table, numbers + self.attention.own.start)

    def _attention(self, name: str) -> Attend:
        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
            own = self.attention.own
            mine = own.stop - own.start
            if query.shape[2] != mine or key.shape[2] != mine or mask is not None:
                what = "with a mask" if mask is not None else f"{query.shape[2]} queries to {key.shape[2]} keys"
                raise UnsupportedError(
                    f"{name}: attends {what} where this rank holds {mine} frames; this call form cannot be cut"
                )
            return self.attention.attend(query, key, value, 1, scale)

        return attend

    def predict(self, batch: int, tokens: dict[str, int], itemsize: int, index: int, step: tuple[int, bool]) -> int:
        """Returns the bytes the rank at `index` sends in one forward of `batch` videos."""
        size = self.axis.size
        neighbours = (index > 0) + (index < size - 1)
        shared = sum(self._shared_bytes) + self.attention.layout.sizes[index] * self._frame_bytes
        moved = neighbours * sum(self._border_bytes) + (size - 1) * shared
        return batch * moved + self.attention.predict(batch, index)


def _positions(child: Any) -> float:
    """Returns the number of frames that a table of positions has room for; other modules have no limit."""
    return child.pe.shape[1] if hasattr(child, "pe") else math.inf
