"""Keeps the keys that a block of frames sees: versions of its neighbours' keys, or a window of the past and a sink."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.samplers.long_video.staged_frames import KeysAround

__all__ = ["INPUT", "CausalKeys", "NeighbourKeys", "Visit"]

#: Key, in place of an attention's number, for the input of a block's call.
INPUT = -1

#: Keys and values `[B, H, L, D]` of some frames.
_KeyValues = tuple[Tensor, Tensor]


def _bytes(pairs: Iterable[_KeyValues]) -> int:
    return sum(tensor.nbytes for pair in pairs for tensor in pair)


def _part(k: Tensor, v: Tensor, tokens: slice) -> _KeyValues:
    """Copies some tokens, so that the rest of the tensors can be freed."""
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
    """Keeps keys at the ends of every block for one read by the neighbour, in versions independent of the schedule.

    A block at step t sees the last frames of the block before as they were at step t, and the first frames of the
    block after as they were `lag` steps earlier. Both are known when they are read, whatever the number of ranks.
    Where the block before is computed again, its last frames lie in front of the block's own in every call, and are
    kept as they entered the model instead of as keys.

    Args:
        frames: latent frames of every block.
        context: frames that are seen of either neighbour, if it has that many.
        lag: steps by which each block lags behind the one before.
        num_steps: denoising steps.
        recomputes: whether the block before is computed again.

    Attributes:
        peak_bytes: most bytes held at a time.
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
        self._held: dict[tuple[Visit, int, bool], _KeyValues] = {}
        self._size = 0

    @property
    def frame_bytes(self) -> int:
        """Returns the bytes of one frame's keys and values in one call on this rank; 0 before the first."""
        return sum(self._layer_bytes.values())

    def in_front(self, block: int) -> int:
        """Returns how many frames of the block before are computed again with a block."""
        return min(self.context, self.frames[block - 1]) if self.recomputes and block > 0 else 0

    def widened(self, sample: Tensor, dim: int) -> Tensor:
        """Returns the model's input for the current block: the previous block's last frames, and its own.

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
        """Keeps the ends of the current block that a neighbour will read."""
        block, frames, in_front = self.visit.block, self.frames[self.visit.block], self.in_front(self.visit.block)
        per_frame = k.shape[2] // (in_front + frames)
        self._layer_bytes[layer] = _bytes([(k, v)]) // (in_front + frames)
        tokens = per_frame * min(self.context, frames)
        if tokens and block + 1 < len(self.frames) and not self.recomputes:
            self._put((self.visit, layer, True), _part(k, v, slice(k.shape[2] - tokens, None)))
        if tokens and block > 0 and self.visit.step + self.lag < self.num_steps:
            start = in_front * per_frame
            self._put((self.visit, layer, False), _part(k, v, slice(start, start + tokens)))

    def drop(self, block: int) -> None:
        """Forgets unread keys of blocks up to this one, such as those left when guidance was switched off."""
        # The last frames of this block stay, for the next one.
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

    def _put(self, key: tuple[Visit, int, bool], pair: _KeyValues) -> None:
        self._held[key] = pair
        self._size += _bytes([pair])
        self.peak_bytes = max(self.peak_bytes, self._size)

    def _take(self, key: tuple[Visit, int, bool]) -> _KeyValues | None:
        pair = self._held.pop(key, None)
        self._size -= _bytes([] if pair is None else [pair])
        return pair


@dataclass(slots=True)
class _Past:
    """Holds the past of one attention at one noise level: the sink, and the newest blocks, oldest first."""

    sink: _KeyValues | None = None
    window: deque[_KeyValues] = field(default_factory=deque)


class CausalKeys:
    """Keeps keys of the past, in one bounded cache per denoising step, each at its own noise level.

    Args:
        frames: latent frames of a block.
        window: blocks of the past that are seen.
        sink: first frames of the video that are always seen. Their keys are kept and rotated to lie just before
            the window, so no distance exceeds those in training.

    Attributes:
        visit: the current call.
        peak_bytes: the most that was held.
    """

    def __init__(self, frames: int, window: int, sink: int) -> None:
        self.frames, self.window, self.sink = frames, window, sink
        self.visit = Visit(0, 0)
        self.peak_bytes = 0
        self._past: dict[tuple[int, int, int], _Past] = {}

    def read(self, layer: int) -> KeysAround:
        """Returns the sink, and the window before the current block."""
        past = self._past.get(self._key(layer))
        if past is None:
            return []
        held = len(past.window)
        around = [(*pair, (number - held) * self.frames) for number, pair in enumerate(past.window)]
        # While the first block is in the window, its frames are seen there.
        if past.sink is not None and self.visit.block > held:
            around.insert(0, (*past.sink, -held * self.frames - self.sink))
        return around

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Adds the current block, and drops the oldest."""
        past = self._past.setdefault(self._key(layer), _Past())
        if past.sink is None and self.sink:
            past.sink = _part(k, v, slice(0, k.shape[2] // self.frames * self.sink))
        past.window.append((k, v))
        if len(past.window) > self.window:
            past.window.popleft()
        self.peak_bytes = max(self.peak_bytes, self.held_bytes())

    def held_bytes(self) -> int:
        """Counts the bytes of all caches."""
        pairs = [pair for past in self._past.values() for pair in (*past.window, *([past.sink] if past.sink else []))]
        return _bytes(pairs)

    def state(self) -> dict[str, Tensor]:
        """Returns all that is held, by names that `load` reads."""
        tensors: dict[str, Tensor] = {}
        for (layer, step, branch), past in self._past.items():
            held = {f"{place:06d}": pair for place, pair in enumerate(past.window)}
            held |= {"sink": past.sink} if past.sink else {}
            for place, (k, v) in held.items():
                tensors |= {f"{layer}.{step}.{branch}.{place}.k": k, f"{layer}.{step}.{branch}.{place}.v": v}
        return tensors

    def load(self, tensors: Mapping[str, Tensor], owns: Callable[[int], bool], steps: Collection[int]) -> None:
        """Takes over what another run held, for the attentions of this rank and some steps."""
        for name in sorted(tensors):  # the window in order
            layer, step, branch, place, kind = name.split(".")
            if kind != "k" or not owns(int(layer)) or int(step) not in steps:
                continue
            past = self._past.setdefault((int(layer), int(step), int(branch)), _Past())
            pair = (tensors[name], tensors[f"{name[:-1]}v"])
            if place == "sink":
                past.sink = pair
            else:
                past.window.append(pair)

    def _key(self, layer: int) -> tuple[int, int, int]:
        return layer, self.visit.step, self.visit.branch
