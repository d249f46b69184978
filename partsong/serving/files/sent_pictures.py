"""Keeps pictures that clients have sent as plain files, under names of the server's own."""

from __future__ import annotations

import base64
import io
import secrets
import shutil
from typing import Any

from PIL import Image
from starlette.datastructures import UploadFile

from partsong.errors import OutputError
from partsong.serving.errors import ApiError
from partsong.serving.server import Server

__all__ = ["copy_picture", "keep_picture", "read_reference", "remove_pictures"]


def keep_picture(server: Server, data: bytes, what: str) -> str:
    """Writes a picture as a PNG file and returns its name.

    Args:
        server: has the folder, and the bound of its size.
        data: what was sent, in any form that can be read.
        what: field of the request; masks keep what is transparent.

    Raises:
        ApiError: it is no picture, or too large.
        OutputError: it cannot be written.
    """
    name = _new_name()
    try:
        with Image.open(io.BytesIO(data)) as picture:
            if picture.width * picture.height > server.limits.pixels:
                size = f"{what} has {picture.width * picture.height} pixels"
                raise ApiError(400, f"{size}; this server takes {server.limits.pixels} at most", param=what)
            kept = picture.convert("RGBA" if what == "mask" else "RGB")
    except (OSError, ValueError, Image.DecompressionBombError):
        raise ApiError(400, f"{what} is no picture that can be read; send PNG, JPEG or WebP", param=what) from None
    try:
        kept.save(server.file(name), "PNG")
    except OSError as error:
        server.file(name).unlink(missing_ok=True)
        raise OutputError(f"{what} cannot be kept: {error.strerror}; is the disk full?") from error
    return name


def copy_picture(server: Server, name: str) -> str:
    """Returns the name of a copy of a picture, for a job that may live longer than the first.

    Raises:
        OutputError: it cannot be written.
    """
    copy = _new_name()
    try:
        shutil.copyfile(server.file(name), server.file(copy))
    except OSError as error:
        raise OutputError(f"the picture cannot be copied: {error.strerror}; is the disk full?") from error
    return copy


def remove_pictures(server: Server, *names: str) -> None:
    """Removes pictures for which there is no job that would remove them when it expires."""
    for name in names:
        server.file(name).unlink(missing_ok=True)


async def read_reference(given: Any) -> bytes:
    """Returns the bytes of the picture that a video begins with: a file of a form, or ``{"image_url": "data:..."}``.

    Raises:
        ApiError: it is something else.
    """
    if isinstance(given, UploadFile):
        return await given.read()
    url = given.get("image_url") if isinstance(given, dict) and set(given) == {"image_url"} else None
    head, _, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not (head.startswith("data:") and head.endswith(";base64")):
        how = 'send a file in a form, or {"image_url": "data:image/png;base64,..."}; nothing is fetched from elsewhere'
        raise ApiError(400, f"input_reference is no picture: {how}", param="input_reference")
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise ApiError(400, "input_reference is not written in base64", param="input_reference") from None


def _new_name() -> str:
    return f"sent_{secrets.token_hex(12)}.png"
