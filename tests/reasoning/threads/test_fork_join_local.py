"""Fork and join on a model of this process: keys are joined; where they are not, what it costs is what is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from partsong.reasoning import Answer, Completion, Message, Parameters, Request, Run, Usage, final_number
from partsong.reasoning.calls.text_tree import shape_of
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.strategies import fork_join
from partsong.reasoning.threads.formats import FORMATS
from partsong.reasoning.threads.parse import parse
from tests.reasoning import local_models
from tests.reasoning.threads.test_fork_join import tree_of


class Puppet:
    """A `LocalEngine` that takes some answers from a script and writes the others itself."""

    def __init__(self, engine: LocalEngine, script: dict[str, str]) -> None:
        self.engine, self.script, self.name = engine, script, "puppet"

    async def generate(self, request: Request, progress: Any = None) -> Completion:
        text = self.script.get(f"{'/'.join(request.path)}#{request.sample}")
        if text is None:
            return await self.engine.generate(request, progress)
        tokens = tuple(self.engine.tokenizer(text, add_special_tokens=False).input_ids)
        return Completion(text=text, tokens=tokens, usage=Usage(completion=len(tokens) + 1))

    async def close(self) -> None:
        await self.engine.close()


class Counting:
    """An engine around a `LocalEngine` that counts what goes through the model, and may give it plain text only."""

    def __init__(self, engine: LocalEngine, flat: bool) -> None:
        self.engine, self.flat, self.name, self.computed = engine, flat, "counting", 0
        inner = engine.model.forward

        def forward(tokens: Sequence[int], *rest: Any) -> torch.Tensor:
            self.computed += len(tokens)
            return inner(tokens, *rest)

        engine.model.forward = forward  # type: ignore[method-assign]

    async def generate(self, request: Request, progress: Any = None) -> Completion:
        if self.flat:
            messages = tuple(Message(message.role, (message.text,)) for message in request.messages)
            request = replace(request, messages=messages)
        return await self.engine.generate(request, progress)

    async def close(self) -> None:
        await self.engine.close()


def think(flat: bool, seed: int, num: int, concurrency: int = 64, times: int = 1) -> tuple[Answer, Run, int]:
    """Answers on an engine that has answered the same before, where `times` says so."""
    model = local_models.llama(max_position_embeddings=1024)

    async def main() -> tuple[Answer, Run, int]:
        engine = Counting(local_models.engine(model), flat)
        knobs: dict[str, Any] = {"format": "parathinker", "num": num, "thread_tokens": 9, "teach": False}
        try:
            for _ in range(times):
                run = Run(engine, seed=seed, concurrency=concurrency)
                asked = Parameters(max_tokens=6)
                answer = await fork_join(run, "what is it", extract=final_number, parameters=asked, **knobs)
        finally:
            await engine.close()
        return answer, run, engine.computed

    return asyncio.run(main())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("flat", [False, True])
def test_nothing_is_read_again_where_keys_are_joined(flat: bool, seed: int) -> None:
    answer, run, computed = think(flat, seed, 3)
    nodes = run.graph.nodes
    completions = [node.completion for node in nodes.values() if node.completion is not None]
    # What went through the model: what of prompts was not there, and every token drawn but the last of each answer.
    assert computed == sum(c.usage.prompt - c.usage.cached + c.usage.completion - 1 for c in completions)
    assert answer.details["estimated"] is False
    threads = [nodes[f"fork 0/thread {i}/text#0"].completion for i in (1, 2, 3)]
    if not flat:
        assert answer.details["tokens_repeated"] == 0
        return
    # The digit tells openers apart, but this model has one token for all letters it does not know: the openers were
    # computed once, so what is read again is the later threads' own words.
    kept = [len(c.tokens or ()) for c in threads if c is not None]
    cut = [c.finish == "length" for c in threads if c is not None]
    # The last token of a thread that ran out was never read before.
    assert answer.details["tokens_repeated"] == sum(kept[1:]) - sum(cut[1:])


def test_one_thread_joined_or_read_again_is_the_same_text() -> None:
    joined, flat = think(False, 1, 1)[0], think(True, 1, 1)[0]
    assert joined.text == flat.text and joined.details == flat.details
    assert flat.details["tokens_repeated"] == 0


def test_what_an_engine_had_before_is_no_gain() -> None:
    """The question's keys are there the second time; so are the threads', which no count goes below."""
    assert think(False, 1, 3, times=2)[0].details["tokens_repeated"] == 0
    assert (
        0 <= think(True, 1, 3, times=2)[0].details["tokens_repeated"] <= think(True, 1, 3)[0].details["tokens_repeated"]
    )


def test_concurrency_changes_nothing() -> None:
    one, many = think(False, 5, 4, concurrency=1)[0], think(False, 5, 4)[0]
    assert (one.text, one.details) == (many.text, many.details)


def test_forks_within_forks_are_joined_within_them() -> None:
    """Each call reads every token of the tree before it once, and no other thread's."""
    form = FORMATS["multiverse"]
    plan = "<Parallel><Goal><Outline>1: a</Outline><Outline>2: b</Outline>"
    script = {"text#0": f"so {plan}", "fork 0/thread 1/text#0": f"deep {plan}"}

    async def main() -> tuple[Answer, Run]:
        engine = Puppet(local_models.engine(local_models.llama(max_position_embeddings=1024)), script)
        run = Run(engine, seed=2)
        knobs: dict[str, Any] = {"format": "multiverse", "thread_tokens": 120, "teach": False}
        try:
            return await fork_join(run, "what is it", extract=final_number, **knobs), run
        finally:
            await engine.close()

    answer, run = asyncio.run(main())
    assert answer.details["threads"] == [2, 2] and answer.stopped == "done"
    parsed = parse(answer.text, form)
    assert [note.partition(" (")[0] for note in parsed.notes] == ["</Conclusion> is missing"] * 2
    assert shape_of(parsed.parts) == shape_of(tree_of(answer.details["tree"]))
    begin = f"so {plan}</Goal>\n<Path>\n1:deep {plan}</Goal>\n<Path>\n2:"
    calls = {name: node.completion.usage.prompt for name, node in run.graph.nodes.items() if node.completion}
    # One token for every letter.
    assert calls["fork 0/thread 1/fork 0/thread 2/text#0"] == len("what is it") + len(begin)
    after = answer.text.rindex("\n<Conclusion>") + len("\n<Conclusion>")
    assert calls["text#1"] == len("what is it") + after
