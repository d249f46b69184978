"""Talks to a partsong server with the standard library alone.

Redirects and proxies are not followed, so that the key goes to the configured server and nowhere else.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlsplit

__all__ = ["ENDED", "Event", "LostError", "ServerClient", "ServerError"]

#: States in which a job stays.
ENDED = ("completed", "failed", "cancelled")
DEFAULT_URL = "http://127.0.0.1:8000"
#: Seconds between two looks at whether the user has stopped the run.
GLANCE = 0.2
#: Seconds without a byte after which a connection counts as lost.
SILENCE = 120.0
ATTEMPTS = 5

Event = tuple[str, dict[str, Any]]


class ServerError(RuntimeError):
    """Says what the server answered instead of a success, or that it does not answer.

    Attributes:
        status: of HTTP; None where no answer came.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """Sends requests to one server.

    Args:
        url: address of the server; by default ``PARTSONG_URL`` of the environment, or port 8000 of this machine.
        key: the server's key; by default ``PARTSONG_API_KEY`` of the environment.

    Raises:
        ServerError: the address is not one of http or https.
    """

    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        self.url = (url or os.environ.get("PARTSONG_URL") or DEFAULT_URL).rstrip("/")
        self.key = key if key is not None else os.environ.get("PARTSONG_API_KEY", "")
        self._address = urlsplit(self.url)
        if self._address.scheme not in ("http", "https") or not self._address.hostname:
            raise ServerError(f"PARTSONG_URL should look like {DEFAULT_URL}, found {self.url!r}")

    def model(self, kind: str, name: str = "") -> str:
        """Returns a model of the server by its name, or its first of a kind.

        Raises:
            ServerError: there is none; the message names those that the server has.
        """
        names = [model["id"] for model in self.get("/v1/models")["data"] if model["kind"] == kind]
        if name and name not in names:
            raise ServerError(f"the server has no {kind} model {name!r}; it has: {', '.join(names) or 'none'}")
        if not names:
            raise ServerError(f"the server at {self.url} has no {kind} model")
        return name or names[0]

    def get(self, path: str) -> dict[str, Any]:
        """Returns what the server says at a path."""
        return json.loads(self.fetch(path))

    def fetch(self, path: str) -> bytes:
        """Returns a file of the server."""
        with self._open("GET", path) as (response, _):
            return response.read()

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Sends JSON and returns the JSON that comes back."""
        with self._open("POST", path, json.dumps(body).encode(), "application/json") as (response, _):
            return json.loads(response.read())

    def send(self, path: str, content: bytes) -> bytes:
        """Sends bytes and returns the bytes that come back."""
        with self._open("POST", path, content, "application/octet-stream") as (response, _):
            return response.read()

    def run(
        self, body: Mapping[str, Any], on_event: Callable[[str, dict[str, Any]], None], check: Callable[[], None]
    ) -> dict[str, Any]:
        """Makes a job and returns it when it is done.

        Args:
            body: what is asked for, as ``POST /v1/jobs`` takes it; values that are None are left out.
            on_event: gets the name and data of each event.
            check: called several times a second; when it raises, the job is cancelled and the error goes on.

        Raises:
            ServerError: the job failed or was cancelled by somebody else.
        """
        job = self.post("/v1/jobs", {name: value for name, value in body.items() if value is not None})
        path = f"/v1/jobs/{quote(job['id'], safe='')}"
        try:
            job = self._follow(path, on_event, check)
        except BaseException:
            # Whatever ends the wait, nobody will fetch the result: the ranks should not go on with it.
            with contextlib.suppress(ServerError):
                self.post(f"{path}/cancel", {})
            raise
        if job["status"] != "completed":
            raise ServerError((job.get("error") or {}).get("message") or f"the job was {job['status']} on the server")
        return job

    def stream(
        self, path: str, fields: Mapping[str, Any], files: Mapping[str, bytes], check: Callable[[], None]
    ) -> Iterator[Event]:
        """Sends a form and yields the events of the answer. When `check` raises, the connection is closed.

        Raises:
            ServerError: the server refuses, or reports an error on the way.
        """
        content, kind = _form(fields, files)
        for event in self._events("POST", path, check, content, kind):
            name, data = event
            if "error" in data:
                raise ServerError(data["error"]["message"])
            yield data.get("type", name), data

    def _follow(
        self, path: str, on_event: Callable[[str, dict[str, Any]], None], check: Callable[[], None]
    ) -> dict[str, Any]:
        """Reads a job's events to its end, and connects again where the connection is lost."""
        for _ in range(ATTEMPTS):
            with contextlib.suppress(LostError):
                for name, data in self._events("GET", f"{path}/events", check):
                    on_event(name, data)
                    if name == "job" and data["status"] in ENDED:
                        return data
            job = self.get(path)
            if job["status"] in ENDED:
                return job
        raise ServerError(f"the connection to {self.url} was lost {ATTEMPTS} times")

    def _events(
        self, method: str, path: str, check: Callable[[], None], body: bytes | None = None, kind: str | None = None
    ) -> Iterator[Event]:
        """Yields (name, data) of a stream. It is read in a thread, so that `check` is heard while nothing comes."""
        arrived: queue.Queue[Event | Exception | None] = queue.Queue()
        holder: list[socket.socket] = []

        def read() -> None:
            try:
                with self._open(method, path, body, kind) as (response, sock):
                    holder.append(sock)
                    for event in _parse(response):
                        arrived.put(event)
                arrived.put(None)
            except ServerError as error:
                arrived.put(error)
            except ValueError as error:
                arrived.put(ServerError(f"{self.url}{path} sent something else than JSON: {error}"))

        threading.Thread(target=read, daemon=True).start()
        try:
            while True:
                check()
                with contextlib.suppress(queue.Empty):
                    event = arrived.get(timeout=GLANCE)
                    if event is None:
                        return
                    if isinstance(event, Exception):
                        raise event
                    yield event
        finally:
            for sock in holder:
                # The reader may be waiting for bytes: this wakes it, and the server sees that nobody listens.
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _open(
        self, method: str, path: str, body: bytes | None = None, kind: str | None = None
    ) -> Iterator[tuple[HTTPResponse, socket.socket]]:
        if not path.startswith("/"):
            raise ServerError(f"the server named a file elsewhere: {path!r}")
        connect = HTTPSConnection if self._address.scheme == "https" else HTTPConnection
        connection = connect(self._address.hostname or "", self._address.port, timeout=SILENCE)
        headers = {"Content-Type": kind} if kind else {}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        with contextlib.closing(connection):
            try:
                connection.connect()
            except OSError as error:
                raise ServerError(f"no server at {self.url} ({error}); start one with: partsong serve") from error
            sock = connection.sock
            try:
                connection.request(method, self._address.path + path, body, headers)
                response = connection.getresponse()
                if not 200 <= response.status < 300:
                    raise ServerError(_sentence(response), response.status)
                yield response, sock
            except (OSError, HTTPException) as error:
                raise LostError(f"the connection to {self.url} was lost: {error}") from error


