"""Keeps small tensors of many layers in flat buffers: written one by one, sent together, read one step later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partsong.parallel.exchange.wires import Wire, message_room
from partsong.parallel.ranks.collectives import Pending, exchange
from partsong.parallel.ranks.mesh import Axis

__all__ = ["CHUNK", "Letter", "Mailbox"]

#: Numbers that share a scale where there is a wire. Every layer starts a chunk, so its bytes do not depend on others.
CHUNK = 64

#: Shapes by peer.
Shapes = Mapping[int, torch.Size]


@dataclass(frozen=True, slots=True)
class Letter:
    """Holds the shapes that one layer sends to each peer and receives from it."""

    sends: Shapes
    recvs: Shapes


class _Flat:
    """Holds one flat buffer per peer, with a view of every layer's tensor in it; each starts a chunk."""

    def __init__(self, shapes: Mapping[int, Shapes], like: Tensor, chunk: int = 1) -> None:
        self.buffers: dict[int, Tensor] = {}
        self._views: dict[int, dict[int, Tensor]] = {}
        by_peer: dict[int, dict[int, torch.Size]] = {}
        for layer, layer_shapes in shapes.items():
            for peer, shape in layer_shapes.items():
                by_peer.setdefault(peer, {})[layer] = shape
        for peer, layers in by_peer.items():
            sizes = [-(-shape.numel() // chunk) * chunk for shape in layers.values()]
            self.buffers[peer] = like.new_zeros(sum(sizes))
            parts = self.buffers[peer].split(sizes)
            for (layer, shape), part in zip(layers.items(), parts, strict=True):
                self._views.setdefault(layer, {})[peer] = part[: shape.numel()].view(shape)

    def write(self, layer: int, tensors: Mapping[int, Tensor]) -> None:
        for peer, view in self._views.get(layer, {}).items():
            view.copy_(tensors[peer])

    def read(self, layer: int) -> dict[int, Tensor]:
        return self._views.get(layer, {})


class Mailbox:
    """Carries the letters of a run of layers, which every rank visits once per step and in the same order.

    A step first opens the box. This waits for the messages of the previous step and, where two older steps are held,
    extrapolates. Then each layer reads and writes its tensors, and the last layer's write posts all of them. No
    memory is allocated after construction.

    Args:
        axis: the ranks.
        letters: what each layer sends and receives, in order of execution.
        past: what each layer received in the last steps, newest last.
        like: a tensor of the letters' type and device.
        name: what errors call the messages.
        keep: steps to look back on, 1 or 2.
        wire: how letters are written into messages; None sends them as they are. Residuals are relative to what was
            sent last.
        sent: what each layer sent in the last step; needed where there is a wire.
    """

    def __init__(
        self,
        axis: Axis,
        letters: Mapping[int, Letter],
        past: Mapping[int, Sequence[Mapping[int, Tensor]]],
        *,
        like: Tensor,
        name: str,
        keep: int,
        wire: Wire | None = None,
        sent: Mapping[int, Mapping[int, Tensor]] | None = None,
    ) -> None:
        self.axis, self.name, self.layers = axis, name, tuple(letters)
        self.wire, chunk = wire, 1 if wire is None else CHUNK
        outgoing = {layer: letter.sends for layer, letter in letters.items()}
        self._outgoing = _Flat(outgoing, like, chunk)
        # What the peers know of this rank's values, where there is a wire.
        self._sent = _Flat(outgoing, like, chunk) if sent is not None else self._outgoing
        for layer, tensors in (sent or {}).items():
            self._sent.write(layer, tensors)
        self._messages: dict[int, Tensor] = {}
        shapes = {layer: letter.recvs for layer, letter in letters.items()}
        known = min([keep, *map(len, past.values())])
        self._keep = keep
        self._held = [_Flat(shapes, like, chunk) for _ in range(known)]  # newest last
        # Arriving values must not overwrite those being read, so there is one buffer more than is read.
        self._free = [_Flat(shapes, like, chunk) for _ in range(keep + 1 - known)]
        for layer, steps in past.items():
            for flat, tensors in zip(reversed(self._held), reversed(steps), strict=False):
                flat.write(layer, tensors)
        self._incoming: _Flat | None = None
        self._pending: Pending | None = None
        self._now = self._held[-1]
        self._opened = -1

    def open(self, ratio: float | None, step: int) -> None:
        """Gets the box ready for a step; later calls in the same step do nothing.

        Args:
            ratio: how far to extrapolate, in units of the last step; None reads the last step as it is.
            step: the step's number.
        """
        if step == self._opened:
            return
        self._opened = step
        self.settle()
        self._now = self._held[-1]
        if ratio is not None and len(self._held) > 1:
            # The older step is not needed any more: last + ratio * (last - older) is written over it.
            older, last = self._held.pop(0), self._held[-1]
            for peer, buffer in older.buffers.items():
                buffer.lerp_(last.buffers[peer], 1.0 + ratio)
            self._now = older
            self._free.append(older)

    def read(self, layer: int) -> dict[int, Tensor]:
        """Returns what each peer sent for a layer, as views into the box."""
        return self._now.read(layer)

    def write(self, layer: int, tensors: Mapping[int, Tensor], *, post: bool) -> None:
        """Puts a layer's tensors into the outgoing buffers; the run's last layer posts them all if `post` is set."""
        self._outgoing.write(layer, tensors)
        if post and layer == self.layers[-1]:
            self._incoming = next(flat for flat in self._free if flat is not self._now)
            self._free.remove(self._incoming)
            if self.wire is None:
                sends, recvs = self._outgoing.buffers, self._incoming.buffers
            else:
                sends, recvs = self._encoded(self.wire), self._rooms(self.wire, self._incoming)
                self._messages = recvs
            self._pending = exchange(self.axis, sends, recvs, name=self.name)

    def _encoded(self, wire: Wire) -> dict[int, Tensor]:
        """Encodes the message to each peer, and applies it here as the peer does."""
        messages = {}
        for peer, values in self._outgoing.buffers.items():
            base = self._sent.buffers[peer]
            messages[peer] = wire.encode((values - base if wire.is_residual else values).view(-1, 1, CHUNK))
            base.copy_(_decoded(wire, messages[peer], base))
        return messages

    def _rooms(self, wire: Wire, incoming: _Flat) -> dict[int, Tensor]:
        return {
            peer: message_room(wire, (len(rows) // CHUNK, 1, CHUNK), rows.device)
            for peer, rows in incoming.buffers.items()
        }

    def settle(self) -> None:
        """Waits for the pending letters."""
        if self._pending is None or self._incoming is None:
            return
        self._pending.wait()
        if self.wire is not None:
            for peer, message in self._messages.items():
                self._incoming.buffers[peer].copy_(_decoded(self.wire, message, self._held[-1].buffers[peer]))
        self._held.append(self._incoming)
        if len(self._held) > self._keep:
            self._free.append(self._held.pop(0))
        self._pending = self._incoming = None


def _decoded(wire: Wire, message: Tensor, base: Tensor) -> Tensor:
    """Decodes a message into values; both ends know `base`."""
    values = wire.decode(message, (len(base) // CHUNK, 1, CHUNK)).view(-1).to(base.dtype)
    return base + values if wire.is_residual else values
