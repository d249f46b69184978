"""``/v1/responses`` with the official client and a real model, against the chats of the same server."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest

from partsong.errors import ArgumentError
from partsong.serving.access.users import OPERATOR
from partsong.serving.answers.response_store import KeptResponse, ResponseStore
from partsong.serving.errors import ApiError
from partsong.serving.served_names import ServedNames
from partsong.serving.texts.limits import TextLimits
from tests.serving.text_server import LONG, EngineText, LoopThread, client_of, serving, user

ASK = "12+5=?"
FOUR = "sums:self-consistency:num=4,early_stop=false"
#: More than a second of work together, which a test ends before it is done.
LONG_ASK = "37+48-19*3+12=?"
MANY = "sums:self-consistency:num=256,early_stop=false"
HOW: dict[str, Any] = {"max_output_tokens": 80, "extra_body": {"seed": 7}}


@pytest.fixture(scope="module")
def served() -> Iterator[SimpleNamespace]:
    """A model that thinks; the server keeps four responses."""
    loop = LoopThread()
    text = EngineText("sums", TextLimits(max_tokens=500, max_messages=6))
    try:
        with serving(loop, [text]) as address:
            yield SimpleNamespace(loop=loop, text=text, url=address, client=client_of(address))
    finally:
        loop.run(text.close())
        loop.close()


def respond(served: SimpleNamespace, model: str = "sums", ask: Any = ASK, **more: Any) -> Any:
    return served.client.responses.create(model=model, input=ask, **{**HOW, **more})


def chat(served: SimpleNamespace, model: str = "sums", messages: Any = None, **more: Any) -> Any:
    how = {"max_tokens": 80, "seed": 7, **more}
    return served.client.chat.completions.create(model=model, messages=messages or user(ASK), **how)


def test_a_response_is_the_answer_of_a_chat(served: SimpleNamespace) -> None:
    whole, reply = chat(served), respond(served, metadata={"of": "a test"}, top_p=1.0)
    assert reply.output_text == whole.choices[0].message.content
    assert (reply.object, reply.status, reply.error, reply.metadata) == (
        "response",
        "completed",
        None,
        {"of": "a test"},
    )
    assert [item.type for item in reply.output] == ["message"]
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert reply.usage.output_tokens_details.reasoning_tokens == 0
    assert reply.partsong == whole.partsong
    parts = [{"role": "user", "content": [{"type": "input_text", "text": ASK}]}]
    assert respond(served, ask=parts).output_text == reply.output_text
    assert respond(served, "gpt-4o").output_text == reply.output_text  # another name of the same model


def test_typed_events_come_in_order_and_add_up(served: SimpleNamespace) -> None:
    whole = respond(served)
    with served.client.responses.stream(model="sums", input=ASK, **HOW) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds == [*begin, *["output_text.delta"] * len(deltas), *end]
    assert len(deltas) > 5  # it came token by token
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == "".join(deltas) == whole.output_text
    assert final.usage == whole.usage


def test_the_lines_of_a_stream_name_their_events(served: SimpleNamespace) -> None:
    body = {"model": "sums", "input": ASK, "stream": True, "max_output_tokens": 80, "seed": 7}
    reply = httpx2.post(f"{served.url}/responses", json=body, trust_env=False, timeout=LONG)
    assert reply.headers["x-accel-buffering"] == "no"
    events = reply.text.strip().split("\n\n")
    assert events[0].startswith('event: response.created\ndata: {"type": "response.created"')
    assert events[-1].startswith("event: response.completed\n")


def test_an_answer_that_is_cut_is_incomplete(served: SimpleNamespace) -> None:
    reply = respond(served, max_output_tokens=5)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output[0].status == "incomplete"
    *_, last = respond(served, max_output_tokens=5, stream=True)
    assert (last.type, last.response.output_text) == ("response.incomplete", reply.output_text)


def test_thinking_is_shown_where_it_is_asked_for(served: SimpleNamespace) -> None:
    whole = respond(served, FOUR, reasoning={"summary": "auto"})
    thoughts, message = whole.output
    assert (thoughts.type, message.type) == ("reasoning", "message")
    assert len(thoughts.summary) == 4
    assert whole.output_text == chat(served, FOUR).choices[0].message.content
    assert whole.output_text in [part.text for part in thoughts.summary]
    spent = whole.partsong
    assert (
        whole.usage.output_tokens_details.reasoning_tokens == whole.usage.output_tokens - spent["tokens_accepted"] > 0
    )
    assert [item.type for item in respond(served, FOUR).output] == ["message"]

    with served.client.responses.stream(model=FOUR, input=ASK, reasoning={"summary": "auto"}, **HOW) as stream:
        events = list(stream)
    texts = [""] * 4
    for event in events:
        if event.type == "response.reasoning_summary_text.delta":
            texts[event.summary_index] += event.delta
    assert sorted(texts) == sorted(part.text for part in thoughts.summary)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [part.text for part in done[0].summary] == texts
    assert [item.type for item in done] == ["reasoning", "message"]
    assert events[-1].response.output_text == whole.output_text


def test_a_response_follows_another(served: SimpleNamespace) -> None:
    first = respond(served, ask="3+4=?")
    second = respond(served, previous_response_id=first.id)
    turns = [*user("3+4=?"), {"role": "assistant", "content": first.output_text}, *user(ASK)]
    assert second.output_text == chat(served, messages=turns).choices[0].message.content
    assert second.previous_response_id == first.id
    # What a client sends back of a reply is the same as to name it.
    sent_back = [*user("3+4=?"), *(item.model_dump() for item in first.output), *user(ASK)]
    assert respond(served, ask=sent_back).output_text == second.output_text


def test_responses_are_kept_fetched_and_forgotten(served: SimpleNamespace) -> None:
    reply = respond(served)
    assert served.client.responses.retrieve(reply.id) == reply
    *_, last = respond(served, stream=True)
    assert served.client.responses.retrieve(last.response.id).output_text == reply.output_text
    served.client.responses.delete(reply.id)
    for name in (reply.id, respond(served, store=False).id):
        with pytest.raises(openai.NotFoundError, match="no response"):
            served.client.responses.retrieve(name)
    with pytest.raises(openai.BadRequestError, match="no response") as refused:
        respond(served, previous_response_id=reply.id)
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")


def test_a_response_in_the_background_is_fetched_or_cancelled(served: SimpleNamespace) -> None:
    begun = respond(served, background=True)
    assert begun.status == "in_progress"
    served.loop.until(lambda: served.text.in_flight == 0)
    ended = served.client.responses.retrieve(begun.id)
    assert (ended.status, ended.output_text) == ("completed", respond(served).output_text)

    before = served.text.cancelled
    long = respond(served, MANY, LONG_ASK, background=True)
    assert served.client.responses.cancel(long.id).status == "cancelled"
    forgotten = respond(served, MANY, LONG_ASK, background=True)
    served.client.responses.delete(forgotten.id)
    served.loop.until(lambda: served.text.in_flight == 0)
    assert served.text.cancelled == before + 2
    with pytest.raises(openai.BadRequestError, match="hang up"):
        served.client.responses.cancel(respond(served).id)


def test_hanging_up_ends_the_run(served: SimpleNamespace) -> None:
    before = served.text.cancelled
    with respond(served, MANY, LONG_ASK, stream=True) as stream:
        assert next(iter(stream)).type == "response.created"
    with pytest.raises(openai.APITimeoutError):
        respond(served, MANY, LONG_ASK, timeout=httpx2.Timeout(LONG, read=0.3))
    served.loop.until(lambda: served.text.in_flight == 0)
    assert served.text.cancelled == before + 2


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools", "--upstream"),
        ({"extra_body": {"wings": 2}}, "wings", "unknown field"),
        ({"extra_body": {"max_tokens": 2}}, "max_tokens", "the fields are background"),
        ({"max_output_tokens": 501}, "max_output_tokens", "500 at most"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "input", "no message"),
        ({"input": user(ASK) * 7}, "input", "6 at most"),
        ({"input": [{"type": "function_call", "name": "add"}]}, "input.0", "'function_call'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None, "'input_text'"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format.type", "should be 'text'"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "should be 'medium'"),
        ({"truncation": "auto"}, "truncation", "no message is left out"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"background": True, "store": False}, "background", "store=true"),
        ({"instructions": "Sing."}, None, "no role but user"),
    ],
)
def test_what_is_wrong_is_said(served: SimpleNamespace, fields: dict[str, Any], param: str | None, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        served.client.responses.create(**{"model": "sums", "input": ASK, **fields})
    assert words in refused.value.response.json()["error"]["message"]  # older clients quote it
    assert param in (None, refused.value.param)


def test_the_oldest_responses_are_forgotten() -> None:
    store = ResponseStore(most=3, characters=10)
    for name, text in (("a", "123"), ("b", "123"), ("c", "123"), ("d", "123"), ("e", "12345678")):
        store.keep(KeptResponse(reply={"id": name}, turns=(("user", text),)))
    for name in "abcd":
        with pytest.raises(ApiError, match="no response"):
            store.find(name, OPERATOR)
    assert store.find("e", OPERATOR).size == 8


def test_other_names_stand_for_models() -> None:
    names = ServedNames.read(["gpt-4o=sums:pdr", "gpt-image-1=shapes", "gpt-4o:mini=sums"])
    names.check(["shapes"], ["sums"])
    asked = ("gpt-4o", "gpt-4o:mini:single", "gpt-image-1", "gpt-4", None)
    assert [names.target(name) for name in asked] == ["sums:pdr", "sums:single", "shapes", "gpt-4", None]
    rows = names.rows([{"id": "shapes", "kind": "image"}, {"id": "sums", "kind": "thinking"}])
    assert rows[0] == {"id": "gpt-4o", "kind": "thinking", "root": "sums:pdr"}
    for wrong, words in ((["x"], "NAME=MODEL"), (["x=y"], "y is not served"), (["sums=shapes"], "name of a model")):
        with pytest.raises(ArgumentError, match=words):
            ServedNames.read(wrong).check(["shapes"], ["sums"])
