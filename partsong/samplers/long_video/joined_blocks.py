"""Joins what a pipeline returned for each block of a video."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["joined"]


def joined(outputs: Sequence[Any], dim: int) -> Any:
    """Joins the outputs of a video's blocks, in order: arrays, tensors or lists of pictures.

    Args:
        outputs: what the pipeline returned for each block.
        dim: of the frames, where they are tensors.
    """
    parts = [output[0] if isinstance(output, tuple) else output.frames for output in outputs]
    if isinstance(parts[0], np.ndarray):
        whole: Any = np.concatenate(parts, axis=1)
    elif isinstance(parts[0], Tensor):
        whole = torch.cat(parts, dim=dim)
    else:
        whole = [list(itertools.chain.from_iterable(pictures)) for pictures in zip(*parts, strict=True)]
    return (whole,) if isinstance(outputs[0], tuple) else type(outputs[0])(frames=whole)
