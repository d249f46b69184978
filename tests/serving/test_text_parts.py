"""The parts of serving text that need no server: bodies, names, limits, turns, and a process whose parent dies."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partsong.errors import ArgumentError
from partsong.serving.answers.chat_bodies import ChatBody, TextBody
from partsong.serving.answers.chat_fields import read_body
from partsong.serving.errors import ApiError
from partsong.serving.texts.events import (
    TextAccepted,
    TextDelta,
    TextDone,
    TextRequest,
    ThreadNews,
    event_of,
    record_of,
)
from partsong.serving.texts.limits import TextLimits
from partsong.serving.texts.local import LocalText
from partsong.serving.texts.served import find_text
from partsong.serving.texts.step_turns import StepTurns
from partsong.serving.texts.upstream import with_model
from partsong.serving.texts.wire import TextSpec
from tests import covering

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@settings(max_examples=100 if covering.FULL else 30)
@given(st.dictionaries(st.text(), VALUES), VALUES, st.booleans(), st.sampled_from([None, 1, "\t"]), st.randoms())
def test_a_name_is_put_into_a_body(more: dict[str, Any], value: Any, ascii_only: bool, indent: Any, draw: Any) -> None:
    items = list(({**more, "model": value}).items())
    draw.shuffle(items)
    body = json.dumps(dict(items), ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    if not ascii_only and b"\xed" in body:
        return  # half of a surrogate pair: no UTF-8, which JSON needs
    changed = with_model(body, "caf\u00e9")
    assert json.loads(changed) == {**dict(items), "model": "caf\u00e9"}
    # What follows and what comes before has not been touched.
    written = json.dumps(value, ensure_ascii=ascii_only)
    assert len(changed) - len('"caf\u00e9"'.encode()) == len(body) - len(written.encode()) or indent is not None


def test_every_model_field_is_named_anew() -> None:
    assert with_model(b'{"model":"a:single","n":1,"model" : "a:single"}', "a") == b'{"model":"a","n":1,"model" : "a"}'


def test_the_longest_name_that_fits_is_taken() -> None:
    texts: Any = {name: SimpleNamespace(name=name) for name in ("m", "m:7b", "m:7b-chat")}
    assert [(text.name, rest) for text, rest in (find_text(texts, m) for m in ("m:7b:pdr:keep=2", "m:pdr", "m"))] == [
        ("m:7b", "pdr:keep=2"),
        ("m", "pdr"),
        ("m", ""),
    ]
    with pytest.raises(ApiError, match="m:7b-chat") as missing:
        find_text(texts, "m2")
    assert missing.value.status == 404
    for model in (None, 3, "", ["m"]):
        with pytest.raises(ApiError, match="give one of") as refused:
            find_text(texts, model)
        assert refused.value.status == 400


def test_a_reply_can_be_sent_back_as_a_message() -> None:
    """The official client writes all fields of a reply's message, most of them empty."""
    empty = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))
    chat = [{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2", **empty}]
    fields = {"model": "m", "messages": [*chat, {"role": "user", "content": "and 2+2?"}], "tools": None, "store": False}
    request = read_body(ChatBody, fields).as_request("", TextLimits())
    assert request.messages == (("user", "1+1=?"), ("assistant", "2"), ("user", "and 2+2?"))
    assert TextRequest.from_json(json.loads(json.dumps(request.as_json()))) == request
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(ApiError, match="tool_calls"):
        read_body(ChatBody, {**fields, "messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": "a", "best_of": 2}, "best_of=2"),
        ({"prompt": ["a", "b"]}, "at most 1"),
        ({}, "prompt is missing"),
        ({"prompt": "a", "seed": -1}, "seed=-1"),
        ({"prompt": "a", "seed": 1 << 64}, "seed="),
        ({"prompt": "a", "stop": list("abcde")}, "at most 4"),
        ({"prompt": "a", "stream_options": {"include_threads": True}}, "stream_options is for stream=true"),
        ({"prompt": "a", "stream": True, "stream_options": {"threads": True}}, "stream_options.threads"),
        ({"prompt": " "}, "is empty"),
        ({"prompt": "\ud800"}, "surrogate"),
        ({"prompt": "a" * 11}, "11 characters"),
    ],
)
def test_bodies_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        read_body(TextBody, {"model": "m", **fields}).as_request("", TextLimits(max_characters=10))
    assert refused.value.status == 400


def test_knobs_that_make_many_calls_are_refused() -> None:
    limits = TextLimits(max_knob=8)
    limits.check_strategy({"num": 8, "schedule": (8, 1), "workspace_tokens": 4096, "early_stop": True, "risk": 0.1})
    for knobs in ({"num": 9}, {"schedule": (4, 9)}, {"workspace_tokens": 10**6}):
        with pytest.raises(ApiError, match="at most"):
            limits.check_strategy(knobs)


