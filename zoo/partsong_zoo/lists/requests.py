"""Defines the prompts' language and reads prompts into requests."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass

from partsong.errors import ArgumentError, ArgumentTypeError

#: The items of lists, in alphabetical order.
ANIMALS: tuple[str, ...] = (
    *("ant", "bat", "cat", "dog", "eel", "fox", "gnu", "hen", "ibex", "jay", "kea", "lynx", "mole"),
    *("newt", "owl", "pig", "quail", "ram", "seal", "toad", "urial", "vole", "wolf", "xerus", "yak", "zebu"),
)
VERBS: tuple[str, ...] = ("copy", "reverse", "sort", "shuffle", "insert", "remove", "replace", "latin", "add", "chain")
MARKS: tuple[str, ...] = ("at", "any", "with", ":", "=", "+", ",")
#: Every word of prompts and answers.
WORDS: tuple[str, ...] = (*VERBS, *MARKS, *"0123456789", *ANIMALS)
GRAMMAR = (
    "copy|reverse|sort|shuffle|latin : ITEMS = ; insert|replace at PLACE|any with ITEM : ITEMS = ; "
    "remove at PLACE|any : ITEMS = ; add|chain : NUMBER + NUMBER ... = ; ITEMS differ, PLACE counts from 1, "
    "digits stand apart"
)
_HEAD = re.compile(
    r"(?P<verb>copy|reverse|sort|shuffle|latin|add|chain)"
    r"|(?P<edit>insert|replace) at (?P<where>[1-9]|any) with (?P<item>[a-z]+)"
    r"|(?P<cut>remove) at (?P<gap>[1-9]|any)"
)
_SUM = re.compile(r"[1-9]( [0-9]){0,2}( \+ [1-9]( [0-9]){0,2})+")
_MOST_ITEMS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ListRequest:
    """Describes what a prompt asks.

    Attributes:
        family: The task's name.
        items: The list, or a Latin square's symbols.
        numbers: The numbers to add.
        item: The item that is inserted or replaces another one.
        place: Its place, counted from 1; None for a random place.
    """

    family: str
    items: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    item: str | None = None
    place: int | None = None


def parse(prompt: str) -> ListRequest:
    """Reads a prompt.

    Args:
        prompt: A sentence of `GRAMMAR`; spaces count only as separators.

    Returns:
        The request.

    Raises:
        ArgumentTypeError: (a TypeError) If the prompt is not text.
        ArgumentError: (a ValueError) If it is not of the grammar, with what is wrong.

    >>> parse("remove at 2 : ant dog cat =").place
    2
    """
    if not isinstance(prompt, str):
        raise ArgumentTypeError(f"a prompt is text, found {prompt!r} ({type(prompt).__name__})")
    words = prompt.split()
    head, colon, rest = " ".join(words).partition(" : ")
    match = _HEAD.fullmatch(head)
    if match is None or not colon or not rest.endswith(" ="):
        raise ArgumentError(f"cannot read {prompt!r}; the grammar is: {GRAMMAR}")
    body = rest.removesuffix(" =")
    if match["verb"] in ("add", "chain"):
        return _sum(prompt, match["verb"], body)
    place, item = match["where"] or match["gap"], match["item"]
    request = ListRequest(
        family=match["verb"] or f"{match['edit'] or match['cut']}_{'random' if place == 'any' else 'at'}",
        items=tuple(body.split()),
        item=item,
        place=None if place in (None, "any") else int(place),
    )
    _check_list(prompt, request)
    return request


def _sum(prompt: str, verb: str, body: str) -> ListRequest:
    if _SUM.fullmatch(body) is None:
        raise ArgumentError(
            f"cannot read the numbers of {prompt!r}: each has 1 to 3 digits, spaced out, without a leading 0"
        )
    numbers = tuple(int(part.replace(" ", "")) for part in body.split(" + "))
    if verb == "add" and len(numbers) != 2:
        raise ArgumentError(f"add takes two numbers, {prompt!r} has {len(numbers)}; use chain")
    return ListRequest(family=verb, numbers=numbers)


def _check_list(prompt: str, request: ListRequest) -> None:
    """Refuses lists with unknown, repeated, too many or too few items, and edits that do not fit the list."""
    items, named = request.items, (*request.items, *([] if request.item is None else [request.item]))
    if unknown := [word for word in named if word not in ANIMALS]:
        raise ArgumentError(f"{prompt!r} has items that are not in the vocabulary: {', '.join(unknown)}")
    if len(set(named)) < len(named):
        raise ArgumentError(f"{prompt!r} names an item twice; items differ")
    if request.family == "latin" and len(items) != 4:
        raise ArgumentError(f"a Latin square here has 4 symbols, {prompt!r} has {len(items)}")
    if len(items) > _MOST_ITEMS:
        raise ArgumentError(f"lists have at most {_MOST_ITEMS} items, {prompt!r} has {len(items)}")
    last = len(items) + (request.family == "insert_at")
    if request.place is not None and request.place > last:
        raise ArgumentError(f"{prompt!r} names place {request.place}, the last one is {last}")


@functools.lru_cache(maxsize=4)
def squares(size: int) -> list[tuple[int, ...]]:
    """Lists every Latin square of `size` symbols 0, 1, ..., row by row; there are 576 of size 4."""

    def fill(rows: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
        if len(rows) == size:
            return [tuple(itertools.chain(*rows))]
        orders = itertools.permutations(range(size))
        fits = [o for o in orders if not any(a == b for row in rows for a, b in zip(row, o, strict=True))]
        return [square for order in fits for square in fill((*rows, order))]

    return fill(())
