"""The tasks as rows of data, and what a problem is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from partsong.errors import ArgumentError

__all__ = ["Facts", "Language", "BenchProblem", "Task", "task_of", "tasks"]

#: What problems are written in: "chat", English with a worked example, or "lists", the prompts of `partsong.zoo.lists`.
Language = Literal["chat", "lists"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A task of the benchmark.

    Attributes:
        name: its name.
        family: "waiting line", "arithmetic" or "puzzle".
        sizes: people of a line, terms of a sum, digits, dominoes or lines of a square; problems take them in turn.
        answers: "one" valid answer, or "many" and none of them likelier: where tokens that are drawn together must
            agree, and parallel decoding shows what it costs.
        max_new_tokens: room for an answer in the usual subword vocabularies.
        lists: the task of `partsong.zoo.lists` that asks the same; "" is none.
        lists_sizes: its sizes.
    """

    name: str
    family: Literal["waiting line", "arithmetic", "puzzle"]
    sizes: tuple[int, ...]
    answers: Literal["one", "many"]
    max_new_tokens: int
    lists: str = ""
    lists_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a problem is made of; fields its task has no use for are empty.

    Attributes:
        items: people in line, or the symbols of a square.
        word: who is inserted, or takes another's place.
        place: where, counted from 1; None for anywhere.
        count: how many times each is repeated, or how many dominoes are laid.
        numbers: terms of a sum, the two sides of an operation, or the first domino.
        sign: of an operation: "+", "-" or "*".
        clues: cells of a square line by line, 0 where it is empty.
    """

    items: tuple[str, ...] = ()
    word: str = ""
    place: int | None = None
    count: int = 0
    numbers: tuple[int, ...] = ()
    sign: str = ""
    clues: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchProblem:
    """A question, and what is needed to judge an answer.

    Attributes:
        task: the name of its task.
        number: which of the seed's problems.
        size: one of the task's.
        language: what it is written in.
        facts: what it is made of; empty in "lists", where the question says all.
        question: what is asked.
        answer: one valid answer, written as asked.
        example: another question of the task with a valid answer; None in "lists".
    """

    task: str
    number: int
    size: int
    language: Language
    facts: Facts
    question: str
    answer: str
    example: tuple[str, str] | None = None

    def messages(self) -> list[dict[str, str]]:
        """The question as a chat: the worked example is an exchange that has taken place."""
        shown = [] if self.example is None else [("user", self.example[0]), ("assistant", self.example[1])]
        return [{"role": role, "content": text} for role, text in (*shown, ("user", self.question))]

    def prompt(self) -> str:
        """The question as plain text, for models without a chat template; in "lists" the question itself."""
        if self.language == "lists":
            return self.question
        shown = "" if self.example is None else f"Question: {self.example[0]}\nAnswer:\n{self.example[1]}\n\n"
        return f"{shown}Question: {self.question}\nAnswer:\n"


_LINE, _LONG = (3, 4, 5, 6), (15,)

#: Operations on a waiting line: name, answers, task of the zoo.
_OPERATIONS: tuple[tuple[str, Literal["one", "many"], str], ...] = (
    ("copy", "one", "copy"),
    ("reverse", "one", "reverse"),
    ("sort", "one", "sort"),
    ("shuffle", "many", "shuffle"),
    ("insert_index", "one", "insert_at"),
    ("insert_random", "many", "insert_random"),
    ("remove_index", "one", "remove_at"),
    ("remove_random", "many", "remove_random"),
    ("replace_index", "one", "replace_at"),
    ("replace_random", "many", "replace_random"),
)


def _waiting_line() -> list[Task]:
    short = [
        Task(
            name=name,
            family="waiting line",
            sizes=_LINE,
            answers=answers,
            max_new_tokens=64,
            lists=lists,
            lists_sizes=_LINE,
        )
        for name, answers, lists in _OPERATIONS
    ]
    repeat = Task(name="repeat", family="waiting line", sizes=_LINE, answers="one", max_new_tokens=160)
    long = [
        Task(name=f"{name}_n15", family="waiting line", sizes=_LONG, answers=answers, max_new_tokens=160)
        for name, answers, _ in _OPERATIONS
    ]
    return [*short, repeat, *long]


_OTHERS = (
    Task(
        name="cumsum",
        family="arithmetic",
        sizes=(4, 6, 8),
        answers="one",
        max_new_tokens=64,
        lists="chain",
        lists_sizes=(3, 4),
    ),
    Task(
        name="math_op",
        family="arithmetic",
        sizes=(3, 4, 5, 6),
        answers="one",
        max_new_tokens=32,
        lists="add",
        lists_sizes=(2, 3),
    ),
    Task(name="domino", family="puzzle", sizes=(4, 5, 6), answers="many", max_new_tokens=64),
    Task(
        name="latin_square",
        family="puzzle",
        sizes=(4,),
        answers="many",
        max_new_tokens=64,
        lists="latin",
        lists_sizes=(4,),
    ),
    Task(name="sudoku", family="puzzle", sizes=(4,), answers="one", max_new_tokens=64),
)


_TASKS = {task.name: task for task in (*_waiting_line(), *_OTHERS)}


def tasks(language: Language = "chat") -> list[Task]:
    """Every task there is in a language.

    Args:
        language: "chat" for all, "lists" for those the `lists` models of the zoo can be asked.

    Raises:
        ArgumentError: no such language.

    >>> len(tasks()), len(tasks("lists"))
    (26, 13)
    """
    if language not in ("chat", "lists"):
        raise ArgumentError(f"language={language!r}; use 'chat' or 'lists'")
    return [task for task in _TASKS.values() if language == "chat" or task.lists]


def task_of(name: str, language: Language = "chat") -> Task:
    """A task by name.

    Raises:
        ArgumentError: there is none of that name in the language; the message lists them.
    """
    known: Sequence[Task] = tasks(language)
    for task in known:
        if task.name == name:
            return task
    raise ArgumentError(f"no task {name!r} in {language!r}; the tasks are {', '.join(task.name for task in known)}")
