"""What the engine sends, and what it makes of what comes back."""

from __future__ import annotations

import asyncio
import math
import pickle
from typing import Any

import pytest

from partsong.errors import ArgumentError
from partsong.reasoning import Completion, Message, Parameters, Request
from partsong.reasoning.remote import OpenAIEngine, Patience, RequestRefusedError
from tests.reasoning.misbehaving import Behaviour, Exchange, Misbehaving, well

ASK = (Message("system", ("Add.",)), Message("user", ("2+2=",)))


def ask(**parameters: Any) -> Request:
    return Request(messages=ASK, parameters=Parameters(**parameters), seed=2**40 + 5)


async def ask_server(
    behaviour: Behaviour, request: Request | None = None, heard: list[Any] | None = None, **options: Any
) -> tuple[Completion, Misbehaving]:
    def progress(*report: Any, restart: bool = False) -> None:
        if heard is not None:
            heard.append(report)

    async with Misbehaving(behaviour) as server:
        engine = server.engine(**options)
        completion = await engine.generate(request or ask(), progress)
        await engine.close()
        return completion, server


def test_a_chat() -> None:
    heard: list[tuple[str, int]] = []

    async def main() -> None:
        async with Misbehaving() as server:
            engine = server.engine(extra={"top_k": 0}, api_key="sk-secret")
            request = ask(max_tokens=9, temperature=0.5, top_p=0.9, stop=("\n",))
            completion = await engine.generate(
                request, lambda text, tokens, confidence=(): heard.append((text, tokens))
            )
            assert (completion.text, completion.finish, completion.reasoning) == ("the sum is 4", "stop", "")
            usage = completion.usage
            assert (usage.prompt, usage.cached, usage.completion, usage.reported) == (7, 0, 3, True)
            (sent,) = server.asked
            assert sent.path == "/v1/chat/completions"
            assert sent.headers["authorization"] == "Bearer sk-secret"
            assert sent.body == {
                "model": "m",
                "messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}],
                "max_tokens": 9,
                "temperature": 0.5,
                "top_p": 0.9,
                "stop": ["\n"],
                "seed": (2**40 + 5) % (2**31 - 1),
                "stream": True,
                "stream_options": {"include_usage": True},
                "top_k": 0,
            }
            await engine.close()

    asyncio.run(main())
    assert heard == [("the sum", 1), (" is", 2), (" 4", 3)]


def test_plain_completions() -> None:
    completion, server = asyncio.run(ask_server(well, endpoint="completions"))
    assert (completion.text, completion.usage.completion) == ("the sum is 4", 3)
    assert (server.asked[0].path, server.bodies[0]["prompt"]) == ("/v1/completions", "Add.\n\n2+2=")
    assert "messages" not in server.bodies[0]


def test_in_one_piece_and_from_a_server_that_does_not_stream() -> None:
    async def whole(exchange: Exchange) -> None:
        exchange.body["stream"] = False
        await well(exchange)

    for behaviour, options in ((well, {"stream": False}), (whole, {})):
        completion, server = asyncio.run(ask_server(behaviour, **options))
        assert (completion.text, completion.usage.completion, completion.usage.reported) == ("the sum is 4", 3, True)
        assert server.asked[0].method == "POST" and len(server.asked) == 1


