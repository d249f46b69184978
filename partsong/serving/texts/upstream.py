"""Serves the models of another server with the OpenAI API: passes requests on, or turns one into many calls."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from partsong.errors import UnsupportedError
from partsong.reasoning.calls.engine import Engine, EngineError
from partsong.reasoning.remote import OpenAIEngine, Patience, RemoteError
from partsong.reasoning.remote.address import Secret, check_address, is_loopback
from partsong.reasoning.remote.errors import ModelNotServedError, RateLimitError, RequestRefusedError
from partsong.reasoning.scorers.verifier import VerifierAddress
from partsong.serving.errors import ApiError
from partsong.serving.texts.events import TextAccepted, TextEvent, TextRequest
from partsong.serving.texts.limits import TextLimits
from partsong.serving.texts.reply_votes import ReplyVotes
from partsong.serving.texts.thinking import ThinkingJob, prepare_thinking, thinking_names

if TYPE_CHECKING:
    import httpx2

__all__ = ["PassedReply", "Upstream", "UpstreamText", "with_model"]

#: Seconds an idle connection is kept. Many servers close theirs after 5 s, and a request sent just then is lost.
_IDLE_SECONDS = 2.0
#: Most whole replies that one model is asked for at a time.
_CALLS = 16
#: Headers of a request that are passed on. The key is not: the one that clients send is this server's own.
_ASKED = ("content-type", "accept", "accept-encoding", "user-agent")
#: Headers that belong to one connection, and are not passed back.
_OWN = ("connection", "keep-alive", "transfer-encoding", "server", "date", "trailer", "upgrade", "set-cookie")


class PassedReply:
    """Holds a reply of the other server, whose body arrives as it is read.

    Args:
        response: that of the client of the other server.
        place: released when the reply has ended.

    Attributes:
        status: status of HTTP.
        headers: those that say what the body is.
    """

    def __init__(self, response: httpx2.Response, place: contextlib.ExitStack) -> None:
        self._response, self._place = response, place
        self.status = response.status_code
        self.headers = {name: value for name, value in response.headers.items() if name.lower() not in _OWN}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yields the bytes of the body, still compressed if they came compressed."""
        async for chunk in self._response.aiter_raw():
            yield chunk

    async def close(self) -> None:
        """Hangs up if the body has not ended; closing twice does nothing."""
        self._place.close()
        await self._response.aclose()


