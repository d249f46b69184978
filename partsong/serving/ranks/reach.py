"""Finds out whether a model can make what is asked, and what it can make instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from partsong.serving.errors import CannotMakeError, shortened

__all__ = ["Asked", "Failure", "Reach"]


class Asked(NamedTuple):
    """Says what a call is to make.

    Attributes:
        height: in pixels.
        width: in pixels.
        frames: of a video; 1 for a picture.
        steps: of the scheduler.
    """

    height: int
    width: int
    frames: int
    steps: int

    @property
    def size(self) -> str:
        """Returns width and height as clients write them."""
        return f"{self.width}x{self.height}"


class Failure(NamedTuple):
    """Says that a model cannot make something.

    Attributes:
        words: what the model itself said; "" where that is of no use to a client.
    """

    words: str = ""


class Reach:
    """Tries calls of a model, and looks for the nearest one that works where one does not.

    Args:
        name: of the model.
        usual: a call that works.
        latent: pixels of a side for one latent.
        failure: tries a call; returns why it does not work, None where it does.
    """

    def __init__(self, name: str, usual: Asked, latent: int, failure: Callable[[Asked], Failure | None]) -> None:
        self._name, self._usual, self._latent, self._failure = name, usual, latent, failure

    def check(self, asked: Asked) -> None:
        """Refuses what the model cannot make.

        Raises:
            CannotMakeError: says what was asked, what the model makes, and what to ask for.
        """
        failure = None if asked == self._usual else self._failure(asked)
        if failure is None:
            return
        usual = self._usual
        if self._failure(usual._replace(steps=asked.steps)) is not None:
            raise self._error(asked, failure, "num_inference_steps", "steps")
        if self._failure(usual._replace(frames=asked.frames)) is not None:
            raise self._error(asked, failure, "num_frames", "frames")
        raise self._size_error(asked, failure)

    def unit(self, asked: Asked) -> int:
        """Returns the pixels of which a model's sides are multiples: the fewest where odd multiples work."""
        units = (self._latent * times for times in (1, 2, 4, 8, 16))
        return next((unit for unit in units if self._takes_multiples(asked, unit)), self._latent)

    def _error(self, asked: Asked, failure: Failure, param: str, field: str) -> CannotMakeError:
        """Returns the error for a number that is wrong at any size."""

        def works(number: int) -> bool:
            return number > 0 and self._failure(self._usual._replace(**{field: number})) is None

        number = getattr(asked, field)
        near = (number + apart for apart in (-1, 1, -2, 2, -3, 3, -4, 4))
        if (beside := next(filter(works, near), None)) is not None:
            return self._refused(f"{param}={number}", failure, f"the nearest that it makes is {beside}", param)
        most = _last(number - 1, works) or getattr(self._usual, field)
        return self._refused(f"{param}={number}", failure, f"it makes {most} at most; ask for {param}={most}", param)

    def _size_error(self, asked: Asked, failure: Failure) -> CannotMakeError:
        """Returns the error for a size, at the frames and steps that were asked for."""
        unit = self.unit(asked)
        longer = max(asked.height, asked.width)

        def of(length: int) -> Asked:
            height, width = (_rounded(side * length * unit / longer, unit) for side in (asked.height, asked.width))
            return asked._replace(height=height, width=width)

        whole = max(1, int(longer / unit + 0.5))
        length = _last(whole, lambda length: self._failure(of(length)) is None)
        of_frames = f" for {asked.frames} frames" if asked.frames != self._usual.frames else ""
        if length is None:
            can = f"its own size is {self._usual.size}{of_frames and ', and fewer frames leave room for more'}"
            return self._refused(f"size {asked.size}", failure, f"{can}; ask for that", "size")
        near = of(length).size
        if length == whole:
            can = f"it makes sides in multiples of {unit} pixels; ask for size {near}"
        else:
            can = f"the largest of this shape is {near}{of_frames}; ask for that or less, in multiples of {unit}"
        return self._refused(f"size {asked.size}", failure, can, "size")

    def _takes_multiples(self, asked: Asked, unit: int) -> bool:
        """Says whether sides may be any multiple of a number: tries odd ones, no larger than the model's own."""
        usual = self._usual
        height, width = _odd(min(asked.height, usual.height), unit), _odd(min(asked.width, usual.width), unit)
        tried = (usual._replace(height=height), usual._replace(width=width))
        return all(self._failure(each) is None for each in tried)

    def _refused(self, asked: str, failure: Failure, can: str, param: str) -> CannotMakeError:
        words = f" ({shortened(failure.words, 160)})" if failure.words else ""
        return CannotMakeError(f"{self._name} cannot make {asked}{words}: {can}", param)


def _rounded(pixels: float, unit: int) -> int:
    return max(1, int(pixels / unit + 0.5)) * unit


def _odd(side: int, unit: int) -> int:
    """Returns an odd multiple of a number, near a side and not above it where that is possible."""
    times = max(1, side // unit)
    return (times - (times % 2 == 0)) * unit


def _last(most: int, works: Callable[[int], bool]) -> int | None:
    """Returns the largest number from 1 on that works, where all that are smaller do too; None where none works."""
    if most < 1:
        return None
    if works(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low or None
