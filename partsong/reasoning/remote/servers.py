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
from types import TracebackType
from typing import IO, Any

from partsong.errors import ArgumentError, UnsupportedError
from partsong.reasoning.calls.engine import EngineError
from partsong.reasoning.remote.engine import OpenAIEngine

__all__ = ["LocalServer", "Recipe", "ServerError", "command_server", "llama_server", "transformers_server"]

_HERE = Path(__file__).parent
_HOST = "127.0.0.1"
#: Lines of a server's output in an error, and bytes to look for them in.
_LINES, _TAIL = 12, 8192
#: Seconds a server has to end by itself.
_GRACE = 5.0
#: Another process may take a free port before the server does.
_PORTS = 3
_TAKEN = ("address already in use", "couldn't bind", "could not bind")


class ServerError(EngineError):
    """A server did not come up, or ended by itself; the message has its last words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a server is started, and how it is asked.

    Attributes:
        command: makes the command line from a port.
        model: its name in requests.
        extra: fields every request needs so that the whole distribution is drawn from; see `OpenAIEngine`.
        health: path that answers 200 once calls may come.
        environment: added to ours.
        endpoint: "chat", or "completions" for models that know no chat.
    """

    command: Callable[[int], Sequence[str]]
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    health: str = "/health"
    environment: Mapping[str, str] = field(default_factory=dict)
    endpoint: str = "chat"


class LocalServer:
    """A server as a child process on a free port of this machine, for the time of a ``with`` block.

    It ends with the block, and with this process however that ends: a guard between the two holds a pipe.

    Args:
        recipe: what to start; see `llama_server`, `transformers_server` and `command_server`.
        seconds: until it must answer.

    Attributes:
        base_url: of its API, once it is up.

    Raises:
        ArgumentError: seconds that are not positive.
        ServerError: it did not come up; with the last lines it wrote.

    >>> with LocalServer(recipe) as server:  # doctest: +SKIP
    ...     asyncio.run(server.engine().generate(request))
    """

    def __init__(self, recipe: Recipe, *, seconds: float = 120.0) -> None:
        if not seconds > 0:
            raise ArgumentError(f"seconds={seconds!r}; use a positive number")
        self.recipe, self.seconds, self.base_url = recipe, seconds, ""
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> LocalServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        command = [*self.recipe.command(port)]
        # A file without a name: nothing is left of it, however this process ends.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed by stop
        guarded = [sys.executable, "-P", str(_HERE / "guard.py"), str(_GRACE), *command]
        environment = {**os.environ, **self.recipe.environment}
        self._process = subprocess.Popen(
            guarded,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,
        )
        until = time.monotonic() + self.seconds
        try:
            while not self._answers(port):
                # Waiting for its end is what tells at once that it ended.
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
        """The last lines it wrote; empty once it has been stopped."""
        if self._log is None:
            return ""
        # The server writes where this file stands, so it is read without moving there.
        size = os.fstat(self._log.fileno()).st_size
        said = os.pread(self._log.fileno(), _TAIL, max(size - _TAIL, 0))
        return "\n".join(said.decode("utf-8", "replace").splitlines()[-_LINES:])

    @property
    def is_up(self) -> bool:
        """Whether its process is there."""
        return self._process is not None and self._process.poll() is None

    def engine(self, **options: Any) -> OpenAIEngine:
        """An engine that asks this server, with what its recipe says; options as of `OpenAIEngine`."""
        if not self.is_up or not self.base_url:
            raise ServerError(f"the server for {self.recipe.model} is not up; use it inside its with block")
        extra = {**self.recipe.extra, **options.pop("extra", {})}
        given = {"endpoint": self.recipe.endpoint, "api_key": "", **options}
        return OpenAIEngine(self.recipe.model, base_url=self.base_url, extra=extra, **given)

    def stop(self) -> None:
        """Ends it; nothing happens if it is not up."""
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
    model: str | Path, *, slots: int = 4, context: int = 4096, threads: int = 1, seconds: float = 120.0
) -> LocalServer:
    """llama.cpp's server, from the package `xllamacpp`.

    Args:
        model: a GGUF file.
        slots: calls at a time.
        context: tokens of each, prompt and answer.
        threads: of the processor.
        seconds: until it must answer.

    Raises:
        ArgumentError: no such file, or a number that is none.
        UnsupportedError: the package is not installed.
    """
    path = Path(model)
    if not path.is_file():
        raise ArgumentError(f"{path} is not there; llama.cpp takes a GGUF file")
    for name, value in (("slots", slots), ("context", context), ("threads", threads)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{name}={value!r}; use a positive integer")
    _needs("xllamacpp", "pip install xllamacpp")
    options = {"model": str(path.resolve()), "alias": path.stem, "slots": slots, "context": context, "threads": threads}

    def command(port: int) -> list[str]:
        return [sys.executable, "-P", str(_HERE / "llama_child.py"), json.dumps({**options, "port": port})]

    # Its own defaults keep 40 tokens, and of those the ones at least a twentieth as likely as the first.
    extra = {"top_k": 0, "min_p": 0.0}
    return LocalServer(Recipe(command=command, model=path.stem, extra=extra), seconds=seconds)


def transformers_server(
    model: str | Path, *, threads: int = 1, endpoint: str = "chat", seconds: float = 120.0
) -> LocalServer:
    """``transformers serve``, from the extra `serve`.

    It reports no log-probabilities, and its seeds are those of the whole process: samples are the same again only
    when one call is made at a time (``engine(connections=1)``).

    Args:
        model: a folder in transformers' layout, or the name of a hub.
        threads: of the processor.
        endpoint: "completions" for models without a chat template.
        seconds: until it must answer.

    Raises:
        UnsupportedError: the extra is not installed.
    """
    for package in ("transformers", "fastapi", "uvicorn"):
        _needs(package, "pip install 'partsong[serve]'")
    name = str(Path(model).resolve()) if Path(model).is_dir() else str(model)

    def command(port: int) -> list[str]:
        serve = [sys.executable, "-m", "transformers.cli.transformers", "serve", name]
        return [*serve, "--host", _HOST, "--port", str(port), "--device", "cpu"]

    # It takes temperatures of a model whose own configuration is greedy, and goes on being greedy.
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
    """Any other server, such as vLLM's.

    Args:
        command: with its arguments, ``{port}`` where the port belongs; it should bind to 127.0.0.1.
        model: its name in requests.
        extra: as in `Recipe`.
        health: likewise.
        seconds: until it must answer.

    Raises:
        ArgumentError: the command does not say where the port belongs.

    >>> server = command_server(["vllm", "serve", "m", "--host", "127.0.0.1", "--port", "{port}"], "m")
    """
    if not any("{port}" in word for word in command):
        raise ArgumentError(
            f"{' '.join(command)!r} has no {{port}}, so the server would not listen where it is looked for"
        )

    def with_port(port: int) -> list[str]:
        return [word.replace("{port}", str(port)) for word in command]

    return LocalServer(Recipe(command=with_port, model=model, extra=extra or {}, health=health), seconds=seconds)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _needs(package: str, remedy: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UnsupportedError(f"{package} is not installed; {remedy}")
