"""Lets in requests that show a key, come from this site, are small enough and arrive in time, and logs them."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import re
import secrets
import time
import zlib
from collections import Counter
from collections.abc import Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from partsong.serving.access.addresses import path_of
from partsong.serving.access.users import OPERATOR, User
from partsong.serving.errors import ApiError
from partsong.serving.server import Server

__all__ = ["ACCESS", "Gate"]

#: Logs one line for each request.
ACCESS = logging.getLogger("partsong.serving.access")
#: Types of bodies that a page of another site cannot send without asking first, and that of forms with files.
_TYPES = ("application/json", "multipart/form-data", "application/octet-stream")
#: How much of a refused body is read before the answer, in sizes of the largest body, and for how long.
_REST, _REST_SECONDS = 4, 10.0
#: What a client may call its request; anything else gets a name of the server's own.
_NAME = re.compile(rb"[A-Za-z0-9._-]{1,64}")

_Headers = dict[bytes, bytes]


class Gate:
    """Lets in requests that may be answered.

    Args:
        app: the application that it guards.
        server: knows its users and limits.
        open_paths: what anybody may see without a key.
    """

    def __init__(self, app: ASGIApp, server: Server, open_paths: Collection[str]) -> None:
        self.app, self.server, self._open = app, server, open_paths
        self._answered: Counter[str] = Counter()  # requests of each user that are answered now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; see ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        user = self._user(path_of(scope), headers)
        answer = _Answer(scope, headers, send, user)
        try:
            if (error := self._refusal(headers, user)) is not None:
                if b"expect" not in headers:  # a client that waits for a word before it sends its body sends none
                    await _read_rest(receive, self.server.limits.body)
                await _refuse(answer.send, error)
                return
            assert user is not None, "who shows no key is refused"
            self._answered[user.name] += 1
            try:
                limits = self.server.limits
                body = _Body(receive, limits.body, limits.body_seconds, headers.get(b"content-encoding", b""))
                inner = {**scope, "method": answer.method, "state": {**scope.get("state", {}), "user": user}}
                await self.app(inner, body.receive, body.instead(answer.send))
            finally:
                self._answered[user.name] -= 1
        finally:
            answer.log()
            if user is not None and user.name:
                self.server.metrics.user_requests.labels(user.name).inc()

    def _refusal(self, headers: _Headers, user: User | None) -> ApiError | None:
        """Says why a request is not let in; None where it is."""
        host = headers.get(b"host")
        if self.server.users.is_open and not _is_here(host):
            # Without a key, a name that another site points to this machine would open the server to that site.
            return ApiError(403, "without a key this server answers to names of its own machine only")
        if self.server.users.is_open and (error := _of_another_site(headers)) is not None:
            return error
        if user is None:
            return ApiError(401, "show the key of this server as Authorization: Bearer KEY")
        if user.requests is not None and self._answered[user.name] >= user.requests:
            most = f"{user.requests} requests of {user.name} are answered at a time; ask again when one is done"
            return ApiError(429, most, code="user_requests", retry_after=2.0)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.server.limits.body:
            return ApiError(413, f"a request has at most {self.server.limits.body} bytes", code="too_large")
        if (coding := headers.get(b"content-encoding", b"").lower()) not in (b"", b"identity", b"gzip"):
            return ApiError(415, f"a body may be packed by gzip, not {coding[:40].decode('latin-1')}")
        return None

    def _user(self, path: str, headers: _Headers) -> User | None:
        """Returns who sent a request; None without a key that is known."""
        if path in self._open:
            return OPERATOR  # nothing there is anybody's
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        return self.server.users.find(given.strip() if scheme.lower() == b"bearer" else b"")


def _of_another_site(headers: _Headers) -> ApiError | None:
    """Refuses what a page of another site makes a browser send, which needs no key here."""
    origin = headers.get(b"origin")
    if origin is not None and origin.partition(b"://")[2] != headers.get(b"host"):
        return ApiError(403, "without a key this server answers no pages of other sites")
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    if kind and kind not in _TYPES:
        return ApiError(415, f"a body is of the type {' or '.join(_TYPES)}, not {kind[:60]}")
    return None


def _is_here(host: bytes | None) -> bool:
    """Says whether a request was sent to a name of this machine, with any port or none; HTTP/1.0 needs no name."""
    if host is None:
        return True
    name = host.decode("latin-1").lower()
    name = name[1 : name.index("]")] if name.startswith("[") and "]" in name else name.partition(":")[0]
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class _Answer:
    """Names the answer to a request, leaves its body out where only the head was asked for, and logs it."""

    def __init__(self, scope: Scope, headers: _Headers, send: Send, user: User | None) -> None:
        self._user = "" if user is None else user.name
        self._send, self._path, self._begun = send, scope["path"], time.monotonic()
        self._asked = scope["method"]
        self.method = "GET" if self._asked == "HEAD" else self._asked
        given = headers.get(b"x-request-id", b"")
        self._name = given if _NAME.fullmatch(given) else secrets.token_hex(8).encode()
        self._status, self._is_over = 0, False

    async def send(self, message: Message) -> None:
        """Passes on a part of the answer."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", self._name)]}
        elif self._asked == "HEAD":
            if self._is_over:
                return
            self._is_over, message = True, {"type": "http.response.body", "body": b""}
        await self._send(message)

    def log(self) -> None:
        """Writes a line; 0 stands for a client that hung up before it was answered."""
        facts: dict[str, Any] = {
            "method": self._asked,
            "path": self._path,
            "status": self._status,
            "ms": round(1000 * (time.monotonic() - self._begun), 1),
            "request": self._name.decode(),
            **({"user": self._user} if self._user else {}),
        }
        ACCESS.info("%s", " ".join(map(str, facts.values())), extra={"facts": facts})


