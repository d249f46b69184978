"""Streams as public servers send them: the answer is the same however they write it, and an error keeps its words."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from partsong.reasoning import Completion
from partsong.reasoning.remote import DroppedError, GarbledError, RemoteError, RequestRefusedError, ServerFailedError
from tests.reasoning.misbehaving import HASTY, Exchange, Misbehaving
from tests.reasoning.test_openai_engine import ask

ONCE = replace(HASTY, retries=0)


def piece(content: Any = None, finish: Any = None, **more: Any) -> str:
    delta = {} if content is None else {"content": content}
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish} | more]})


def usage(completion: int) -> str:
    return json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": completion}})


def logprob() -> dict[str, Any]:
    return {"logprobs": {"content": [{"token": "x", "logprob": -0.5, "top_logprobs": [{"logprob": -0.5}]}]}}


def stream(*events: str, begin: str = "", between: str = "\n\n", field: str = "data: ", end: str = "[DONE]") -> str:
    events = (*events, end) if end else events
    return begin + "".join(f"{field}{event}{between}" for event in events)


ANSWER = (piece("the answer"), piece(" is 42"), piece(finish="stop"))
#: What a server sends, every one of which says the same.
SAME = {
    "plain": stream(*ANSWER),
    "finish_reason is empty": stream(piece("the answer", ""), piece(" is 42", ""), piece("", "stop")),
    "finish_reason is the word null": stream(piece("the answer", "null"), piece(" is 42", "null"), piece("", "stop")),
    "a byte order mark": stream(*ANSWER, begin="\ufeff"),
    "a comment first": stream(*ANSWER, begin=": OPENROUTER PROCESSING\n\n"),
    "CR LF": stream(*ANSWER, between="\r\n\r\n"),
    "CR": stream(*ANSWER, between="\r\r"),
    "no blank after the colon": stream(*ANSWER, field="data:"),
    "names and numbers of events": stream(*ANSWER, field="event: message\nid: 7\nretry: 10\ndata: "),
    "no [DONE]": stream(*ANSWER, end=""),
    "no end of the last line": stream(*ANSWER, end="").rstrip("\n"),
    "one line for each": stream(*ANSWER, between="\n"),
    "empty lines first": stream(*ANSWER, begin="\n\r\n\n"),
    "pings": stream(*ANSWER, begin="event: ping\ndata: alive\n\nevent: ping\ndata: {}\n\ndata:\n\n"),
    "usage before the end": stream(piece("the answer"), usage(4), piece(" is 42", "stop")),
    "usage at the end": stream(*ANSWER, usage(4)),
    "usage without choices": stream(*ANSWER, json.dumps({"usage": {"prompt_tokens": 3, "completion_tokens": 4}})),
    "choices null": stream('{"choices": null}', *ANSWER),
    "a role first": stream(piece(None, delta={"role": "assistant", "content": ""}), *ANSWER),
    "a null delta": stream(piece(None, delta=None), *ANSWER),
    "a null content": stream(piece(None, delta={"content": None}), *ANSWER),
    "content in parts": stream(piece([{"type": "text", "text": "the answer"}]), piece(" is 42", "stop")),
    "the end twice": stream(*ANSWER, piece("", "stop")),
    "pretty JSON": stream(
        json.dumps(json.loads(piece("the answer is 42", "stop")), indent=1).replace("\n", "\ndata: ")
    ),
    "halves of a character apart": stream(piece("the answer\ud83d"), piece("\ude00 is 42"), piece(finish="stop")),
    "half a character": stream(piece("the answer \ud83d is 42"), piece(finish="stop")),
    "half a character at the end": stream(piece("the answer is 42"), piece("\ud83d"), piece(finish="stop")),
}
TEXTS = {
    "halves of a character apart": "the answer\U0001f600 is 42",
    "half a character": "the answer \ufffd is 42",
    "half a character at the end": "the answer is 42\ufffd",
}
#: What a server sends, and how we name it.
FAULTS: dict[str, tuple[str, type[RemoteError], str]] = {
    "words": (
        stream(piece("the"), end="") + "event: error\ndata: slot 3 is full\n\n",
        ServerFailedError,
        "slot 3 is full",
    ),
    "an object": (stream(piece("the"), '{"error": {"message": "queue full"}}'), ServerFailedError, "queue full"),
    "a text": (stream(piece("the"), '{"error": "queue full"}'), ServerFailedError, "queue full"),
    "an error without the key": (stream('{"object": "error", "message": "too long"}'), ServerFailedError, "too long"),
    "half a character in it": (stream('{"error": "full \\ud83d"}'), ServerFailedError, "full \ufffd"),
    "no choice": (stream('{"detail": "no such route"}'), GarbledError, "no such route"),
    "cut in an event": (stream(piece("the"), piece(" sum", "stop"), end="")[:-9], DroppedError, "broke off"),
    "no JSON": (stream(piece("the"), "hello"), GarbledError, "did not send JSON"),
}


async def answer(text: str, **parameters: Any) -> tuple[Completion, str]:
    async def send(exchange: Exchange) -> None:
        await exchange.begin()
        for place in range(0, len(data := text.encode("utf-8", "surrogatepass")), 13):
            exchange.writer.write(b"%x\r\n" % len(data[place : place + 13]) + data[place : place + 13] + b"\r\n")
        exchange.writer.write(b"0\r\n\r\n")
        await exchange.writer.drain()

    heard: list[str] = []
    async with Misbehaving(send) as server:
        engine = server.engine(patience=ONCE)
        try:
            reply = await engine.generate(
                ask(**parameters), lambda text, tokens, confidence=(), **_: heard.append(text)
            )
        finally:
            await engine.close()
    return reply, "".join(heard)


@pytest.mark.parametrize("name", SAME)
def test_the_answer_is_the_same(name: str) -> None:
    reply, heard = asyncio.run(answer(SAME[name]))
    assert reply.text == heard == TEXTS.get(name, "the answer is 42")
    assert reply.finish == "stop"
    reply.text.encode()
    if "usage" in name:
        assert (reply.usage.completion, reply.usage.reported) == (4, True)


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_keeps_its_words(name: str) -> None:
    text, kind, words = FAULTS[name]
    with pytest.raises(kind, match=words):
        asyncio.run(answer(text))


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ((piece("one two", **logprob()), piece(" three"), piece(" four", "stop"), usage(5)), "those of 1 tokens of at"),
        ((piece("one two three four five", "stop", **logprob()), usage(5)), "those of 1 tokens of at least 4"),
        ((piece("one", **logprob()), piece(" two"), piece(" three", "stop")), "those of 1 tokens of at least 2"),
    ],
)
def test_fewer_log_probabilities_than_tokens_are_refused(events: tuple[str, ...], words: str) -> None:
    with pytest.raises(RequestRefusedError, match=words):
        asyncio.run(answer(stream(*events), logprobs=1))


@pytest.mark.parametrize(
    "events",
    [
        (piece("one", **logprob()), piece(" two", **logprob()), piece("", "stop"), usage(3)),  # the end counts as one
        (piece("one", **logprob()), piece(" two", **logprob()), piece("", "stop"), usage(2)),
        (piece(None, delta={"reasoning": "so"}), piece("one", "stop", **logprob()), usage(40)),  # of thoughts none come
    ],
)
def test_one_log_probability_for_each_token_is_right(events: tuple[str, ...]) -> None:
    reply, _ = asyncio.run(answer(stream(*events), logprobs=1))
    assert reply.logprobs == (-0.5,) * sum("logprob" in event for event in events)
