"""Writes results (PNG, JSON) and compares images.

An image is a PIL image, or an array or tensor `[H, W]`, `[H, W, C]` or (tensors only) `[C, H, W]`: floats in [0, 1]
or 8-bit integers in 0 .. 255. Folders on the way to a file are created.
"""

from __future__ import annotations

import io
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from partsong.errors import ArgumentError, ArgumentTypeError, OutputError

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "PSNR_OF_EQUAL",
    "check_image_name",
    "check_writable",
    "max_abs_diff",
    "psnr",
    "rgb_bytes",
    "save_image",
    "save_images",
    "size_note",
    "write_json",
    "write_text",
]

#: Stands for an infinite psnr in JSON, which has no infinity.
PSNR_OF_EQUAL = 999.0


def check_writable(path: str | os.PathLike[str]) -> Path:
    """Makes sure, before any work, that a file can be written at `path`; makes the folders on the way.

    Raises:
        ArgumentError: `path` is a folder, a part of it is a file, or the place is not writable.
    """
    target = Path(path)
    if target.is_dir():
        raise ArgumentError(f"cannot write {target}: it is a folder; give a file name")
    if not _is_written_through(target):
        try:
            folder = target.resolve().parent
            folder.mkdir(parents=True, exist_ok=True)
            # Only creating a file shows it: permission bits say nothing on read-only or full file systems.
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".partsong-"):
                pass
        except (OSError, RuntimeError) as error:  # links in a circle are a RuntimeError
            reason = getattr(error, "strerror", None) or error
            raise ArgumentError(f"cannot write {target}: {reason}; choose another place") from error
    if target.exists() and not os.access(target, os.W_OK):
        raise ArgumentError(f"cannot write {target}: it exists and is read-only; choose another name")
    return target


def _is_written_through(target: Path) -> bool:
    """Says whether a target is written directly: a pipe, a device, or the program's own output."""
    return target.exists() and (not target.is_file() or any(target.is_relative_to(root) for root in ("/dev", "/proc")))


#: How images are written, by the ending of the file; JPEG alone loses something.
_IMAGE_FORMATS: dict[str, dict[str, Any]] = {
    ".png": {"format": "PNG"},
    ".webp": {"format": "WEBP", "lossless": True},
    ".jpg": {"format": "JPEG", "quality": 95},
    ".jpeg": {"format": "JPEG", "quality": 95},
}


def check_image_name(path: str | os.PathLike[str]) -> Path:
    """Returns the path of an image, whose ending says how it is written.

    Raises:
        ArgumentError: it has another ending than .png, .webp, .jpg and .jpeg.
    """
    target = Path(path)
    if target.suffix.lower() not in _IMAGE_FORMATS:
        raise ArgumentError(f"images are written as {', '.join(_IMAGE_FORMATS)}, not {target.name}")
    return target


def save_image(image: Any, path: str | os.PathLike[str]) -> Path:
    """Writes one image as its name says and returns its path: .png or .webp, in which nothing is lost, .jpg or .jpeg.

    Raises:
        ArgumentError: another ending, the place is not writable, values lie outside [0, 1], or transparency for JPEG.
        ArgumentTypeError: `image` is of another kind than those above.
    """
    from PIL import Image

    how = _IMAGE_FORMATS[check_image_name(path).suffix.lower()]
    target = check_writable(path)
    picture = Image.fromarray(_to_bytes(image))
    if how["format"] == "JPEG" and picture.mode == "RGBA":
        raise ArgumentError(f"{target.name}: JPEG has no transparency; name the file *.png")
    with _replace_when_complete(target) as file:
        picture.save(file, **how)
    return target


def save_images(images: Sequence[Any], path: str | os.PathLike[str]) -> list[Path]:
    """Writes images: one under `path` itself, several as ``name-000.png``, ``name-001.png``, ...

    Returns:
        The paths, in order. Raises as `save_image` does.
    """
    target = Path(path)
    if len(images) == 1:
        return [save_image(images[0], target)]
    return [
        save_image(image, target.with_name(f"{target.stem}-{index:03d}{target.suffix}"))
        for index, image in enumerate(images)
    ]


