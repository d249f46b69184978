"""Texts that part and come together: what each call reads, what it costs, and what wrong tags lead to."""

from __future__ import annotations

import random
from typing import Any

import pytest

from partsong.reasoning import (
    Answer,
    Budget,
    Completion,
    Line,
    Parameters,
    Request,
    Run,
    ScriptedEngine,
    Usage,
)
from partsong.reasoning.answers.extract import final_number
from partsong.reasoning.calls.text_tree import Fork, Part, Piece, shape_of
from partsong.reasoning.calls.virtual_time import run_virtual
from partsong.reasoning.strategies import fork_join
from partsong.reasoning.threads.formats import FORMATS, Format
from partsong.reasoning.threads.parse import parse
from partsong.reasoning.threads.plans import stop_of
from partsong.reasoning.threads.render import fork_text

Script = dict[str, str | tuple[str, int]]


def think(script: Script, *, engine: Any = None, budget: Budget | None = None, **knobs: Any) -> tuple[Answer, Run, Any]:
    """Answers by name of the call, empty where the script has no text; a number of tokens may stand beside it."""

    def play(request: Request, draw: random.Random) -> Line:
        line = script.get(f"{'/'.join(request.path)}#{request.sample}", "")
        text, tokens = line if isinstance(line, tuple) else (line, 10)
        return Line(text=text, tokens=tokens)

    answering = engine or ScriptedEngine(play)
    run = Run(answering, budget=budget)
    answer, _ = run_virtual(fork_join(run, "the question", **{"extract": final_number, **knobs}))
    return answer, run, answering


def tree_of(shown: list[Any]) -> tuple[Part, ...]:
    """The parts that `details["tree"]` shows."""
    parts: list[Part] = []
    for part in shown:
        if isinstance(part, str):
            parts.append(part)
        elif "fork" in part:
            threads = tuple(tree_of(thread) for thread in part["fork"])
            parts.append(Fork(threads, tuple(part.get("marks", ())), apart=part.get("apart", False)))
        else:
            parts.append(Piece(part["text"], part["call"]))
    return tuple(parts)


def plan_of(form: Format, *goals: str) -> str:
    """What a model says that announces threads, up to where it is stopped."""
    text = fork_text(form, list(goals), ["x" for _ in goals], "", ["y" for _ in goals] if form.apart else ())
    stop = stop_of(form)
    return text[: text.index(stop)] if stop else ""


# --- every format, end to end -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_fork_in_every_format(form: Format) -> None:
    begins = bool(form.announce)
    ends = ["<Return>2", "<Return>3"] if form.apart else ["2", "3"]
    script: Script = {
        "text#0": (f"So {plan_of(form, 'add', 'double')}", 5) if begins else ("5", 3),
        "fork 0/thread 1/text#0": (f" first {ends[0]}", 20),
        "fork 0/thread 2/text#0": (f" second {ends[1]}", 30),
        "text#1": (f" both 5{form.end}", 3),
    }
    if not begins:
        script["text#0"] = script.pop("text#1")
    answer, run, _ = think(script, format=form.name, num=2)
    works = [] if form.apart else [" first 2", " second 3"]
    whole = fork_text(form, ["add", "double"], works, " both 5", ["2", "3"] if form.apart else ())
    assert answer.text == ("So " if begins else "") + whole
    assert (answer.answer, answer.stopped) == ("5", "done")
    assert answer.details["threads"] == [2] and answer.details["notes"] == []
    # By hand: what comes before, the longest thread, and what comes after.
    assert answer.summary["tokens_critical"] == (5 if begins else 0) + 30 + 3
    assert answer.summary["tokens_total"] == (5 if begins else 0) + 20 + 30 + 3
    tree = tree_of(answer.details["tree"])
    if not form.apart:
        assert shape_of(tree) == shape_of(parse(answer.text, form).parts)
    first, *threads, last = run.graph.nodes.values()
    threads = threads if begins else [first, *threads]
    assert [node.reads for node in threads] == [(first.name,) if begins else ()] * 2
    assert set(last.reads) == {*([first.name] if begins else []), *(node.name for node in threads)}
    assert set(answer.calls) == set(run.graph.nodes)
    if form.apart:
        assert [node.request.messages[-1].role for node in threads] == ["user", "user"]
        assert "add" in threads[0].request.messages[-1].text and "double" in threads[1].request.messages[-1].text
    else:
        before = answer.text[: answer.text.index(form.opener(1))]
        texts = [node.request.messages[-1].text for node in threads]
        assert texts == [before + form.opener(1), before + form.opener(2)]


