"""Knobs of fork and join, and what reading a joined text again costs on an engine that keeps keys by prefix."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from partsong.errors import ArgumentError
from partsong.reasoning import Completion, Line, Message, Request, ScriptedEngine, Usage
from partsong.reasoning.calls.text_tree import Fork
from partsong.reasoning.strategies import ForkJoinPrompts
from partsong.reasoning.threads.formats import FORMATS, Format
from partsong.reasoning.threads.parse import parse
from tests.reasoning.threads.test_fork_join import FORM, Script, plan_of, think


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_the_format_is_taught_by_an_example_of_itself(form: Format) -> None:
    _, _, engine = think({"text#0": "7"}, format=form.name)
    text = engine.asked[0].messages[0].text
    begin = text.index("parts:\n\n") + len("parts:\n\n")
    example = text[begin : text.index("\n\nThreads are")]
    parsed = parse(example, form)
    widths = [len(part.threads) for part in parsed.parts if isinstance(part, Fork)]
    assert (parsed.notes == () and widths == [2]) or form.apart
    assert text.endswith("\nthe question")
    plain = think({"text#0": "7"}, format=form.name, teach=False)[2]
    assert plain.asked[0].messages[0] == Message("user", ("the question",))


def test_prompts_of_ones_own() -> None:
    prompts = ForkJoinPrompts(taught="{example}!{question}", taught_child="{message} {opening}{closing}?")
    script: Script = {"text#0": plan_of(FORMATS["apr"], "a"), "text#1": "7"}
    _, _, engine = think(script, format="apr", prompts=prompts)
    assert engine.asked[0].messages[0].text.endswith("!the question")
    assert engine.asked[1].messages[0].text == "a <Return></Return>?"
    with pytest.raises(ArgumentError, match="prompt child has no gaps"):
        think(script, prompts=ForkJoinPrompts(child="do it"))


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"format": "xml"}, "format='xml'; use threadweaver, multiverse"),
        ({"num": 0}, "num=0"),
        ({"max_forks": 0}, "max_forks=0"),
        ({"thread_tokens": 0}, "thread_tokens=0"),
        ({"teach": "yes"}, "teach='yes'"),
    ],
)
def test_refused(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        think({}, **knobs)


# --- what is read again -----------------------------------------------------------------------------------------------


class Reading(ScriptedEngine):
    """A token is a letter, and keys are kept by prefix: what servers do that read a joined text again.

    Attributes:
        known: all texts so far.
        computed: letters of prompts.
    """

    def __init__(self, script: Callable[[Request, random.Random], Line]) -> None:
        super().__init__(script)
        self.known: list[str] = []
        self.computed = 0

    async def generate(self, request: Request, progress: Any = None) -> Completion:
        line = self.script(request, random.Random(0))
        prompt = "".join(message.text for message in request.messages)
        cached = max((common(prompt, text) for text in self.known), default=0)
        self.known.append(prompt + line.text)
        self.computed += len(prompt) - cached
        usage = Usage(prompt=len(prompt), cached=cached, completion=len(line.text) + 1)
        return Completion(text=line.text, usage=usage, tokens=tuple(map(ord, line.text)))


def common(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("num", [1, 2, 5])
def test_what_a_server_reads_again_is_every_thread_but_the_first(num: int) -> None:
    letters = "abcde"[:num]
    texts = {f"fork 0/thread {i}/text#0": f" {letter * (3 + i)}" for i, letter in enumerate(letters, 1)}
    script: Script = {"text#0": f"So {plan_of(FORM, *letters)}", **texts, "text#1": " it is 7"}
    engine = Reading(lambda request, draw: Line(text=str(script[f"{'/'.join(request.path)}#{request.sample}"])))
    answer, _, _ = think(script, engine=engine)
    # Each later thread is read a second time after the others, with the number it begins with. The tag before that was
    # computed once for all threads, and then for each; closing tags are new there.
    again = sum(len("2:") + len(texts[f"fork 0/thread {i}/text#0"]) for i in range(2, num + 1))
    assert answer.details["tokens_repeated"] == again
    assert answer.details["estimated"] is False
    # All that was put into the text once, and that.
    put = len(engine.known[0]) - len(str(script["text#0"])) + len("</Outlines>" + "\n</Parallel>")
    put += sum(len(FORM.opener(i) + FORM.closer(i)) for i in range(1, num + 1))
    assert engine.computed == put + again
