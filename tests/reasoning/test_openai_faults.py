"""A server that misbehaves: each fault has a name or a recovery, nothing is lost, and no answer counts twice."""

from __future__ import annotations

import asyncio
import email.utils
import time
from pathlib import Path
from typing import Any

import pytest

from partsong.reasoning import Completion, EngineError, Journal, Parameters, Run
from partsong.reasoning.remote import (
    DroppedError,
    GarbledError,
    KeyRefusedError,
    ModelNotServedError,
    OpenAIEngine,
    Patience,
    RateLimitError,
    RemoteError,
    RequestRefusedError,
    ServerFailedError,
    StalledError,
    UnreachableError,
    WithheldError,
)
from partsong.reasoning.remote.faults import asked_pause
from tests.reasoning.misbehaving import HASTY, Behaviour, Exchange, Misbehaving, half, well
from tests.reasoning.test_openai_engine import ASK, ask


async def ask_server(*behaviours: Behaviour, **options: Any) -> tuple[Completion, OpenAIEngine, Misbehaving]:
    async with Misbehaving(*behaviours) as server:
        engine = server.engine(**options)
        try:
            return await engine.generate(ask(**options.pop("parameters", {}))), engine, server
        finally:
            await engine.close()


def failed(kind: type[RemoteError], words: str, *behaviours: Behaviour, **options: Any) -> RemoteError:
    with pytest.raises(kind, match=words) as caught:
        asyncio.run(ask_server(*behaviours, **options))
    assert type(caught.value) is kind and isinstance(caught.value, EngineError)
    return caught.value


def answering(code: int, body: Any, **headers: str) -> Behaviour:
    async def answer(exchange: Exchange) -> None:
        await exchange.status(code, body, **headers)

    return answer


def sending(text: str, *, head: bool = True) -> Behaviour:
    async def send(exchange: Exchange) -> None:
        await (exchange.begin() if head else asyncio.sleep(0))
        await exchange.piece("the")
        await exchange.send(text)
        await exchange.end()

    return send


async def dropping(exchange: Exchange) -> None:
    await half(exchange)
    await exchange.drop()


async def at_once(exchange: Exchange) -> None:
    await exchange.drop()


async def unfinished(exchange: Exchange) -> None:
    """Ends in good order, but in the middle of a sentence."""
    await half(exchange)
    await exchange.end()


async def stalling(exchange: Exchange) -> None:
    await half(exchange)
    await exchange.gone.wait()


async def silent(exchange: Exchange) -> None:
    await exchange.gone.wait()


# --- faults that pass -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "lost"),
    [
        (dropping, 2),
        (at_once, 0),
        (unfinished, 2),
        (answering(500, {"error": {"message": "out of memory"}}), 0),
        (answering(503, "loading"), 0),
        (answering(429, {"error": {"message": "slow down"}}), 0),
        (answering(200, "<html>gateway</html>", x="y"), 0),
        (sending("data: {no json\n\n"), 1),
        (sending("data: [1, 2]\n\n"), 1),
        (sending('data: {"choices": 4}\n\n'), 1),
        (sending('data: {"choices": [{"delta": "text"}]}\n\n'), 1),
        (sending('data: {"choices": [{"delta": {"content": 7}}]}\n\n'), 1),
        (sending('data: {"error": {"message": "the worker died", "code": 500}}\n\n'), 1),
        (sending("data: \xff\n\n"), 1),
    ],
)
def test_a_passing_fault_is_tried_again_and_counts_once(fault: Behaviour, lost: int) -> None:
    completion, engine, server = asyncio.run(ask_server(fault, well))
    assert (completion.text, completion.finish) == ("the sum is 4", "stop")
    assert (completion.usage.completion, completion.usage.reported) == (3, True)
    assert (engine.traffic.requests, engine.traffic.retries, engine.traffic.wasted) == (2, 1, lost)
    assert server.bodies[0] == server.bodies[1]


@pytest.mark.parametrize(("fault", "seconds"), [(stalling, {"stall": 0.1}), (silent, {"first": 0.1})])
def test_a_stalled_stream_is_hung_up_on_and_tried_again(fault: Behaviour, seconds: dict[str, float]) -> None:
    patience = Patience(**{"stall": 5.0, "first": 5.0, "backoff": 0.001, **seconds})
    completion, engine, server = asyncio.run(ask_server(fault, well, patience=patience))
    assert completion.text == "the sum is 4"
    assert engine.traffic.wasted == (2 if fault is stalling else 0)
    assert server.asked[0].gone.is_set()


