"""Chats and texts over HTTP: the official client, real processes, and the answers of the library called directly."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest

from partsong import zoo
from partsong.reasoning import Answer, LocalEngine, Message, Parameters, Request, Run, parse_thinking
from partsong.samplers.text import decode
from partsong.seeds import derive
from partsong.serving.texts.limits import TextLimits
from partsong.serving.texts.local import LocalText
from partsong.serving.texts.wire import TextSpec
from partsong_zoo import sums
from tests.serving.text_server import LONG, LoopThread, client_of, serving, user

ASK = "37+48-19*3+12=?"
SORT = "sort : dog ant cat ="
#: More than a second of work, which a test ends before it is done.
MANY = "sums:self-consistency:num=256,early_stop=false"
HOW: dict[str, Any] = {"max_tokens": 80, "seed": 7}


@pytest.fixture(scope="module")
def served() -> Iterator[SimpleNamespace]:
    """Two text models, each in its process; two requests may be under way at the one that thinks."""
    loop = LoopThread()
    limits = TextLimits(max_in_flight=2, keep_alive=0.01, max_tokens=500, max_messages=5)
    texts = [LocalText(TextSpec(name="sums", model="sums", limits=limits))]
    texts.append(LocalText(TextSpec(name="lists", model="lists-mdlm")))
    try:
        for text in texts:
            loop.run(text.start())
        with serving(loop, texts) as address:
            yield SimpleNamespace(loop=loop, sums=texts[0], lists=texts[1], url=address, client=client_of(address))
    finally:
        for text in texts:
            loop.run(text.close())
        loop.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    """The engine of the library in this process."""
    engine = LocalEngine("sums")
    yield engine
    asyncio.run(engine.close())


def think(engine: LocalEngine, strategy: str, **knobs: Any) -> Answer:
    """What the library answers when it is called directly."""

    async def main() -> Answer:
        run, how = Run(engine, seed=HOW["seed"]), Parameters(max_tokens=HOW["max_tokens"])
        return await parse_thinking(strategy)(run, ASK, extract=sums.answer_of, parameters=how, **knobs)

    answer = asyncio.run(main())
    assert answer.text
    return answer


def chat(served: SimpleNamespace, model: str, ask: str = ASK, **more: Any) -> Any:
    return served.client.chat.completions.create(model=model, messages=user(ask), **{**HOW, **more})


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_chat_is_what_the_library_answers(served: SimpleNamespace, engine: LocalEngine) -> None:
    direct, reply = think(engine, "single"), chat(served, "sums")
    assert reply.choices[0].message.content == direct.text
    assert (reply.object, reply.model, reply.choices[0].message.role) == ("chat.completion", "sums", "assistant")
    assert reply.usage.completion_tokens == direct.summary["tokens_total"] > 0
    assert reply.usage.prompt_tokens == direct.summary["prefill"]
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.partsong["answer"] == direct.answer
    assert (reply.partsong["strategy"], reply.partsong["calls"], reply.partsong["seed"]) == ("single", 1, HOW["seed"])
    assert chat(served, "sums:single").choices[0].message.content == direct.text


def test_a_stream_is_the_same_text(served: SimpleNamespace) -> None:
    chunks = list(chat(served, "sums", stream=True, stream_options={"include_usage": True}))
    whole = chat(served, "sums")
    assert text_of(chunks) == whole.choices[0].message.content
    assert len([chunk for chunk in chunks if chunk.choices]) > 5  # it came token by token
    assert chunks[0].choices[0].delta.role == "assistant"
    *_, last, usage = chunks
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.partsong == whole.partsong
    assert usage.choices == []
    assert (usage.usage.completion_tokens, usage.usage.prompt_tokens) == (
        whole.usage.completion_tokens,
        whole.usage.prompt_tokens,
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert not any(chunk.usage for chunk in chat(served, "sums", stream=True))


def test_a_seed_is_drawn_where_none_is_given(served: SimpleNamespace) -> None:
    first, second = (chat(served, "sums", seed=None) for _ in range(2))
    assert first.partsong["seed"] != second.partsong["seed"]
    again = chat(served, "sums", seed=first.partsong["seed"])
    assert again.choices[0].message.content == first.choices[0].message.content


def test_a_strategy_is_part_of_the_name(served: SimpleNamespace, engine: LocalEngine) -> None:
    strategy = "self-consistency:num=8,early_stop=false"
    direct, reply = think(engine, strategy), chat(served, f"sums:{strategy}")
    assert reply.choices[0].message.content == direct.text
    assert reply.model == f"sums:{strategy}"
    assert reply.partsong["answer"] == direct.answer
    spent = {name: reply.partsong[name] for name in ("calls", "tokens_critical", "tokens_accepted", "tokens_cancelled")}
    assert spent == {name: direct.summary[name] for name in spent}
    assert spent["calls"] == 8
    # All tokens are counted, and not those of the answer alone.
    assert reply.usage.completion_tokens == direct.summary["tokens_total"] > spent["tokens_accepted"]


def test_the_zoos_own_prompts_are_used(served: SimpleNamespace, engine: LocalEngine) -> None:
    direct = think(engine, "pdr:schedule=4-1", **sums.thinking_knobs("pdr"))
    assert chat(served, "sums:pdr:schedule=4-1").choices[0].message.content == direct.text


def test_earlier_turns_are_read(served: SimpleNamespace, engine: LocalEngine) -> None:
    turns = [
        *user("3+4=?"),
        {"role": "assistant", "content": [{"type": "text", "text": "3+4=7. answer: 7"}]},
        *user(ASK),
    ]
    reply = served.client.chat.completions.create(model="sums", messages=turns, **HOW)

    texts: list[Any] = [("user", "3+4=?"), ("assistant", "3+4=7. answer: 7"), ("user", ASK)]
    messages = tuple(Message(role, (text,)) for role, text in texts)
    how, seed = Parameters(max_tokens=HOW["max_tokens"]), derive(HOW["seed"], "call", "sample", 0)
    direct = asyncio.run(engine.generate(Request(messages=messages, parameters=how, seed=seed)))
    assert reply.choices[0].message.content == direct.text


def test_a_text_is_continued_without_the_template(served: SimpleNamespace) -> None:
    _, tokenizer = zoo.load("sums")
    prompt = tokenizer.apply_chat_template(user(ASK), tokenize=False, add_generation_prompt=True)
    reply = served.client.completions.create(model="sums", prompt=prompt, **HOW)
    whole = chat(served, "sums")
    assert (reply.object, reply.choices[0].text) == ("text_completion", whole.choices[0].message.content)
    assert reply.usage.prompt_tokens == whole.usage.prompt_tokens
    chunks = list(served.client.completions.create(model="sums", prompt=prompt, stream=True, **HOW))
    assert "".join(chunk.choices[0].text for chunk in chunks) == reply.choices[0].text


def test_a_budget_ends_a_strategy(served: SimpleNamespace) -> None:
    reply = chat(served, "sums:self-consistency:num=8", extra_body={"budget_calls": 3})
    assert (reply.partsong["stopped"], reply.partsong["calls"]) == ("budget", 8)
    assert 0 < reply.usage.completion_tokens <= 3 * HOW["max_tokens"]


# --- diffusion language models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [None, "quota:per_step=2"])
def test_a_diffusion_model_decodes_by_a_rule(served: SimpleNamespace, rule: str | None) -> None:
    model, tokenizer = zoo.load("lists-mdlm")
    ids = tokenizer(SORT).input_ids
    direct = decode(model, [ids], rule=rule, max_new_tokens=24, seed=3, temperature=0.5)
    name, how = "lists" if rule is None else f"lists:{rule}", {"max_tokens": None, "seed": 3, "temperature": 0.5}
    reply = chat(served, name, SORT, **how)
    expected = tokenizer.decode(direct.tokens[0], skip_special_tokens=True)
    assert reply.choices[0].message.content == expected == "ant cat dog"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.partsong["rule"] == (rule or "entropy-bound")
    assert reply.partsong["forwards"] == direct.tallies[0].num_forwards
    assert reply.usage.completion_tokens == len(direct.tokens[0])
    assert reply.usage.prompt_tokens == len(ids)
    chunks = list(chat(served, name, SORT, stream=True, **how))
    assert text_of(chunks) == expected
    assert chunks[-1].partsong == reply.partsong


def test_text_comes_as_soon_as_it_is_stable(served: SimpleNamespace) -> None:
    """A block of two is finished before the next begins, so the text comes in several parts."""
    more = {"max_tokens": None, "temperature": 0, "extra_body": {"block_size": 2}}
    chunks = list(chat(served, "lists:quota:per_step=1", "reverse : dog ant cat owl pig =", stream=True, **more))
    parts = [chunk.choices[0].delta.content for chunk in chunks[1:-1]]
    assert len(parts) >= 3
    assert "".join(parts) == "pig owl cat ant dog"


def test_gaps_of_a_text_are_filled(served: SimpleNamespace) -> None:
    _, tokenizer = zoo.load("lists-mdlm")
    prompt = f"{SORT} ant {tokenizer.mask_token} dog"
    reply = served.client.completions.create(model="lists", prompt=prompt)
    assert "ant cat dog" in reply.choices[0].text
    assert reply.choices[0].finish_reason == "stop"


# --- threads and silence ----------------------------------------------------------------------------------------------


def test_threads_are_shown_as_they_run(served: SimpleNamespace, engine: LocalEngine) -> None:
    name, options = "sums:self-consistency:num=4,early_stop=false", {"include_threads": True, "include_usage": True}
    chunks = list(chat(served, name, stream=True, stream_options=options))
    texts, ends = defaultdict[str, str](str), dict[str, str]()
    news = [
        chunk.partsong for chunk in chunks if not chunk.choices and "thread" in (chunk.model_extra or {})["partsong"]
    ]
    for each in news:
        assert ends.get(each["thread"]) in (None, "running")  # nothing comes after the end of a thread
        texts[each["thread"]] += each["text"]
        ends[each["thread"]] = each["status"]
    assert ends == dict.fromkeys([f"sample#{number}" for number in range(4)], "finished")
    assert {each["label"] for each in news} == {f"sample {number}" for number in range(4)}
    assert len(news) > 20
    assert text_of(chunks) in texts.values()
    assert texts["sample#0"] == think(engine, "single").text  # sample 0 of every strategy is the plain answer


def test_silence_is_filled_with_comments(served: SimpleNamespace) -> None:
    body = {"model": "sums:self-consistency:num=16,early_stop=false", "messages": user(ASK), "stream": True, **HOW}
    with httpx2.stream("POST", f"{served.url}/chat/completions", json=body, trust_env=False, timeout=LONG) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = "".join(reply.iter_text()).split("\n\n")
    comments = [event for event in events if event == ": keep-alive"]
    assert len(comments) >= 2
    data = [event.removeprefix("data: ") for event in events if event not in ("", ": keep-alive")]
    assert data[-1] == "[DONE]"
    whole = chat(served, body["model"])
    deltas = (json.loads(event)["choices"][0]["delta"].get("content", "") for event in data[:-1])
    assert "".join(deltas) == whole.choices[0].message.content


# --- refusals ---------------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(
    ("model", "fields", "param", "words"),
    [
        ("sums", {"tools": TOOLS}, "tools", "--upstream"),
        ("sums:self-consistency", {"tools": TOOLS}, "tools", "read and write text alone"),
        ("sums", {"extra_body": {"wings": 2}}, "wings", "unknown field"),
        ("sums", {"n": 2}, "n", "self-consistency:num=2"),
        ("sums", {"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ("sums", {"top_p": 0}, "top_p", "greater than 0"),
        ("sums", {"max_tokens": 501}, "max_tokens", "500 at most"),
        ("sums", {"messages": []}, "messages", "at least 1"),
        ("sums", {"messages": user("1+1=?") * 6}, "messages", "5 at most"),
        ("sums", {"messages": [{"role": "assistant", "content": "so"}]}, "messages", "end with one of the user"),
        ("sums", {"messages": [{"role": "system", "content": "Sing."}, *user(ASK)]}, None, "no role but user"),
        ("sums", {"messages": user("7" * 2000)}, None, "shorten"),
        ("sums", {"frequency_penalty": 1.0}, "frequency_penalty", "does not support"),
        ("sums", {"logprobs": True}, "logprobs", "does not support"),
        ("sums:majority", {}, None, "the strategies are single, self-consistency"),
        ("sums:self-consistency:number=8", {}, None, "its options are num"),
        ("sums:self-consistency:num=257", {}, "model", "256 at most"),
        ("sums:edit-test-select", {}, "model", "needs"),
        ("sums", {"extra_body": {"cache": "prefix"}}, "cache", "diffusion language models"),
        ("lists", {"stop": ["cat"]}, "stop", "one token after another"),
        ("lists:quorum", {}, None, "the rules are entropy-bound"),
        ("lists", {"messages": user("sort the dogs")}, None, "cannot read"),
    ],
)
def test_what_is_wrong_is_said(
    served: SimpleNamespace, model: str, fields: dict[str, Any], param: str | None, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        served.client.chat.completions.create(**{"model": model, "messages": user(ASK), **fields})
    error = refused.value
    assert words in error.message
    assert (error.param, error.type) == (param, "invalid_request_error")
    # A stream is refused before it begins.
    with pytest.raises(openai.BadRequestError):
        served.client.chat.completions.create(**{"model": model, "messages": user(ASK), **fields, "stream": True})


def test_an_unknown_model_is_not_found(served: SimpleNamespace) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        chat(served, "quartet")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert "sums, lists" in missing.value.message
    for body in (b"[1]", b"{", b'{"messages": []}'):
        reply = httpx2.post(f"{served.url}/chat/completions", content=body, trust_env=False)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


# --- hanging up, too many, and death ----------------------------------------------------------------------------------


def test_hanging_up_ends_one_run_and_too_many_are_refused(served: SimpleNamespace, engine: LocalEngine) -> None:
    before = served.sums.outcomes["cancelled"]
    with ThreadPoolExecutor(1) as pool, chat(served, MANY, stream=True) as long:
        assert next(iter(long)).choices[0].delta.role == "assistant"
        other = pool.submit(chat, served, "sums:self-consistency:num=16,early_stop=false")
        served.loop.until(lambda: served.sums.in_flight == 2)
        with pytest.raises(openai.RateLimitError) as refused:
            chat(served, "sums")
        assert refused.value.response.headers["retry-after"] == "1"
        assert refused.value.type == "rate_limit_error"
        long.close()
        served.loop.until(lambda: served.sums.in_flight < 2)
        answer = other.result(LONG)
    served.loop.until(lambda: served.sums.in_flight == 0)
    assert served.sums.outcomes["cancelled"] == before + 1
    assert answer.choices[0].message.content == think(engine, "self-consistency:num=16,early_stop=false").text


def test_hanging_up_before_the_whole_reply_ends_the_run(served: SimpleNamespace) -> None:
    before = served.sums.outcomes["cancelled"]
    with pytest.raises(openai.APITimeoutError):
        chat(served, MANY, timeout=httpx2.Timeout(LONG, read=0.3))
    served.loop.until(lambda: served.sums.in_flight == 0)
    assert served.sums.outcomes["cancelled"] == before + 1


def test_a_killed_process_fails_its_requests(served: SimpleNamespace) -> None:
    pid = served.sums.pid
    with ThreadPoolExecutor(1) as pool, chat(served, MANY, stream=True) as stream:
        next(iter(stream))
        whole = pool.submit(chat, served, MANY)
        served.loop.until(lambda: served.sums.in_flight == 2)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(openai.InternalServerError) as failed:
            whole.result(LONG)
        assert failed.value.code == "model_process_ended"
        assert "was ended by SIGKILL" in failed.value.message
        with pytest.raises(openai.APIError, match="SIGKILL"):
            list(stream)


@pytest.mark.full
def test_after_a_killed_process_the_next_request_waits_for_another(
    served: SimpleNamespace, engine: LocalEngine
) -> None:
    starts, pid = served.sums.starts, served.sums.pid
    with chat(served, MANY, stream=True) as stream:
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="SIGKILL"):
            list(stream)
    # The next request waits for the process that is being started.
    assert chat(served, "sums").choices[0].message.content == think(engine, "single").text
    assert (served.sums.starts, served.sums.ready) == (starts + 1, True)
    assert served.sums.pid != pid
    assert chat(served, "lists", SORT, max_tokens=None).choices[0].message.content == "ant cat dog"