class LostError(ServerError):
    """Says that a stream broke off; whether the job goes on is not known."""


def _sentence(response: HTTPResponse) -> str:
    text = response.read().decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status} {response.reason}"


def _parse(response: HTTPResponse) -> Iterator[Event]:
    """Yields (name, data) of each event of a text/event-stream whose data is JSON."""
    name, data = "message", []
    for raw in response:
        line = raw.decode("utf-8").rstrip("\r\n")
        if line.startswith("event:"):
            name = line[6:].strip()
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line:
            if data and data != ["[DONE]"]:
                yield name, json.loads("\n".join(data))
            name, data = "message", []


def _form(fields: Mapping[str, Any], files: Mapping[str, bytes]) -> tuple[bytes, str]:
    """Returns a multipart form and its type; fields that are None are left out, files are PNG."""
    boundary = uuid.uuid4().hex
    parts = [
        f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
        if value is not None
    ]
    for name, content in files.items():
        disposition = f'Content-Disposition: form-data; name="{name}"; filename="{name.rstrip("[]")}.png"'
        parts.append(f"{disposition}\r\nContent-Type: image/png\r\n\r\n".encode() + content + b"\r\n")
    start = f"--{boundary}\r\n".encode()
    return b"".join(
        start + part for part in parts
    ) + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"
