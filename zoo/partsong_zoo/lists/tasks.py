"""Draws prompts of list operations, Latin squares and additions from a seed, and checks answers by reading them.

The language is small: words between spaces, a prompt that ends in `=`, and an answer that follows. `sort : dog ant =`
asks for `ant dog`. Some tasks have many answers (`shuffle : ...`, `remove at any : ...`). Then every valid answer is
equally likely, and `support` lists them all, so that a sampler's distribution can be compared with the truth.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from partsong.errors import ArgumentError
from partsong.knobs import Whole, check_knobs, type_hints
from partsong.seeds import derive
from partsong_zoo.lists.requests import ANIMALS, ListRequest, parse, squares

__all__ = ["FAMILIES", "ListExample", "check", "draw", "examples", "sizes", "support"]

_LISTS = range(3, 9)
#: Sizes by task: items of a list, lines of a square, digits of the larger number, terms of a chain.
_SIZES: dict[str, range] = {
    "copy": _LISTS,
    "reverse": _LISTS,
    "sort": _LISTS,
    "shuffle": _LISTS,
    "insert_at": _LISTS,
    "insert_random": _LISTS,
    "remove_at": _LISTS,
    "remove_random": _LISTS,
    "replace_at": _LISTS,
    "replace_random": _LISTS,
    "latin": range(4, 5),
    "add": range(2, 4),
    "chain": range(3, 5),
}
#: Every task by name.
FAMILIES: tuple[str, ...] = tuple(_SIZES)


@dataclass(frozen=True, slots=True)
class ListExample:
    """Holds a prompt and one valid answer.

    Attributes:
        family: The task's name, one of `FAMILIES`.
        prompt: The prompt, which ends in `=`.
        answer: A valid answer, drawn uniformly among all of them.
    """

    family: str
    prompt: str
    answer: str


def sizes(family: str) -> range:
    """Returns the sizes of a task: items of a list, lines of a square, digits of the larger number, terms of a chain.

    Raises:
        ArgumentError: (a ValueError) If there is no such task.

    >>> sizes("sort")
    range(3, 9)
    """
    if family not in _SIZES:
        raise ArgumentError(f"no list task {family!r}; known: {', '.join(FAMILIES)}")
    return _SIZES[family]


# --- drawing ----------------------------------------------------------------------------------------------------------


def draw(family: str, rng: random.Random, size: int | None = None) -> ListExample:
    """Draws a prompt of a task, and one of its answers with equal chances.

    Args:
        family: One of `FAMILIES`.
        rng: Where the draws come from.
        size: One of `sizes(family)`; None draws it, too.

    Returns:
        The example.

    Raises:
        ArgumentError: (a ValueError) If there is no such task, or it has no such size.

    >>> draw("copy", random.Random(0), 3).prompt
    'copy : mole yak newt ='
    """
    allowed = sizes(family)
    if size is not None and size not in allowed:
        raise ArgumentError(f"{family} has sizes {allowed.start} to {allowed.stop - 1}, not {size!r}")
    prompt = _prompt(family, rng, rng.choice(allowed) if size is None else size)
    return ListExample(family, prompt, _answer(parse(prompt), rng))


def examples(num: Annotated[int, Whole(0)], seed: int = 0, families: Sequence[str] = FAMILIES) -> list[ListExample]:
    """Draws examples, the tasks in turn.

    Args:
        num: How many.
        seed: Draws them; example i depends on (seed, i, its task) alone.
        families: The tasks.

    Returns:
        `num` examples.

    Raises:
        ArgumentError: (a ValueError) If there is no such task or nothing to draw from.

    >>> [example.family for example in examples(3, families=["sort", "copy"])]
    ['sort', 'copy', 'sort']
    """
    check_knobs(type_hints(examples), {"num": num})
    if not families:
        raise ArgumentError("families is empty; give at least one task")
    picked = (families[index % len(families)] for index in range(num))
    return [draw(family, random.Random(derive(seed, "lists", family, i))) for i, family in enumerate(picked)]


def _prompt(family: str, rng: random.Random, size: int) -> str:
    if family == "add":
        digits = rng.sample([size, rng.randint(2, size)], 2)
        return f"add : {' + '.join(_number(rng, count) for count in digits)} ="
    if family == "chain":
        return f"chain : {' + '.join(_number(rng, 2) for _ in range(size))} ="
    items = rng.sample(ANIMALS, size)
    verb, _, place = family.partition("_")
    head = verb
    if place:
        last = size + 1 if verb == "insert" else size
        head += f" at {rng.randint(1, last) if place == 'at' else 'any'}"
    if verb in ("insert", "replace"):
        head += f" with {rng.choice([animal for animal in ANIMALS if animal not in items])}"
    return f"{head} : {' '.join(items)} ="


def _number(rng: random.Random, digits: int) -> str:
    return " ".join(str(rng.randint(10 ** (digits - 1), 10**digits - 1)))


def _answer(request: ListRequest, rng: random.Random) -> str:
    """Draws one of the request's answers uniformly, without listing them."""
    items = list(request.items)
    match request.family:
        case "shuffle":
            words = rng.sample(items, len(items))
        case "latin":
            words = [items[index] for index in rng.choice(squares(len(items)))]
        case "insert_random" | "remove_random" | "replace_random":
            words = _edit(request, rng.choice(_places(request)))
        case _:
            words = _only_answer(request)
    return " ".join(words)


