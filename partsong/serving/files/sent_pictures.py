"""Keeps pictures that clients have sent as plain files, under names of the server's own."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from PIL import Image
from starlette.datastructures import UploadFile

from partsong.errors import OutputError
from partsong.serving.errors import ApiError
from partsong.serving.messages import Ready
from partsong.serving.server import Server

__all__ = ["check_pictures", "copied_picture", "kept_pictures", "read_data_url", "read_reference"]


def check_pictures(facts: Ready, name: str, pictures: int, masks: int, field: str = "image") -> None:
    """Refuses pictures that a model cannot use.

    Args:
        facts: what its ranks said of it.
        name: of the model.
        pictures: how many were sent.
        masks: how many masks.
        field: of the request that holds them.

    Raises:
        ApiError: says what the model takes.
    """
    if not (most := facts.most_pictures):
        raise ApiError(
            400, f"{name} makes {facts.kind}s of text alone; leave {field} out", param=field, code="no_picture"
        )
    if pictures > most:
        some = "one picture" if most == 1 else f"{most} pictures at most"
        message = f"{name} begins with {some}, and {pictures} were sent; send fewer as {field}"
        raise ApiError(400, message, param=field, code="one_picture" if most == 1 else None)
    if masks and not facts.takes_mask:
        raise ApiError(400, f"{name} takes no mask", param="mask", code="no_mask")


@contextlib.asynccontextmanager
async def kept_pictures(
    server: Server, pictures: Sequence[bytes], mask: bytes | None = None, *, field: str = "image"
) -> AsyncIterator[dict[str, Any]]:
    """Keeps pictures for a job that is submitted in a block, and removes them where the block raises.

    Reading and writing a large picture takes seconds, and is done beside the event loop.

    Args:
        server: has the folder, and the bound of their size.
        pictures: what was sent, in any form that can be read.
        mask: the same for a mask.
        field: of the request that holds the pictures.

    Yields:
        What the job asks for, by the names of `Job.request`.

    Raises:
        ApiError: one is no picture, or too large.
        OutputError: one cannot be written.
    """
    kept: list[str] = []
    try:
        for each in pictures:
            kept.append(_new_name())
            await _beside(_keep, server, kept[-1], each, field)
        asked: dict[str, Any] = {"picture": list(kept)} if kept else {}
        if mask is not None:
            kept.append(_new_name())
            await _beside(_keep, server, kept[-1], mask, "mask")
            asked["mask"] = kept[-1]
        yield asked
    except BaseException:  # a client or the server may leave while it waits for ranks
        _remove(server, *kept)
        raise


async def _beside(work: Callable[..., None], *args: Any) -> None:
    """Does something in another thread, and waits until that is done also where the task is cancelled."""
    done = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait({done})  # what it writes is removed after that
        done.exception()  # nobody else will ask for it
        raise


def _keep(server: Server, name: str, data: bytes, what: str) -> None:
    """Writes a picture as a PNG file; masks keep what is transparent."""
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


def copied_picture(server: Server, name: str) -> bytes:
    """Returns a picture that was sent earlier, for a job that may live longer than the first.

    Raises:
        OutputError: it cannot be read.
    """
    try:
        return server.file(name).read_bytes()
    except OSError as error:
        raise OutputError(f"the picture cannot be copied: {error.strerror}") from error


def _remove(server: Server, *names: str) -> None:
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
    return read_data_url(url, "input_reference", 'a file in a form, or {"image_url": "data:image/png;base64,..."}')


def read_data_url(url: Any, field: str, form: str = "data:image/png;base64,...") -> bytes:
    """Returns the bytes of a picture that is written into a request.

    Args:
        url: begins with ``data:`` and holds base64.
        field: of the request.
        form: how it should be sent.

    Raises:
        ApiError: it is something else.
    """
    head, _, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not (head.startswith("data:") and head.endswith(";base64")):
        how = f"send {form}; nothing is fetched from elsewhere"
        raise ApiError(400, f"{field} is no picture: {how}", param=field)
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise ApiError(400, f"{field} is not written in base64", param=field) from None


def _new_name() -> str:
    return f"sent_{secrets.token_hex(12)}.png"
