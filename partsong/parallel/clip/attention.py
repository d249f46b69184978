"""Attends from a clip's frames to the frames they see, whichever ranks hold them.

Each peer sends the keys and values of the frames that a rank needs, and only those, in one message. They are put in the
order of the video, so that the window of a frame is one run of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.kernels import Segment, attention, merge
from partsong.parallel.clip.keys import ClipLayout, KeySet
from partsong.parallel.exchange.key_blocks import empty_block, unpack_keys_values, write_keys_values
from partsong.parallel.ranks.collectives import all_gather, exchange
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.shards import split_sizes

__all__ = ["Emphasis", "FrameAttention", "Shared"]

KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Shared:
    """Holds keys and values `[B, Hkv, L, D]` that are the same on every rank: those of the text.

    Attributes:
        k: the keys.
        v: the values.
        mask: `[B, 1, 1, L]`; bool keeps True, float is added to the logits; None masks nothing.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Emphasis:
    """Holds the numbers that are added to the logits of frames.

    Attributes:
        near: added for frames within the window, at timesteps below `since`.
        far: added for sampled frames, at the other timesteps.
        since: a timestep, on the scale the model is called with.
    """

    near: float = 0.0
    far: float = 0.0
    since: float = 0.0

    def at(self, timestep: float) -> tuple[float, float]:
        """Returns what is added at a timestep to frames within the window, and to sampled ones."""
        return (0.0, self.far) if timestep >= self.since else (self.near, 0.0)


