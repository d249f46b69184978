"""Keeps the keys at the ends of every block of frames, for versioned reads by its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.samplers.long_video.staged_frames import KeysAround

__all__ = ["INPUT", "KeyValues", "NeighbourKeys", "Visit", "size_of", "tokens_of"]

#: Stands in the place of an attention's number for what a block's call was given.
INPUT = -1

#: Keys and values `[B, H, L, D]` of some frames.
KeyValues = tuple[Tensor, Tensor]


def size_of(pairs: Iterable[KeyValues]) -> int:
    """Counts the bytes of some keys and values."""
    return sum(tensor.nbytes for pair in pairs for tensor in pair)


def tokens_of(k: Tensor, v: Tensor, tokens: slice) -> KeyValues:
    """Copies some tokens, so that the rest of the tensors is not kept alive."""
    return k[:, :, tokens].clone(), v[:, :, tokens].clone()


@dataclass(frozen=True, slots=True)
class Visit:
    """Names one call of the model for one block of frames.

    Attributes:
        block: number of the block.
        step: its denoising step.
        branch: number of the call within the step.
    """

    block: int
    step: int
    branch: int = 0


class NeighbourKeys:
    """Keeps keys at the ends of every block, each read once by the neighbour, in a version that no schedule changes.

    A block at step t sees the last frames of the block before as they were at step t, and the first frames of the
    block after as they were `lag` steps earlier. Both are known when they are read, whatever the number of ranks.
    Where the block before is computed again, its last frames lie in front of the block's own in every call, and are
    kept as they entered the model instead of as keys.

    Args:
        frames: latent frames of every block.
        context: frames that are seen of either neighbour, or all it has.
        lag: steps by which each block lags the one before.
        num_steps: denoising steps.
        recomputes: whether the block before is computed again.

    Attributes:
        peak_bytes: the most that was held.
        frame_bytes: bytes of the keys and values of one frame in one call of the model on this rank.
    """

    def __init__(
        self, frames: Sequence[int], context: int, lag: int, num_steps: int, *, recomputes: bool = False
    ) -> None:
        self.frames, self.context, self.lag, self.num_steps = tuple(frames), context, lag, num_steps
        self.recomputes = recomputes
        self._layer_bytes: dict[int, int] = {}
        self.visit = Visit(0, 0)
        self.peak_bytes = 0
        self._held: dict[tuple[Visit, int, bool], KeyValues] = {}
        self._size = 0

    @property
    def frame_bytes(self) -> int:
        """Returns the bytes of one frame's keys and values in one call on this rank; 0 before the first."""
        return sum(self._layer_bytes.values())

    def in_front(self, block: int) -> int:
        """Returns how many frames of the block before are computed again with a block."""
        return min(self.context, self.frames[block - 1]) if self.recomputes and block > 0 else 0

    def widened(self, sample: Tensor, dim: int) -> Tensor:
        """Returns what enters the model for the active block: what the block before was given last, and its own.

        Args:
            sample: its own frames.
            dim: of the frames, or of the tokens of all of them.

        Raises:
            UnsupportedError: the block before made fewer calls in this step.
        """
        if not self.recomputes:
            return sample
        block, step, branch = self.visit.block, self.visit.step, self.visit.branch
        frames = min(self.context, self.frames[block])
        if frames and block + 1 < len(self.frames):
            each = sample.shape[dim] // self.frames[block]
            last = sample.narrow(dim, (self.frames[block] - frames) * each, frames * each).clone()
            self._put((self.visit, INPUT, True), (last, last.new_empty(0)))
        if not self.in_front(block):
            return sample
        before = self._take((Visit(block - 1, step, branch), INPUT, True))
        if before is None:
            raise UnsupportedError(
                f"call {branch} of step {step} has no twin in the block before, whose guidance ended earlier; use "
                "DualParallel(previous='cached')"
            )
        return torch.cat([before[0], sample], dim=dim)

    def around(self, layer: int, k: Tensor, v: Tensor) -> KeysAround:
        """Returns what the active block sees in one attention, and keeps its own keys."""
        around = self.read(layer)
        self.keep(layer, k, v)
        return around

    def read(self, layer: int) -> KeysAround:
        """Returns the neighbours' keys for one attention; each version is read once and dropped."""
        block, step, branch = self.visit.block, self.visit.step, self.visit.branch
        before = self._take((Visit(block - 1, step, branch), layer, True))
        after = self._take((Visit(block + 1, step - self.lag, branch), layer, False))
        around = []
        if before is not None:
            around.append((*before, -self.frames[block - 1]))
        if after is not None:
            later = self.in_front(block) + self.frames[block] - self.in_front(block + 1)
            around.append((*after, later))
        return around

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keeps the ends of the active block that a neighbour will read."""
        block, frames, in_front = self.visit.block, self.frames[self.visit.block], self.in_front(self.visit.block)
        per_frame = k.shape[2] // (in_front + frames)
        self._layer_bytes[layer] = size_of([(k, v)]) // (in_front + frames)
        tokens = per_frame * min(self.context, frames)
        if tokens and block + 1 < len(self.frames) and not self.recomputes:
            self._put((self.visit, layer, True), tokens_of(k, v, slice(k.shape[2] - tokens, None)))
        if tokens and block > 0 and self.visit.step + self.lag < self.num_steps:
            start = in_front * per_frame
            self._put((self.visit, layer, False), tokens_of(k, v, slice(start, start + tokens)))

    def drop(self, block: int) -> None:
        """Forgets what was not read of blocks up to this one: a guidance that was switched off leaves some."""
        # What the next block reads stays: the last frames of this one.
        for visit, layer, last in [key for key in self._held if key[0].block < block + (not key[2])]:
            self._take((visit, layer, last))

    def state(self) -> dict[str, Tensor]:
        """Returns all that is held, by names that `load` reads."""
        return {
            f"{v.block}.{v.step}.{v.branch}.{layer}.{int(last)}.{name}": tensor
            for (v, layer, last), pair in self._held.items()
            for name, tensor in zip("kv", pair, strict=True)
        }

    def load(self, tensors: Mapping[str, Tensor], owns: Callable[[int], bool]) -> None:
        """Takes over what another run held, for the attentions of this rank."""
        for name, k in tensors.items():
            *numbers, kind = name.split(".")
            block, step, branch, layer, last = map(int, numbers)
            if kind == "k" and (layer == INPUT or owns(layer)):
                self._put((Visit(block, step, branch), layer, bool(last)), (k, tensors[f"{name[:-1]}v"]))

    def _put(self, key: tuple[Visit, int, bool], pair: KeyValues) -> None:
        self._held[key] = pair
        self._size += size_of([pair])
        self.peak_bytes = max(self.peak_bytes, self._size)

    def _take(self, key: tuple[Visit, int, bool]) -> KeyValues | None:
        pair = self._held.pop(key, None)
        self._size -= size_of([] if pair is None else [pair])
        return pair
