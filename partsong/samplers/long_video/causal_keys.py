"""Keeps the keys of the past that a block of frames sees: a window of blocks, and a sink."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from partsong.samplers.long_video.neighbour_keys import KeyValues, Visit, size_of, tokens_of
from partsong.samplers.long_video.staged_frames import KeysAround

__all__ = ["CausalKeys"]


@dataclass(slots=True)
class _Past:
    """Holds what one attention at one noise level has seen: the sink, and the newest blocks, oldest first."""

    sink: KeyValues | None = None
    window: deque[KeyValues] = field(default_factory=deque)


class CausalKeys:
    """Keeps keys of the past, in one bounded cache per denoising step, each at its own noise level.

    Args:
        frames: latent frames of a block.
        window: blocks of the past that are seen.
        sink: first frames of the video that are always seen. They stay where they were first computed and are turned
            to lie just before the window, so that nothing gets farther away than in training.

    Attributes:
        visit: the active call.
        peak_bytes: the most that was held.
    """

    def __init__(self, frames: int, window: int, sink: int) -> None:
        self.frames, self.window, self.sink = frames, window, sink
        self.visit = Visit(0, 0)
        self.peak_bytes = 0
        self._past: dict[tuple[int, int, int], _Past] = {}

    def around(self, layer: int, k: Tensor, v: Tensor) -> KeysAround:
        """Returns what the active block sees in one attention, and keeps its own keys."""
        around = self.read(layer)
        self.keep(layer, k, v)
        return around

    def read(self, layer: int) -> KeysAround:
        """Returns the sink, and the window that comes before the active block."""
        past = self._past.get(self._key(layer))
        if past is None:
            return []
        held = len(past.window)
        around = [(*pair, (number - held) * self.frames) for number, pair in enumerate(past.window)]
        # While the first block is still in the window its frames are seen there.
        if past.sink is not None and self.visit.block > held:
            around.insert(0, (*past.sink, -held * self.frames - self.sink))
        return around

    def keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Takes in the active block, and lets the oldest go."""
        past = self._past.setdefault(self._key(layer), _Past())
        if past.sink is None and self.sink:
            past.sink = tokens_of(k, v, slice(0, k.shape[2] // self.frames * self.sink))
        past.window.append((k, v))
        if len(past.window) > self.window:
            past.window.popleft()
        self.peak_bytes = max(self.peak_bytes, self.held_bytes())

    def held_bytes(self) -> int:
        """Counts the bytes of all caches."""
        pairs = [pair for past in self._past.values() for pair in (*past.window, *([past.sink] if past.sink else []))]
        return size_of(pairs)

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
