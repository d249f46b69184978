"""Reads and writes addresses of this server as clients see them, behind proxies too."""

from __future__ import annotations

import re

from fastapi import Request
from starlette.types import Scope

__all__ = ["path_of", "public_url"]

_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")


def path_of(scope: Scope) -> str:
    """Returns the path of a request below the one under which a proxy shows the server.

    >>> path_of({"path": "/pictures/health", "root_path": "/pictures"})
    '/health'
    """
    return scope["path"].removeprefix(scope.get("root_path", ""))


def public_url(request: Request, route: str, **path: str) -> str:
    """Returns the address of a route, with the host and the scheme that a proxy names.

    Anybody may name them, since the address goes to nobody but the sender of the request.

    Args:
        request: the one that is answered.
        route: name of the route.
        **path: its parameters.
    """
    url = request.url_for(route, **path)
    host, scheme = (
        request.headers.get(name, "").partition(",")[0].strip() for name in ("x-forwarded-host", "x-forwarded-proto")
    )
    url = url.replace(netloc=host) if _HOST.fullmatch(host) else url
    return str(url.replace(scheme=scheme) if scheme in ("http", "https") else url)
