"""The quality of a text-to-video pipeline on the motion task: fresh captions, videos, facts read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from partsong.zoo.motion.grammar import captions
from partsong.zoo.motion.measures import facts, identity_kept

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Facts read back from videos.

    Attributes:
        captions: The captions.
        videos: Their videos `[num, frames, 32, 32, 3]`, float in [0, 1].
        facts: Per caption its facts and whether each holds.
        identity: Per caption the fraction of frames in which every object keeps its colour, shape and size.
    """

    captions: list[str]
    videos: NDArray[np.float32]
    facts: list[dict[str, bool]]
    identity: list[float]

    @property
    def facts_read(self) -> float:
        """The fraction of all facts of all captions that hold."""
        return float(np.mean([held for row in self.facts for held in row.values()]))

    @property
    def all_right(self) -> float:
        """The fraction of captions all of whose facts hold."""
        return float(np.mean([all(row.values()) for row in self.facts]))

    @property
    def identity_kept(self) -> float:
        """The mean of `identity`."""
        return float(np.mean(self.identity))

    def by_kind(self) -> dict[str, tuple[float, int]]:
        """Fraction that holds and number of facts, for `count`, `colour`, `shape`, `size`, `direction`, `speed`."""
        kinds: dict[str, list[bool]] = {}
        for row in self.facts:
            for name, held in row.items():
                kinds.setdefault(name.split(":")[0], []).append(held)
        return {kind: (float(np.mean(held)), len(held)) for kind, held in kinds.items()}

    def sheet(self, rows: int = 12, columns: int = 11) -> NDArray[np.float32]:
        """Frames of the first videos, evenly spaced, one video per row: `[rows * 32, columns * 32, 3]`."""
        shown = self.videos[:rows]
        frames = np.linspace(0, shown.shape[1] - 1, min(columns, shown.shape[1])).round().astype(int)
        return np.concatenate([np.concatenate(list(video[frames]), axis=1) for video in shown])


def score(pipeline: DiffusionPipeline, num: int = 100, *, seed: int = 0, batch: int = 10, **arguments: Any) -> Score:
    """Samples a video for each of `num` fresh captions and reads the facts back.

    Video i is drawn with a generator of its own, seeded `seed + i`.

    Args:
        pipeline: A text-to-video pipeline.
        num: How many captions.
        seed: Draws captions and noise.
        batch: Captions per call.
        **arguments: Passed to the pipeline's call, such as a zoo row's `defaults`.

    Returns:
        Captions, videos and facts.
    """
    import torch

    call: Any = pipeline  # the base class has no call; every text-to-video pipeline does
    texts, videos = captions(num, seed), []
    for first in range(0, num, batch):
        part = texts[first : first + batch]
        noise = [torch.Generator().manual_seed(seed + first + index) for index in range(len(part))]
        videos.append(np.asarray(call(part, generator=noise, output_type="np", **arguments).frames))
    stacked = np.concatenate(videos)
    pairs = list(zip(texts, stacked, strict=True))
    return Score(
        captions=texts,
        videos=stacked,
        facts=[facts(text, video) for text, video in pairs],
        identity=[identity_kept(text, video) for text, video in pairs],
    )
