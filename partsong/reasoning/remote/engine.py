"""Uses any server with the OpenAI API as an engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from partsong.errors import UnsupportedError
from partsong.knobs import Count, check_knobs, type_hints
from partsong.reasoning.calls.call import Completion, Message, Request
from partsong.reasoning.calls.engine import Progress
from partsong.reasoning.remote.address import Secret, check_address, is_loopback
from partsong.reasoning.remote.dialect import Dialect, Endpoint, joined
from partsong.reasoning.remote.errors import (
    GarbledError,
    ModelNotServedError,
    RemoteError,
    RequestRefusedError,
    StalledError,
)
from partsong.reasoning.remote.event_stream import events_of
from partsong.reasoning.remote.faults import named_faults, stalled
from partsong.reasoning.remote.reply import Reply, ReplyPart
from partsong.reasoning.remote.think_tags import THINK_TAGS, check_tags
from partsong.reasoning.remote.timeouts import Patience
from partsong.whole_text import whole_text

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["OpenAIEngine", "Traffic"]

_OPENAI = "https://api.openai.com/v1"
#: Seconds an idle connection is kept. Many servers close theirs after 5 s, and a request sent just then is lost.
_IDLE_SECONDS = 2.0


@dataclass(slots=True)
class Traffic:
    """Counts what went over the line beyond what completions say.

    Attributes:
        requests: all requests sent.
        retries: requests sent again after a failure.
        reworded: requests sent again without what the server refused.
        wasted: tokens that failed attempts had streamed. They are in no completion, so a call counts once.
        cancelled: tokens that cancelled calls had streamed; a run counts these itself.
    """

    requests: int = 0
    retries: int = 0
    reworded: int = 0
    wasted: int = 0
    cancelled: int = 0


class _Reporter:
    """Reports what a call has written, failed attempts included, because they cost tokens as well.

    `lost` counts the tokens of failed attempts, and `cut` those of the attempt that was cancelled.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self.lost, self.cut, self._has_reported = progress, 0, 0, False

    def report(self, part: ReplyPart) -> None:
        if self._progress is not None and part.tokens:
            self._has_reported = True
            self._progress(part.text, self.lost + part.tokens, part.confidence)

    def restart(self, tokens: int) -> None:
        """Notes that an attempt failed after some tokens, and reports its text as void."""
        self.lost += tokens
        if self._has_reported and self._progress is not None:
            self._progress("", self.lost, restart=True)
        self._has_reported = False