def test_what_calls_read_is_the_tree() -> None:
    """Threads that have come together are a fork in the last message, which engines may join; earlier text is text."""
    form = FORMATS["threadweaver"]
    script: Script = {
        "text#0": plan_of(form, "a", "b"),
        "fork 0/thread 1/text#0": " x",
        "fork 0/thread 2/text#0": " y",
        "text#1": f" so {plan_of(form, 'c')}",
        "fork 1/thread 1/text#0": " z",
        "text#2": " 7",
    }
    answer, run, _ = think(script)
    assert answer.details["threads"] == [2, 1] and answer.answer == "7"
    last = run.graph.nodes["text#2"].request.messages
    assert [message.role for message in last] == ["user", "assistant"]
    assert (*last[-1].pieces, Piece(" 7", "text#2")) == tree_of(answer.details["tree"])
    assert [isinstance(part, Fork) for part in last[-1].pieces] == [
        False,
        False,
        True,
        False,
        False,
        False,
        True,
        False,
    ]
    thread = run.graph.nodes["fork 1/thread 1/text#0"].request.messages[-1].pieces
    assert sum(isinstance(part, Fork) for part in thread) == 1 and thread[-1] == "\n<Thread>\n1:"
    assert answer.text == run.graph.nodes["text#2"].request.messages[-1].text + " 7"


def test_threads_may_fork_where_the_format_lets_them() -> None:
    form = FORMATS["multiverse"]
    inner = plan_of(form, "c", "d")
    script: Script = {
        "text#0": (plan_of(form, "a", "b"), 5),
        "fork 0/thread 1/text#0": (f" deep {inner}", 4),
        "fork 0/thread 1/fork 0/thread 1/text#0": (" v", 6),
        "fork 0/thread 1/fork 0/thread 2/text#0": (" w", 9),
        "fork 0/thread 1/text#1": (f" inside{form.end} and", 3),
        "fork 0/thread 2/text#0": (" y", 11),
        "text#1": (f" 7{form.end}", 2),
    }
    answer, run, _ = think(script, format="multiverse")
    assert answer.summary["tokens_critical"] == 5 + (4 + 9 + 3) + 2
    assert answer.details["threads"] == [2, 2] and answer.details["notes"] == []
    parsed = parse(answer.text, form)
    assert parsed.notes == () and shape_of(parsed.parts) == shape_of(tree_of(answer.details["tree"]))
    deep = run.graph.nodes["fork 0/thread 1/fork 0/thread 2/text#0"].request.messages[-1].text
    assert deep == f"{plan_of(form, 'a', 'b')}</Goal>\n<Path>\n1: deep {inner}</Goal>\n<Path>\n2:"
    # Deeper than it may: the thread goes on by itself, through tags that look like its own end.
    script["fork 0/thread 1/text#0"] = f" deep {inner}</Goal>\n<Path>\n1: v"
    script["fork 0/thread 1/text#1"] = "\n<Path>\n2: w"
    script["fork 0/thread 1/text#2"] = f"\n<Conclusion> inside{form.end} and"
    flat, _, _ = think(script, format="multiverse", max_depth=1)
    assert flat.text == answer.text and flat.details["threads"] == [2]
    assert flat.details["notes"] == ["fork 0/thread 1: announces more threads than it may; they stay one text"]