class _Body:
    """Passes the parts of a body on while they are few enough and in time; otherwise acts as if the client hung up.

    Args:
        receive: where the parts come from.
        most: most bytes of the body, also when it is unpacked.
        seconds: most seconds for all of it.
        coding: how it is packed; ``gzip`` or not at all.
    """

    def __init__(self, receive: Receive, most: int, seconds: float, coding: bytes = b"") -> None:
        self._receive, self._most, self._seconds = receive, most, seconds
        self._size, self._is_complete = 0, False
        self._deadline: float | None = None
        self._error: ApiError | None = None
        self._unpack = zlib.decompressobj(wbits=31) if coding.lower() == b"gzip" else None

    async def receive(self) -> Message:
        """Returns the next part."""
        if self._is_complete:
            return await self._receive()  # the only message that still comes: the client has hung up
        now = asyncio.get_running_loop().time()
        self._deadline = now + self._seconds if self._deadline is None else self._deadline
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, self._deadline - now))
        except TimeoutError:
            return self._refused(ApiError(408, f"the request did not arrive within {self._seconds:g} s"))
        if self._unpack is not None and message.get("body"):
            try:
                message = {**message, "body": self._unpack.decompress(message["body"], self._most - self._size + 1)}
            except zlib.error:
                return self._refused(ApiError(400, "the body is not packed by gzip, as its header says"))
        self._size += len(message.get("body", b""))
        if self._size > self._most:
            return self._refused(ApiError(413, f"a request has at most {self._most} bytes", code="too_large"))
        self._is_complete = not message.get("more_body", False)
        return message

    def _refused(self, error: ApiError) -> Message:
        self._error = error
        return {"type": "http.disconnect"}

    def instead(self, send: Send) -> Send:
        """Returns a function that sends the application's answer, or the refusal in its place."""

        async def send_or_refuse(message: Message) -> None:
            if self._error is None:
                await send(message)
            elif message["type"] == "http.response.start":
                if self._error.status != 408:
                    await _read_rest(self._receive, self._most)
                await _refuse(send, self._error)

        return send_or_refuse


async def _read_rest(receive: Receive, most: int) -> None:
    """Reads the rest of a body that is refused and keeps none of it, up to a few times the most that is taken.

    A client that is still sending when the connection is closed loses the answer with it.
    """
    left = _REST * most
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REST_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


async def _refuse(send: Send, error: ApiError) -> None:
    body = json.dumps(error.as_json()).encode()
    length = (b"content-length", str(len(body)).encode())
    headers = [(b"content-type", b"application/json"), length, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
