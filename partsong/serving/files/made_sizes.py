"""Notes the size of what a job has made, and says so where a client asked for another one."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from partsong.outputs import size_note
from partsong.serving.jobs import Job

__all__ = ["note_size"]


def note_size(job: Job, path: Path) -> None:
    """Notes the size of a job's first file.

    Args:
        job: a job that is done.
        path: the file.
    """
    try:
        width, height = _size_of(path)
    except Exception:  # noqa: BLE001 - such as a file that has gone since; the job itself is done
        return
    asked = dict(job.request)
    if path.suffix == ".mp4":  # an odd side is padded by one pixel in such a file
        asked |= {side: asked[side] + asked[side] % 2 for side in ("height", "width") if asked.get(side)}
    job.made_size = f"{width}x{height}"
    notes = job.note, size_note(asked, height, width)
    job.note = "; ".join(note for note in notes if note is not None) or None


def _size_of(path: Path) -> tuple[int, int]:
    """Returns the width and height of a picture or a video."""
    if path.suffix != ".mp4":
        with Image.open(path) as picture:
            return picture.size
    import imageio.v3 as imageio  # takes a second

    _, height, width, _ = imageio.improps(path, plugin="FFMPEG").shape
    return width, height
