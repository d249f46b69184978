"""Replies that look like answers and are none: each has the name that docs/engines.md gives it."""

from __future__ import annotations

import asyncio

import pytest

from partsong.reasoning.remote import DroppedError, GarbledError, RemoteError
from tests.reasoning.misbehaving import Behaviour, Exchange
from tests.reasoning.test_openai_faults import answering, ask_server, failed


async def page(exchange: Exchange) -> None:
    """A form to log in, as a proxy shows it with status 200."""
    await exchange.status(200, "<html><h1>Log in</h1> to go on</html>", content_type="text/html")


async def short(exchange: Exchange) -> None:
    """A body that ends before the length its head gives."""
    exchange.writer.write(b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{")
    await exchange.writer.drain()
    exchange.writer.close()


async def ended(exchange: Exchange) -> None:
    await exchange.begin()
    await exchange.end()


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (answering(200, {"choices": []}), GarbledError, "no choice"),
        (
            answering(200, {"choices": [{"index": 0, "finish_reason": "stop"}]}),
            GarbledError,
            "no message in its choice",
        ),
        (ended, GarbledError, "0 events and no choice"),
        (page, GarbledError, "a web page where an answer was due: Log in to go on"),
        (short, DroppedError, "dropped the connection"),
    ],
)
def test_what_is_no_answer_has_the_name_the_page_on_engines_gives(
    fault: Behaviour, kind: type[RemoteError], words: str
) -> None:
    failed(kind, words, fault)


def test_text_after_the_end_is_left_out() -> None:
    async def going_on(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.piece("4")
        await exchange.piece(finish="stop")
        await exchange.piece(" and more")
        await exchange.usage(7, 1)
        await exchange.end()

    completion, _, _ = asyncio.run(ask_server(going_on))
    assert (completion.text, completion.finish) == ("4", "stop")


def test_a_count_that_nobody_wrote_is_an_estimate() -> None:
    async def boasting(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.piece("four")
        await exchange.piece(finish="stop")
        await exchange.usage(7, 10**12)
        await exchange.end()

    completion, _, _ = asyncio.run(ask_server(boasting))
    assert (completion.usage.completion, completion.usage.reported, completion.finish) == (1, False, "stop")
