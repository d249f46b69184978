"""What `fork_join` wrote, as the tree of what was drawn: the tree the text was made from, whatever the format."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from partsong.reasoning import Answer, Line, Parameters, Request, Run, ScriptedEngine
from partsong.reasoning.calls.text_tree import Fork, Part, Piece, flat_text
from partsong.reasoning.strategies.fork_join import fork_join
from partsong.reasoning.strategies.single import single
from partsong.reasoning.threads import FORMATS, Format
from partsong.reasoning.threads.plans import stop_of
from partsong_zoo.products import answer_of, draw, in_threads, work_out
from partsong_zoo.products.solutions import ProductWork
from partsong_zoo.training.rollouts import drawn_parts, has_forked

END = 99


def script(work: ProductWork, form: Format) -> Any:
    """Says what the work says, as far as the call goes: engines leave out what stops them."""
    parts = in_threads(work, form)
    place = next(place for place, part in enumerate(parts) if isinstance(part, Fork))
    before, behind = flat_text(parts[:place]), flat_text(parts[place + 2 :])
    fork: Any = parts[place]

    def said(request: Request, _: random.Random) -> Line:
        text = request.messages[-1].text
        for number, thread in enumerate(fork.threads, 1):
            opener = thread[0] if form.apart else form.opener(number)
            asked = request.messages[-1].role == "user" if form.apart else text.endswith(opener)
            # All threads of this format begin alike: its stop string tells that one is meant, and they say the same.
            if asked and text.endswith(opener):
                return Line(text=flat_text(thread[1:-1]))
        stop = stop_of(form)
        return Line(text=before.removesuffix(stop)) if request.messages[-1].role == "user" else Line(text=behind)

    return said


def written(name: str, seed: int, **knobs: Any) -> tuple[Run, Answer, tuple[Part, ...]]:
    form, problem = FORMATS[name], draw("product", random.Random(seed), fresh=False, sizes=[(3, 3)])
    work = work_out(problem)
    if name == "parallel-r1":  # its threads have no numbers and read the same
        work = replace(work, threads=(work.threads[0],) * 3)
    run = Run(ScriptedEngine(script(work, form)))
    options: dict[str, Any] = {"extract": answer_of, "format": name, "num": 3, "teach": False}
    answer = asyncio.run(fork_join(run, problem.question, **{**options, **knobs}))
    return run, answer, in_threads(work, form)


def told(parts: Sequence[Part]) -> Iterator[Any]:
    """Texts with whether they were drawn, neighbours of a kind together; forks as lists."""
    drawn, text = None, ""
    for part in (*parts, None):
        kind = None if part is None or isinstance(part, Fork) else isinstance(part, Piece)
        if kind != drawn and text:
            yield drawn, text
            text = ""
        drawn = kind
        if isinstance(part, Fork):
            yield [list(told(thread)) for thread in part.threads], part.marks, part.apart
        elif part is not None:
            text += part if isinstance(part, str) else part.text


@pytest.mark.parametrize("name", FORMATS)
def test_what_was_drawn_is_what_training_shows(name: str) -> None:
    run, answer, parts = written(name, seed=3)
    found = drawn_parts(run, answer, FORMATS[name], END)
    assert found[-1] == Piece("", tokens=(END,))
    assert list(told(found)) == list(told(parts))
    assert has_forked(answer)


def test_a_thread_that_ran_out_of_tokens_did_not_draw_its_end() -> None:
    form = FORMATS["npr"]
    run, answer, _ = written("npr", seed=3, parameters=Parameters(max_tokens=500), thread_tokens=1)
    (whole,) = (part for part in drawn_parts(run, answer, form, END) if isinstance(part, Fork))
    assert [thread[-1] for thread in whole.threads] == [Piece("</step>", thread[1].source) for thread in whole.threads]

    def wordy(request: Request, _: random.Random) -> Line:
        text = request.messages[-1].text
        if text.endswith(":") and request.messages[-1].role == "assistant":
            return Line(text="never ends", tokens=9)
        return Line(text="end" if request.messages[-1].role == "assistant" else "<guideline><plan>1: a</plan>")

    run = Run(ScriptedEngine(wordy))
    answer = asyncio.run(fork_join(run, "?", extract=answer_of, format="npr", teach=False, thread_tokens=1))
    parts = drawn_parts(run, answer, form, END)
    (fork,) = (part for part in parts if isinstance(part, Fork))
    assert fork.threads[0][-1] == "</step>" and not has_forked(answer)
    assert parts[-1] == Piece("", tokens=(END,))


def test_a_text_that_ran_out_of_tokens_did_not_draw_its_end() -> None:
    run = Run(ScriptedEngine(lambda request, draw: Line(text="on and on", tokens=9)))
    answer = asyncio.run(
        fork_join(run, "?", extract=answer_of, format="npr", teach=False, parameters=Parameters(max_tokens=2))
    )
    (piece,) = drawn_parts(run, answer, FORMATS["npr"], END)
    assert isinstance(piece, Piece) and piece.text == "on and"


def test_a_single_text_is_one_piece_and_its_end() -> None:
    run = Run(ScriptedEngine(lambda request, draw: Line(text="answer: 4")))
    answer = asyncio.run(single(run, "?", extract=answer_of))
    piece, end = drawn_parts(run, answer, None, END)
    assert isinstance(piece, Piece) and piece.text == "answer: 4" and end == Piece("", tokens=(END,))
    assert not has_forked(answer)
