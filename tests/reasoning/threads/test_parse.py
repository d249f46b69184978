"""Texts of threads as trees: well-formed ones come out as they went in, and nothing else is too odd to be read."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partsong.errors import ArgumentError
from partsong.reasoning.calls.text_tree import Fork, Part, Piece, flat_text
from partsong.reasoning.threads.formats import FORMATS, Format
from partsong.reasoning.threads.parse import MAX_DEPTH, MAX_NOTES, parse
from partsong.reasoning.threads.plans import ThreadPlan, read_announcement, read_plan, stop_of
from partsong.reasoning.threads.render import fork_text, render
from tests import covering

TAG = re.compile(r"</?\w+(?:\{number\})?>")
#: Text that is not one of the tags, though it may look like one.
WORDS = (
    "so",
    " it is 4",
    "\n",
    "<",
    ">",
    "</",
    "{number}",
    "{0.__class__}",
    "1:",
    "\\",
    "%s",
    "<Thread ",
    "é",
    "\u2028",
    "",
)


def tags_of(form: Format) -> list[str]:
    templates = [form.begin, *(form.plan or ()), *(form.item or ()), *(form.returned or ()), form.announce]
    names = [
        name
        for text in (*templates, form.thread_open, form.thread_close, form.join, form.end)
        for name in TAG.findall(text)
    ]
    return sorted({name.replace("{number}", number) for name in names for number in "0123"})


# --- well-formed texts ------------------------------------------------------------------------------------------------


class Grown:
    """A random well-formed text and, beside it, its tree."""

    def __init__(self, form: Format, dice: random.Random) -> None:
        self.form, self.dice, self.text = form, dice, ""

    def say(self, text: str) -> str:
        self.text += text
        return text

    def words(self) -> str:
        return self.say("".join(self.dice.choices(WORDS, k=self.dice.randint(0, 3))))

    def space(self) -> str:
        return self.say(self.dice.choice(("", "\n", " ", "\n \n")))

    def body(self, depth: int = 0) -> list[Part]:
        """Grows a text with forks whose parts are known."""
        parts: list[Part] = []
        text = self.words()
        for _ in range(self.dice.randint(0, 2) if depth < 3 and (self.form.nested or not depth) else 0):
            number = self.dice.randint(1, 3)
            goals, begin = self.announcement(number)
            text += begin
            parts += [Piece(text)] if text else []
            parts += [Piece(self.say(self.form.announce))] if self.form.announce else []
            parts += self.joined(number, goals, depth)
            text = (
                self.words()
                + "".join(self.space() + self.say(tag) for tag in TAG.findall(self.form.end))
                + self.words()
            )
        return parts + ([Piece(text)] if text else [])

    def announcement(self, number: int) -> tuple[list[str], str]:
        if self.form.plan is None:
            return [""] * number, ""
        begin, goals = len(self.text), []
        self.say(self.form.begin)
        self.space()
        self.say(self.form.plan[0])
        for i in range(1, number + 1):
            self.space()
            self.say((self.form.item or ("",))[0] + (f" {i}: " if self.form.numbered else ""))
            goals.append(self.words())
            self.say((self.form.item or ("", ""))[1])
        self.space()
        return goals, self.text[begin:]

    def joined(self, number: int, goals: list[str], depth: int) -> list[Part]:
        threads, returned = [], []
        for i in range(1, number + 1):
            opener = self.opener(i)
            body = self.body(depth + 1)
            if self.form.returned:
                returned.append(self.say(self.form.returned[0]) + self.words())
                last = (
                    body.pop()
                    if body and isinstance(body[-1], Piece) and body[-1].text != self.form.announce
                    else Piece("")
                )
                assert isinstance(last, Piece)
                body.append(Piece(last.text + returned[-1]))
            threads.append((goals[i - 1] if self.form.apart else opener, *body, Piece(self.say(self.form.closer(i)))))
        marks = tuple(range(1, number + 1)) if self.form.marks else ()
        begin = len(self.text)
        names = TAG.findall(self.form.join)
        self.space()
        self.say(names[0])
        for text in returned:
            self.space()
            self.say(text + self.form.closer(0))
        for name in names[1:]:
            self.space()
            self.say(name)
        return [Fork(tuple(threads), marks, apart=self.form.apart), self.text[begin:]]

    def opener(self, number: int) -> str:
        if self.form.apart:
            return self.say(self.form.opener(number))
        before = self.space() if number > 1 or self.form.plan or self.form.announce else ""
        if not self.form.numbered:
            return before + self.say(self.form.opener(number).strip())
        return before + self.say(TAG.findall(self.form.thread_open)[0]) + self.space() + self.say(f"{number}:")


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_a_well_formed_text_is_the_tree_it_was_made_of(form: Format, seed: int) -> None:
    grown = Grown(form, random.Random(seed))
    parts = tuple(grown.body())
    parsed = parse(grown.text, form)
    assert parsed.parts == parts
    assert parsed.notes == ()
    assert render(parts, form) == grown.text
    if not form.apart:
        assert flat_text(parts) == grown.text


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_the_text_of_a_fork_is_one(form: Format) -> None:
    text = fork_text(form, ["add", "double"], [" 2+2=4", " 2*2=4"], "both 4", ["4", "4"] if form.apart else ())
    parsed = parse(f"So {text} it is.", form)
    (fork,) = (part for part in parsed.parts if isinstance(part, Fork))
    assert parsed.notes == () and len(fork.threads) == 2
    assert (fork.marks, fork.apart) == ((1, 2) if form.marks else (), form.apart)
    before = parsed.parts[: parsed.parts.index(fork)]
    assert flat_text(before).endswith(form.announce or "So ")
    (join,) = (part for part in parsed.parts if isinstance(part, str))
    assert join == "".join(str(part) for part in form.joining(("4", "4")))
    assert flat_text(parsed.parts[-1:]) == f"both 4{form.end} it is."


def test_a_parent_reads_what_children_return_and_nothing_else() -> None:
    form = FORMATS["apr"]
    text = fork_text(form, ["add", "double"], ["2+2=4 ", "2*2=4 "], " both", ["sum 4", "product 4"])
    parts = parse(text, form).parts
    alone = fork_text(form, ["add", "double"], [], " both", ["sum 4", "product 4"])
    assert flat_text(parts) == alone
    parsed = parse(alone, form)
    assert parsed.parts == tuple(part for part in parts if not isinstance(part, Fork))
    assert parsed.notes == (f"2 threads are announced, and 0 follow (character {alone.index('</Spawn>')})",)


def test_what_makes_no_fork_is_refused() -> None:
    for goals, threads, returned in (([], [], []), (["a"], ["b", "c"], []), (["a"], ["b"], ["c", "d"])):
        for form in (FORMATS["npr"], FORMATS["apr"]):
            with pytest.raises(ArgumentError, match="give one of each to every thread"):
                fork_text(form, goals, threads, "", returned)


# --- tag soup ---------------------------------------------------------------------------------------------------------


def soups(form: Format) -> st.SearchStrategy[str]:
    tags = tags_of(form)
    whole = fork_text(form, ["a", "b"], ["x", "y"], "z", ["r", "s"] if form.apart else ())
    pieces = [*tags, *tags, *WORDS, "\n1:", "1: a", "2: b", form.opener(1), form.opener(2), form.join, whole]
    return st.lists(st.sampled_from(pieces), max_size=40).map("".join)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_tag_soup_is_read_and_nothing_is_lost(form: Format, data: Any) -> None:
    text = data.draw(soups(form))
    parsed = parse(text, form)
    assert render(parsed.parts, form) == text
    assert len(parsed.notes) <= MAX_NOTES + 1
    if not form.apart:
        assert flat_text(parsed.parts) == text
    for part in walk(parsed.parts):
        assert not isinstance(part, Piece) or part.text
        assert not isinstance(part, Fork) or part.threads
    read_announcement(text, form)


def walk(parts: Any) -> Any:
    for part in parts:
        yield part
        if isinstance(part, Fork):
            for thread in part.threads:
                yield from walk(thread[1:])


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_text_that_is_cut_anywhere_is_read(form: Format) -> None:
    """Every fork in the beginning of a text is a fork of the whole text."""
    inner = fork_text(form, ["c"], ["v"], "w", ["t"] if form.apart else ()) if form.nested else ""
    text = "So " + fork_text(form, ["a", "b"], [f"x{inner}u", "y"], "z", ["r", "s"] if form.apart else ()) + " end"
    whole = parse(text, form)
    assert whole.notes == ()
    forks = [part for part in walk(whole.parts) if isinstance(part, Fork)]
    assert len(forks) == (2 if form.nested else 1)
    for cut in range(len(text)):
        parsed = parse(text[:cut], form)
        assert render(parsed.parts, form) == text[:cut]
        seen = [part for part in walk(parsed.parts) if isinstance(part, Fork)]
        # A fork with fewer threads than were announced stands with a note.
        assert all(any(fork.threads == other.threads[: len(fork.threads)] for other in forks) for fork in seen)


PLAN = "<Parallel><Outlines><Outline>1: a</Outline><Outline>2: b</Outline></Outlines>"


@pytest.mark.parametrize(
    ("name", "text", "note", "widths"),
    [
        ("threadweaver", "plain text", None, []),
        ("threadweaver", f"{PLAN}<Thread>1:x</Thread><Thread>2:y</Thread></Parallel>", None, [2]),
        ("threadweaver", f"{PLAN}<Thread>1:x</Thread></Parallel>", "2 threads are announced, and 1 follow", [1]),
        ("threadweaver", f"{PLAN}<Thread>1:x</Thread><Thread>2:y</Parallel>", "thread 2 has no end", []),
        ("threadweaver", f"{PLAN}<Thread>1:x<Thread>2:y</Thread></Parallel>", "thread 1 has no end", []),
        (
            "threadweaver",
            f"{PLAN}<Thread>1:x</Thread><Thread>3:y</Thread></Parallel>",
            "thread 2 has a wrong beginning",
            [],
        ),
        (
            "threadweaver",
            f"{PLAN}<Thread>x</Thread><Thread>y</Thread></Parallel>",
            "thread 1 has a wrong beginning",
            [],
        ),
        ("threadweaver", f"{PLAN}so </Parallel>", "2 threads are announced, and 0 follow", []),
        ("threadweaver", f"{PLAN}<Thread>1:x</Thread><Thread>2:y</Thread>", "the text ends before threads come", [2]),
        ("threadweaver", f"{PLAN}<Thread>1:x</Thread><Thread>2:y</Thread> so", "</Parallel> is missing", [2]),
        ("threadweaver", f"{PLAN}<Thread>1:x</Thread> so <Thread>2:y</Thread></Parallel>", "and 1 follow", [1]),
        ("threadweaver", PLAN.replace("2:", "3:") + "<Thread>1:x</Thread>", "item 2 of the plan is '3: b'", []),
        ("threadweaver", PLAN.replace("2:", "1:") + "<Thread>1:x</Thread>", "item 2 of the plan is '1: b'", []),
        ("threadweaver", PLAN.replace("1:", "") + "<Thread>1:x</Thread>", "item 1 of the plan is 'a'", []),
        ("threadweaver", PLAN.replace("><Outline>2", "> and <Outline>2"), "'and' stands in the plan", []),
        ("threadweaver", PLAN.replace("b</Outline>", "b"), "item 2 of the plan has no </Outline>", []),
        ("threadweaver", "<Parallel><Outlines></Outlines><Thread>1:x</Thread>", "the plan has no items", []),
        ("threadweaver", "<Outlines><Outline>1: a", "<Outlines> has no </Outlines>", []),
        ("threadweaver", PLAN.removeprefix("<Parallel>") + "<Thread>1:x</Thread>", "no <Parallel> stands before", [1]),
        ("threadweaver", "<Thread>1:x</Thread>", "<Thread> belongs to no fork", []),
        ("threadweaver", "so </Parallel></Outline>", "</Outline> belongs to no fork", []),
        ("threadweaver", "<Parallel> well", "<Parallel> belongs to no fork", []),
        ("threadweaver", f"{PLAN}<Thread>1:{PLAN}</Thread>", "deeper than threadweaver allows", [1]),
        (
            "multiverse",
            "<Goal><Outline>1: a</Outline></Goal><Path>1:x</Path><Conclusion>so",
            "</Conclusion> is missing",
            [1],
        ),
        ("npr", "<guideline><plan>1: a</plan></guideline><step>1:x</step><takeaway>so", "</takeaway> is missing", [1]),
        ("parallel-r1", "<Parallel><Path>x</Path><Path>y</Path></Parallel>", "the text ends before threads come", [2]),
        ("parallel-r1", "<Parallel><Path>x</Path></Parallel> so", "<Summary> is missing", [1]),
        ("parallel-r1", "<Parallel> so", "some threads are announced, and 0 follow", []),
        ("parallel-r1", "<Parallel><Path>a<Parallel><Path>b</Path>", "deeper than parallel-r1 allows", []),
        ("parathinker", "<think2>a</think2><think7>b</think7><summary>c</summary>", None, [2]),
        (
            "parathinker",
            "<think2>a</think2><think2>b</think2><summary>c</summary>",
            "thread 2 has a wrong beginning",
            [],
        ),
        ("parathinker", "<think0>a</think0><summary>c", "thread 1 has a wrong beginning", []),
        ("parathinker", "<think1>a</think2><summary>c", "thread 1 has no end", []),
        ("parathinker", "<think>a</think>b", None, []),
        ("apr", "<Spawn><Message>a</Message></Spawn><Child>b<Return>c</Return>", "thread 1 has a wrong beginning", []),
        ("apr", "<Spawn><Message>a</Message></Spawn>\n<Child>\nb\n<Join></Join>", "thread 1 has no end", []),
        (
            "apr",
            "<Spawn><Message>a</Message></Spawn>\n<Child>\nb</Return>\n<Join><Return>c</Join>",
            "</Join> is missing",
            [1],
        ),
    ],
)
def test_what_is_wrong_is_said(name: str, text: str, note: str | None, widths: list[int]) -> None:
    parsed = parse(text, FORMATS[name])
    assert [len(part.threads) for part in walk(parsed.parts) if isinstance(part, Fork)] == widths
    assert any(note in line for line in parsed.notes) if note else not parsed.notes
    assert render(parsed.parts, FORMATS[name]) == text


def test_a_fork_within_a_broken_one_stands() -> None:
    form = FORMATS["multiverse"]
    inner = fork_text(form, ["c", "d"], ["v", "w"], "z")
    text = f"<Parallel><Goal><Outline>1: a</Outline></Goal><Path>1:{inner} and then nothing"
    parsed = parse(text, form)
    assert parsed.notes == ("thread 1 has no end (character 46)",)
    assert [len(part.threads) for part in parsed.parts if isinstance(part, Fork)] == [2]
    assert flat_text(parsed.parts) == text


def test_forks_have_an_end_in_depth() -> None:
    form = FORMATS["multiverse"]
    text = "x"
    for _ in range(MAX_DEPTH):
        text = fork_text(form, ["a"], [text], "y")
    assert parse(text, form).notes == ()
    deeper = parse(fork_text(form, ["a"], [text], "y"), form)
    assert "deeper than multiverse allows" in deeper.notes[0]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_megabyte_of_anything_takes_no_longer_than_its_length(form: Format) -> None:
    """What would be read again for every tag would take hours, and of a fifth minutes; one pass takes a second."""
    length = 1_000_000 if covering.FULL else 200_000
    begin = form.begin + (form.plan or ("",))[0]
    item = "" if form.item is None else f"{form.item[0]}1: a{form.item[1]}"
    units = [begin, begin + item + form.announce + form.opener(1), "\n" * 99 + form.opener(1)]
    for each in filter(None, units):
        text = each * (length // len(each))
        assert render(parse(text, form).parts, form) == text


# --- announcements ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [form for form in FORMATS.values() if form.announce], ids=lambda form: form.name)
def test_a_text_tells_whether_it_announced_threads(form: Format) -> None:
    """What an engine returns that leaves out the stop string."""
    text = "So " + fork_text(form, ["add", "double"], ["x", "y"], "z", ["r", "s"] if form.apart else ())
    stop = stop_of(form)
    begun = text[: text.index(stop)]
    goals = ("add", "double") if form.plan else ()
    assert read_announcement(begun, form) == ThreadPlan(goals)
    assert read_announcement("It is 4.", form) is None
    assert read_announcement(f"{text} So it is 4.", form) is None
    again = f"{text} And {begun}"
    assert read_announcement(again, form) == ThreadPlan(goals)


def test_a_tag_that_closes_nothing_announces_nothing() -> None:
    plan = read_announcement("so </", FORMATS["parallel-r1"])
    assert plan is not None and plan.fault == "</Parallel> closes nothing"


def test_a_plan_is_never_evaluated() -> None:
    goals = read_plan("<Message>__import__('os')</Message><Message>{0.__class__}</Message>", FORMATS["apr"]).goals
    assert goals == ("__import__('os')", "{0.__class__}")
    assert (
        read_plan("<plan>1: {x}</plan>{y!r}", FORMATS["npr"]).fault == "'{y!r}' stands in the plan outside of its items"
    )
