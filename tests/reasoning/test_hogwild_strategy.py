"""`hogwild` as a strategy: calls of a run, with its budget, journal and ledger; nobody is left waiting."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import sqlite3
import threading
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from partsong.errors import ArgumentError, PartsongError, UnsupportedError
from partsong.ledger import Ledger
from partsong.reasoning import (
    Answer,
    Budget,
    Completion,
    EngineError,
    Journal,
    Line,
    Message,
    Parameters,
    Request,
    Run,
    ScriptedEngine,
    final_number,
)
from partsong.reasoning.calls.graph import CallNode
from partsong.reasoning.hogwild import workers as hogwild_workers
from partsong.reasoning.hogwild.strategy import _Workers, hogwild
from partsong.reasoning.hogwild.workers import Writing
from partsong.reasoning.local import LocalEngine
from tests.reasoning.hogwild_twin import SHORT, tiny, tokenizer, work

QUESTION = "What is three and four?"
LONG = Parameters(max_tokens=48)


def engine(**more: Any) -> LocalEngine:
    return LocalEngine(tiny(**more), tokenizer=tokenizer(), name="tiny")


def extract(text: str) -> str | None:
    return final_number(text) if "boxed" in text else None


def finished(main: Coroutine[Any, Any, Any]) -> Any:
    """Runs it; afterwards no worker's thread is left."""
    found = asyncio.run(main)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hogwild")]
    return found


def think(local: LocalEngine | None = None, **more: Any) -> tuple[Answer, Run]:
    knobs = {"extract": extract, "num_workers": 3, "prompts": SHORT, "parameters": LONG, "probe_every": 16}
    of_run = {name: more.pop(name) for name in ("seed", "journal", "budget", "concurrency", "observer") if name in more}

    async def main() -> tuple[Answer, Run]:
        inner = local or engine()
        run = Run(inner, **of_run)
        try:
            return await hogwild(run, QUESTION, **{**knobs, **more}), run
        finally:
            await inner.close()

    return finished(main())


def test_workers_are_calls_that_are_counted() -> None:
    told: dict[str, str] = {}

    def observe(node: CallNode, text: str) -> None:
        told[node.name] = told.get(node.name, "") + text

    with Ledger() as ledger:
        answer, run = think(observer=observe, seed=3)
    nodes = list(run.graph.nodes.values())
    texts = [node.completion.text for node in nodes if node.completion is not None]
    tokens = [node.tokens for node in nodes]
    assert [node.name for node in nodes] == [f"hogwild/combined/3 workers/probe 16#{n}" for n in range(3)]
    assert answer.details["texts"] == texts == list(told.values())
    summary = answer.summary
    assert (summary["calls"], summary["tokens_total"], summary["estimated"]) == (3, sum(tokens), 0)
    assert summary["tokens_critical"] == answer.details["steps"] == max(tokens)
    assert ledger.summary()["tokens"] == sum(tokens)
    # The prompt is read once.
    first, *others = (node.completion.usage for node in nodes if node.completion is not None)
    assert first.cached == 0 and len({each.cached for each in others}) == 1
    assert first.prompt > others[0].cached > len(QUESTION)


def test_the_answer_is_the_first_result() -> None:
    # One token of the vocabulary is a result; somebody draws it sooner or later.
    answer, run = think(seed=1, parameters=Parameters(max_tokens=400))
    [winner] = answer.calls
    kept = {name: node.completion for name, node in run.graph.nodes.items() if node.completion is not None}
    assert (answer.answer, answer.stopped, answer.text) == ("7", "done", kept[winner].text)
    assert kept[winner].text.endswith("\\boxed{7}")
    assert [each.finish for name, each in kept.items() if name != winner] == ["halted", "halted"]


def test_questions_and_replies_are_reported() -> None:
    answer, _ = think(seed=3)
    replies = answer.details["probes"]
    assert replies and {worker for worker, _ in replies} <= {0, 1, 2}
    asked = sum(text.count(SHORT.probe) for text in answer.details["texts"])
    assert len(replies) == asked
    for worker, reply in replies:
        assert reply in answer.details["texts"][worker]


