"""Runs ``partsong serve check``: asks a running server what a health probe wants to know."""

from __future__ import annotations

import base64
import io
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from partsong.cli.serving_options import ServeCheck
from partsong.errors import ArgumentError, DistributedError

__all__ = ["check", "summary"]

#: The job that is asked of a model of pictures or videos, and the text that is asked of any other.
_JOB = {"prompt": "a test", "num_inference_steps": 1}
_TEXT = {"prompt": "1", "max_tokens": 8}
#: Steps where a job begins with a picture: models then leave out the first ones.
_STEPS_FROM_PICTURE = 4
#: Seconds between two looks at a job.
_PAUSE = 0.2


def check(options: ServeCheck) -> dict[str, Any]:
    """Asks the server; returns what it said, in the order in which it was asked.

    Raises:
        ArgumentError: the address or the key cannot be used.
        DistributedError: the server is not there, or something is not as it should be.
    """
    if not options.url.startswith(("http://", "https://")):
        raise ArgumentError(f"{options.url}: write an address such as http://127.0.0.1:8000")
    server = _Server(options.url.rstrip("/"), _key(options), options.timeout)
    checks: list[dict[str, Any]] = []

    def note(name: str, ask: Callable[[], str]) -> None:
        begin = time.perf_counter()
        try:
            answer = ask()
        except (AttributeError, KeyError, TypeError) as error:
            raise DistributedError(f"{options.url} answers {name} in another form; is it a partsong server?") from error
        checks.append({"check": name, "seconds": round(time.perf_counter() - begin, 3), "answer": answer})

    note("health", lambda: _health(server.ask("/health")))
    note("ready", lambda: _ready(server.ask("/ready")))
    models: list[dict[str, Any]] = []
    note("models", lambda: models.extend(server.ask("/v1/models")["data"]) or _names(models))
    for model in models if options.make else ():
        note(f"{model['kind']} {model['id']}", partial(server.make, model))
    return {"command": "serve check", "url": options.url, "checks": checks}


def summary(result: dict[str, Any]) -> str:
    """Says in a line for each check what the server said."""
    rows = [f"{row['check']}: {row['answer']} ({row['seconds']:.2f} s)" for row in result["checks"]]
    return "\n".join(rows)


class _Server:
    """Asks one server.

    Args:
        url: of it.
        key: to show; None for none.
        seconds: for each answer.
    """

    def __init__(self, url: str, key: str | None, seconds: float) -> None:
        self._url, self._seconds = url, seconds
        shown = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._headers = {"Content-Type": "application/json", **shown}

    def ask(self, path: str, fields: dict[str, Any] | None = None) -> Any:
        """Returns the answer at a path; `fields` make it a POST."""
        body = None if fields is None else json.dumps(fields).encode()
        try:
            with urlopen(Request(self._url + path, body, self._headers), timeout=self._seconds) as reply:
                return json.load(reply)
        except HTTPError as error:
            raise DistributedError(f"{path} answered {error.code}: {_said(error.read())}") from error
        except (URLError, OSError, ValueError) as error:
            raise DistributedError(f"{self._url}{path} does not answer: {error}") from error

    def make(self, model: dict[str, Any]) -> str:
        """Has a model make something small, from a picture where it takes one, and waits for it."""
        name, kind = model["id"], model["kind"]
        if kind not in ("image", "video"):
            self.ask("/v1/completions", {**_TEXT, "model": name})
            return "made"
        job = self.ask("/v1/jobs", {**_JOB, **_begin(model), "model": name, "kind": kind})
        until = time.monotonic() + self._seconds
        while job.get("status") in ("queued", "in_progress"):
            if time.monotonic() > until:
                raise DistributedError(f"{name} was not done within {self._seconds:g} s: {job['status']}")
            time.sleep(_PAUSE)
            job = self.ask(f"/v1/jobs/{job['id']}")
        if job.get("error"):
            raise DistributedError(f"{name} failed: {job['error']['message']}")
        return "made"


def _begin(model: dict[str, Any]) -> dict[str, Any]:
    """Returns what a job begins with where the model can begin with a picture: a grey one, all of which may change."""
    if not model.get("most_pictures"):
        return {}
    begin = {"num_inference_steps": _STEPS_FROM_PICTURE, "pictures": [_grey("RGB")]}
    return {**begin, "mask": _grey("RGBA")} if model.get("takes_mask") else begin


def _grey(mode: str) -> str:
    """Returns a grey picture as a data URL; it is transparent where the mode allows that."""
    from PIL import Image

    file = io.BytesIO()
    Image.new(mode, (64, 64), (128, 128, 128, 0)[: len(mode)]).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _health(reply: dict[str, Any]) -> str:
    if reply["status"] != "ok":
        raise DistributedError(f"/health says {reply['status']}: {json.dumps(reply.get('models'))}")
    return "ok"


def _ready(reply: dict[str, Any]) -> str:
    return "yes" if reply["ready"] else "no"


def _names(models: list[dict[str, Any]]) -> str:
    return ", ".join(model["id"] for model in models) or "none"


def _said(body: bytes) -> str:
    """Returns what an error says, whether it is of this server or of a proxy before it."""
    text = body.decode("utf-8", "replace")
    try:
        reply = json.loads(text)
    except ValueError:
        return text[:200]
    if missing := reply.get("missing"):
        return "; ".join(missing)
    return str(reply.get("error", {}).get("message", text[:200]))


def _key(options: ServeCheck) -> str | None:
    if options.key_file is None:
        return os.environ.get("PARTSONG_API_KEY") or None
    try:
        return Path(options.key_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--key-file {options.key_file} cannot be read as text: {error}") from error