@pytest.mark.parametrize(
    "event",
    [
        TextAccepted(),
        TextDelta("caf\u00e9"),
        ThreadNews("a#1", "a 1", "x", "cancelled"),
        TextDone(text="4", finish="stop", prompt_tokens=1, cached_tokens=0, completion_tokens=2, report={"calls": 1}),
    ],
)
def test_events_go_through_json(event: Any) -> None:
    assert event_of(json.loads(json.dumps(record_of(event)))) == event


# --- turns ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def turns() -> Iterator[StepTurns]:
    turns = StepTurns()
    yield turns
    turns.close()


def test_steps_of_several_texts_take_turns(turns: StepTurns) -> None:
    order: list[str] = []
    both = threading.Event()

    def text(name: str, length: int) -> Generator[int, None, str]:
        both.wait()
        for number in range(length):
            order.append(f"{name}{number}")
            yield number
        return name

    async def main() -> list[str]:
        works = [asyncio.ensure_future(turns.run(text(*each), lambda step: None)) for each in (("a", 4), ("b", 2))]
        await asyncio.sleep(0)
        both.set()
        return await asyncio.gather(*works)

    assert asyncio.run(main()) == ["a", "b"]
    assert order == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_cancelled_text_ends_and_a_failed_one_fails_alone(turns: StepTurns) -> None:
    closed: list[str] = []

    def endless() -> Generator[int, None, None]:
        try:
            while True:
                yield 0
        finally:
            closed.append("endless")

    def failing() -> Generator[int, None, None]:
        yield 0
        raise ArgumentError("no more")

    async def main() -> None:
        begun = asyncio.Event()
        task = asyncio.ensure_future(turns.run(endless(), lambda step: begun.set()))
        await begun.wait()
        with pytest.raises(ArgumentError, match="no more"):
            await turns.run(failing(), lambda step: None)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed == ["endless"]

    asyncio.run(main())


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.slow
def test_a_model_that_is_not_there_is_named() -> None:
    text = LocalText(TextSpec(name="quartet", model="no-such-model"))

    async def main() -> None:
        with pytest.raises(ArgumentError, match="model quartet: no model 'no-such-model'"):
            await text.start()
        with pytest.raises(ApiError, match="no model 'no-such-model'") as refused:
            await anext(text.run(TextRequest(messages=(("user", "hi"),))))
        assert (refused.value.status, text.ready, text.in_flight) == (503, False, 0)
        await text.close()

    asyncio.run(main())


@pytest.mark.full
@pytest.mark.slow
def test_ranks_share_a_model_and_end_with_the_server() -> None:
    """Read with the chat template and without it; one refusal, and a share that the model cannot have."""
    asks = [TextRequest(messages=(("user", "37+48-19*3=?"),), plain=plain, max_tokens=12, seed=4) for plain in (0, 1)]

    async def written(**how: Any) -> list[str]:
        text = LocalText(TextSpec(name="sums", model="sums", dtype="float64", **how))
        await text.start()
        try:
            ends = [[event async for event in text.run(ask)][-1] for ask in asks]
            return [end.text for end in ends if isinstance(end, TextDone)]
        finally:
            await text.close()

    shared = asyncio.run(written(nproc=2))
    assert shared == asyncio.run(written()) and len(set(shared)) == 2
    with pytest.raises(ArgumentError, match="model sums: Ring does not run on a language model"):
        asyncio.run(written(nproc=2, share="ring"))


def test_a_model_can_be_closed_while_it_is_loaded_and_before() -> None:
    async def main() -> None:
        await LocalText(TextSpec(name="sums", model="sums")).close()
        text = LocalText(TextSpec(name="sums", model="sums"))
        start = asyncio.ensure_future(text.start())
        while text.pid is None:
            await asyncio.sleep(0.005)
        watched = os.pidfd_open(text.pid)
        start.cancel()
        await text.close()
        ended, _, _ = select.select([watched], [], [], 30)
        os.close(watched)
        assert ended

    asyncio.run(main())


ORPHAN = """
import asyncio, os, sys
from partsong.serving.texts.local import LocalText
from partsong.serving.texts.wire import TextSpec

async def main():
    text = LocalText(TextSpec(name="sums", model="sums"))
    await text.start()
    print(text.pid, sorted({"torch", "transformers", "diffusers"} & set(sys.modules)), flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.full
def test_a_process_ends_with_its_parent_which_loads_no_torch(tmp_path: Any) -> None:
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pid, loaded = parent.stdout.readline().split(maxsplit=1)
        assert loaded.strip() == "[]"
        watched = os.pidfd_open(int(pid))
        try:
            parent.kill()
            ready, _, _ = select.select([watched], [], [], 30)
            assert ready, "the process has outlived its parent"
        finally:
            os.close(watched)