def test_slow_is_not_stalled() -> None:
    """Every piece is in time, though all of them together take longer than one may."""

    async def slowly(exchange: Exchange) -> None:
        await exchange.begin()
        for _ in range(4):
            await asyncio.wait_for(asyncio.shield(quiet(exchange)), None)
            await exchange.piece("4")
        await exchange.piece(finish="stop")
        await exchange.usage(7, 4)
        await exchange.end()

    async def quiet(exchange: Exchange) -> None:
        try:
            await asyncio.wait_for(exchange.gone.wait(), 0.15)
        except TimeoutError:
            return
        raise AssertionError("the engine hung up on a slow server")

    completion, engine, _ = asyncio.run(ask_server(slowly, patience=Patience(stall=0.4, first=0.4, retries=0)))
    assert (completion.text, engine.traffic.requests) == ("4444", 1)


# --- faults that stay -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (dropping, DroppedError, r"dropped the connection.*last of 4 attempts.*8 tokens of failed attempts are lost"),
        (unfinished, DroppedError, "broke off after 2 tokens"),
        (answering(500, {"error": {"message": "out of memory"}}), ServerFailedError, "500.*out of memory.*of 4 att"),
        (answering(429, {"error": {"message": "slow down"}}), RateLimitError, "429.*slow down.*last of 4 attempts"),
        (sending("data: {no json\n\n"), GarbledError, "did not send JSON"),
        (answering(200, "{not json"), GarbledError, "did not send JSON"),
    ],
)
def test_a_fault_that_stays_has_a_name(fault: Behaviour, kind: type[RemoteError], words: str) -> None:
    assert failed(kind, words, fault).attempts == 4


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (answering(401, {"error": {"message": "no such key"}}), KeyRefusedError, "401.*no such key.*set api_key="),
        (answering(403, {"error": {"message": "not yours"}}), KeyRefusedError, "403"),
        (answering(404, {"error": "no model m"}), ModelNotServedError, "model='m'.*served are: served-one, served-two"),
        (answering(400, {"error": {"message": "the prompt is too long"}}), RequestRefusedError, "400.*too long"),
        (answering(501, {"error": "no"}), RequestRefusedError, "501"),
        (answering(429, {"error": {"code": "insufficient_quota"}}), RateLimitError, "insufficient_quota"),
        (sending('data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}\n\n'), GarbledError,
         "finish_reason='tool_calls', which does not end a text"),
        (sending('data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "content_filter"}]}\n\n'),
         WithheldError, "ask in other words"),
        (sending('data: {"choices": [{"index": 1, "delta": {"content": "5"}}]}\n\n'), GarbledError,
         "one answer was asked for and the server sent others"),
        (answering(200, {"choices": [{"index": i, "message": {"content": "4"}, "finish_reason": "stop"}
                                     for i in range(2)]}), GarbledError, "one answer was asked for"),
    ],
)  # fmt: skip
def test_a_fault_that_trying_again_cannot_mend_is_raised_at_once(
    fault: Behaviour, kind: type[RemoteError], words: str
) -> None:
    assert failed(kind, words, fault, well).attempts == 1


def test_nobody_is_there() -> None:
    async def main() -> None:
        async with Misbehaving() as server:
            pass
        engine = server.engine(patience=Patience(retries=1, backoff=0.001))
        await engine.generate(ask())

    with pytest.raises(UnreachableError, match=r"cannot be reached.*is the server up.*last of 2 attempts"):
        asyncio.run(main())


def test_an_address_that_is_no_api() -> None:
    async def main() -> None:
        async with Misbehaving() as server:
            port = int(server.base_url.rsplit(":", 1)[1].split("/")[0])
        missing = await asyncio.start_server(_nothing_here, "127.0.0.1", port)
        async with missing:
            await server.engine(base_url=f"http://127.0.0.1:{port}").generate(ask())

    with pytest.raises(ModelNotServedError, match="base_url mostly ends in /v1"):
        asyncio.run(main())