def test_children_may_spawn_children() -> None:
    form = FORMATS["apr"]
    script: Script = {
        "text#0": (f"So {plan_of(form, 'a')}", 5),
        "fork 0/thread 1/text#0": (plan_of(form, "b", "c"), 4),
        "fork 0/thread 1/fork 0/thread 1/text#0": ("v <Return> 2 ", 6),
        "fork 0/thread 1/fork 0/thread 2/text#0": ("all of it is 3", 9),
        "fork 0/thread 1/text#1": ("w <Return>5", 3),
        "text#1": (" 5", 2),
    }
    answer, run, _ = think(script, format="apr", teach=False)
    assert answer.text == f"So {fork_text(form, ['a'], [], '', ['5'])} 5"
    assert answer.summary["tokens_critical"] == 5 + 4 + 9 + 3 + 2
    asked = {name: [m.text for m in node.request.messages] for name, node in run.graph.nodes.items()}
    assert asked["fork 0/thread 1/text#0"] == ["a"]
    assert asked["fork 0/thread 1/fork 0/thread 2/text#0"] == ["c"]
    # What a child does not mark it returns whole.
    returned = fork_text(form, ["b", "c"], [], "", ["2", "all of it is 3"])
    assert asked["fork 0/thread 1/text#1"] == ["a", returned]
    assert answer.details["threads"] == [1, 2]


# --- what goes otherwise ----------------------------------------------------------------------------------------------

FORM = FORMATS["threadweaver"]
PLAN = plan_of(FORM, "a", "b")


def test_a_plan_that_cannot_be_read_leaves_one_text() -> None:
    script: Script = {"text#0": PLAN.replace("2:", "3:"), "text#1": "\n<Thread>\n1: x</Thread> and 7"}
    answer, run, _ = think(script)
    assert answer.answer == "7" and answer.details["threads"] == []
    assert answer.details["notes"] == ["goes on in one text: item 2 of the plan is '3: b', without that number"]
    assert answer.text == f"{script['text#0']}</Outlines>{script['text#1']}"
    assert list(run.graph.nodes) == ["text#0", "text#1"]


def test_a_model_that_does_not_obey_is_one_call() -> None:
    answer, run, _ = think({"text#0": "I say 7."})
    assert (answer.answer, answer.text, len(run.graph.nodes)) == ("7", "I say 7.", 1)
    assert answer.details == {
        "tree": [{"text": "I say 7.", "call": "text#0"}],
        "threads": [],
        "notes": [],
        "tokens_repeated": 0,
        "estimated": True,
    }


@pytest.mark.parametrize("text", ["so </", "so <Parallel"])
def test_a_tag_without_a_plan_is_told_from_the_end_of_a_text(text: str) -> None:
    """Stopped at "Parallel>", which "</Parallel>" holds as well; and stopped by itself."""
    answer, run, engine = think({"text#0": text, "text#1": " it is 7"}, format="parallel-r1")
    if text == "so </":
        assert answer.text == "so </Parallel> it is 7"
        assert answer.details["notes"] == ["goes on in one text: </Parallel> closes nothing"]
    else:
        assert answer.text == text and len(run.graph.nodes) == 1
    assert engine.asked[0].parameters.stop == ("Parallel>",)


def test_too_many_threads_and_too_many_forks() -> None:
    script: Script = {
        "text#0": plan_of(FORM, *"abcde"),
        **{f"fork 0/thread {i}/text#0": f" {i}" for i in range(1, 6)},
        "text#1": f" so {PLAN}</Outlines> and 7",
    }
    answer, _, engine = think(script, max_threads=3, max_forks=1)
    assert answer.details["threads"] == [3] and answer.answer == "7"
    assert answer.details["notes"] == [
        "fork 0 announces 5 threads; the first 3 are written",
        "announces more threads than it may; they stay one text",
    ]
    assert [request.parameters.stop for request in engine.asked] == [("</Outlines>",), *[("</Thread>",)] * 3, ()]


def test_a_thread_that_runs_out_of_tokens_is_closed() -> None:
    script: Script = {
        "text#0": PLAN,
        "fork 0/thread 1/text#0": (" a b c", 3),
        "fork 0/thread 2/text#0": " y",
        "text#1": " 7",
    }
    answer, _, _ = think(script, thread_tokens=2)
    assert answer.answer == "7" and answer.summary["truncated"] == 2
    assert "\n1:a b</Thread>\n<Thread>\n2:" in answer.text
    assert answer.details["notes"][0] == "fork 0/thread 1: ran out of tokens; it is closed where it stands"


