"""Drafts on a rank of its own for the rank with the model, and prepares drafts for the outcomes of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from partsong.kernels.keyed_draw import TokenDraw, likely_draws
from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.outcome_tree import OutcomePlace, OutcomeTree, outcome_rates
from partsong.reasoning.local.batch_feed import BatchRow
from partsong.reasoning.local.loading import load
from partsong.reasoning.local.model import LocalModel
from partsong.reasoning.local.prefix_node import PrefixNode
from partsong.reasoning.local.speculation.draft_line import (
    DraftHandshake,
    DraftLine,
    DraftOrder,
    DraftOutcome,
    DraftReply,
    HowDrafted,
    axis_of_two,
)
from partsong.reasoning.local.speculation.saguaro import Saguaro
from partsong.reasoning.local.speculation.second_rows import SecondRows
from partsong.reasoning.local.speculation.vocabulary import check_same_tokens

__all__ = ["DraftServer", "serve_drafts"]

#: Tokens of prompts that are read between two looks for an order.
_CHUNK = 256
#: Places that a forward prepares, at most; it reads the guesses before them, too.
_WIDTH = 8


def serve_drafts(drafter: Saguaro, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Drafts for the engine of the mesh's first rank until it is closed; the second rank calls this.

    Args:
        drafter: the same as that of the engine.
        tokenizer: that of a model which was given loaded. Default: the folder's own.

    Raises:
        ArgumentError: there are not two ranks, this is the first one, or there is no such model.
        UnsupportedError: the model has another vocabulary than the engine's.
        DistributedError: the rank with the engine is gone.

    >>> serve_drafts(Saguaro(model="lists-ar"))
    Traceback (most recent call last):
    partsong.errors.ArgumentError: Saguaro drafts on a rank of its own, and has mesh=None; give mesh=Mesh(pipe=2), ...
    """
    drafter.validate()
    line = DraftLine(axis_of_two(drafter.mesh, 1))
    try:
        with torch.inference_mode():
            handshake: DraftHandshake = line.expect().take()
            with line.answering():
                server = _server(drafter, tokenizer, handshake)
                line.answer(DraftReply())
            while not (order := _next(line, server)).ends:
                with line.answering():
                    line.answer(server.answer(order))
    finally:
        line.close()


def _server(drafter: Saguaro, tokenizer: PreTrainedTokenizerBase | None, handshake: DraftHandshake) -> DraftServer:
    loaded = load(drafter.model, tokenizer, None, None if drafter.mesh is None else drafter.mesh.device)
    check_same_tokens(loaded, handshake.vocabulary)
    model = LocalModel(loaded.module, owned=loaded.owned)
    cost = model.num_weights / handshake.num_weights if drafter.cost is None else drafter.cost
    return DraftServer(model, drafter, cost)


def _next(line: DraftLine, server: DraftServer) -> DraftOrder:
    """Prepares drafts until the next order arrives."""
    inbox = line.expect()
    while not inbox.is_there and server.prepare():
        pass
    return inbox.take()


class _Guessed:
    """Holds a text, and what the second model guesses after it.

    Args:
        outcome: the text's first.
        leaf: the last node of its prompt.
        tree: its guesses.

    Attributes:
        row: the second model's row; None until the prompt was read.
    """

    def __init__(self, outcome: DraftOutcome, leaf: PrefixNode, tree: OutcomeTree) -> None:
        self.tokens, self.draw, self.room = list[int](), outcome.draw, outcome.room
        self.leaf, self.tree = leaf, tree
        self.row: BatchRow | None = None
        self.known = False

    def take(self, outcome: DraftOutcome) -> None:
        """Takes the tokens of a step; `known` then says whether a draft after them is prepared."""
        self.tokens += outcome.tokens
        self.draw, self.room = outcome.draw, outcome.room
        self.known = self.tree.take(outcome.tokens)

    def unread(self) -> tuple[int, ...]:
        """Returns the tokens after the row's next one."""
        assert self.row is not None
        return tuple(self.tokens[self.row.position + 1 :])

    def limit(self, context: int) -> int:
        """Returns how many tokens may be guessed, given the context of the second model."""
        return min(self.room, context - len(self.tokens))

    def draw_at(self, place: OutcomePlace) -> TokenDraw:
        """Says how the token after a place is drawn."""
        return replace(self.draw, place=self.draw.place + self.tree.depth_of(place))