async def _nothing_here(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 404 X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


def test_the_key_is_in_no_error() -> None:
    echo = answering(401, {"error": {"message": "Incorrect API key provided: sk-secret-1"}})
    error = failed(KeyRefusedError, r"provided: \[key\]", echo, api_key="sk-secret-1")
    assert "sk-secret-1" not in f"{error!r} {error.words} {vars(error)}" and error.__cause__ is None


# --- pauses -----------------------------------------------------------------------------------------------------------


def test_the_pause_a_server_asks_for_is_kept() -> None:
    started = time.monotonic()
    completion, engine, _ = asyncio.run(ask_server(answering(429, {}, retry_after_ms="300"), well))
    assert (completion.text, engine.traffic.retries) == ("the sum is 4", 1)
    assert time.monotonic() - started >= 0.3
    failed(RateLimitError, r"the next attempt would be 60 s later, past Patience\(total=20\)",
           answering(429, {}, retry_after="60"), well)  # fmt: skip


def test_how_servers_write_pauses() -> None:
    now = 1_800_000_000.0
    date = email.utils.formatdate(now + 90, usegmt=True)
    assert asked_pause({"retry-after": date}, now) == 90.0
    assert asked_pause({"retry-after": "1.5"}) == 1.5
    assert asked_pause({"retry-after-ms": "20", "retry-after": "9"}) == 0.02
    assert asked_pause({"retry-after": "-3"}) == 0.0
    assert [asked_pause({"retry-after": text}) for text in ("soon", "nan", "inf", "")] == [None] * 4


def test_a_call_ends_when_its_time_is_over() -> None:
    started = time.monotonic()
    patience = Patience(total=0.2, retries=100, backoff=0.01)
    error = failed(
        StalledError,
        r"did not end its answer within 0.2 s; raise Patience\(total=...\).*2 tokens of failed",
        stalling,
        patience=patience,
    )
    assert time.monotonic() - started < 2.0 and error.wasted == 2


# --- cancelling, connections, runs ------------------------------------------------------------------------------------


def test_cancelling_closes_the_stream() -> None:
    async def main() -> None:
        async with Misbehaving(stalling) as server:
            engine = server.engine()
            heard = asyncio.Event()
            call = asyncio.ensure_future(
                engine.generate(ask(), lambda text, tokens, confidence=(): heard.set() if tokens == 2 else None)
            )
            await heard.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.wait_for(server.asked[0].gone.wait(), 5.0)
            assert (engine.traffic.cancelled, engine.traffic.wasted, engine.traffic.retries) == (2, 0, 0)

    asyncio.run(main())


def test_connections_are_limited_and_waiting_for_one_is_no_stall() -> None:
    async def main() -> None:
        most = 0
        served: list[int] = []

        async def slow(exchange: Exchange) -> None:
            nonlocal most
            served.append(1)
            most = max(most, len(served))
            try:
                await asyncio.wait_for(exchange.gone.wait(), 0.1)
            except TimeoutError:
                await well(exchange)
            finally:
                served.pop()

        async with Misbehaving(slow) as server:
            # Twelve calls, three at a time, take four times as long as one may wait to begin.
            engine = server.engine(connections=3, patience=Patience(first=0.3, retries=0))
            completions = await asyncio.gather(*(engine.generate(ask()) for _ in range(12)))
            assert len(completions) == 12 and most == 3
            await engine.close()

    asyncio.run(main())


def test_a_run_counts_a_retried_call_once_and_repeats_nothing(tmp_path: Path) -> None:
    """Every second request is dropped after two tokens; then the server dies for good, and comes back."""
    state = {"asked": 0, "dead": False}

    async def flaky(exchange: Exchange) -> None:
        state["asked"] += 1
        if state["dead"]:
            await exchange.status(500, {"error": "dead"})
        elif state["asked"] % 2:
            await dropping(exchange)
        else:
            await well(exchange)

    async def calls(server: Misbehaving, names: str) -> Run:
        with Journal(tmp_path / "j.db") as journal:
            run = Run(server.engine(patience=HASTY), journal=journal)
            for name in names:
                await run.call(ASK, path=(name,), parameters=Parameters(max_tokens=9))
            return run

    async def main() -> None:
        async with Misbehaving(flaky) as server:
            run = await calls(server, "abc")
            assert run.summary(["c#0"])["tokens_total"] == 9
            assert (state["asked"], run.engine.traffic.wasted) == (6, 6)  # type: ignore[attr-defined]
            state["dead"] = True
            with pytest.raises(ServerFailedError):
                await calls(server, "abcd")
            state["dead"], before = False, state["asked"]
            run = await calls(server, "abcd")
            assert run.replayed == 3 and run.summary(["d#0"])["tokens_total"] == 12
            assert state["asked"] - before <= 2

    asyncio.run(main())
    assert "sk-" not in (tmp_path / "j.db").read_bytes().decode("latin-1")


def test_what_was_reported_of_a_failed_attempt_is_taken_back() -> None:
    """Whoever judges by what has come so far must not see two halves of different answers as one."""

    class Reader:
        text, tokens, restarts = "", 0, 0

        def __call__(self, text: str, tokens: int, confidence: Any = (), *, restart: bool = False) -> None:
            self.text, self.tokens = text if restart else self.text + text, tokens
            self.restarts += restart

    async def main() -> Reader:
        reader = Reader()
        async with Misbehaving(dropping, at_once, well) as server:
            await server.engine().generate(ask(), reader)
        return reader

    reader = asyncio.run(main())
    # Tokens go on: what was lost has been spent.
    assert (reader.text, reader.tokens, reader.restarts) == ("the sum is 4", 2 + 3, 1)
