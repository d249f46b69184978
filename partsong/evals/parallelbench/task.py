"""Defines the tasks as data, and what a problem holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from partsong.errors import ArgumentError
from partsong.knobs import check_value

__all__ = ["Facts", "Language", "BenchProblem", "Task", "task_of", "tasks"]

#: The language of problems: "chat" is English with a worked example, "lists" the prompts of `partsong_zoo.lists`.
Language = Literal["chat", "lists"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Describes a task of the benchmark.

    Attributes:
        name: of the task.
        family: "waiting line", "arithmetic" or "puzzle".
        sizes: numbers of people in a line, terms of a sum, digits, dominoes or lines of a square; taken in turn.
        answers: "one" if there is one valid answer, "many" if there are several equally likely ones. Then tokens that
            are drawn together must agree, and parallel decoding shows what it costs.
        max_new_tokens: enough for an answer in the usual subword vocabularies.
        lists: the task of `partsong_zoo.lists` that asks the same, or "".
        lists_sizes: sizes of that task.
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
    """Holds the facts of a problem; fields that its task does not use are empty.

    Attributes:
        items: people in line, or the symbols of a square.
        word: the person who is inserted or replaces another.
        place: the place of that, counted from 1; None is any place.
        count: how many times each is repeated, or how many dominoes are laid.
        numbers: terms of a sum, the two sides of an operation, or the first domino.
        sign: of an operation: "+", "-" or "*".
        clues: cells of a square line by line, 0 for an empty one.
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
    """Holds a question and what is needed to judge an answer.

    Attributes:
        task: the name of its task.
        number: which of the seed's problems it is.
        size: one of the task's.
        language: of the question.
        facts: the data of the question; empty in "lists", where the question contains it.
        question: as the model reads it.
        answer: one valid answer, written as the question asks.
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
        """Returns the question as a chat in which the worked example comes first."""
        shown = [] if self.example is None else [("user", self.example[0]), ("assistant", self.example[1])]
        return [{"role": role, "content": text} for role, text in (*shown, ("user", self.question))]

    def prompt(self) -> str:
        """Returns the question as plain text, for models without a chat template."""
        if self.language == "lists":
            return self.question
        shown = "" if self.example is None else f"Question: {self.example[0]}\nAnswer:\n{self.example[1]}\n\n"
        return f"{shown}Question: {self.question}\nAnswer:\n"


_LINE, _LONG = (3, 4, 5, 6), (15,)

#: Operations on a waiting line: the name, the number of answers, and the task of the zoo.
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
    """Returns the tasks of a language.

    Args:
        language: "chat" has all tasks, "lists" those that the `lists` models of the zoo know.

    Raises:
        ArgumentError: there is no such language.

    >>> len(tasks()), len(tasks("lists"))
    (26, 13)
    """
    check_value("language", language, Language)
    return [task for task in _TASKS.values() if language == "chat" or task.lists]


def task_of(name: str, language: Language = "chat") -> Task:
    """Returns a task by name.

    Raises:
        ArgumentError: the language has no task of that name; the message lists those it has.
    """
    known = {task.name: task for task in tasks(language)}
    if name not in known:
        raise ArgumentError(f"no task {name!r} in {language!r}; the tasks are {', '.join(known)}")
    return known[name]
