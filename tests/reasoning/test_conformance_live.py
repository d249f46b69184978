"""Every strategy on a model in this process and on a real server: it ends, its counts are theirs, it goes on, replays.

The model is tiny and random, so nothing it says makes sense: a strategy must bear that, and end.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from partsong.reasoning import Answer, Engine, Journal, Message, Parameters, Request, Run, final_number
from partsong.reasoning.remote import Patience, RemoteError
from partsong.reasoning.remote.servers import LocalServer, transformers_server
from partsong.reasoning.strategies import STRATEGIES, self_consistency, sequential_refinement
from tests.reasoning import local_models
from tests.reasoning.test_conformance import Pretending, score
from tests.reasoning.wire_tap import WireTap

QUESTION = "what is three and four"
#: Knobs with which a strategy makes a few calls; those that are not here run with their defaults.
KNOBS: dict[str, dict[str, Any]] = {
    "single": {},
    "self-consistency": {"num": 3},
    "adaptive-consistency": {"num": 3},
    "best-of-n": {"num": 3, "alternatives": 4},
    "short-m": {"num": 3, "shortest": 2},
    "deepconf": {"num": 4, "warmup": 2, "group": 2, "alternatives": 4},
    "deepprune": {"num": 3, "prefix_tokens": 4},
    "parallel-probe": {"num": 3, "interval": 2, "probe_tokens": 2, "probe": " hence "},
    "sequential-refinement": {"rounds": 2},
    "pdr": {"schedule": (2, 1), "workspace_tokens": 6},
    "rsa": {"population": 3, "aggregate": 2, "generations": 2},
    "particle-filtering": {"particles": 2, "max_steps": 2, "step_tokens": 4, "scorer": score, "separator": "."},
    "particle-gibbs": {
        "particles": 2,
        "iterations": 2,
        "max_steps": 2,
        "step_tokens": 4,
        "scorer": score,
        "separator": ".",
    },
    "beam-search": {"beams": 2, "width": 2, "max_steps": 2, "step_tokens": 4, "scorer": score, "separator": "."},
    "dvts": {"trees": 2, "width": 2, "max_steps": 2, "step_tokens": 4, "scorer": score, "separator": "."},
    "compute-optimal": {
        "probes": 2,
        "choices": (partial(self_consistency, num=2), partial(sequential_refinement, rounds=2)),
    },
    "plan-search": {"observations": 2, "num": 2},
    "edit-test-select": {"runner": Pretending(), "trajectories": 2, "iterations": 2},
    "decompose": {"plan_tokens": 6},
    "skeleton-of-thought": {"point_tokens": 4},
    "fork-join": {"format": "parathinker", "num": 2, "thread_tokens": 4, "teach": False},
}
#: Strategies that read what the model's confidence was.
CONFIDENT = ("best-of-n", "deepconf")
#: Strategies that go on with an answer, which this server's chats do not.
GOING_ON = ("deepprune", "parallel-probe", "particle-filtering", "particle-gibbs", "beam-search", "dvts", "fork-join")


def names() -> list[str]:
    assert set(KNOBS) <= set(STRATEGIES)
    return sorted(STRATEGIES)


def think(name: str, engine: Callable[[], Engine], **options: Any) -> tuple[Answer, Run]:
    arguments: dict[str, Any] = {"extract": final_number, "parameters": Parameters(max_tokens=6)}

    async def main() -> tuple[Answer, Run]:
        live = engine()
        try:
            run = Run(live, seed=1, **options)
            return await STRATEGIES[name](run, QUESTION, **{**arguments, **KNOBS.get(name, {})}), run
        finally:
            await live.close()

    return asyncio.run(main())


def record_of(answer: Answer) -> str:
    kept = {name: getattr(answer, name) for name in ("answer", "text", "calls", "stopped", "summary", "details")}
    return json.dumps(kept, default=str)


def read_by(request: Request) -> str:
    """What a model without a chat template reads: an answer it goes on with follows the question as it was drawn."""
    texts = [message.text for message in request.messages]
    goes_on = request.messages[-1].role == "assistant"
    return "\n\n".join(texts[:-1]) + texts[-1] if goes_on else "\n\n".join(texts)


@pytest.mark.parametrize("name", names())
def test_on_a_model_of_this_process(name: str, tmp_path: Path) -> None:
    model = local_models.llama(max_position_embeddings=4096)
    engine = partial(local_models.engine, model)
    with Journal(tmp_path / "j.db") as journal:
        answer, run = think(name, engine, journal=journal)
    assert answer.stopped in ("done", "decided", "confident") and len(run.graph.nodes) > 0
    words = local_models.tokenizer()
    for node in run.graph.nodes.values():
        completion = node.completion
        assert completion is not None
        if completion.finish in ("stop", "length"):
            assert completion.usage.reported
            assert completion.usage.prompt == len(words(read_by(node.request)).input_ids)
            spelled = len(words(completion.text).input_ids)
            assert spelled <= completion.usage.completion <= node.request.parameters.max_tokens
    with Journal(tmp_path / "j.db", replay=True) as journal:
        again, _ = think(name, engine, journal=journal)
    assert record_of(again) == record_of(answer)
    with Journal(tmp_path / "j.db") as journal:
        _, second = think(name, engine, journal=journal)
    ended = [
        node.name for node in run.graph.nodes.values() if node.completion and node.completion.finish != "cancelled"
    ]
    assert all(second.graph.nodes[call].replayed for call in ended if call in second.graph.nodes)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    if any(importlib.util.find_spec(package) is None for package in ("fastapi", "uvicorn", "openai")):
        pytest.skip("needs fastapi, uvicorn and openai: pip install 'partsong[serve,reasoning]'")
    folder = tmp_path_factory.mktemp("served")
    words = local_models.tokenizer()
    words.add_tokens(list("</>12"))  # this server refuses stop strings that the vocabulary cannot spell
    local_models.llama(max_position_embeddings=4096, vocab_size=len(words)).float().save_pretrained(folder)
    words.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    words.save_pretrained(folder)
    with transformers_server(folder) as running:
        yield running


@pytest.mark.full  # the test above has every strategy, and test_openai_servers has whole runs on this server
@pytest.mark.parametrize("name", names())
def test_on_a_real_server(name: str, server: LocalServer, tmp_path: Path) -> None:
    """Counts are read off the wire; a replay does not need the server."""

    async def main() -> tuple[Answer, Run, list[dict[str, int]]]:
        async with WireTap(server.base_url) as tap:
            endpoint = "completions" if name in GOING_ON else "chat"
            engine = server.engine(patience=Patience(retries=2, backoff=0.01), connections=1, endpoint=endpoint)
            engine.base_url = tap.base_url
            with Journal(tmp_path / "j.db") as journal:
                run = Run(engine, seed=1, journal=journal)
                arguments: dict[str, Any] = {"extract": final_number, "parameters": Parameters(max_tokens=6)}
                try:
                    answer = await STRATEGIES[name](run, QUESTION, **{**arguments, **KNOBS.get(name, {})})
                finally:
                    await engine.close()
            return answer, run, tap.usages()

    if name in CONFIDENT:  # this server tells no log-probabilities, and says so by leaving them out
        with pytest.raises(RemoteError, match="logprobs"):
            asyncio.run(main())
        return
    answer, run, usages = asyncio.run(main())
    nodes = [node for node in run.graph.nodes.values() if node.completion is not None]
    whole = [
        node.completion.usage for node in nodes if node.completion and node.completion.finish in ("stop", "length")
    ]
    counts = sorted((usage["prompt_tokens"], usage["completion_tokens"]) for usage in usages)
    ours = sorted((usage.prompt, usage.completion) for usage in whole)
    assert ours == counts and all(usage.reported for usage in whole)
    with Journal(tmp_path / "j.db", replay=True) as journal:
        again, _ = think(name, lambda: Silent(run.engine.name), journal=journal)
    assert record_of(again) == record_of(answer)


class Silent:
    """An engine that must not be asked."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def generate(self, request: Any, progress: Any = None) -> Any:
        raise AssertionError("a replay asked the engine")

    async def close(self) -> None:
        pass


def test_a_message_is_a_message() -> None:
    """The tiny tokenizer has one token for every letter, one of them for all it does not know."""
    assert len(local_models.tokenizer()(Message("user", ("What? 7",)).text).input_ids) == 7