# --- answers ----------------------------------------------------------------------------------------------------------


def support(prompt: str) -> list[str]:
    """Lists every valid answer to a prompt once; each has the same probability.

    A list of 8 has 40320 shuffles, and a 4 x 4 Latin square has 576 fillings. Most tasks have one answer.

    Args:
        prompt: A prompt of the language.

    Returns:
        The answers.

    Raises:
        ArgumentError: (a ValueError) If the prompt is not of the language.

    >>> support("remove at any : ant dog cat =")
    ['dog cat', 'ant cat', 'ant dog']
    """
    request = parse(prompt)
    items = request.items
    match request.family:
        case "shuffle":
            answers: list[list[str]] = [list(order) for order in itertools.permutations(items)]
        case "latin":
            answers = [[items[index] for index in square] for square in squares(len(items))]
        case "insert_random" | "remove_random" | "replace_random":
            answers = [_edit(request, place) for place in _places(request)]
        case _:
            answers = [_only_answer(request)]
    return [" ".join(words) for words in answers]


def check(prompt: str, answer: str) -> bool:
    """Returns whether an answer is valid, which it finds by reading it, not by looking it up.

    Args:
        prompt: A prompt of the language.
        answer: Any text.

    Raises:
        ArgumentError: (a ValueError) If the prompt is not of the language.

    >>> check("shuffle : ant dog cat =", "cat ant dog"), check("add : 7 5 + 2 7 =", "1 0 3")
    (True, False)
    """
    request, words = parse(prompt), answer.split()
    reader = _READERS.get(request.family)
    return reader(request, words) if reader is not None else words == _only_answer(request)


def _places(request: ListRequest) -> range:
    return range(len(request.items) + (request.family == "insert_random"))


def _edit(request: ListRequest, place: int) -> list[str]:
    """Returns the list after the request's edit at `place`, counted from 0."""
    items, verb = list(request.items), request.family.partition("_")[0]
    rest = place if verb == "insert" else place + 1
    return items[:place] + ([] if request.item is None else [request.item]) + items[rest:]


def _only_answer(request: ListRequest) -> list[str]:
    match request.family:
        case "copy":
            return list(request.items)
        case "reverse":
            return list(request.items[::-1])
        case "sort":
            return sorted(request.items)
        case "add":
            return list(str(sum(request.numbers)))
        case "chain":
            totals = list(itertools.accumulate(request.numbers))[1:]
            return " , ".join(" ".join(str(total)) for total in totals).split()
        case _:
            assert request.place is not None, request.family
            return _edit(request, request.place - 1)


def _is_shuffle(request: ListRequest, words: list[str]) -> bool:
    return sorted(words) == sorted(request.items)


def _is_latin(request: ListRequest, words: list[str]) -> bool:
    size, symbols = len(request.items), set(request.items)
    if len(words) != size * size:
        return False
    rows = [set(words[size * line : size * (line + 1)]) for line in range(size)]
    columns = [set(words[line::size]) for line in range(size)]
    return all(line == symbols for line in rows + columns)


def _is_inserted(request: ListRequest, words: list[str]) -> bool:
    return words.count(str(request.item)) == 1 and [w for w in words if w != request.item] == list(request.items)


def _is_removed(request: ListRequest, words: list[str]) -> bool:
    missing = [item for item in request.items if item not in words]
    return len(missing) == 1 and words == [item for item in request.items if item != missing[0]]


def _is_replaced(request: ListRequest, words: list[str]) -> bool:
    changed = [new for old, new in zip(request.items, words, strict=False) if old != new]
    return len(words) == len(request.items) and changed == [request.item]


_READERS: dict[str, Callable[[ListRequest, list[str]], bool]] = {
    "shuffle": _is_shuffle,
    "latin": _is_latin,
    "insert_random": _is_inserted,
    "remove_random": _is_removed,
    "replace_random": _is_replaced,
}