class Upstream:
    """Holds the connections to another server.

    Args:
        base_url: address of its API, mostly ending in ``/v1``.
        api_key: its key; None takes the environment's ``OPENAI_API_KEY``, an empty text sends none.
        patience: timeouts and retries of the calls that strategies make. Requests that are passed through are sent
            once, and may take as long as they need once connected.

    Raises:
        ArgumentError: the address cannot be used.
        UnsupportedError: the client is not installed.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, patience: Patience | None = None) -> None:
        try:
            import httpx2
        except ImportError as error:
            raise UnsupportedError(f"{error}; install partsong[reasoning] to ask other servers") from error
        self._key, self.patience = Secret.find(api_key), patience or Patience()
        self.base_url = check_address(base_url, has_key=bool(self._key), plain_http=False)
        host = urlsplit(self.base_url).hostname or ""
        self._client: httpx2.AsyncClient = httpx2.AsyncClient(
            timeout=httpx2.Timeout(None, connect=self.patience.connect),
            limits=httpx2.Limits(max_connections=None, keepalive_expiry=_IDLE_SECONDS),
            # A proxy from the environment is of no use on the way to this machine.
            trust_env=not is_loopback(host),
        )

    async def models(self) -> list[str]:
        """Returns the names of the models that the server offers.

        Raises:
            ApiError: the server does not list them.
        """
        engine = self.engine("models", "chat")
        try:
            return await engine.models()
        except RemoteError as error:
            raise _as_api_error(error) from error
        finally:
            await engine.close()

    def engine(self, model: str, endpoint: Any) -> OpenAIEngine:
        """Returns an engine that asks the server."""
        key = self._key.reveal() if self._key else ""
        where: dict[str, Any] = {"base_url": self.base_url, "api_key": key, "patience": self.patience}
        return OpenAIEngine(model, endpoint=endpoint, **where)

    async def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> httpx2.Response:
        """Passes a request on byte for byte, and returns the reply before its body has been read.

        Args:
            path: below the address of the API, such as ``/chat/completions``.
            body: of the request.
            headers: of the request, names in lower case.

        Raises:
            ApiError: the server cannot be reached.
        """
        import httpx2

        # Without this, the client would ask for compressed replies that its own client may not be able to read.
        sent = {"accept-encoding": "identity", **{name: headers[name] for name in _ASKED if name in headers}}
        if self._key:
            sent["authorization"] = f"Bearer {self._key.reveal()}"
        request = self._client.build_request("POST", f"{self.base_url}{path}", content=body, headers=sent)
        try:
            return await self._client.send(request, stream=True, follow_redirects=False)
        except httpx2.HTTPError as error:
            reason = self._key.clean(str(error)) or type(error).__name__
            message = f"the server {self.base_url} cannot be reached: {reason}"
            raise ApiError(502, message, code="upstream_unreachable") from None

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()


class UpstreamText:
    """Answers requests with a model of another server; see `ServedText`.

    Without a strategy, and with ``single``, requests and replies go through as they are, tools and streams included.

    Args:
        name: what the server calls the model, and clients too.
        upstream: the server; several models share it, and its creator closes it.
        limits: what requests may ask for.
        verifier: scores texts for methods that take a scorer; None leaves them their own.

    Attributes:
        name: what clients call the model.
        limits: what requests may ask for.
    """

    def __init__(
        self,
        name: str,
        upstream: Upstream,
        limits: TextLimits | None = None,
        verifier: VerifierAddress | None = None,
    ) -> None:
        self.name, self.upstream, self.limits, self._verifier = name, upstream, limits or TextLimits(), verifier
        self.limits.validate()
        self.in_flight = 0
        self._calls = asyncio.Semaphore(min(_CALLS, self.limits.max_in_flight))
        self._engines = {plain: upstream.engine(name, "completions" if plain else "chat") for plain in (False, True)}

    @property
    def ready(self) -> bool:
        """Returns True: whether the other server answers is only known when it is asked."""
        return True

    async def start(self) -> None:
        """Does nothing: there is nothing to load."""

    async def close(self) -> None:
        """Closes the engines' connections."""
        for engine in self._engines.values():
            await engine.close()

    def as_json(self) -> dict[str, Any]:
        """Returns the model by the keys of ``GET /v1/models``: id, kind, strategies and defaults."""
        return {"id": self.name, "kind": "thinking", "strategies": thinking_names(), "defaults": {}}

    async def run(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """Yields what happens while a thinking method answers a request; see `ServedText.run`."""
        with self._place():
            job = prepare_thinking(request, self.limits, None, self._verifier)
            yield TextAccepted()
            async with contextlib.aclosing(_events(job, self._engines[request.plain])) as events:
                async for event in events:
                    yield event

    async def pass_through(self, path: str, body: bytes, headers: Mapping[str, str]) -> PassedReply:
        """Passes a request on as `Upstream.send` does; it counts as running until the reply is closed."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._place())
            return PassedReply(await self.upstream.send(path, body, headers), stack.pop_all())

    async def vote(self, path: str, votes: ReplyVotes) -> dict[str, Any]:
        """Returns the reply for which most replies vote; see `ReplyVotes.run`."""
        with self._place():
            return await votes.run(partial(self._whole_reply, path))

    async def _whole_reply(self, path: str, body: bytes) -> dict[str, Any]:
        """Sends a request and returns the reply in one piece.

        Raises:
            ApiError: the server cannot be reached, refuses the request, or sends no JSON.
        """
        async with self._calls:
            response = await self.upstream.send(path, body, {"content-type": "application/json"})
            try:
                data = await response.aread()
            finally:
                await response.aclose()
        try:
            reply = json.loads(data)
        except ValueError:
            reply = None
        if response.status_code >= 400 or not isinstance(reply, dict):
            given = reply.get("error") if isinstance(reply, dict) else None
            reason = given.get("message") if isinstance(given, dict) else data[:200].decode("utf-8", "replace")
            status = response.status_code if 400 <= response.status_code < 500 else 502
            code = "upstream_refused" if status < 500 else "upstream_failed"
            raise ApiError(status, f"{self.upstream.base_url} answered {response.status_code}: {reason}", code=code)
        return reply

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """Counts a request for the length of a block, or refuses it."""
        if self.in_flight >= self.limits.max_in_flight:
            message = f"model {self.name} has {self.in_flight} requests under way, the most it takes; try again soon"
            raise ApiError(429, message, code="too_many_requests", retry_after=1.0)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


def with_model(body: bytes, name: str) -> bytes:
    r"""Puts a model's name into the body of a request, and changes no other byte.

    >>> with_model(b'{"model": "a:single",  "tools": [{"model": "a:single"}]}', "a")
    b'{"model": "a",  "tools": [{"model": "a:single"}]}'
    """
    text, decoder = body.decode("utf-8", "surrogateescape"), json.JSONDecoder(strict=False)
    spans: list[tuple[int, int]] = []
    at = text.index("{") + 1
    while True:
        at = _skip(text, at, ",")
        if text[at] == "}":
            break
        key, at = decoder.raw_decode(text, at)
        at = _skip(text, at, ":")
        _, end = decoder.raw_decode(text, at)
        if key == "model":
            spans.append((at, end))
        at = end
    for start, end in reversed(spans):
        text = text[:start] + json.dumps(name, ensure_ascii=False) + text[end:]
    return text.encode("utf-8", "surrogateescape")


def _skip(text: str, at: int, mark: str) -> int:
    while text[at] in " \t\r\n" + mark:
        at += 1
    return at


async def _events(job: ThinkingJob, engine: Engine) -> AsyncGenerator[TextEvent, None]:
    """Yields the events of a job that runs in this process; closing cancels it."""
    events: asyncio.Queue[TextEvent | None] = asyncio.Queue()
    task = asyncio.ensure_future(job.run(engine, events.put_nowait))
    task.add_done_callback(lambda _: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            yield event
        yield task.result()
    except EngineError as error:
        raise _as_api_error(error) from error
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _as_api_error(error: EngineError) -> ApiError:
    """Turns a failure of the other server into an error of this one."""
    wait = error.wait if isinstance(error, RemoteError) else None
    if isinstance(error, RateLimitError):
        return ApiError(429, str(error), code="upstream_rate_limit", retry_after=wait or 1.0)
    if isinstance(error, ModelNotServedError):
        return ApiError(404, str(error), param="model", code="model_not_found")
    if isinstance(error, RequestRefusedError):
        return ApiError(400, str(error), code="upstream_refused")
    return ApiError(502, str(error), code="upstream_failed")
