"""Starts a server on this machine as a child process, waits until it answers, and sees that it ends."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from partsong import parent
from partsong.errors import ArgumentError, UnsupportedError
from partsong.knobs import AboveZero, Count, check_knobs, type_hints
from partsong.reasoning.calls.engine import EngineError
from partsong.reasoning.remote.engine import OpenAIEngine

__all__ = ["LocalServer", "Recipe", "ServerError", "command_server", "llama_server", "transformers_server"]

_LLAMA = Path(__file__).with_name("llama_child.py")
_HOST = "127.0.0.1"
#: Lines of a server's output in an error, and bytes at its end in which they are looked for.
_LINES, _TAIL = 12, 8192
#: Seconds a server gets to end by itself.
_GRACE = 5.0
#: Ports that are tried, because another process may take a free port before the server does.
_PORTS = 3
_TAKEN = ("address already in use", "couldn't bind", "could not bind")


class ServerError(EngineError):
    """Says that a server did not start, or ended by itself; the message has its last output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Says how to start a server, and how to ask it.

    Attributes:
        command: makes the command line from a port.
        model: name of the model in requests.
        extra: fields every request needs so that the server draws from the whole distribution; see `OpenAIEngine`.
        health: path that answers 200 once the server takes calls.
        environment: variables added to the environment of this process.
        endpoint: "chat", or "completions" for models that know no chat.
    """

    command: Callable[[int], Sequence[str]]
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    health: str = "/health"
    environment: Mapping[str, str] = field(default_factory=dict)
    endpoint: str = "chat"


class LocalServer:
    """Runs a server as a child process on a free port of this machine, for the time of a ``with`` block.

    It ends with the block and with this process, even if that is killed: a guard between the two holds a pipe.

    Args:
        recipe: what to start; see `llama_server`, `transformers_server` and `command_server`.
        seconds: longest time until it answers.

    Attributes:
        base_url: address of its API, once it is up.

    Raises:
        ArgumentError: `seconds` is not positive.
        ServerError: it did not start; the message has the last lines it wrote.

    >>> with LocalServer(recipe) as server:  # doctest: +SKIP
    ...     asyncio.run(server.engine().generate(request))
    """

    def __init__(self, recipe: Recipe, *, seconds: AboveZero = 120.0) -> None:
        check_knobs(type_hints(LocalServer.__init__), {"seconds": seconds})
        self.recipe, self.seconds, self.base_url = recipe, seconds, ""
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> LocalServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts it and returns once it answers."""
        if os.name != "posix":
            raise UnsupportedError("servers are started on Linux and macOS only; start one by hand and give base_url=")
        if self._process is not None:
            raise ArgumentError("this server is up already")
        for left in reversed(range(_PORTS)):
            try:
                self._start(_free_port())
                break
            except ServerError as error:
                if not left or not any(words in str(error).lower() for words in _TAKEN):
                    raise

    def _start(self, port: int) -> None:
        # A file without a name leaves nothing behind, even if this process is killed.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed by stop
        guarded = [sys.executable, "-P", parent.__file__, str(_GRACE), *self.recipe.command(port)]
        environment = {**os.environ, **self.recipe.environment}
        self._process = subprocess.Popen(
            guarded, stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, env=environment, start_new_session=True
        )
        until = time.monotonic() + self.seconds
        try:
            while not self._answers(port):
                # Waiting for the process instead of sleeping shows its end at once.
                with suppress(subprocess.TimeoutExpired):
                    raise self._error(f"ended with status {self._process.wait(0.05)}")
                if time.monotonic() > until:
                    raise self._error(f"did not answer within {self.seconds:g} s")
        except BaseException:
            self.stop()
            raise
        self.base_url = f"http://{_HOST}:{port}/v1"

    def _answers(self, port: int) -> bool:
        connection = http.client.HTTPConnection(_HOST, port, timeout=2.0)
        try:
            connection.request("GET", self.recipe.health)
            return connection.getresponse().status == 200 and self.is_up
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _error(self, what: str) -> ServerError:
        return ServerError(f"the server for {self.recipe.model} {what}; its last words:\n{self.last_words()}")

    def last_words(self) -> str:
        """Returns the last lines it wrote; empty once it has been stopped."""
        if self._log is None:
            return ""
        # The server writes at the position of this file, so it is read without moving the position.
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _TAIL, max(size - _TAIL, 0))
        return "\n".join(tail.decode("utf-8", "replace").splitlines()[-_LINES:])

    @property
    def is_up(self) -> bool:
        """Returns whether its process runs."""
        return self._process is not None and self._process.poll() is None

    def engine(self, **options: Any) -> OpenAIEngine:
        """Returns an engine that asks this server as its recipe says; for options see `OpenAIEngine`."""
        if not self.is_up or not self.base_url:
            raise ServerError(f"the server for {self.recipe.model} is not up; use it inside its with block")
        extra = {**self.recipe.extra, **options.pop("extra", {})}
        options = {"endpoint": self.recipe.endpoint, "api_key": "", **options}
        return OpenAIEngine(self.recipe.model, base_url=self.base_url, extra=extra, **options)

    def stop(self) -> None:
        """Ends the server; does nothing if it is not up."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(3 * _GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._log is not None:
            self._log.close()
        self._process, self._log, self.base_url = None, None, ""


def llama_server(
    model: str | Path, *, slots: Count = 4, context: Count = 4096, threads: Count = 1, seconds: AboveZero = 120.0
) -> LocalServer:
    """Returns llama.cpp's server, from the package `xllamacpp`.

    Args:
        model: a GGUF file.
        slots: calls at the same time.
        context: tokens of each call, prompt and answer.
        threads: processor threads.
        seconds: longest time until it answers.

    Raises:
        ArgumentError: the file does not exist, or a number is not positive.
        UnsupportedError: the package is not installed.
    """
    path = Path(model)
    if not path.is_file():
        raise ArgumentError(f"{path} is not there; llama.cpp takes a GGUF file")
    sizes = {"slots": slots, "context": context, "threads": threads}
    check_knobs(type_hints(llama_server), sizes)
    _check_installed("xllamacpp", "pip install xllamacpp")
    options = {"model": str(path.resolve()), "alias": path.stem, **sizes}

    def command(port: int) -> list[str]:
        return [sys.executable, "-P", str(_LLAMA), json.dumps({**options, "port": port})]

    # By default it keeps 40 tokens, and of those the ones at least a twentieth as likely as the first.
    extra = {"top_k": 0, "min_p": 0.0}
    return LocalServer(Recipe(command=command, model=path.stem, extra=extra), seconds=seconds)


def transformers_server(
    model: str | Path, *, threads: int = 1, endpoint: str = "chat", seconds: float = 120.0
) -> LocalServer:
    """Returns a server that runs ``transformers serve``, from the extra `transformers-serve`.

    It reports no log-probabilities, and a seed counts for the whole process: samples come out the same again only when
    one call is made at a time (``engine(connections=1)``).

    Args:
        model: a folder in transformers' layout, or a name at the hub.
        threads: processor threads.
        endpoint: "chat", or "completions" for models without a chat template.
        seconds: longest time until it answers.

    Raises:
        UnsupportedError: the extra is not installed.
    """
    for package in ("transformers", "fastapi", "uvicorn"):
        _check_installed(package, "pip install 'partsong[transformers-serve]'")
    name = str(Path(model).resolve()) if Path(model).is_dir() else str(model)

    def command(port: int) -> list[str]:
        serve = [sys.executable, "-m", "transformers.cli.transformers", "serve", name]
        return [*serve, "--host", _HOST, "--port", str(port), "--device", "cpu"]

    # Without this, a model whose own configuration is greedy stays greedy at any temperature.
    extra = {"generation_config": json.dumps({"do_sample": True, "top_k": 0})}
    environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    recipe = Recipe(command=command, model=name, extra=extra, environment=environment, endpoint=endpoint)
    return LocalServer(recipe, seconds=seconds)


def command_server(
    command: Sequence[str],
    model: str,
    *,
    extra: Mapping[str, Any] | None = None,
    health: str = "/health",
    seconds: float = 600.0,
) -> LocalServer:
    """Returns any other server, such as vLLM's.

    Args:
        command: the command with its arguments, and ``{port}`` where the port belongs; it should bind to 127.0.0.1.
        model: name of the model in requests.
        extra: see `Recipe`.
        health: see `Recipe`.
        seconds: longest time until it answers.

    Raises:
        ArgumentError: the command does not say where the port belongs.

    >>> server = command_server(["vllm", "serve", "m", "--host", "127.0.0.1", "--port", "{port}"], "m")
    """
    if not any("{port}" in word for word in command):
        raise ArgumentError(
            f"{' '.join(command)!r} has no {{port}}; put it where the port belongs, so that the server can be found"
        )

    def with_port(port: int) -> list[str]:
        return [word.replace("{port}", str(port)) for word in command]

    return LocalServer(Recipe(command=with_port, model=model, extra=extra or {}, health=health), seconds=seconds)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _check_installed(package: str, remedy: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UnsupportedError(f"{package} is not installed; {remedy}")
