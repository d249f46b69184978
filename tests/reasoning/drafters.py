"""Drafters that guess at random, always wrong, or always right: the text must not depend on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.drafter import Drafter, DraftText, Observation

#: A step over many tokens costs what one over a single token costs, so that every guess is verified.
FREE = {1: 1.0, 256: 1.0}


@dataclass(kw_only=True)
class Guessing:
    """Knobs and drafter in one: guesses what a function of the text says.

    Attributes:
        guess: text, room -> draft.
        layers: whose states it wants.
        masks: how many masks it wants.
    """

    guess: Callable[[list[int], int], DraftTree]
    layers: tuple[int, ...] = ()
    masks: int = 0

    def __post_init__(self) -> None:
        self.seen: list[tuple[list[int], Observation]] = []
        self.forgotten: list[DraftText] = []

    def validate(self) -> None: ...

    def build(self, model: Any, tokenizer: Any) -> Drafter:
        return self

    def propose(self, texts: Sequence[DraftText], rooms: Sequence[int]) -> list[DraftTree]:
        return [self.guess(text.tokens, room) for text, room in zip(texts, rooms, strict=True)]

    def observe(self, text: DraftText, seen: Observation) -> None:
        self.seen.append((list(text.tokens), seen))

    def forget(self, text: DraftText) -> None:
        self.forgotten.append(text)


def at_random(vocabulary: int, size: int = 9) -> Guessing:
    """Trees of any form; what is guessed depends on the text, so that runs can be repeated."""

    def guess(tokens: list[int], room: int) -> DraftTree:
        dice = random.Random(repr(tokens))
        guesses, parents, depths = list[int](), list[int](), [0]
        for _ in range(dice.randrange(size)):
            parent, token = dice.randrange(len(depths)), dice.randrange(vocabulary)
            if depths[parent] < room and (parent, token) not in zip(parents, guesses, strict=True):
                guesses.append(token)
                parents.append(parent)
                depths.append(depths[parent] + 1)
        return DraftTree(tuple(guesses), tuple(parents))

    return Guessing(guess=guess)


def knowing(answers: Sequence[Sequence[int]], wrong: Callable[[int], int] = lambda token: token) -> Guessing:
    """Guesses from texts that are known; ``wrong`` changes each guess."""

    def guess(tokens: list[int], room: int) -> DraftTree:
        for answer in answers:
            if list(answer[: len(tokens)]) == tokens:
                return DraftTree.chain([wrong(token) for token in answer[len(tokens) : len(tokens) + min(room, 6)]])
        return DraftTree()

    return Guessing(guess=guess)


def unruly(answers: Sequence[Sequence[int]], kind: str) -> Guessing:
    """Guesses from texts that are longer than asked for, and heeds neither the room nor what a token or a chance is."""

    def guess(tokens: list[int], room: int) -> DraftTree:
        known = next((answer for answer in answers if list(answer[: len(tokens)]) == tokens), ())
        right = list(known[len(tokens) : len(tokens) + 6])
        if kind == "deep":
            return DraftTree.chain(right)
        if kind == "chances":
            return DraftTree.chain(
                right, [(2.0, float("nan"), -1.0, float("inf"), 0.5, 7.0)[n] for n in range(len(right))]
            )
        # Beside each right guess one that is no token.
        odd = [(-1, 10**9, 10**20)[n % 3] for n in range(len(right))]
        both = [token for pair in zip(right, odd, strict=True) for token in pair]
        return DraftTree(tuple(both), tuple(max(0, 2 * (n // 2) - 1) for n in range(len(both))))

    return Guessing(guess=guess)