def test_the_text_itself_has_so_many_tokens_in_all() -> None:
    script: Script = {
        "text#0": (PLAN, 10),
        **{f"fork 0/thread {i}/text#0": (" x", 5) for i in (1, 2)},
        "text#1": (" 7 8", 3),
    }
    limits = [
        request.parameters.max_tokens
        for request in think(script, thread_tokens=6, parameters=Parameters(max_tokens=20))[2].asked
    ]
    assert limits == [20, 6, 6, 10]
    answer, _, _ = think(script, parameters=Parameters(max_tokens=12))
    assert (answer.answer, answer.stopped, answer.summary["truncated"]) == (None, "done", 1)
    answer, run, _ = think(script, parameters=Parameters(max_tokens=10))
    assert answer.answer is None and "text#1" not in run.graph.nodes
    assert answer.details["tokens_repeated"] is None


@pytest.mark.parametrize(
    ("calls", "threads", "repeated"), [(1, [2], None), (2, [2], None), (3, [2], None), (4, [2], 0)]
)
def test_a_budget_that_ends_in_the_middle_of_a_fork(calls: int, threads: list[int], repeated: int | None) -> None:
    script: Script = {"text#0": PLAN, "fork 0/thread 1/text#0": " x", "fork 0/thread 2/text#0": " y", "text#1": " 7"}
    answer, _, _ = think(script, budget=Budget(calls=calls))
    assert answer.stopped == ("done" if calls == 4 else "budget")
    assert answer.answer == ("7" if calls == 4 else None)
    assert answer.details["threads"] == threads
    assert (answer.details["tokens_repeated"] is None) == (repeated is None)
    assert answer.text.startswith(PLAN) and len(answer.calls) == calls


def test_a_thread_may_write_the_tags_of_threads() -> None:
    """Only the tag that closes what it opened ends it."""
    script: Script = {
        "text#0": PLAN,
        "fork 0/thread 1/text#0": " <Thread> 1",
        "fork 0/thread 1/text#1": " <Thread> 2",
        "fork 0/thread 1/text#2": " 3",
        "fork 0/thread 1/text#3": " 4",
        "fork 0/thread 2/text#0": " <Thread> and nothing",
        "text#1": " 7",
    }
    answer, _, _ = think(script)
    assert "\n1: <Thread> 1</Thread> <Thread> 2</Thread> 3</Thread>\n<Thread>\n2:" in answer.text
    assert answer.text.endswith(" <Thread> and nothing</Thread></Thread>\n</Parallel> 7")


def test_servers_that_leave_the_stop_string_in_the_text() -> None:
    script: Script = {
        "text#0": f"{PLAN}</Outlines>\n",
        "fork 0/thread 1/text#0": " x</Thread>",
        "fork 0/thread 2/text#0": " y</Thread>\n",
        "text#1": " 7",
    }
    clean: Script = {
        name: str(text).split("</Thread>")[0].removesuffix("</Outlines>\n") for name, text in script.items()
    }
    assert think(script)[0].text == think(clean)[0].text
    r1: Script = {"text#0": "so <Parallel>", "fork 0/thread 1/text#0": "x</Path>", "text#1": " 7"}
    answer, _, _ = think(r1, format="parallel-r1", num=1)
    assert answer.text == "so <Parallel>\n<Path>x</Path>\n</Parallel>\n<Summary> 7"


class Thinking(ScriptedEngine):
    """Keeps apart what it calls hidden reasoning."""

    async def generate(self, request: Request, progress: Any = None) -> Completion:
        return Completion(text="", reasoning="so <Parallel>", finish="length", usage=Usage(completion=4))


def test_hidden_reasoning_is_spoken_of() -> None:
    answer, _, _ = think({}, engine=Thinking(lambda request, draw: Line(text="")))
    assert answer.answer is None
    assert answer.details["notes"] == [
        "the engine keeps the text apart as hidden reasoning, where threads cannot be seen"
    ]