class OpenAIEngine:
    """Asks a server for every request by itself, and streams the answer.

    One request is one answer: ``n`` is never sent. Servers count the tokens of several answers in different ways, and
    sample 3 of 8 could not be sample 3 of 64. Where prompts are long, let the server keep their keys.

    Args:
        model: name of the model at the server.
        base_url: address of the API, usually ending in ``/v1``. None takes the environment's ``OPENAI_BASE_URL``, or
            OpenAI's own. A key is sent only over https, or to this machine.
        api_key: the key. None takes the environment's ``OPENAI_API_KEY``; an empty text sends no key. It is written
            nowhere.
        endpoint: "chat", or "completions" for models that continue a text.
        name: name in journals. None makes it from endpoint, model, and settings that change answers. The address is
            not part of it, so a run can continue when the server has moved.
        extra: further fields of every request, such as ``{"top_k": 0, "min_p": 0.0}`` for servers that cut the
            distribution by themselves.
        template: makes one text from messages, for "completions".
        think_tags: tags around hidden reasoning in the text, which is separated; None takes the text as it is.
        stream: whether answers come piece by piece. Without that there is no progress, and a cancelled call may go on
            at the server.
        connections: most requests at the same time; further calls wait their turn here, without a time limit.
        patience: timeouts and retries.
        plain_http: whether the key may be sent unencrypted over a network.

    Attributes:
        name: name in journals.
        traffic: counts of what went over the line.

    Raises:
        ArgumentError: an address, tag, limit or field cannot be used.

    >>> engine = OpenAIEngine("smollm2", base_url="http://127.0.0.1:8000/v1", api_key="")
    >>> engine.name
    'openai:chat:smollm2'
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | Secret | None = None,
        endpoint: Endpoint = "chat",
        name: str | None = None,
        extra: Mapping[str, Any] | None = None,
        template: Callable[[Sequence[Message]], str] = joined,
        think_tags: tuple[str, str] | None = THINK_TAGS,
        stream: bool = True,
        connections: Count = 256,
        patience: Patience | None = None,
        plain_http: bool = False,
    ) -> None:
        knobs = {"endpoint": endpoint, "connections": connections, "patience": patience}
        check_knobs(type_hints(OpenAIEngine.__init__), knobs)
        self._key = Secret.find(api_key)
        address = base_url or os.environ.get("OPENAI_BASE_URL") or _OPENAI
        self.base_url = check_address(address, has_key=bool(self._key), plain_http=plain_http)
        self.patience = patience or Patience()
        self.dialect = Dialect(endpoint=endpoint, model=model, extra=extra or {}, template=template, stream=stream)
        self.think_tags, self.connections = check_tags(think_tags), connections
        self.name = name or _name(endpoint, model, extra or {}, self.think_tags)
        self.traffic = Traffic()
        self._random = random.Random()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"OpenAIEngine({self.dialect.model!r}, base_url={self.base_url!r}, name={self.name!r})"

    # --- calls --------------------------------------------------------------------------------------------------------

    async def generate(self, request: Request, progress: Progress | None = None) -> Completion:
        """Answers one request; see `Engine`.

        Cancelling closes the stream, which shows the server that the reader is gone. Failed attempts are repeated as
        `patience` allows.

        Raises:
            RemoteError: there is no answer; its subclasses say why.
            UnsupportedError: the client is not installed.
        """
        client = self._client()
        async with self._gate:
            loop, reporter = asyncio.get_running_loop(), _Reporter(progress)
            until = loop.time() + self.patience.total
            attempt = 0
            while True:
                attempt += 1
                try:
                    completion = await self._send_in_time(client, request, reporter, until)
                    return replace(completion, usage=replace(completion.usage, wasted=reporter.lost))
                except RemoteError as error:
                    wait = self.patience.pause(attempt, error.wait, self._random)
                    if not error.retry or attempt > self.patience.retries:
                        raise await self._explain(client, error, attempt, reporter.lost) from None
                    if loop.time() + wait > until:
                        hint = f"; the next attempt would be {wait:.3g} s later, past Patience(total="
                        raise error.after(attempt, reporter.lost, f"{hint}{self.patience.total:g})") from None
                await asyncio.sleep(wait)
                self.traffic.retries += 1

    async def _send_in_time(
        self, client: AsyncOpenAI, request: Request, reporter: _Reporter, until: float
    ) -> Completion:
        try:
            async with asyncio.timeout_at(until):
                return await self._send(client, request, reporter)
        except TimeoutError:
            self._lose(reporter, reporter.cut)
            seconds = self.patience.total
            words = f"did not end its answer within {seconds:g} s; raise Patience(total=...) to wait longer"
            raise StalledError(f"{self.base_url} {words}", retry=False) from None
        except asyncio.CancelledError:
            self.traffic.cancelled += reporter.cut
            raise

    async def _send(self, client: AsyncOpenAI, request: Request, reporter: _Reporter) -> Completion:
        """Sends a request, and again without the fields a server refuses, if the answer is as good without them."""
        sent: list[set[str]] = []
        while True:
            body = self.dialect.body(request)
            sent.append(set(body))
            try:
                reply, completion = await self._attempt(client, body, request, reporter)
                if not reply.ended_in_thoughts or "stop" not in body or request.parameters.stop_in_thoughts:
                    return completion
                # The server found a stop string in the thoughts: from now on answers are cut here.
                self._lose(reporter, reply.tokens)
                self.dialect.thinks = True
            except RequestRefusedError as error:
                if not self.dialect.learn(body, error.words) or set(self.dialect.body(request)) in sent:
                    raise
            self.traffic.reworded += 1

    async def _attempt(
        self, client: AsyncOpenAI, body: Mapping[str, Any], request: Request, reporter: _Reporter
    ) -> tuple[Reply, Completion]:
        reply = Reply(request, self.think_tags)
        self.traffic.requests += 1
        try:
            with named_faults(self.base_url, self._key, lambda: reply.tokens > 0):
                await self._read(client, body, reply, reporter)
            return reply, reply.completion()
        except asyncio.CancelledError:
            reporter.cut = reply.tokens
            raise
        except RemoteError:
            self._lose(reporter, reply.tokens)
            raise

    def _lose(self, reporter: _Reporter, tokens: int) -> None:
        reporter.restart(tokens)
        self.traffic.wasted += tokens

    async def _read(self, client: AsyncOpenAI, body: Mapping[str, Any], reply: Reply, reporter: _Reporter) -> None:
        from openai import AsyncStream

        loop, patience = asyncio.get_running_loop(), self.patience
        began = False
        try:
            async with asyncio.timeout(patience.first) as limit:
                if not body["stream"]:
                    reply.add(await client.post(self.dialect.path, cast_to=object, body=body))
                    return
                stream = await client.post(
                    self.dialect.path, cast_to=object, body=body, stream=True, stream_cls=AsyncStream[object]
                )
                try:
                    kind = stream.response.headers.get("content-type", "")
                    if "json" in kind:  # it does not stream
                        reply.add(json.loads(await stream.response.aread()))
                        return
                    if "html" in kind:
                        page = (await stream.response.aread()).decode(errors="replace")
                        raise GarbledError(f"{self.base_url} sent a web page where an answer was due: {_start(page)}")
                    async for event in events_of(stream.response.aiter_bytes(), self._key.clean):
                        reporter.report(reply.add(event))
                        began = True
                        limit.reschedule(loop.time() + patience.stall)
                        if self.dialect.thinks and "stop" not in body and reply.has_stopped:
                            break
                finally:
                    await stream.close()
        except TimeoutError:
            if not limit.expired():
                raise
            if began:
                raise stalled(self.base_url, patience.stall, "stall") from None
            raise stalled(self.base_url, patience.first, "first") from None

    async def _explain(self, client: AsyncOpenAI, error: RemoteError, attempt: int, lost: int) -> RemoteError:
        """Returns an error for the user; if a model is not served, it names those that are."""
        hint = ""
        if isinstance(error, ModelNotServedError):
            try:
                served = await self._served(client)
                hint = f"; model={self.dialect.model!r} was asked for, served are: {', '.join(served) or 'none'}"
            except RemoteError:
                hint = "; no models are listed there either: base_url mostly ends in /v1"
        return error.after(attempt, lost, hint)

    # --- the server ---------------------------------------------------------------------------------------------------

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Sends a body to an endpoint beside those that make answers, and returns the JSON that it answers with.

        Args:
            path: from the root of the server, such as ``/pooling`` or ``/v1/classify``.
            body: what to send as JSON.

        Raises:
            RemoteError: there is no answer, after as many attempts as `patience` allows; its subclasses say why.
            UnsupportedError: the client is not installed.
        """
        client = self._client()
        address = self.base_url.removesuffix("/v1") + path
        async with self._gate:
            self.traffic.requests += 1
            try:
                async with asyncio.timeout(self.patience.first):
                    with named_faults(address, self._key, lambda: False):
                        patient = client.with_options(max_retries=self.patience.retries)
                        return await patient.post(address, cast_to=object, body=dict(body))
            except TimeoutError:
                raise stalled(address, self.patience.first, "first") from None

    async def models(self) -> list[str]:
        """Returns the names of the models the server offers.

        Raises:
            RemoteError: the server does not name them.
        """
        return await self._served(self._client())

    async def _served(self, client: AsyncOpenAI) -> list[str]:
        try:
            async with asyncio.timeout(self.patience.connect):
                with named_faults(self.base_url, self._key, lambda: False):
                    reply: Any = await client.get("/models", cast_to=object)
        except TimeoutError:
            raise stalled(self.base_url, self.patience.connect, "connect") from None
        models = reply.get("data") if isinstance(reply, Mapping) else None
        return [whole_text(str(model.get("id"))) for model in models or [] if isinstance(model, Mapping)]

    def _client(self) -> AsyncOpenAI:
        """Returns a client for the running event loop: connections do not outlive the loop they were made in."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return self._loop_client
        try:
            import httpx2
            import openai
        except ImportError as error:
            raise UnsupportedError(f"{error}; install partsong[reasoning] to ask servers") from error
        host = urlsplit(self.base_url).hostname or ""
        http = openai.DefaultAsyncHttpxClient(
            limits=httpx2.Limits(
                max_connections=self.connections,
                max_keepalive_connections=self.connections,
                keepalive_expiry=_IDLE_SECONDS,
            ),
            timeout=httpx2.Timeout(None, connect=self.patience.connect),
            # A proxy from the environment is not used for this machine.
            trust_env=not is_loopback(host),
        )
        self._loop_client: AsyncOpenAI = openai.AsyncOpenAI(
            api_key=self._key.reveal(), base_url=self.base_url, max_retries=0, http_client=http
        )
        self._gate = asyncio.Semaphore(self.connections)
        self._loop = loop
        return self._loop_client

    async def close(self) -> None:
        """Closes the connections; the engine opens new ones if it is asked again."""
        if self._loop is asyncio.get_running_loop():
            self._loop = None
            await self._loop_client.close()


def _start(page: str) -> str:
    """Returns the first words of a page, such as a login form, without its tags."""
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())[:200]


def _name(endpoint: str, model: str, extra: Mapping[str, Any], tags: tuple[str, str] | None) -> str:
    if not extra and tags == THINK_TAGS:
        return f"openai:{endpoint}:{model}"
    text = json.dumps([dict(extra), tags], sort_keys=True, default=str)
    return f"openai:{endpoint}:{model}+{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"
