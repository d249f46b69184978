"""Keeps what a drafter would guess after each likely outcome of a step that is being verified.

The outcome of a step is how many guesses hold and the model's own token after them. A drafter that draws with the
model's noise can guess that token, too, so it prepares a draft for each likely outcome while the step still runs
(speculative speculative decoding, "Saguaro", arXiv 2603.03251). Places are prepared in the order of their chances.
These fall by a constant factor from guess to guess, and so does how many tokens are prepared at a place: the geometric
fan-out of that paper follows from rates that are learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.rates import Rates

__all__ = ["OutcomePlace", "OutcomeTree", "outcome_rates"]

#: How likely the first guess at a place is assumed to be right, and each further one if those before it are wrong.
_FIRST, _FURTHER = 0.6, 0.3
#: What is less likely than this is not prepared.
_LEAST = 0.02


def outcome_rates(fan_out: int) -> Rates:
    """Returns how often the first, second, ... guess at a place is right if those before it are wrong."""
    return Rates({rank: _FIRST if rank == 1 else _FURTHER for rank in range(1, fan_out + 1)})


@dataclass(slots=True, eq=False)
class OutcomePlace:
    """Describes a token that may follow, after the path of tokens before it.

    Attributes:
        token: the token.
        place: how many tokens of the text lie before it, counted from the tree's first root.
        parent: the one before; None at the root.
        children: guesses at the next token, the likeliest first; empty until they are known.
    """

    token: int
    place: int = 0
    parent: OutcomePlace | None = None
    children: list[OutcomePlace] = field(default_factory=list)

    def expand(self, guesses: Sequence[int]) -> None:
        """Takes the guesses at what follows, the likeliest first."""
        self.children = [OutcomePlace(token, self.place + 1, self) for token in guesses]


class OutcomeTree:
    """Holds the guesses that are known after the last token of a text.

    Args:
        rates: how often guesses hold, from `outcome_rates`; texts may share it.
        length: how many tokens a draft has at most.

    >>> tree = OutcomeTree(outcome_rates(2), length=2)
    >>> tree.take([5]), tree.end.expand([7, 9])  # nothing is known of what follows token 5
    (False, None)
    >>> tree.end.expand([8, 6])
    >>> tree.draft(2).tokens
    (7, 8)
    >>> [(tree.path(place), round(chance, 2)) for chance, place in tree.unknown(limit=9)][:2]
    [([7, 8], 0.36), ([9], 0.12)]
    >>> tree.unknown(limit=9)[1][1].expand([3, 4])
    >>> tree.take([9]), tree.draft(2).tokens  # what follows this outcome was prepared
    (True, (3,))
    """

    def __init__(self, rates: Rates, length: int) -> None:
        self.rates, self._length = rates, length
        self._root = OutcomePlace(-1)
        self._drafted = 0

    def take(self, tokens: Sequence[int]) -> bool:
        """Goes on to the last of a step's tokens, and learns which guesses held.

        Returns:
            Whether guesses at what follows are known already.
        """
        place: OutcomePlace | None = self._root
        for token in tokens:
            place = self._follow(place, token) if place is not None else None
        if place is None:
            place = OutcomePlace(tokens[-1], self._root.place + len(tokens))
        place.parent, self._root, self._drafted = None, place, 0
        return bool(place.children)

    def _follow(self, place: OutcomePlace, token: int) -> OutcomePlace | None:
        for rank, child in enumerate(place.children, 1):
            self.rates.see(rank, child.token == token)
            if child.token == token:
                return child
        return None

    @property
    def depth(self) -> int:
        """Counts the guesses of the chain that follows the last token."""
        return self.end.place - self._root.place

    @property
    def end(self) -> OutcomePlace:
        """Returns the last guess of that chain, after which nothing is known."""
        place = self._root
        while place.children:
            place = place.children[0]
        return place

    def depth_of(self, place: OutcomePlace) -> int:
        """Returns how many tokens after the last one a place lies."""
        return place.place - self._root.place

    def path(self, place: OutcomePlace) -> list[int]:
        """Lists the tokens after the last one, up to and with a place's."""
        tokens = list[int]()
        while place.parent is not None:
            tokens.append(place.token)
            place = place.parent
        return tokens[::-1]

    def draft(self, room: int, branches: int = 1) -> DraftTree:
        """Returns the draft that is verified next, at most `room` tokens deep.

        Args:
            room: how many tokens the text has room for.
            branches: how many guesses each place has; only the first is continued.
        """
        tokens, parents, chances, place, last = list[int](), list[int](), list[float](), self._root, 0
        depth = min(room, self._length)
        while place.children and self.depth_of(place) < depth:
            here = place.children[:branches]
            tokens += [child.token for child in here]
            parents += [last] * len(here)
            chances += list(self._chances(len(here)))
            place, last = here[0], len(tokens) - len(here) + 1
        self._drafted = self.depth_of(place)
        return DraftTree(tuple(tokens), tuple(parents), tuple(chances))

    def unknown(self, limit: int) -> list[tuple[float, OutcomePlace]]:
        """Lists places after which nothing is known, with the chance that the text gets there, the likeliest first.

        A step ends where a guess of its draft is wrong, or one token behind it. So a path leaves the draft once, at any
        guess or behind the last, and goes on with first guesses as far as the draft after that outcome.

        Args:
            limit: places as many tokens after the last one, or more, are left out.
        """
        places = list[tuple[float, OutcomePlace]]()
        # A place, its chance, and how many tokens after the last one the step ends that leads there.
        stack = [(self._root, 1.0, self._drafted + 1, False)]
        while stack:
            place, chance, end, has_left = stack.pop()
            depth = self.depth_of(place)
            if chance < _LEAST or depth >= min(limit, end + self._length):
                continue
            if not place.children:
                places.append((chance, place))
                continue
            several = place.children[:1] if has_left or depth > self._drafted else place.children
            for number, (child, share) in enumerate(zip(several, self._chances(len(several)), strict=True)):
                leaves = number > 0
                stack.append((child, chance * share, depth + 1 if leaves else end, has_left or leaves))
        return sorted(places, key=lambda each: -each[0])

    def feed(self, before: Sequence[int], places: Sequence[OutcomePlace]) -> tuple[DraftTree, list[int]]:
        """Lays out what a forward reads to learn what follows some places.

        Args:
            before: tokens up to the text's last one that were not read yet.
            places: the places.

        Returns:
            The tree of those tokens and of the paths to the places, and the node of each place.
        """
        tokens, parents = list(before), list(range(len(before)))
        nodes = {id(self._root): len(before)}
        for place in places:
            path = list[OutcomePlace]()
            while id(place) not in nodes:
                path.append(place)
                assert place.parent is not None
                place = place.parent
            for each in reversed(path):
                assert each.parent is not None
                parents.append(nodes[id(each.parent)])
                tokens.append(each.token)
                nodes[id(each)] = len(tokens)
        return DraftTree(tuple(tokens), tuple(parents)), [nodes[id(place)] for place in places]

    def _chances(self, num: int) -> Iterator[float]:
        """Yields the chances of the guesses at a place."""
        left = 1.0
        for rank in range(1, num + 1):
            yield left * self.rates[rank]
            left *= 1.0 - self.rates[rank]
