"""Serves the web page: one HTML template, its style sheet and its scripts, all from this package.

The page is another client of the HTTP routes and needs nothing from other hosts. Its policy allows no script inside
the HTML and no address but its own. These paths need no key, since the page is where a user types it.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from fastapi import APIRouter, Request, Response

import partsong
from partsong.serving.errors import ApiError

__all__ = ["PAGE_PATHS", "router"]

FOLDER = Path(__file__).with_name("page")
#: The files of the page and their types. No other file of the folder is served.
ASSETS = {
    "page.css": "text/css; charset=utf-8",
    **{
        f"{name}.js": "text/javascript; charset=utf-8"
        for name in ("page", "wire", "words", "media", "stage", "compare", "compose", "gallery", "chat", "server")
    },
    "icon.svg": "image/svg+xml",
}
#: Paths that are served without a key. They hold nothing but the page itself.
PAGE_PATHS = ("/", *(f"/page/{name}" for name in ASSETS))

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    # With a key, pictures are fetched by script and shown as blobs; previews come as base64 text.
    "img-src": "'self' blob: data:",
    "media-src": "'self' blob:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Browsers ask again each time and get 304 unless the package was updated.
    "Cache-Control": "no-cache",
}

router = APIRouter()


@router.get("/", include_in_schema=False)
async def page(request: Request) -> Response:
    """Returns the page."""
    return _reply(request, _html(request.scope.get("root_path", "")), "text/html; charset=utf-8")


@router.get("/page/{name}", include_in_schema=False)
async def asset(name: str, request: Request) -> Response:
    """Returns a style sheet, script or icon of the page.

    Raises:
        ApiError: 404 for any other name.
    """
    if name not in ASSETS:
        raise ApiError(404, f"the page has no file {name!r}; it has {', '.join(ASSETS)}")
    return _reply(request, _read(name), ASSETS[name])


def _reply(request: Request, content: bytes, media_type: str) -> Response:
    tag = '"' + hashlib.sha256(content).hexdigest()[:32] + '"'
    headers = {**HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=media_type, headers=headers)


@functools.cache
def _read(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


@functools.cache
def _html(root: str) -> bytes:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(version=partsong.__version__, root=root).encode()