def write_json(path: str | os.PathLike[str] | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """Checks a result and writes it with sorted keys, replacing the file in one step.

    Args:
        path: file to write; None only checks.
        values: text keys; values are None, bools, text, paths, finite numbers (numpy's too) and lists or dicts of
            these. An infinite number is accepted under a key with "psnr" in it and written as 999.

    Returns:
        What was written, as plain Python values.

    Raises:
        ArgumentError: a number is not finite, or the place is not writable.
        ArgumentTypeError: a key or value of another type.
    """
    plain = _plain(values, "")
    if path is not None:
        target = check_writable(path)
        with _replace_when_complete(target) as file:
            text = json.dumps(plain, sort_keys=True, indent=2, allow_nan=False, ensure_ascii=False)
            file.write((text + "\n").encode("utf-8", "backslashreplace"))
    return plain


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Writes a text in UTF-8, replacing the file in one step; what UTF-8 cannot encode is written as an escape.

    Raises:
        ArgumentError: the place is not writable.
        OutputError: there is no room.
    """
    target = check_writable(path)
    with _replace_when_complete(target) as file:
        file.write(text.encode("utf-8", "backslashreplace"))
    return target


def size_note(asked: Mapping[str, Any], height: int, width: int) -> str | None:
    """Says that a picture or video has another size than was asked for; None where it has that size.

    Models make sides in whole patches, and many round down without a word.

    Args:
        asked: arguments of the call, in which `height` and `width` may be missing or None.
        height: rows of pixels that were made.
        width: pixels of a row.

    Example:
        >>> size_note({"height": 100, "width": 130}, 96, 128)
        '130 x 100 pixels were asked for, and the model makes 128 x 96'
    """
    wanted = asked.get("height") or height, asked.get("width") or width
    if wanted == (height, width):
        return None
    return f"{wanted[1]} x {wanted[0]} pixels were asked for, and the model makes {width} x {height}"


def psnr(a: Any, b: Any) -> float:
    """Computes the peak signal-to-noise ratio of two images of one size, in dB at peak 1; infinite if equal."""
    import numpy as np

    first, second = _pair(a, b)
    error = float(np.mean((first - second) ** 2)) if first.size else 0.0
    return math.inf if error == 0.0 else -10.0 * math.log10(error)


def max_abs_diff(a: Any, b: Any) -> float:
    """Returns the largest absolute difference of two images of one size, in units of the range [0, 1]."""
    import numpy as np

    first, second = _pair(a, b)
    return float(np.max(np.abs(first - second))) if first.size else 0.0


def _pair(a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    first, second = _to_float(a), _to_float(b)
    if first.shape != second.shape:
        raise ArgumentError(f"images of one size can be compared, found {first.shape} and {second.shape}")
    return first, second


def _to_float(image: Any) -> np.ndarray:
    """Returns float64 in [0, 1] with unchanged dims, so whole batches and videos can be compared too."""
    import numpy as np

    if hasattr(image, "detach"):
        # bfloat16 has no numpy counterpart.
        image = image.detach().cpu()
        image = (image.double() if image.is_floating_point() else image).numpy()
    elif isinstance(image, list | tuple):
        return np.stack([_to_float(item) for item in image])
    elif hasattr(image, "getbands"):
        # The bytes of a palette image are indices of colours, not colours.
        image = image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB")
    elif not isinstance(image, np.ndarray):
        raise ArgumentTypeError(f"an image is a PIL image, an array or a tensor, found {type(image).__name__}")
    pixels = np.asarray(image)
    if pixels.dtype == np.uint8:
        return pixels / 255.0
    if pixels.dtype.kind != "f":
        raise ArgumentTypeError(f"pixels are floats in [0, 1] or 8-bit integers, found {pixels.dtype}")
    return pixels.astype(np.float64)


def _to_bytes(image: Any) -> np.ndarray:
    """Returns uint8 `[H, W]` or `[H, W, C]`."""
    import numpy as np

    pixels = _to_float(image)
    if hasattr(image, "detach") and pixels.ndim == 3:
        pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))) or not pixels.size:
        raise ArgumentError(
            f"an image is [H, W] or [H, W, C], as a tensor [C, H, W], with C out of 1, 3, 4; found {pixels.shape}"
        )
    # A decoder's output may leave the range by rounding; more than that is a mistake, so it is refused.
    if not bool(np.all((pixels >= -1e-3) & (pixels <= 1.0 + 1e-3))):
        raise ArgumentError(f"pixels lie in [0, 1], found {pixels.min():.4g} .. {pixels.max():.4g}")
    return np.rint(pixels.clip(0.0, 1.0) * 255.0).astype(np.uint8)


def rgb_bytes(image: Any) -> np.ndarray:
    """Returns the pixels of one image as uint8 `[H, W, 3]`; grey is repeated, transparency dropped.

    Raises:
        ArgumentError: values outside [0, 1], or a shape that no image has.
        ArgumentTypeError: `image` is of another kind than those above.
    """
    import numpy as np

    pixels = _to_bytes(image)
    return np.repeat(pixels[:, :, None], 3, axis=2) if pixels.ndim == 2 else pixels[:, :, :3]


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ArgumentTypeError(f"a JSON key is text, found {key!r} in {where or 'the result'}")
        return {str(key): _plain(item, f"{where}.{key}" if where else key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()  # a numpy number
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not isinstance(value, float):
        raise ArgumentTypeError(f"{where} cannot be written as JSON: it is a {type(value).__name__}")
    if value == math.inf and "psnr" in where:
        return PSNR_OF_EQUAL
    if not math.isfinite(value):
        raise ArgumentError(f"{where} is {value}; JSON holds finite numbers only")
    return value


@contextmanager
def _replace_when_complete(target: Path) -> Iterator[IO[bytes]]:
    """Opens a file that replaces `target` only once it is complete; pipes and devices are written directly.

    Raises:
        OutputError: there is no room, or the place is gone.
    """
    try:
        with _written_into(target) if _is_written_through(target) else _replacing(target.resolve()) as file:
            yield file
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from error


@contextmanager
def _written_into(target: Path) -> Iterator[IO[bytes]]:
    content = io.BytesIO()
    yield content
    # Standard output that is redirected to a file is not truncated.
    with target.open("ab") as file:
        file.write(content.getbuffer())


@contextmanager
def _replacing(target: Path) -> Iterator[IO[bytes]]:
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o644  # temporary files are private, results are not
    file = tempfile.NamedTemporaryFile(dir=target.parent, prefix=".partsong-", delete=False)  # noqa: SIM115
    try:
        with file:
            yield file
        os.chmod(file.name, mode)
        os.replace(file.name, target)
    except BaseException:
        os.unlink(file.name)
        raise
