"""Measures a text-to-image pipeline on the shapes task: fresh captions, pictures, facts read back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from partsong_zoo.scoring import FactScore, sample
from partsong_zoo.shapes.grammar import captions
from partsong_zoo.shapes.reader import facts

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapesScore(FactScore):
    """Holds facts read back from pictures.

    Attributes:
        images: Their pictures `[num, height, width, 3]`, float in [0, 1].
    """

    images: NDArray[np.float32]

    def grid(self, columns: int = 10, rows: int = 6) -> NDArray[np.float32]:
        """Puts the first pictures side by side, `[rows * height, columns * width, 3]`; white fills short rows."""
        shown = self.images[: columns * rows]
        missing = -len(shown) % columns
        shown = np.concatenate([shown, np.ones((missing, *shown.shape[1:]), shown.dtype)])
        lines = shown.reshape(-1, columns, *shown.shape[1:])
        return np.concatenate([np.concatenate(list(line), axis=1) for line in lines])

    def save_grid(self, path: Path) -> None:
        """Writes `grid`, twice as large, to a file."""
        from PIL import Image

        grid = Image.fromarray(np.rint(self.grid() * 255).astype(np.uint8))
        grid.resize((2 * grid.width, 2 * grid.height), Image.Resampling.NEAREST).save(path)


def score(
    pipeline: DiffusionPipeline, num: int = 200, *, seed: int = 0, batch: int = 20, **arguments: Any
) -> ShapesScore:
    """Samples a picture for each of `num` fresh captions and reads the facts back.

    Picture i is drawn with a generator of its own, seeded `seed + i`.

    Args:
        pipeline: A text-to-image pipeline.
        num: How many captions.
        seed: Draws captions and noise.
        batch: Captions per call.
        **arguments: Passed to the pipeline's call, such as a zoo row's `defaults`.

    Returns:
        Captions, pictures and facts.
    """
    texts = captions(num, seed)
    images = sample(pipeline, texts, lambda output: output.images, seed=seed, batch=batch, **arguments)
    held = [facts(text, image) for text, image in zip(texts, images, strict=True)]
    return ShapesScore(captions=texts, images=images, facts=held)
