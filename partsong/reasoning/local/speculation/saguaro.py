"""Guesses with a second model on a rank of its own, which prepares drafts while the first one verifies.

Speculative speculative decoding (arXiv 2603.03251, "Saguaro"): while a step is being verified, the rank that drafts
guesses its outcome, and prepares the next draft for each likely one. The noise is a function of seed and place, so it
guesses the model's own token after the last right guess with the noise that the model will use.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch.distributed as dist
from transformers import PreTrainedModel

from partsong.errors import DistributedError, PartsongError, UnsupportedError
from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.drafter import DraftText, Observation
from partsong.knobs import Count, Knobs, Number
from partsong.parallel.text.plan import TextPlan
from partsong.reasoning.local.loading import load_tokenizer
from partsong.reasoning.local.speculation.draft_line import (
    DraftHandshake,
    DraftLine,
    DraftOrder,
    DraftOutcome,
    DraftReply,
    axis_of_two,
    refusal_of,
)

__all__ = ["DraftCounts", "Saguaro", "SaguaroDrafter"]


class DraftedModel(Protocol):
    """Is the model that is drafted for, as engines and decoders hold it."""

    #: What shares it out over ranks.
    plan: TextPlan | None

    @property
    def num_weights(self) -> int:
        """Counts its weights."""
        ...

    @property
    def source(self) -> str:
        """Returns the folder it was loaded from; empty if it was not."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Saguaro(Knobs):
    """Guesses with a second model of the same vocabulary on a rank of its own, ahead of the outcome of each step.

    The first rank of the mesh makes an engine with it, or gives it to `decode` or `SpeculativeDecoder`, and the second
    calls `serve_drafts` with the same: once for each engine, and for each call of the others.

    Attributes:
        model: as in `LocalEngine`: a folder, a name, a hub id, or a loaded model. Only the second rank loads it.
        length: how many tokens are guessed at most.
        branches: how many guesses are verified for each place; only the first is continued.
        fan_out: for how many tokens at each place drafts are prepared, at most; 1 prepares for right guesses alone.
        cost: time of one of its steps relative to the model's; None takes the ratio of their weights. It decides how
            many guesses the model waits for; those that are prepared cost nothing.
        mesh: the `Mesh` of two ranks along its axis ``pipe``.
    """

    model: str | Path | PreTrainedModel
    length: Count = 6
    branches: Count = 1
    fan_out: Count = 3
    cost: Annotated[float, Number(0)] | None = None
    mesh: Any | None = None

    def build(self, model: DraftedModel, tokenizer: Any) -> SaguaroDrafter:
        """Finds the rank that drafts, and waits until it has loaded the second model.

        Raises:
            ArgumentError: there are not two ranks, this is the second one, or there is no such second model.
            UnsupportedError: the second model has another vocabulary, ranks share the model, or nothing says what its
                tokens are.
            DistributedError: the rank that drafts is gone.
        """
        axis = axis_of_two(self.mesh, 0)
        if model.plan is not None:
            raise UnsupportedError(
                "Saguaro drafts for a model on one rank, and ranks share this one; use ngram or jacobi"
            )
        if tokenizer is None and not model.source:
            raise UnsupportedError(
                "Saguaro compares what two models mean by a token, and this one was loaded from no folder, where its "
                "tokenizer would be; use ngram or jacobi"
            )
        vocabulary = (load_tokenizer(model.source) if tokenizer is None else tokenizer).get_vocab()
        line = DraftLine(axis)
        line.order(DraftHandshake(vocabulary, model.num_weights))
        if (error := line.reply().error) is not None:
            if isinstance(error, PartsongError):
                raise error
            raise DistributedError(f"rank 1, which drafts, could not begin: {refusal_of(error)}")
        return SaguaroDrafter(line)


@dataclass(slots=True)
class DraftCounts:
    """Counts how drafts came about, a draft of every text in every step.

    Attributes:
        hits: drafts that were prepared, and answered at once.
        deepened: prepared ones that were short, to which guesses were added while the model waited.
        misses: drafts for an outcome that was not prepared.
        unread: steps without a draft, since the second model was still reading the prompt.
        seconds: time that the model waited for drafts.
    """

    hits: int = 0
    deepened: int = 0
    misses: int = 0
    unread: int = 0
    seconds: float = 0.0

    def see(self, reply: DraftReply, seconds: float) -> None:
        """Counts a reply, and the time that it took."""
        self.seconds += seconds
        self.hits += reply.how.count("hit")
        self.deepened += reply.how.count("deepened")
        self.misses += reply.how.count("miss")
        self.unread += reply.how.count("unread")


class SaguaroDrafter:
    """Asks the rank that drafts; see `Drafter`.

    A step costs a message to that rank, with the outcome of the previous step, and one back.

    Args:
        line: to that rank.

    Attributes:
        counts: how drafts came about.
    """

    layers: tuple[int, ...] = ()
    masks: int = 0

    def __init__(self, line: DraftLine) -> None:
        self._line: DraftLine | None = line
        self.counts = DraftCounts()
        self._numbers: dict[DraftText, int] = {}
        self._sent: dict[DraftText, int] = {}
        self._forgotten: list[int] = []
        self._begun = 0
        self._lost = "it was closed"

    def propose(self, texts: Sequence[DraftText], rooms: Sequence[int]) -> list[DraftTree]:
        """Says how the texts went on, and returns what was prepared for that, or is drafted now.

        Raises:
            DistributedError: the rank that drafts is gone, or failed.
        """
        pairs = list(zip(texts, rooms, strict=True))
        outcomes = [self._outcome(text, room) for text, room in pairs if text.plain and room > 0]
        if not outcomes:
            return [DraftTree()] * len(texts)
        trees = iter(self._ask(DraftOrder(tuple(outcomes), tuple(self._forgotten))).trees())
        self._forgotten.clear()
        return [next(trees) if text.plain and room > 0 else DraftTree() for text, room in pairs]

    def observe(self, text: DraftText, seen: Observation) -> None:
        """Does nothing: the next order carries the new tokens."""

    def forget(self, text: DraftText) -> None:
        """Lets the other rank drop a text, with the next order."""
        self._sent.pop(text, None)
        if (number := self._numbers.pop(text, None)) is not None:
            self._forgotten.append(number)

    def close(self) -> None:
        """Ends the work of the rank that drafts."""
        line, self._line = self._line, None
        # Where the ranks have parted already, that rank is notified by their end.
        if line is not None and dist.is_initialized():
            with contextlib.suppress(DistributedError):
                line.order(DraftOrder(ends=True))

    def _outcome(self, text: DraftText, room: int) -> DraftOutcome:
        if text not in self._numbers:
            self._numbers[text], self._begun = self._begun, self._begun + 1
        begin = self._sent.get(text, 0)
        self._sent[text] = len(text.tokens)
        return DraftOutcome(self._numbers[text], tuple(text.tokens[begin:]), text.draw, room)

    def _ask(self, order: DraftOrder) -> DraftReply:
        if self._line is None:
            raise DistributedError(f"rank 1 drafts no more: {self._lost}; make a new engine")
        begin = time.perf_counter()
        try:
            self._line.order(order)
            reply = self._line.reply()
            if reply.error is not None:
                raise DistributedError(f"rank 1, which drafts, failed: {refusal_of(reply.error)}")
        except DistributedError as error:
            self._line, self._lost = None, refusal_of(error)
            raise
        self.counts.see(reply, time.perf_counter() - begin)
        return reply
