"""Writes a video frame by frame, while later ones are still being made; what is on disk plays at any time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from partsong.errors import ArgumentError, OutputError
from partsong.knobs import AboveZero, check_knobs, type_hints
from partsong.outputs import check_writable, rgb_bytes, save_image

if TYPE_CHECKING:
    import numpy as np

__all__ = ["FrameSample", "VideoWriter", "check_video_name", "save_video"]

_SUFFIXES = (".mp4", ".gif")


def check_video_name(path: str | os.PathLike[str]) -> None:
    """Refuses a name that no video can be written under.

    Raises:
        ArgumentError: another ending than .mp4, .gif or none, or .mp4 where imageio-ffmpeg is not installed.

    Example:
        >>> check_video_name("v.gif")
    """
    name = Path(path).name
    suffix = Path(path).suffix.lower()
    if suffix not in ("", *_SUFFIXES):
        raise ArgumentError(f"videos are written as .mp4 or .gif or into a folder, not {name}")
    if suffix == ".mp4" and find_spec("imageio_ffmpeg") is None:
        raise ArgumentError(
            f"{name}: .mp4 files are written by imageio-ffmpeg, which is not installed: pip install 'partsong[video]', "
            "or name a .gif or a folder"
        )


class VideoWriter:
    """Appends frames to a video, or to a folder of pictures.

    An mp4 is written in fragments of a second, each complete in itself: when the program is killed or the disk is full,
    the file holds every fragment up to then and plays, and memory does not grow with the length. A GIF is kept in
    memory until it is closed: it is for short videos.

    Args:
        path: file name; .mp4 (H.264) or .gif, or a name without ending for a folder of PNG files, which must be empty
            or new. H.264 needs even sizes, so an odd edge is repeated once.
        fps: frames per second.

    Attributes:
        frames: how many were appended.

    Raises:
        ArgumentError: another ending, .mp4 without imageio-ffmpeg, a place that is not writable, a folder with files
            in it, or fps of 0 or less.

    Example:
        >>> # with VideoWriter("v.mp4", fps=16) as video:
        >>> #     for part in stream(plan, prompt="a red circle moves right", num_frames=1601):
        >>> #         if part is not None:
        >>> #             video.append(part.frames[0])
    """

    def __init__(self, path: str | os.PathLike[str], *, fps: AboveZero = 16.0) -> None:
        target = Path(path)
        self.suffix = target.suffix.lower()
        check_video_name(target)
        check_knobs(type_hints(VideoWriter.__init__), {"fps": fps}, owner="VideoWriter: ")
        self.fps, self.frames = fps, 0
        self._sink: Any = None
        self._size: tuple[int, ...] | None = None
        self.path = check_writable(target) if self.suffix else _empty_folder(target)

    def append(self, frames: Iterable[Any]) -> None:
        """Writes images of one size, in order.

        Raises:
            ArgumentError: an image differs in size from the first.
            OutputError: the video cannot be written any further; what was written before can be played.
        """
        for frame in frames:
            pixels = rgb_bytes(frame)
            if self._size not in (None, pixels.shape):
                raise ArgumentError(f"the frames of a video have one size, found {self._size} and {pixels.shape}")
            self._size = pixels.shape
            try:
                self._write(pixels)
            except (OSError, RuntimeError) as error:
                raise self._write_error(error) from error
            self.frames += 1

    def close(self) -> None:
        """Completes the video; may be called again.

        Raises:
            OutputError: its end cannot be written.
        """
        sink, self._sink = self._sink, None
        if sink is not None:
            try:
                sink.close()
            except (OSError, RuntimeError) as error:
                raise self._write_error(error) from error

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OutputError:
            if kind is None:  # otherwise the first error says more
                raise

    def _write(self, pixels: np.ndarray) -> None:
        import numpy as np

        if not self.suffix:
            save_image(pixels, self.path / f"{self.frames:06d}.png")
            return
        if self._sink is None:
            self._sink = self._open()
        if self.suffix == ".mp4":
            height, width, _ = pixels.shape
            pixels = np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        self._sink.append_data(pixels)

    def _open(self) -> Any:
        import imageio.v2 as imageio

        if self.suffix == ".gif":
            return imageio.get_writer(self.path, mode="I", duration=1000.0 / self.fps, loop=0)
        fragment = ["-g", str(max(1, round(self.fps))), "-movflags", "+frag_keyframe+empty_moov+default_base_moof"]
        # macro_block_size=1: imageio would else rescale the frames to multiples of 16.
        return imageio.get_writer(
            self.path, fps=self.fps, codec="libx264", quality=8, macro_block_size=1, output_params=fragment
        )

    def _write_error(self, error: Exception) -> OutputError:
        reason = (getattr(error, "strerror", None) or str(error)).strip().splitlines() or [type(error).__name__]
        return OutputError(
            f"{self.path} cannot be written after frame {self.frames}: {reason[0]}; is the disk full? What was "
            "written before can be played"
        )


class FrameSample:
    """Keeps a few frames of a video, evenly spaced from its first on, however long it becomes.

    Args:
        most: how many are kept at most, at least 2.

    Attributes:
        frames: those that are kept, in order.
        numbers: which ones they are, counted from 0.

    Example:
        >>> sample = FrameSample(4)
        >>> sample.append(range(10))
        >>> sample.numbers
        [0, 4, 8]
    """

    def __init__(self, most: int) -> None:
        self._most, self._step, self._seen = max(most, 2), 1, 0
        self.frames: list[Any] = []
        self.numbers: list[int] = []

    def append(self, frames: Iterable[Any]) -> None:
        """Takes the next frames."""
        for frame in frames:
            if self._seen % self._step == 0:
                if len(self.frames) == self._most:  # every other one makes room
                    self.frames, self.numbers, self._step = self.frames[::2], self.numbers[::2], 2 * self._step
                if self._seen % self._step == 0:
                    self.frames.append(frame)
                    self.numbers.append(self._seen)
            self._seen += 1


def save_video(frames: Sequence[Any], path: str | os.PathLike[str], *, fps: float = 16.0) -> Path:
    """Writes images of one size as a video and returns its path.

    Args:
        frames: images, in order.
        path: see `VideoWriter`.
        fps: frames per second.

    Raises:
        ArgumentError: no frames, sizes that differ, or see `VideoWriter`.
        OutputError: the video cannot be written to its end.
    """
    if not len(frames):
        raise ArgumentError("a video needs frames, found none")
    with VideoWriter(path, fps=fps) as video:
        video.append(frames)
    return video.path


def _empty_folder(path: Path) -> Path:
    if path.is_dir() and any(path.iterdir()):
        raise ArgumentError(f"the folder {path} holds files already; give a new one, or a name ending in .mp4")
    check_writable(path / "000000.png")
    return path