class DraftServer:
    """Answers orders of drafts with a second model, and prepares answers between them.

    Args:
        model: the second model.
        knobs: how many guesses are made.
        cost: time of one of its steps relative to the first model's.
    """

    def __init__(self, model: LocalModel, knobs: Saguaro, cost: float) -> None:
        self._model, self._knobs, self._cost = model, knobs, cost
        self._known = SecondRows(model)
        self._num = max(knobs.fan_out, knobs.branches)
        self._rates = outcome_rates(self._num)
        self._texts: dict[int, _Guessed] = {}
        self._asked: list[_Guessed] = []

    def answer(self, order: DraftOrder) -> DraftReply:
        """Returns the drafts that were prepared, and drafts what is missing as far as that is worth the wait."""
        for number in order.forgotten:
            self._forget(number)
        self._asked = [self._take(outcome) for outcome in order.texts]
        grown = self._deepen([text for text in self._asked if text.row is not None])
        drafts = [text.tree.draft(text.limit(self._model.context), self._knobs.branches) for text in self._asked]
        how: tuple[HowDrafted, ...] = tuple(_how(text, text in grown) for text in self._asked)
        return DraftReply(tuple((draft.tokens, draft.parents, draft.known_chances) for draft in drafts), how)

    def prepare(self) -> bool:
        """Computes one forward for what may be asked for next; returns False where nothing is left to prepare."""
        if unread := [text for text in self._texts.values() if text.row is None]:
            self._known.read([text.leaf for text in unread], _CHUNK)
            for text in unread:
                if all(node.complete for node in text.leaf.chain()):
                    text.row = self._known.begin(text.leaf, text.tokens[text.leaf.end])
            return True
        ranked = [
            (chance, text, place)
            for text in self._asked
            for chance, place in text.tree.unknown(text.limit(self._model.context))
        ]
        chosen = dict[_Guessed, list[OutcomePlace]]()
        for _, text, place in sorted(ranked, key=lambda each: -each[0])[: max(_WIDTH, 2 * len(self._asked))]:
            chosen.setdefault(text, []).append(place)
        if chosen:
            self._look(chosen)
        return bool(chosen)

    def _take(self, outcome: DraftOutcome) -> _Guessed:
        if (text := self._texts.get(outcome.number)) is None:
            leaf = self._known.place(outcome.tokens)
            text = self._texts[outcome.number] = _Guessed(outcome, leaf, OutcomeTree(self._rates, self._knobs.length))
        text.take(outcome)
        return text

    def _forget(self, number: int) -> None:
        text = self._texts.pop(number, None)
        if text is None:
            return
        if text.row is None:
            self._known.give_up(text.leaf)
        else:
            self._known.drop(text.row)

    def _deepen(self, texts: Sequence[_Guessed]) -> set[_Guessed]:
        """Adds guesses to the chains of texts while the first model waits; returns texts that got some."""
        grown, steps = set[_Guessed](), 0
        while any(self._is_worth(text, steps) for text in texts):
            short = [text for text in texts if text.tree.depth < self._most(text)]
            self._look({text: [text.tree.end] for text in short})
            grown.update(short)
            steps += 1
        return grown

    def _is_worth(self, text: _Guessed, steps: int) -> bool:
        """Says whether another guess gives more tokens for its time than the step has without it.

        Args:
            text: the text.
            steps: how many steps of this model the first one has waited for.
        """
        if (depth := text.tree.depth) >= self._most(text):
            return False
        rate = self._rates[1]
        expected = sum(rate**number for number in range(depth + 1))
        return rate ** (depth + 1) * (1 + self._cost * steps) > self._cost * expected

    def _most(self, text: _Guessed) -> int:
        return min(self._knobs.length, text.limit(self._model.context))

    def _look(self, chosen: Mapping[_Guessed, Sequence[OutcomePlace]]) -> None:
        """Computes what follows some places, and reads the texts' own new tokens beside."""
        batch, trees, kept = self._known.batch, list[DraftTree](), list[int]()
        texts = {text.row: text for text in self._texts.values() if text.row is not None}
        places, draws, begin = list[OutcomePlace](), list[TokenDraw](), 0
        for row in batch.rows:
            text = texts[row]
            here = chosen.get(text, ())
            tree, nodes = text.tree.feed(text.unread(), here)
            kept += [begin + node for node in nodes]
            places += here
            draws += [text.draw_at(place) for place in here]
            trees.append(tree)
            begin += len(tree) + 1
        logits = batch.forward([], trees).logits[kept]
        for place, guesses in zip(places, likely_draws(logits, draws, self._num), strict=True):
            place.expand(guesses)
        for row in batch.rows:
            if unread := texts[row].unread():
                batch.advance(row, range(len(unread)), unread)


def _how(text: _Guessed, is_grown: bool) -> HowDrafted:
    if text.row is None:
        return "unread"
    if not text.known:
        return "miss"
    return "deepened" if is_grown else "hit"