@pytest.mark.parametrize(
    "layout", ["combined", *(pytest.param(name, marks=pytest.mark.full) for name in ("contiguous", "interleaved"))]
)
def test_the_order_of_calls_changes_nothing(layout: str) -> None:
    wide, _ = think(layout=layout, seed=2)
    narrow, run = think(layout=layout, seed=2, concurrency=1)
    assert wide.details == narrow.details and (wide.answer, wide.text) == (narrow.answer, narrow.text)
    assert all(node.completion is not None for node in run.graph.nodes.values())


def test_seeds_and_branches_write_differently() -> None:
    async def main() -> list[str]:
        inner = engine()
        found = []
        for run in (Run(inner, seed=1), Run(inner, seed=2), Run(inner, seed=1).branch("again")):
            answer = await hogwild(run, QUESTION, extract=extract, prompts=SHORT, parameters=LONG)
            found.append(answer.details["texts"][0])
        await inner.close()
        return found

    assert len(set(finished(main()))) == 3


def test_a_journal_keeps_the_workers(tmp_path: Path) -> None:
    path = tmp_path / "calls.sqlite"
    with Journal(path) as journal:
        first, _ = think(seed=5, journal=journal)
    with Journal(path, replay=True) as journal:
        local = engine()
        again, run = think(local, seed=5, journal=journal)
    assert run.replayed == 3
    assert (again.answer, again.text, again.details) == (first.answer, first.text, first.details)


def test_a_run_whose_budget_ended_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    whole, _ = think(seed=5)
    with Journal(tmp_path / "calls.sqlite") as journal:
        cut, run = think(seed=5, journal=journal, budget=Budget(tokens=30))
        assert (cut.answer, cut.stopped) == (None, "budget")
        assert 30 <= run.summary(())["tokens_total"] < 40
        rest, _ = think(seed=5, journal=journal)
    assert (rest.answer, rest.details) == (whole.answer, whole.details)


def test_a_worker_missing_from_a_journal_is_written_again_with_the_others(tmp_path: Path) -> None:
    path = tmp_path / "calls.sqlite"
    with Journal(path) as journal:
        whole, _ = think(seed=5, journal=journal)
    with contextlib.closing(sqlite3.connect(path)) as file, file:
        assert file.execute("DELETE FROM calls WHERE place = 1").rowcount == 1
    with Journal(path) as journal:
        rest, run = think(seed=5, journal=journal)
    assert (run.replayed, rest.details) == (2, whole.details)


def test_calls_of_the_engine_may_run_beside_the_workers() -> None:
    async def main() -> tuple[list[Any], list[Any]]:
        inner = engine()
        asked = Parameters(max_tokens=24)
        requests = [replace(request(0), parameters=asked, seed=seed) for seed in range(3)]

        async def written() -> Any:
            answer = await hogwild(Run(inner), QUESTION, extract=extract, prompts=SHORT, parameters=asked)
            return answer.details

        apart = [await written(), *[(await inner.generate(each)).text for each in requests]]
        found = await asyncio.gather(written(), written(), *map(inner.generate, requests))
        await inner.close()
        return apart, [found[0], found[1], *(each.text for each in found[2:])]

    apart, beside = finished(main())
    assert beside == [apart[0], *apart]


def test_a_cancelled_run_ends_and_leaves_the_engine_usable() -> None:
    async def main() -> Completion:
        inner = engine()
        begun = asyncio.Event()
        run = Run(inner, observer=lambda node, text: begun.set() if text else None)
        long = Parameters(max_tokens=10_000)
        task = asyncio.ensure_future(hogwild(run, QUESTION, extract=extract, prompts=SHORT, parameters=long))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        found = await inner.generate(Request(messages=(Message("user", (QUESTION,)),), parameters=LONG))
        await inner.close()
        return found

    assert finished(main()).usage.completion > 0


def request(number: int) -> Request:
    return Request(messages=(Message("user", (QUESTION,)),), sample=number)


