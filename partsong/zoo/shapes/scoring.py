"""The quality of a text-to-image pipeline on the shapes task: fresh captions, pictures, facts read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from partsong.zoo.shapes.grammar import captions
from partsong.zoo.shapes.reader import facts

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Facts read back from pictures.

    Attributes:
        captions: The captions.
        images: Their pictures `[num, height, width, 3]`, float in [0, 1].
        facts: Per caption its facts and whether each holds.
    """

    captions: list[str]
    images: NDArray[np.float32]
    facts: list[dict[str, bool]]

    @property
    def facts_read(self) -> float:
        """The fraction of all facts of all captions that hold."""
        return float(np.mean([held for row in self.facts for held in row.values()]))

    @property
    def all_right(self) -> float:
        """The fraction of captions all of whose facts hold."""
        return float(np.mean([all(row.values()) for row in self.facts]))

    def grid(self, columns: int = 10, rows: int = 6) -> NDArray[np.float32]:
        """The first pictures side by side, `[rows * height, columns * width, 3]`; short rows are filled with white."""
        shown = self.images[: columns * rows]
        missing = -len(shown) % columns
        shown = np.concatenate([shown, np.ones((missing, *shown.shape[1:]), shown.dtype)])
        lines = shown.reshape(-1, columns, *shown.shape[1:])
        return np.concatenate([np.concatenate(list(line), axis=1) for line in lines])

    def by_kind(self) -> dict[str, tuple[float, int]]:
        """Fraction that holds and number of facts, for `count`, `colour`, `shape`, `size`, `place`, `relation`."""
        kinds: dict[str, list[bool]] = {}
        for row in self.facts:
            for name, held in row.items():
                kinds.setdefault(name.split(":")[0], []).append(held)
        return {kind: (float(np.mean(held)), len(held)) for kind, held in kinds.items()}


def score(pipeline: DiffusionPipeline, num: int = 200, *, seed: int = 0, batch: int = 20, **arguments: Any) -> Score:
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
    import torch

    call: Any = pipeline  # the base class has no call; every text-to-image pipeline does
    texts, images = captions(num, seed), []
    for first in range(0, num, batch):
        part = texts[first : first + batch]
        noise = [torch.Generator().manual_seed(seed + first + index) for index in range(len(part))]
        images.append(call(part, generator=noise, output_type="np", **arguments).images)
    stacked = np.concatenate(images)
    held = [facts(text, image) for text, image in zip(texts, stacked, strict=True)]
    return Score(captions=texts, images=stacked, facts=held)
