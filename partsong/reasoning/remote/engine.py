"""Any server that speaks the OpenAI API, as an engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from partsong.errors import ArgumentError, UnsupportedError
from partsong.reasoning.calls.call import Completion, Message, Request
from partsong.reasoning.calls.engine import Progress
from partsong.reasoning.remote.address import Secret, check_address, is_loopback
from partsong.reasoning.remote.dialect import Dialect, Endpoint, joined
from partsong.reasoning.remote.errors import ModelNotServedError, RemoteError, RequestRefusedError, StalledError
from partsong.reasoning.remote.faults import named_faults, stalled
from partsong.reasoning.remote.patience import Patience
from partsong.reasoning.remote.reply import Reply, ReplyPart
from partsong.reasoning.remote.tagged import THINK_TAGS, check_tags

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["OpenAIEngine", "Traffic"]

_OPENAI = "https://api.openai.com/v1"
#: Seconds an idle connection is kept. Many servers close theirs after 5 s: a request sent just then is lost.
_KEPT = 2.0


@dataclass(slots=True)
class Traffic:
    """What went over the line, beyond what completions tell.

    Attributes:
        requests: sent, however they ended.
        retries: of those, sent again after a failure.
        reworded: of those, sent again without what the server refused.
        wasted: tokens that failed attempts had streamed. They are in no completion, so a call counts once.
        cancelled: tokens that cancelled calls had streamed; a run counts these itself.
    """

    requests: int = 0
    retries: int = 0
    reworded: int = 0
    wasted: int = 0
    cancelled: int = 0


class _Watch:
    """Tells a run what a call has written, failed attempts included: they cost too.

    Attributes:
        lost: tokens of failed attempts.
        cut: tokens of the attempt that was cancelled.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self.lost, self.cut, self._told = progress, 0, 0, False

    def tell(self, news: ReplyPart) -> None:
        if self._progress is not None and news.tokens:
            self._told = True
            self._progress(news.text, self.lost + news.tokens, news.confidence)

    def again(self, tokens: int) -> None:
        """Another attempt: what was told of the last one is void, where somebody keeps it."""
        self.lost += tokens
        if self._told and self._progress is not None:
            self._progress("", self.lost, restart=True)
        self._told = False