def test_one_call_can_be_cancelled_and_the_other_goes_on() -> None:
    async def main() -> tuple[list[Any], Writing]:
        inner = engine()
        made = Writing(inner.model, tokenizer(), work(QUESTION, 2, ends=frozenset(), answer_tokens=0))
        group = _Workers("group", lambda _: made)
        tasks: list[asyncio.Task[Completion]] = []

        def progress(text: str, tokens: int, *_: Any, **__: Any) -> None:
            if tokens == 5:
                tasks[0].cancel()

        tasks.append(asyncio.ensure_future(group.generate(request(0), progress)))
        tasks.append(asyncio.ensure_future(group.generate(request(1))))
        found = await asyncio.gather(*tasks, return_exceptions=True)
        await inner.close()
        return list(found), made

    found, made = finished(main())
    assert isinstance(found[0], asyncio.CancelledError) and found[1].usage.completion == 40
    assert made.writers[0].finish == "cancelled" and 5 <= made.writers[0].drawn <= 7


def test_a_model_that_fails_ends_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, forwards = hogwild_workers.forward, list[int]()

    def failing(*args: Any) -> torch.Tensor:
        forwards.append(1)
        if len(forwards) == 5:
            raise RuntimeError("out of memory")
        return inner(*args)

    monkeypatch.setattr(hogwild_workers, "forward", failing)
    with pytest.raises(EngineError, match="all workers ended: RuntimeError.'out of memory'"):
        think()


REFUSED: list[tuple[dict[str, Any], type[PartsongError], str]] = [
    ({"num_workers": 0}, ArgumentError, "num_workers=0"),
    ({"layout": "ring"}, ArgumentError, "layout='ring'; use combined, contiguous or interleaved"),
    ({"probe_every": -1}, ArgumentError, "probe_every=-1"),
    ({"answer_tokens": 1.5}, ArgumentError, "answer_tokens=1.5"),
    ({"names": ["Ada"]}, ArgumentError, "at least num_workers=3"),
    ({"names": "Ada"}, ArgumentError, "names='Ada'"),
    ({"parameters": Parameters(stop=("x",))}, UnsupportedError, "stop="),
    ({"parameters": Parameters(logprobs=2)}, UnsupportedError, "logprobs=2"),
    ({"parameters": Parameters(max_tokens=0)}, ArgumentError, "max_tokens=0"),
]


@pytest.mark.parametrize(("knobs", "kind", "words"), REFUSED)
def test_knobs_that_cannot_be_are_refused(knobs: dict[str, Any], kind: type[PartsongError], words: str) -> None:
    with pytest.raises(kind, match=words):
        think(**knobs)


def test_engines_whose_calls_share_nothing_are_refused() -> None:
    scripted = ScriptedEngine(lambda request, draw: Line(text="7"))
    with pytest.raises(UnsupportedError, match="found ScriptedEngine: use LocalEngine"):
        asyncio.run(hogwild(Run(scripted), QUESTION, extract=extract))
    assert not scripted.asked


def test_models_of_another_kind_and_prompts_without_room_are_refused() -> None:
    gpt2 = LocalEngine(tiny("gpt2"), tokenizer=tokenizer())
    with pytest.raises(UnsupportedError, match="gpt2 has another kind of position"):
        think(gpt2)
    with pytest.raises(ArgumentError, match="the model's context has 64"):
        think(engine(max_position_embeddings=64))


def test_the_page_knows_the_knobs() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "methods" / "hogwild.md").read_text(encoding="utf-8")
    known = inspect.signature(hogwild).parameters
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \| \S", text, re.MULTILINE))
    knobs = {name: rows[name] for name in known if name not in ("run", "question", "extract")}
    assert knobs["layout"] == known["layout"].default
    for name in ("num_workers", "probe_every", "answer_tokens"):
        assert knobs[name] == str(known[name].default)
    said = re.search(r"^`hogwild\(([^`]*)\)`", text, re.MULTILINE)
    assert said is not None
    for name, default in re.findall(r"(\w+)=([^,)]+)", said[1]):
        assert default.strip('"') == str(known[name].default)
