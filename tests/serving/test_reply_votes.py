"""Checks votes over whole replies of another server: calls of tools, and answers that fit a schema."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from fastapi import APIRouter, Request

from partsong.serving.errors import ApiError
from partsong.serving.texts.limits import TextLimits
from partsong.serving.texts.reply_votes import ReplyVotes, needs_reply_votes
from partsong.serving.texts.upstream import Upstream, UpstreamText
from tests.serving.text_server import LoopThread, app_of, client_of, listening, serving, user

ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a"]}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}


def _call(arguments: str, name: str = "add") -> dict[str, Any]:
    return {"tool_calls": [{"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}]}


class Tools:
    """A server that answers the calls of a vote, told apart by their seeds, with replies of a list in turn."""

    def __init__(self) -> None:
        self.replies: list[dict[str, Any]] = []
        self.bodies: list[dict[str, Any]] = []
        self.router = APIRouter()
        self.router.add_api_route("/v1/models", lambda: {"data": [{"id": "m"}]})
        self.router.add_api_route("/v1/chat/completions", self.answer, methods=["POST"])

    async def answer(self, request: Request) -> dict[str, Any]:
        body = json.loads(await request.body())
        self.bodies.append(body)
        message = {"role": "assistant", "content": None, **self.replies[(len(self.bodies) - 1) % len(self.replies)]}
        finish = "tool_calls" if "tool_calls" in message else message.pop("finish", "stop")
        choice = {"index": 0, "message": message, "finish_reason": finish}
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        return {"id": "r", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


@pytest.fixture(scope="module")
def linked() -> Iterator[SimpleNamespace]:
    loop, far, tools = LoopThread(), LoopThread(), Tools()
    with listening(app_of(tools.router), far) as behind:

        async def open_upstream() -> tuple[Upstream, UpstreamText]:
            upstream = Upstream(behind, api_key="sk-upstream")
            return upstream, UpstreamText("m", upstream, TextLimits(max_in_flight=2))

        upstream, text = loop.run(open_upstream())
        with serving(loop, [text]) as address:
            yield SimpleNamespace(client=client_of(address), tools=tools, text=text)
        loop.run(text.close())
        loop.run(upstream.close())
    loop.close()
    far.close()


def _ask(linked: SimpleNamespace, replies: list[dict[str, Any]], num: int, **more: Any) -> Any:
    linked.tools.replies, linked.tools.bodies = replies, []
    model = f"m:self-consistency:num={num},early_stop=false"
    return linked.client.chat.completions.create(model=model, messages=user("1+2?"), **more)


def test_the_call_that_most_replies_make_wins(linked: SimpleNamespace) -> None:
    replies = [_call('{"a": 1, "b": 3}'), _call('{"b":2,"a":1}'), {"content": "3"}, _call('{"a": 1, "b": 2}')]
    reply = _ask(linked, replies, 4, tools=TOOLS, tool_choice="auto", seed=3)
    assert json.loads(reply.choices[0].message.tool_calls[0].function.arguments) == {"a": 1, "b": 2}
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.model == "m:self-consistency:num=4,early_stop=false"
    assert reply.partsong["shares"]['add({"a":1,"b":2})'] == 0.5
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (20, 8, 28)
    # Every call is the request itself, but for its model and a seed of its own.
    assert len({body.pop("seed") for body in linked.tools.bodies}) == 4
    assert all(body["tools"] == TOOLS and body["model"] == "m" for body in linked.tools.bodies)
    assert linked.text.in_flight == 0


def test_calls_that_do_not_fit_their_tool_have_no_vote(linked: SimpleNamespace) -> None:
    reply = _ask(linked, [_call('{"b": 2}'), _call("{"), _call('{"a": 1}'), _call('{"a": "1"}')], 4, tools=TOOLS)
    assert reply.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'
    assert reply.partsong["spoilt"] == 3


def test_answers_that_do_not_fit_the_schema_have_no_vote(linked: SimpleNamespace) -> None:
    texts = ['{"sum": 4}', "four", '{"sum": "4"}', '{ "sum":3 }', '{"sum": 3}']
    reply = _ask(linked, [{"content": text} for text in texts], 5, response_format=FORM)
    assert json.loads(reply.choices[0].message.content) == {"sum": 3}
    assert reply.partsong["shares"] == {'{"sum":3}': pytest.approx(2 / 3), '{"sum":4}': pytest.approx(1 / 3)}
    with pytest.raises(openai.InternalServerError, match="none of 2 replies fits the schema"):
        _ask(linked, [{"content": "four"}], 2, response_format=FORM)


def test_a_stream_holds_the_same_reply(linked: SimpleNamespace) -> None:
    stream = _ask(linked, [_call('{"a": 1}')], 2, tools=TOOLS, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    (call,) = chunks[0].choices[0].delta.tool_calls
    assert (call.index, call.function.name, call.function.arguments) == (0, "add", '{"a": 1}')
    assert chunks[1].choices[0].finish_reason == "tool_calls"
    assert chunks[2].usage.total_tokens == 14


def test_without_a_seed_the_votes_are_others_each_time() -> None:
    read = [ReplyVotes.read("self-consistency", {"tools": TOOLS}, "m", TextLimits()) for _ in range(2)]
    assert read[0].call(0) != read[1].call(0)
    same = [ReplyVotes.read("self-consistency", {"tools": TOOLS, "seed": 3}, "m", TextLimits()) for _ in range(2)]
    assert same[0].call(0) == same[1].call(0) != same[0].call(1)


def _votes(votes: list[str | None], num: int = 8, **knobs: Any) -> tuple[dict[str, Any], int]:
    """Lets replies that arrive one after the other vote; returns the report, and how many were read."""
    fields = {"messages": user("?"), "tools": TOOLS}
    read = ReplyVotes.read(f"self-consistency:num={num}", fields, "m", TextLimits())
    given = iter(votes)
    read_replies = 0

    async def send(body: bytes) -> dict[str, Any]:
        nonlocal read_replies
        vote, turn = next(given), read_replies
        read_replies += 1
        for _ in range(turn * 20):
            await asyncio.sleep(0)
        message = {"content": vote}
        return {"choices": [{"message": message, "finish_reason": "length" if vote is None else "stop"}]}

    return asyncio.run(read.run(send))["partsong"], read_replies


def test_votes_stop_when_the_rest_cannot_change_the_winner() -> None:
    report, _ = _votes(["x", "x", "y", "x", "x", "x", "y", "z"])
    assert (report["answer"], report["stopped"]) == ("x", "decided")
    assert report["calls"] < 8
    report, _ = _votes(["x", None, "y", "x"], 4)
    assert (report["answer"], report["spoilt"]) == ("x", 1)


def test_the_winner_is_the_plain_majority() -> None:
    votes = ["b", "a", "b", "c", "a", "a", "d"]
    report, _ = _votes(list(votes), 7)
    assert report["answer"] == Counter(votes).most_common(1)[0][0]


@pytest.mark.parametrize(
    ("fields", "needs"),
    [
        ({}, False),
        ({"tools": []}, False),
        ({"tools": TOOLS}, True),
        ({"tools": TOOLS, "tool_choice": "none"}, False),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": FORM}, True),
        ({"messages": [{"role": "tool", "content": "3", "tool_call_id": "c"}]}, True),
        ({"messages": [{"role": "assistant", **_call("{}")}]}, True),
        ({"messages": "?"}, False),
    ],
)
def test_only_what_no_text_can_hold_needs_them(fields: dict[str, Any], needs: bool) -> None:
    assert needs_reply_votes(fields) is needs


@pytest.mark.parametrize(
    ("strategy", "fields", "words"),
    [
        ("pdr", {"tools": TOOLS}, "pdr reads and writes text alone"),
        ("self-consistency:risk=0.1", {"tools": TOOLS}, "self-consistency with risk"),
        ("self-consistency:num=999", {"tools": TOOLS}, "num=999: this server allows 256"),
        ("self-consistency", {"tools": [{"type": "web_search"}]}, "tools.0 is no function with a name"),
        ("self-consistency", {"tools": [{"function": {"name": "f", "parameters": {"type": 3}}}]}, "is no JSON schema"),
        ("self-consistency", {"response_format": {"type": "grammar"}}, "response_format is of the type"),
        ("self-consistency", {"tools": TOOLS, "n": 2}, "one request gives one answer"),
        ("self-consistency", {"tools": TOOLS, "seed": "x"}, 'seed="x": write a whole number from 0'),
        ("self-consistency", {"tools": TOOLS, "budget_calls": 0}, "budget_calls=0: write a whole number from 1"),
        ("self-consistency", {"tools": TOOLS, "budget_tokens": 9}, "budget_tokens does not go with votes"),
    ],
)
def test_what_cannot_vote_is_refused(strategy: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words):
        ReplyVotes.read(strategy, {"messages": user("?"), **fields}, "m", TextLimits())