class OpenAIEngine:
    """Asks a server for every request by itself, and streams the answer.

    One request is one answer: ``n`` is never sent. Servers count the tokens of several answers in different ways, and
    sample 3 of 8 could not be sample 3 of 64. Where prompts are long, let the server keep their keys.

    Args:
        model: as the server calls it.
        base_url: of the API, mostly ending in ``/v1``; None is the environment's ``OPENAI_BASE_URL``, or OpenAI's own.
            A key goes over https, or to this machine.
        api_key: None is the environment's ``OPENAI_API_KEY``; an empty text is none. It is written nowhere.
        endpoint: "chat", or "completions" for models that go on with a text.
        name: in journals; None is made of endpoint, model, and what changes answers. The address is no part of it, so
            a run goes on when the server has moved.
        extra: further fields of every request, such as ``{"top_k": 0, "min_p": 0.0}`` for servers that cut the
            distribution on their own account.
        template: makes one text of messages, for "completions".
        think_tags: around hidden reasoning in the text, which is kept apart; None takes the text as it is.
        stream: False asks for answers in one piece: no progress, and a cancelled call may go on at the server.
        connections: most requests under way; further calls wait their turn here, without a time limit.
        patience: timeouts and retries.
        plain_http: lets the key go over a network unencrypted.

    Attributes:
        name: see above.
        traffic: what went over the line.

    Raises:
        ArgumentError: an address, tag, limit or field that cannot be used.

    >>> engine = OpenAIEngine("smollm2", base_url="http://127.0.0.1:8000/v1", api_key="")
    >>> engine.name
    'openai:chat:smollm2'
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        endpoint: Endpoint = "chat",
        name: str | None = None,
        extra: Mapping[str, Any] | None = None,
        template: Callable[[Sequence[Message]], str] = joined,
        think_tags: tuple[str, str] | None = THINK_TAGS,
        stream: bool = True,
        connections: int = 256,
        patience: Patience | None = None,
        plain_http: bool = False,
    ) -> None:
        if isinstance(connections, bool) or not isinstance(connections, int) or connections < 1:
            raise ArgumentError(f"connections={connections!r}; use a positive integer")
        self._key = Secret.found(api_key)
        address = base_url or os.environ.get("OPENAI_BASE_URL") or _OPENAI
        self.base_url = check_address(address, has_key=bool(self._key), plain_http=plain_http)
        self.patience = patience or Patience()
        self.patience.validate()
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

        Cancelling closes the stream, by which servers know that nobody reads on. Failed attempts are made again as
        `patience` says.

        Raises:
            RemoteError: no answer; its subclasses say why.
            UnsupportedError: the client is not installed.
        """
        client = self._client()
        async with self._gate:
            loop, watch = asyncio.get_running_loop(), _Watch(progress)
            until = loop.time() + self.patience.total
            attempt = 0
            while True:
                attempt += 1
                try:
                    made = await self._in_time(client, request, watch, until)
                    return replace(made, usage=replace(made.usage, wasted=watch.lost))
                except RemoteError as error:
                    wait = self.patience.pause(attempt, error.wait, self._random)
                    if not error.retry or attempt > self.patience.retries:
                        raise await self._explained(client, error, attempt, watch.lost) from None
                    if loop.time() + wait > until:
                        hint = f"; the next attempt would be {wait:.3g} s later, past patience total="
                        raise error.after(attempt, watch.lost, f"{hint}{self.patience.total:g}") from None
                await asyncio.sleep(wait)
                self.traffic.retries += 1

    async def _in_time(self, client: AsyncOpenAI, request: Request, watch: _Watch, until: float) -> Completion:
        try:
            async with asyncio.timeout_at(until):
                return await self._reworded(client, request, watch)
        except TimeoutError:
            self._lose(watch, watch.cut)
            error = StalledError(
                f"{self.base_url} did not end its answer within patience total={self.patience.total:g} s"
            )
            error.retry = False
            raise error from None
        except asyncio.CancelledError:
            self.traffic.cancelled += watch.cut
            raise

    async def _reworded(self, client: AsyncOpenAI, request: Request, watch: _Watch) -> Completion:
        """Sends a request, and again for as long as the server refuses something it can do without."""
        sent: list[set[str]] = []
        while True:
            body = self.dialect.body(request)
            sent.append(set(body))
            try:
                return await self._attempt(client, body, request, watch)
            except RequestRefusedError as error:
                if not self.dialect.learn(body, error.words) or set(self.dialect.body(request)) in sent:
                    raise
            self.traffic.reworded += 1

    async def _attempt(
        self, client: AsyncOpenAI, body: Mapping[str, Any], request: Request, watch: _Watch
    ) -> Completion:
        reply = Reply(request, self.think_tags)
        self.traffic.requests += 1
        try:
            with named_faults(self.base_url, self._key.clean, lambda: reply.tokens > 0):
                await self._read(client, body, reply, watch)
            return reply.completion()
        except asyncio.CancelledError:
            watch.cut = reply.tokens
            raise
        except RemoteError:
            self._lose(watch, reply.tokens)
            raise

    def _lose(self, watch: _Watch, tokens: int) -> None:
        watch.again(tokens)
        self.traffic.wasted += tokens

    async def _read(self, client: AsyncOpenAI, body: Mapping[str, Any], reply: Reply, watch: _Watch) -> None:
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
                    if "json" in stream.response.headers.get("content-type", ""):  # it does not stream
                        reply.add(json.loads(await stream.response.aread()))
                    async for event in stream:
                        watch.tell(reply.add(event))
                        began = True
                        limit.reschedule(loop.time() + patience.stall)
                finally:
                    await stream.close()
        except TimeoutError:
            if not limit.expired():
                raise
            raise stalled(self.base_url, patience.stall if began else patience.first, began) from None

    async def _explained(self, client: AsyncOpenAI, error: RemoteError, attempt: int, lost: int) -> RemoteError:
        """A fault for the user; for a model that is not served, with those that are."""
        hint = ""
        if isinstance(error, ModelNotServedError):
            try:
                served = await self._served(client)
                hint = f"; model={self.dialect.model!r} was asked for, served are: {', '.join(served) or 'none'}"
            except RemoteError:
                hint = "; no models are listed there either: base_url mostly ends in /v1"
        return error.after(attempt, lost, hint)

    # --- the server ---------------------------------------------------------------------------------------------------

    async def models(self) -> list[str]:
        """Names of the models the server offers.

        Raises:
            RemoteError: it does not say.
        """
        return await self._served(self._client())

    async def _served(self, client: AsyncOpenAI) -> list[str]:
        try:
            async with asyncio.timeout(self.patience.connect):
                with named_faults(self.base_url, self._key.clean, lambda: False):
                    said: Any = await client.get("/models", cast_to=object)
        except TimeoutError:
            raise stalled(self.base_url, self.patience.connect, False) from None
        listed = said.get("data") if isinstance(said, Mapping) else None
        return [str(one.get("id")) for one in listed or [] if isinstance(one, Mapping)]

    def _client(self) -> AsyncOpenAI:
        """A client for the running event loop: connections do not outlive the loop they were made in."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return self._made
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
                keepalive_expiry=_KEPT,
            ),
            timeout=httpx2.Timeout(None, connect=self.patience.connect),
            # A proxy of the environment is of no use on the way to this machine.
            trust_env=not is_loopback(host),
        )
        self._made: AsyncOpenAI = openai.AsyncOpenAI(
            api_key=self._key.reveal(), base_url=self.base_url, max_retries=0, http_client=http
        )
        self._gate = asyncio.Semaphore(self.connections)
        self._loop = loop
        return self._made

    async def close(self) -> None:
        """Closes the connections; the engine opens new ones if it is asked again."""
        if self._loop is asyncio.get_running_loop():
            self._loop = None
            await self._made.close()


def _name(endpoint: str, model: str, extra: Mapping[str, Any], tags: tuple[str, str] | None) -> str:
    said = json.dumps([dict(extra), tags], sort_keys=True, default=str) if extra or tags != THINK_TAGS else ""
    digest = "+" + hashlib.blake2b(said.encode(), digest_size=4).hexdigest() if said else ""
    return f"openai:{endpoint}:{model}{digest}"