def test_cached_prompts_are_counted() -> None:
    async def cached(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.piece("4", "stop")
        await exchange.usage(30, 1, prompt_tokens_details={"cached_tokens": 28})
        await exchange.end()

    usage = asyncio.run(ask_server(cached))[0].usage
    assert (usage.prompt, usage.cached, usage.completion) == (30, 28, 1)


def test_a_missing_count_is_an_estimate_and_says_so() -> None:
    async def uncounted(exchange: Exchange) -> None:
        await exchange.begin()
        for text in ("four", " and", " no", " more"):
            await exchange.piece(text)
        await exchange.piece(finish="stop")
        await exchange.end()

    usage = asyncio.run(ask_server(uncounted))[0].usage
    assert not usage.reported
    assert (usage.completion, usage.prompt, usage.cached) == (4, 1 + 4 + 1 + 4, 0)

    async def nought(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.piece("four words in one piece", "stop")
        await exchange.usage(9, 0)
        await exchange.end()

    usage = asyncio.run(ask_server(nought))[0].usage
    assert (usage.completion, usage.reported) == (math.ceil(23 / 4), False)


# --- hidden reasoning -------------------------------------------------------------------------------------------------


def thinker(parts: list[dict[str, Any]], finish: str, completion: int = 5, reasoned: int | None = None) -> Behaviour:
    async def think(exchange: Exchange) -> None:
        await exchange.begin()
        for delta in parts:
            await exchange.event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        await exchange.piece(finish=finish)
        details = {} if reasoned is None else {"completion_tokens_details": {"reasoning_tokens": reasoned}}
        await exchange.usage(7, completion, **details)
        await exchange.end()

    return think


@pytest.mark.parametrize(
    "parts",
    [
        [{"reasoning_content": "2 and"}, {"reasoning_content": " 2"}, {"content": "4"}],
        [{"reasoning": "2 and 2"}, {"content": "4"}],
        [{"reasoning": "2 and 2", "reasoning_content": "2 and 2"}, {"content": "4"}],
        [{"content": "<think>\n2 and"}, {"content": " 2\n</th"}, {"content": "ink>\n\n4"}],
        [{"content": "2 and 2</think>4"}],
        [{"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "2 and 2"}]}]}, {"content": "4"}],
    ],
)
def test_reasoning_is_kept_apart(parts: list[dict[str, Any]]) -> None:
    completion, _ = asyncio.run(ask_server(thinker(parts, "stop")))
    assert (completion.text, completion.reasoning, completion.finish) == ("4", "2 and 2", "stop")
    assert completion.usage.completion == 5


def test_a_stop_string_in_thoughts_does_not_end_the_answer() -> None:
    parts = [
        {"reasoning_content": "2."},
        {"reasoning_content": "2"},
        {"content": "4"},
        {"content": ". 5"},
        {"content": "6"},
    ]

    async def think(exchange: Exchange) -> None:
        await thinker(parts[: 1 if "stop" in exchange.body else None], "stop")(exchange)

    async def main() -> None:
        async with Misbehaving(think) as server:
            engine = server.engine()
            for _ in range(2):
                completion = await engine.generate(ask(stop=(".",)))
                assert (completion.text, completion.reasoning, completion.finish) == ("4", "2.2", "stop")
            # The first request shows that this server looks into thoughts; from then on it is not asked to look.
            assert ["stop" in body for body in server.bodies] == [True, False, False]
            inside = await engine.generate(ask(stop=(".",), stop_in_thoughts=True))
            assert (inside.text, inside.finish) == ("", "length") and "stop" in server.bodies[-1]
            await engine.close()

    asyncio.run(main())


def test_tags_are_left_alone_where_they_are_spoken_of_or_not_wanted() -> None:
    spoken = thinker([{"content": "say <think> and </think>"}], "stop")
    assert asyncio.run(ask_server(spoken))[0].text == "say <think> and </think>"
    tagged = thinker([{"content": "<think>2</think>4"}], "stop")
    assert asyncio.run(ask_server(tagged, think_tags=None))[0].text == "<think>2</think>4"
    braces = thinker([{"content": "[[2]]4"}], "stop")
    assert asyncio.run(ask_server(braces, think_tags=("[[", "]]")))[0].text == "4"


@pytest.mark.parametrize(
    "behaviour",
    [
        thinker([{"reasoning_content": "2 and"}], "length"),
        thinker([{"reasoning_content": "2 and"}], "stop"),
        thinker([{"content": "<think>2 and"}], "stop"),
        thinker([], "stop", completion=5, reasoned=5),
        thinker([{"content": "4 and"}], "length"),
        thinker([{"content": "4 and"}], "max_tokens"),
        thinker([{"content": "4 and more than was allowed"}], "stop", completion=1025),
    ],
)
def test_an_answer_that_ran_out_of_tokens(behaviour: Behaviour) -> None:
    completion, _ = asyncio.run(ask_server(behaviour))
    assert completion.finish == "length"


# --- log-probabilities ------------------------------------------------------------------------------------------------


def alternatives(*values: float) -> list[dict[str, Any]]:
    return [{"token": str(number), "logprob": value} for number, value in enumerate(values)]


def test_log_probabilities_of_chats() -> None:
    async def sure(exchange: Exchange) -> None:
        assert (exchange.body["logprobs"], exchange.body["top_logprobs"]) == (True, 2)
        await exchange.begin()
        first = [{"token": "4", "logprob": -0.5, "top_logprobs": alternatives(-0.5, -1.5, -9.0)}]
        second = [{"token": ".", "logprob": -3.0, "top_logprobs": alternatives(-0.1, -2.1, -3.0)}]
        await exchange.piece("4", logprobs={"content": first})
        await exchange.piece(".", "stop", logprobs={"content": second})
        await exchange.usage(7, 3)
        await exchange.end()

    heard: list[Any] = []
    completion, _ = asyncio.run(ask_server(sure, ask(logprobs=2), heard))
    assert heard == [("4", 1, (1.0,)), (".", 2, (pytest.approx(1.1),))]
    assert completion.logprobs == (-0.5, -3.0)
    assert completion.confidence == pytest.approx((1.0, 1.1))  # of the two asked for, not of the drawn one


def test_log_probabilities_of_plain_completions() -> None:
    async def sure(exchange: Exchange) -> None:
        assert exchange.body["logprobs"] == 2
        await exchange.begin()
        logprobs = {"tokens": ["4"], "token_logprobs": [-2.0], "top_logprobs": [{"4": -2.0, "5": -1.0}]}
        await exchange.piece("4", "stop", logprobs=logprobs)
        await exchange.usage(7, 1)
        await exchange.end()

    completion, _ = asyncio.run(ask_server(sure, ask(logprobs=2), endpoint="completions"))
    assert (completion.logprobs, completion.confidence) == ((-2.0,), (1.5,))


def test_log_probabilities_that_do_not_come_are_an_error() -> None:
    with pytest.raises(RequestRefusedError, match=r"logprobs=4 were asked for and the server sent none"):
        asyncio.run(ask_server(well, ask(logprobs=4)))


# --- what is refused before any work ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base_url": "localhost:8000"}, "use an address such as"),
        ({"base_url": "ftp://localhost/v1"}, "use an address such as"),
        ({"base_url": "https://name:word@example.org/v1"}, "give it as api_key= instead"),
        ({"base_url": "https://example.org/v1?key=1"}, "has a query or fragment; leave out"),
        ({"base_url": "http://10.0.0.7/v1"}, "would carry the key unencrypted"),
        ({"endpoint": "chats"}, "use chat or completions"),
        ({"extra": {"seed": 1, "top_k": 5}}, r"extra=\['seed'\] is written from each request"),
        ({"extra": {"n": 4}}, r"extra=\['n'\]"),
        ({"think_tags": ("a", "a")}, "two different texts"),
        ({"connections": 0}, "connections=0"),
        ({"patience": Patience(stall=0.0)}, "Patience: stall=0.0; use a number above 0"),
        ({"patience": Patience(retries=-1)}, "Patience: retries=-1; use an integer of 0 or more"),
    ],
)
def test_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words) as caught:
        OpenAIEngine(**{"model": "m", "base_url": "https://example.org/v1", "api_key": "sk-secret", **options})
    assert "sk-secret" not in str(caught.value) and "word" not in str(caught.value).replace("password", "")


def test_a_key_goes_over_https_to_this_machine_or_where_it_may() -> None:
    for url, options in [
        ("https://example.org/v1", {}),
        ("http://localhost:1/v1", {}),
        ("http://[::1]:1/v1", {}),
        ("http://10.0.0.7/v1", {"plain_http": True}),
        ("http://10.0.0.7/v1", {"api_key": ""}),
    ]:
        engine = OpenAIEngine("m", **{"base_url": url, "api_key": "sk-secret", **options})
        assert engine.base_url == url


def test_keys_and_addresses_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> str:
        async with Misbehaving() as server:
            monkeypatch.setenv("OPENAI_API_KEY", "sk-environment")
            monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
            # A proxy must not stand between this machine and itself.
            monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
            monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
            engine = OpenAIEngine("m", patience=Patience(retries=0))
            await engine.generate(ask())
            await engine.close()
            return server.asked[0].headers["authorization"]

    assert asyncio.run(main()) == "Bearer sk-environment"


def test_the_key_shows_nowhere() -> None:
    engine = OpenAIEngine("m", base_url="https://example.org/v1", api_key="sk-secret", extra={"top_k": 1})
    assert "sk-secret" not in f"{engine!r} {engine.name} {vars(engine)}"
    with pytest.raises(TypeError, match="a key is not pickled"):
        pickle.dumps(engine)


def test_names_tell_what_changes_answers() -> None:
    def name(**options: Any) -> str:
        return OpenAIEngine(**{"model": "m", "base_url": "http://127.0.0.1:1/v1", **options}).name

    assert name() == name(base_url="http://127.0.0.1:2/v1") == "openai:chat:m"
    different = [name(), name(model="k"), name(endpoint="completions"), name(extra={"top_k": 1}), name(think_tags=None)]
    assert len(set(different)) == 5
    assert name(name="mine") == "mine"


def test_an_engine_outlives_its_event_loop() -> None:
    async def address(server: Misbehaving) -> None:
        async with server:
            engine = server.engine()
            for _ in range(2):
                # Another loop, in a thread of its own, while the server stays in this one.
                completion = await asyncio.to_thread(asyncio.run, engine.generate(ask()))
                assert completion.text == "the sum is 4"
            assert engine.traffic.requests == 2

    asyncio.run(address(Misbehaving()))