class FrameAttention:
    """Attends between frames that lie on several ranks, or on one.

    Args:
        axis: the ranks, in the order of the video.
        model: class name of the model, for messages.
        window: frames to each side that are seen individually; None sees all of them.
        stride: length of a block of the other frames; None leaves them out.
        emphasis: what is added to the logits, and when.
    """

    def __init__(self, axis: Axis, model: str, window: int | None, stride: int | None, emphasis: Emphasis) -> None:
        self.axis, self.window, self.stride, self.model = axis, window, stride, model
        self._emphasis = emphasis
        self.layout = self._layout(axis.size)
        self.batch = 1
        self.emphasis = (0.0, 0.0)
        self._known: tuple[Any, ...] = ()
        self._bias: Tensor | None = None
        # Bytes in all attentions of a call: one frame's keys and values, and what is gathered.
        self._frame_bytes = self._gathered_bytes = 0

    def _layout(self, frames: int) -> ClipLayout:
        keys = KeySet(frames, self.window, self.stride)
        return ClipLayout(keys, split_sizes(frames, self.axis.size))

    @property
    def own(self) -> slice:
        """Returns this rank's frames."""
        clip = self.layout.clip(self.axis.index)
        return slice(clip.start, clip.stop)

    def begin(self, frames: int, batch: int, reach: int = 1) -> None:
        """Distributes the frames of a call over the ranks.

        Args:
            frames: frames of the video, as the model attends to them.
            batch: number of videos in the call.
            reach: fewest frames a clip may have.

        Raises:
            UnsupportedError: there are too few frames for the number of ranks.
        """
        if frames < reach * self.axis.size:
            each = "" if reach == 1 else f" of at least {reach} frames, which its convolutions reach"
            raise UnsupportedError(
                f"{self.model}: {frames} frames cannot be cut into {self.axis.size} clips{each}; use at most "
                f"{max(1, frames // reach)} ranks or {reach * self.axis.size} frames (as the model sees them: a video "
                "autoencoder may put several into one)"
            )
        self.layout, self.batch = self._layout(frames), batch
        self._frame_bytes = self._gathered_bytes = 0

    def note_time(self, timestep: Any) -> None:
        """Notes the timestep of a call, which selects the emphasis."""
        if not (self._emphasis.near or self._emphasis.far):
            return  # reading it would make a GPU wait
        times = torch.as_tensor(timestep)
        now = 0.0 if times.is_meta else float(times.max())  # given frames have a timestep of 0
        self.emphasis = self._emphasis.at(now)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, unit: int, scale: float | None, shared: Shared | None = None
    ) -> Tensor:
        """Attends from this rank's frames to all frames they see.

        Args:
            q: queries `[B, Hq, F * unit, D]` of the rank's F frames.
            k: their keys.
            v: their values.
            unit: tokens of a frame.
            scale: logit scale; None is ``D ** -0.5``.
            shared: what every frame sees besides, the same on every rank.
        """
        k, v = self._fetch(k, v, unit)
        if unit == 1 and shared is None:
            # With one token per frame, one call with a table of weights beats many small calls.
            return attention(q, k, v, bias=self._weights(q), scale=scale)[0]
        parts = []
        for frames, runs in self.layout.runs(self.axis.index, self.emphasis):
            rows = q[:, :, frames.start * unit : frames.stop * unit]
            segments = [Segment(k[:, :, s * unit : e * unit], v[:, :, s * unit : e * unit], w) for s, e, w in runs]
            parts.append(_attention(rows, segments, scale, shared)[0])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _weights(self, like: Tensor) -> Tensor | None:
        """Returns the numbers to add to the logits `[own frames, seen frames]`; None where all are 0."""
        known = (self.layout, self.emphasis, like.dtype, like.device)
        if self._known != known:
            table = self.layout.table(self.axis.index, self.emphasis)
            dtype = torch.promote_types(like.dtype, torch.float32)
            is_plain = not any(weight for row in table for weight in row)
            self._known, self._bias = known, None if is_plain else torch.tensor(table, dtype=dtype, device=like.device)
        return self._bias

    def _fetch(self, k: Tensor, v: Tensor, unit: int) -> KeysValues:
        """Brings the keys and values of all frames that this rank's frames see, in the order of the video."""
        me, (batch, heads, _, dim) = self.axis.index, k.shape
        self._frame_bytes += 2 * unit * batch * heads * dim * k.element_size()
        if self.axis.size == 1:
            return k, v
        counts = [len(self.layout.sent(peer, me)) * unit for peer in range(self.axis.size)]
        block = empty_block(k, sum(counts))
        parts = block.split(counts)
        write_keys_values(parts[me], k, v)
        peers = [peer for peer in range(self.axis.size) if peer != me]
        sends = {peer: self._picked(parts[me], peer, unit) for peer in peers}
        exchange(self.axis, sends, {peer: parts[peer] for peer in peers}, name="keys and values of frames").wait()
        return unpack_keys_values(block)

    def _picked(self, own: Tensor, peer: int, unit: int) -> Tensor:
        """Returns the rows of this rank's frames that a peer sees, in one piece."""
        me = self.axis.index
        start = self.layout.clip(me).start
        frames = [frame - start for frame in self.layout.sent(me, peer)]
        if frames and frames[-1] - frames[0] == len(frames) - 1:
            return own[frames[0] * unit : (frames[-1] + 1) * unit]
        return torch.cat([own[:0], *(own[frame * unit : (frame + 1) * unit] for frame in frames)])

    def attend_to_all(self, q: Tensor, own: KeysValues, shared: Shared, scale: float | None) -> Tensor:
        """Attends with queries that every rank has to the frames of all ranks and to keys that every rank has.

        Each rank attends to its own frames; the results and their log-sum-exps are gathered and merged.

        Args:
            q: queries `[B, Hq, L, D]`, the same on every rank.
            own: keys and values of this rank's frames.
            shared: keys and values that every rank has.
            scale: logit scale.
        """
        among = _attention(q, [], scale, shared)
        out, lse = attention(q, *own, scale=scale)
        part = torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], dim=-1)
        every = part.new_empty((self.axis.size, *part.shape))
        every[self.axis.index] = part
        all_gather(self.axis, every, [1] * self.axis.size, name="attention of the text").wait()
        self._gathered_bytes += part.numel() * part.element_size()
        parts = [(each[..., :-1], each[..., -1]) for each in every]
        return merge([*parts, (among[0].to(lse.dtype), among[1])])[0].to(q.dtype)

    def predict(self, batch: int, index: int) -> int:
        """Returns the bytes the rank at `index` sends in all attentions of a call of `batch` videos."""
        everyone = self._gathered_bytes * (self.axis.size - 1)
        return batch * (self.layout.num_sent(index) * self._frame_bytes + everyone) // self.batch


def _attention(
    q: Tensor, segments: Sequence[Segment], scale: float | None, shared: Shared | None
) -> tuple[Tensor, Tensor]:
    """Attends to frames and to the shared keys, with the mask of the shared keys."""
    if shared is None:
        return attention(q, segments=segments, scale=scale)
    every, mask = [*segments, Segment(shared.k, shared.v)], shared.mask
    if mask is None:
        return attention(q, segments=every, scale=scale)
    keeps = mask.dtype == torch.bool
    padded = F.pad(mask, (sum(segment.length for segment in segments), 0), value=keeps)
    keep, bias = (padded, None) if keeps else (None, padded)
    return attention(q, segments=every, mask=keep, bias=bias, scale=scale)
