"""Measures a text-to-video pipeline on the motion task: fresh captions, videos, facts read back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from partsong_zoo.motion.grammar import captions
from partsong_zoo.motion.measures import facts, identity_kept
from partsong_zoo.scoring import FactScore, sample

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class MotionScore(FactScore):
    """Holds facts read back from videos.

    Attributes:
        videos: Their videos `[num, frames, 32, 32, 3]`, float in [0, 1].
        identity: For each caption the fraction of frames in which every object keeps its colour, shape and size.
    """

    videos: NDArray[np.float32]
    identity: list[float]

    @property
    def identity_kept(self) -> float:
        """Returns the mean of `identity`."""
        return float(np.mean(self.identity))

    def sheet(self, rows: int = 12, columns: int = 11) -> NDArray[np.float32]:
        """Puts evenly spaced frames of the first videos side by side, each in a row: `[rows * 32, columns * 32, 3]`."""
        shown = self.videos[:rows]
        frames = np.linspace(0, shown.shape[1] - 1, min(columns, shown.shape[1])).round().astype(int)
        return np.concatenate([np.concatenate(list(video[frames]), axis=1) for video in shown])

    def save_sheet(self, path: Path) -> None:
        """Writes `sheet`, three times as large, to a file."""
        from PIL import Image

        sheet = Image.fromarray(np.rint(self.sheet() * 255).astype(np.uint8))
        sheet.resize((3 * sheet.width, 3 * sheet.height), Image.Resampling.NEAREST).save(path)

    def report(self) -> dict[str, Any]:
        """Returns the measures as a flat row, rounded: ``facts_read all_right by_kind identity_kept``."""
        return {**FactScore.report(self), "identity_kept": round(self.identity_kept, 4)}


def score(
    pipeline: DiffusionPipeline, num: int = 100, *, seed: int = 0, batch: int = 10, **arguments: Any
) -> MotionScore:
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
    texts = captions(num, seed)
    videos = sample(pipeline, texts, lambda output: output.frames, seed=seed, batch=batch, **arguments)
    pairs = list(zip(texts, videos, strict=True))
    return MotionScore(
        captions=texts,
        videos=videos,
        facts=[facts(text, video) for text, video in pairs],
        identity=[identity_kept(text, video) for text, video in pairs],
    )
