"""Decodes with models that were trained for any order: guesses several tokens at once, and checks all of them together.

Such a model gives the next token of an order from the tokens before it in that order, and one forward may answer for
many places, each of which sees its own prefix of the order. So a forward guesses the next tokens from what is decided,
and another asks for each of them as if those before it had been right. As long as they were, the answers are those of
one token at a time. A plain masked model sees all places of a state at once, so that each state needs a row of its own:
that is `decode` with `verify`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from torch import Tensor

from partsong import seeds
from partsong.errors import ArgumentError
from partsong.kernels.place_draw import draw_places
from partsong.knobs import Count, Number, Whole, check_knobs, type_hints

__all__ = ["AnyOrderModel", "AnyOrderText", "decode_any_order"]


class AnyOrderModel(Protocol):
    """Gives logits of places of a text, each from a prefix of the order in which tokens are decided."""

    def __call__(self, tokens: Tensor, rank: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        """Returns logits `[B, Q, V]` of the tokens at some places.

        The answer for a place depends only on that place and on the tokens of rank below `seen`, which in turn see only
        ranks up to their own (two streams, or query tokens).

        Args:
            tokens: int64 `[B, L]`.
            rank: int64 `[B, L]`, when each of them is decided, from 0.
            places: int64 `[B, Q]`, positions asked for.
            seen: int64 `[B, Q]`, how many tokens of the order each of them sees.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AnyOrderText:
    """Holds decoded texts and what they cost.

    Attributes:
        tokens: int64 `[B, L]`.
        forwards: int64 `[B]`, forwards each text took part in.
        drafted: int64 `[B]`, guesses that were asked for again.
        rejected: int64 `[B]`, guesses that were wrong or came after a wrong one.
    """

    tokens: Tensor
    forwards: Tensor
    drafted: Tensor
    rejected: Tensor


@torch.no_grad()
def decode_any_order(
    model: AnyOrderModel,
    tokens: Tensor,
    order: Tensor,
    *,
    given: Annotated[int, Whole(0)] = 0,
    drafts: Count = 8,
    temperature: Annotated[float, Number(0.0)] = 1.0,
    seed: int = 0,
) -> AnyOrderText:
    """Decides the tokens of texts in a given order, several with two forwards.

    Exact: the texts are those of ``drafts=1``, one token a forward, token for token. The noise is a function of (seed,
    row, position), and a guess and its check draw with the same. There are never more forwards than tokens: the first
    guess sees what its check would see, so it is right, and the check of the next one yields a token in any case.

    Args:
        model: trained for any order.
        tokens: int64 `[B, L]`; what stands at open positions does not matter.
        order: int64 `[B, L]`, the positions of each row in the order in which they are decided.
        given: how many of the first are given.
        drafts: how many tokens to guess at once.
        temperature: of the draws; 0 takes the likeliest tokens.
        seed: of the noise.

    Raises:
        ArgumentError: shapes that do not fit, an order that is not a permutation, or a number out of range.
        NotANumberError: the model's logits are NaN or infinite, or forbid every token; row and position are named.

    Source: any-subset speculative decoding, arXiv 2504.20456. There a guess is accepted by the ratio of its
    probabilities; here it has to be the token that the check draws with the same noise, so the text itself is kept and
    not only its distribution.

    >>> even = lambda tokens, rank, places, seen: torch.zeros(*places.shape, 3)
    >>> decode_any_order(even, torch.zeros(1, 4, dtype=torch.int64), torch.tensor([[2, 0, 3, 1]])).forwards.tolist()
    [2]
    """
    numbers = {"given": given, "drafts": drafts, "temperature": temperature}
    check_knobs(type_hints(decode_any_order), numbers, owner="decode_any_order: ")
    _check(tokens, order, given)
    rounds = _Rounds(model, tokens.clone(), order, given, temperature, seed)
    while (rounds.at < order.shape[1]).any():
        rounds.go(drafts)
    return AnyOrderText(
        tokens=rounds.tokens, forwards=rounds.forwards, drafted=rounds.drafted, rejected=rounds.rejected
    )


