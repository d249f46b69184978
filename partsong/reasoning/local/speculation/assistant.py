"""Guesses with a second, smaller model that draws with the noise of the first.

Speculative decoding (arXiv 2211.17192, 2302.01318) with a coupling instead of ratios: the draft is the token with the
draft model's largest noisy logit (arXiv 2408.07978), and what is verified is the model's own draw.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from partsong.kernels.keyed_draw import likely_draws
from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.drafter import DraftText, Observation
from partsong.kernels.speculation.guess_chain import GuessChain
from partsong.knobs import Count, Knobs, Number
from partsong.reasoning.local.batch_feed import BatchRow
from partsong.reasoning.local.loading import load
from partsong.reasoning.local.model import LocalModel
from partsong.reasoning.local.prefix_tree import common_length
from partsong.reasoning.local.speculation.second_rows import SecondRows
from partsong.reasoning.local.speculation.vocabulary import check_same_vocabulary

if TYPE_CHECKING:
    from partsong.parallel.layer_parallel import LayerParallel

__all__ = ["Assistant", "AssistantDrafter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Assistant(Knobs):
    """Guesses with a second model of the same vocabulary, as many tokens as have paid off.

    Attributes:
        model: as in `LocalEngine`: a folder, a name, a hub id, or a loaded model.
        length: how many tokens are guessed at most.
        branches: how many guesses are made for each place; only the first is continued.
        cost: time of one of its steps relative to the model's; None takes the ratio of their weights.
        group: how many of its layers attend from the same state, as `partsong.parallel.layer_parallel` does; then the
            keys of a step's tokens are computed anew, exactly, with the next step.
        mesh: the `Mesh` with ranks over which these layers are spread, along its axis ``pipe``. All ranks must make the
            same calls, one after the other. Default: all layers in this process.
    """

    model: str | Path | PreTrainedModel
    length: Count = 6
    branches: Count = 1
    cost: Annotated[float, Number(0)] | None = None
    group: Count = 1
    mesh: Any | None = None

    def build(self, model: LocalModel, tokenizer: Any) -> AssistantDrafter:
        """Loads the second model.

        Raises:
            ArgumentError: there is no such model.
            UnsupportedError: it has another vocabulary, or is on another device.
        """
        loaded = load(self.model, tokenizer if isinstance(self.model, torch.nn.Module) else None, None, model.device)
        check_same_vocabulary(loaded, model, tokenizer)
        own = LocalModel(loaded.module, owned=loaded.owned)
        cost = own.num_weights / model.num_weights if self.cost is None else self.cost
        layers = None
        if self.group > 1 or self.mesh is not None:
            from partsong.parallel.layer_parallel import LayerParallel
            from partsong.parallel.ranks.mesh import Axis

            alone = Axis("alone", (0,), 0)
            layers = LayerParallel(own.module, self.group, alone if self.mesh is None else self.mesh.axis("pipe"))
        return AssistantDrafter(own, length=self.length, branches=self.branches, cost=cost, grouped=layers)


@dataclass(slots=True, eq=False)
class _Writing:
    """Holds the second model's state of a text, and its unfinished draft.

    Attributes:
        row: the second model's row.
        chain: its guesses.
        reached: the chance that the first guesses of all depths are right.
        expected: how many tokens a step is expected to give with them.
        exact: how many of the row's own keys were not computed in groups of layers.
    """

    row: BatchRow
    chain: GuessChain
    reached: float = 1.0
    expected: float = 1.0
    exact: int = 0

    def add(self, guesses: list[int]) -> None:
        """Adds the guesses for the next place."""
        self.chain.add(guesses)
        self.reached *= self.chain.rates[len(self.chain.guesses)]
        self.expected += self.reached

    def clear(self) -> None:
        """Begins a new draft."""
        self.chain.clear()
        self.reached, self.expected = 1.0, 1.0


class AssistantDrafter:
    """Drafts by `Assistant`; see `Drafter`.

    Args:
        model: the second model.
        length: how many tokens are guessed at most.
        branches: how many guesses are made for each place.
        cost: time of one of its steps relative to the model's.
        grouped: the model's layers, if they run in groups.
    """

    layers: tuple[int, ...] = ()
    masks: int = 0

    def __init__(
        self, model: LocalModel, *, length: int, branches: int, cost: float, grouped: LayerParallel | None = None
    ) -> None:
        self._grouped, self._exact = grouped, nullcontext if grouped is None else grouped.exact
        self.model, self._length, self._branches, self._cost = model, length, branches, cost
        self._known = SecondRows(model)
        self._batch = self._known.batch
        self._writings: dict[DraftText, _Writing] = {}

    def propose(self, texts: Sequence[DraftText], rooms: Sequence[int]) -> list[DraftTree]:
        """Guesses with the second model, token after token, as long as another guess is worth its time."""
        for text in texts:
            if (writing := self._writings.get(text)) is not None:
                writing.clear()
        # The last token that is fed must have a position, too.
        most = {
            text: min(room, self._length, self.model.context - len(text.tokens))
            for text, room in zip(texts, rooms, strict=True)
            if text.plain and len(text.tokens) < self.model.context
        }
        self._take_in(most)
        if any(self._is_worth(self._writings[text], room) for text, room in most.items()):
            self._catch_up(most)
        while any(self._is_worth(self._writings[text], room) for text, room in most.items()):
            self._add(most, self._batch.forward([]).logits)
        return [self._writings[text].chain.tree() if text in most else DraftTree() for text in texts]

    def observe(self, text: DraftText, seen: Observation) -> None:
        """Learns how often guesses of each depth are right."""
        if (writing := self._writings.get(text)) is not None:
            writing.chain.learn(seen.match.tokens)

    def forget(self, text: DraftText) -> None:
        """Drops the keys of a text."""
        if (writing := self._writings.pop(text, None)) is not None:
            self._known.drop(writing.row)

    def _is_worth(self, writing: _Writing, room: int) -> bool:
        """Says whether the next guess gives more tokens for its time than the step has without it."""
        depth = len(writing.chain.guesses)
        if depth >= room:
            return False
        gain = writing.reached * writing.chain.rates[depth + 1]
        return gain * (1 + self._cost * depth) > self._cost * writing.expected

    def _take_in(self, texts: Iterable[DraftText]) -> None:
        """Reads the prompts of texts that are new."""
        new = {text: self._known.place(text.tokens) for text in texts if text not in self._writings}
        with self._exact():
            self._known.read(list(new.values()))
        for text, leaf in new.items():
            self._writings[text] = _Writing(self._known.begin(leaf, text.tokens[-1]), GuessChain(self._length))

    def _catch_up(self, most: Mapping[DraftText, int]) -> None:
        """Feeds the texts' new tokens, after removing wrong guesses; makes the first guess."""
        drafts = dict[BatchRow, DraftTree]()
        for text in most:
            row = self._writings[text].row
            begin = row.leaf.end
            known = min(common_length(row.tail, text.tokens, begin), len(text.tokens) - 1 - begin)
            if self._grouped is not None:
                known = min(known, self._writings[text].exact)
            self._writings[text].exact = len(text.tokens) - begin
            del row.tail[known:]
            row.next_token, *rest = text.tokens[begin + known :]
            drafts[row] = DraftTree.chain(rest)
        trees = [drafts.get(row, DraftTree()) for row in self._batch.rows]
        with self._exact():
            logits = self._batch.forward([], trees).logits
        ends = list(itertools.accumulate(len(tree) + 1 for tree in trees))
        for row, tree in drafts.items():
            if len(tree):
                self._batch.advance(row, range(len(tree)), tree.tokens)
        self._add(most, logits[[end - 1 for end in ends]])

    def _add(self, most: Mapping[DraftText, int], logits: Tensor) -> None:
        """Adds a guess to each draft from the logits of every row, and continues after it."""
        places = {row: place for place, row in enumerate(self._batch.rows)}
        writings = [(text, self._writings[text]) for text in most]
        draws = [replace(text.draw, place=text.draw.place + len(writing.chain.guesses)) for text, writing in writings]
        own = logits[[places[writing.row] for _, writing in writings]]
        for (text, writing), guesses in zip(writings, likely_draws(own, draws, self._branches), strict=True):
            if len(writing.chain.guesses) < most[text]:
                writing.add(guesses)
                self._batch.advance(writing.row, (0,), (guesses[0],))
