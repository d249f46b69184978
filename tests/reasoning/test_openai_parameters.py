"""What a server refuses is learned once, and left out only where that changes no answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from partsong.reasoning.remote import RequestRefusedError
from tests.reasoning.misbehaving import Behaviour, Exchange, Misbehaving, well
from tests.reasoning.test_openai_engine import ask
from tests.reasoning.test_openai_faults import failed


def taking_no(*names: str, words: str = "Unsupported parameter: '{}' is not supported with this model.") -> Behaviour:
    async def picky(exchange: Exchange) -> None:
        for name in names:
            if name in exchange.body:
                await exchange.refuse(name, words)
                return
        await well(exchange)

    return picky


@pytest.mark.parametrize(
    "words",
    [
        "Unsupported parameter: '{}' is not supported with this model.",
        "Unknown field: {}",
        "Unexpected fields in the request: {{'{}'}}",
        "[{{'type': 'extra_forbidden', 'loc': ('body', '{}'), 'msg': 'Extra inputs are not permitted'}}]",
    ],
)
def test_what_a_server_does_not_take_is_found_out_once(words: str) -> None:
    async def main() -> None:
        async with Misbehaving(taking_no("stream_options", "seed", "max_tokens", "temperature", words=words)) as server:
            engine = server.engine()
            completions = [await engine.generate(ask(max_tokens=9)) for _ in range(3)]
            # All at once, on an engine that has yet to find out.
            other = server.engine()
            completions += await asyncio.gather(*(other.generate(ask(max_tokens=9)) for _ in range(8)))
            assert {completion.text for completion in completions} == {"the sum is 4"}
            assert not any(completion.usage.reported for completion in completions)  # counts came with stream_options
            assert (engine.traffic.reworded, engine.traffic.requests, engine.traffic.retries) == (4, 3 + 4, 0)
            assert server.bodies[-1]["max_completion_tokens"] == 9
            assert not {"seed", "stream_options", "max_tokens", "temperature"} & set(server.bodies[-1])

    asyncio.run(main())


def test_a_limit_of_the_other_name_is_refused_as_well() -> None:
    failed(RequestRefusedError, "max_completion_tokens", taking_no("max_tokens", "max_completion_tokens"))


@pytest.mark.parametrize(
    ("parameters", "name"),
    [({"temperature": 0.5}, "temperature"), ({"top_p": 0.5}, "top_p"), ({"stop": ("x",)}, "stop")],
)
def test_what_would_change_answers_is_not_left_out(parameters: dict[str, Any], name: str) -> None:
    async def main() -> None:
        async with Misbehaving(taking_no(name)) as server:
            engine = server.engine()
            if name != "stop":  # while it has its default, it goes without saying
                assert (await engine.generate(ask())).text == "the sum is 4"
            with pytest.raises(RequestRefusedError, match=name):
                await engine.generate(ask(**parameters))

    asyncio.run(main())


def test_a_limit_that_is_too_large_is_not_taken_for_one_that_is_unknown() -> None:
    words = "'{}' is too large: 1024. This model's maximum context length is 512 tokens."
    error = failed(RequestRefusedError, "is too large", taking_no("max_tokens", words=words))
    assert error.attempts == 1