def _check(tokens: Tensor, order: Tensor, given: int) -> None:
    if tokens.dim() != 2 or tokens.shape != order.shape or {tokens.dtype, order.dtype} != {torch.int64}:
        raise ArgumentError(
            f"decode_any_order needs tokens and order int64 [B, L]; found {tokens.dtype} {tuple(tokens.shape)} and "
            f"{order.dtype} {tuple(order.shape)}"
        )
    if not torch.equal(order.sort(1).values, torch.arange(order.shape[1], device=order.device).expand_as(order)):
        raise ArgumentError("an order names every position of its row once")
    if given > order.shape[1]:
        raise ArgumentError(f"given={given}, but a text has {order.shape[1]} tokens")


class _Rounds:
    """Decides some tokens of every row in a round, by a guess and its check."""

    def __init__(
        self, model: AnyOrderModel, tokens: Tensor, order: Tensor, given: int, temperature: float, seed: int
    ) -> None:
        self.model, self.tokens, self.order, self.temperature = model, tokens, order, temperature
        self.rank = order.argsort(1)
        self.at = torch.full_like(order[:, 0], given)
        keys = [seeds.derive(seed, "row", row) for row in range(len(tokens))]
        # The bits of a 64-bit word, as int64.
        signed = [key - (1 << 64) if key >> 63 else key for key in keys]
        self.keys = torch.tensor(signed, dtype=torch.int64, device=tokens.device)
        self.forwards, self.drafted, self.rejected = (torch.zeros_like(self.at) for _ in range(3))

    def go(self, drafts: int) -> None:
        """Advances every unfinished row by at least one token."""
        length, step = self.order.shape[1], torch.arange(drafts, device=self.order.device)
        left = length - self.at
        ranks = self.at[:, None] + step
        self._write(ranks, self._draw(ranks, self.at[:, None].expand_as(ranks), left > 0), ranks < length)
        # The first guess has seen everything it should; the others should have seen guesses as well.
        ranks = ranks + 1
        checked = (ranks < length) & (drafts > 1)
        asks = checked.any(1)
        if not asks.any():
            self.at = self.at + (left > 0).long()
            return
        guesses, drawn = self._read(ranks), self._draw(ranks, ranks, asks)
        is_guess = checked & (step < drafts - 1)
        # The first token that differs is correct, and so is the one after the last guess.
        right = _leading(is_guess & (drawn == guesses))
        self._write(ranks, drawn, checked & (step <= right[:, None]))
        self.at = torch.minimum(
            self.at + torch.where(asks, right + 2, (left > 0).long()), torch.full_like(left, length)
        )
        self.drafted += is_guess.sum(1)
        self.rejected += is_guess.sum(1) - right

    def _places(self, ranks: Tensor) -> Tensor:
        return self.order.gather(1, ranks.clamp(max=self.order.shape[1] - 1))

    def _read(self, ranks: Tensor) -> Tensor:
        return self.tokens.gather(1, self._places(ranks))

    def _write(self, ranks: Tensor, tokens: Tensor, mask: Tensor) -> None:
        rows = torch.arange(len(ranks), device=ranks.device)[:, None].expand_as(ranks)
        self.tokens[rows[mask], self._places(ranks)[mask]] = tokens[mask]

    def _draw(self, ranks: Tensor, seen: Tensor, rows: Tensor) -> Tensor:
        """Draws the tokens of some ranks `[B, K]` with one forward, which counts for some rows, bool `[B]`."""
        places = self._places(ranks)
        logits = self.model(self.tokens, self.rank, places, seen.clamp(max=self.order.shape[1]))
        self.forwards += rows
        counts = rows[:, None] & (ranks < self.order.shape[1])
        return draw_places(logits, places, self.keys, self.temperature, counts)


def _leading(right: Tensor) -> Tensor:
    """Counts in each row the true ones before the first that is false."""
    return right.long().cumprod(1).sum(1)
