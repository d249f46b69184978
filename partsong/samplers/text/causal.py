"""Decodes texts of causal models, which always decide the next position: a lean version of `Loop`.

The general loop finds in every step the active positions, who sees whom, their statistics and the rule's choice. With a
causal model all of that is known: a step has one place in every row, every rule that only decides takes it, and the
keys of all before it stay. What remains is one token a row, and a few Python lists. Tokens, events, tallies and noise
are those of the general loop, which the tests hold it to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partsong import seeds
from partsong.errors import UnsupportedError
from partsong.kernels.keyed_draw import TokenDraw
from partsong.kernels.no_token import NOT_A_NUMBER
from partsong.kernels.speculation.costs import costs_by_tokens, usual_costs
from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.drafter import DrafterKnobs, DraftText
from partsong.kernels.speculation.match import Match, follow
from partsong.kernels.speculation.speculator import Speculator
from partsong.kernels.token_head import TokenNoise
from partsong.parallel.ranks.collectives import largest
from partsong.parallel.ranks.later import on_device
from partsong.samplers.text.causal_reader import CausalReader
from partsong.samplers.text.draft_reader import DraftReader
from partsong.samplers.text.events import Event, Step
from partsong.samplers.text.heads import head_ids
from partsong.samplers.text.loop import Ended, report_no_token
from partsong.samplers.text.plainly_causal import why_not_plainly_causal
from partsong.samplers.text.request import DecodeRequest
from partsong.samplers.text.runner import StockTextModel
from partsong.samplers.text.tally import Tally, count

__all__ = ["CausalLoop", "is_plainly_causal"]

#: Marks a step without guesses.
_NOTHING = DraftTree()


def is_plainly_causal(request: DecodeRequest) -> bool:
    """Says whether `CausalLoop` decodes this as the general loop would."""
    return why_not_plainly_causal(request.model, request.rule, request.cache) is None


@dataclass(slots=True, eq=False)
class _Row:
    """Holds a text that is being written.

    Attributes:
        name: which row of the batch it is.
        seed: of its noise.
        tally: what it cost.
        tokens: the prompt and all that follows it so far.
        prompt: tokens of the prompt.
        given: tokens of the prompt and of what was given after it.
        length: tokens it may have in all.
        fault: why it could not go on.
    """

    name: int
    seed: int
    tally: Tally
    tokens: list[int]
    prompt: int
    given: int
    length: int
    fault: str | None = None

    @property
    def step(self) -> int:
        """Counts the tokens that were drawn, which is the number of the next one's step."""
        return len(self.tokens) - self.given


class CausalLoop:
    """Decodes texts of a causal model, a token of every row in a step; iterate over it for the steps.

    With drafters a step verifies guesses, and a row gets the next token and one more for each that was right. The token
    after each guess is drawn as plain decoding draws it, so the text is the same (`kernels.speculation`).

    Args:
        request: what was asked for; `is_plainly_causal` holds.
        tallies: one for each row.
        watched: whether steps carry events and texts.
    """

    def __init__(self, request: DecodeRequest, tallies: list[Tally], *, watched: bool) -> None:
        assert isinstance(request.model, StockTextModel)
        self.model, self.temperature, self.watched = request.model, request.temperature, watched
        self.unbiased, self.stops = request.rule.unbiased, frozenset(request.stop_token_ids)
        self.rows: list[_Row] = []
        for name, (prompt, answer) in enumerate(zip(request.prompts, request.answers, strict=True)):
            text = [*prompt, *(token for token in answer if token is not None)]
            sizes: Any = {"prompt": len(prompt), "given": len(text), "length": len(prompt) + len(answer)}
            self.rows.append(_Row(name, request.row_seeds[name], tallies[name], text, **sizes))
        self.ended: dict[int, Ended] = {}
        self.reader: CausalReader | None = None
        self.speculator = speculator_of(request.model, request.speculate)
        for row in self.rows:
            self.speculator.join(row.name, DraftText(list(row.tokens), self._next(row)))

    def __iter__(self) -> Iterator[Step]:
        number, finished = 0, self._leave()
        try:
            while self.rows:
                step = self._step(number, finished)
                yield step
                finished, number = (), number + 1
        finally:
            self.speculator.close()

    @torch.inference_mode()
    def _step(self, number: int, finished: tuple[int, ...]) -> Step:
        drafts = self._propose()
        kind, tokens = self._read_and_draw(drafts)
        if NOT_A_NUMBER in tokens and isinstance(self.reader, DraftReader) and any(map(len, drafts)):
            # A guess that the model breaks on spoils its text though nothing sees it, since 0 * nan is nan.
            self.reader.take_back()
            drafts = [_NOTHING] * len(self.rows)
            kind, tokens = self._read_and_draw(drafts)
        drawn = iter(tokens)
        events: list[Event] = []
        matches: list[Match] = []
        for place, (row, draft) in enumerate(zip(self.rows, drafts, strict=True)):
            match = follow(draft, [next(drawn) for _ in draft.depths], self.stops)
            begin = len(row.tokens)
            self._take(row, draft, match, kind, self._states_of(place, row, draft, kind))
            if self.watched:
                places = enumerate(row.tokens[begin:], begin)
                events += [Event(kind="commit", row=row.name, position=place, token=token) for place, token in places]
            matches.append(match)
        if kind == "denoise" and isinstance(self.reader, DraftReader):
            self.reader.keep_paths([match.path for match in matches])
        stable: dict[int, int] = {}
        texts: dict[int, list[int | None]] = {}
        for row in self.rows if self.watched else ():
            stable[row.name] = len(row.tokens) - row.prompt
            texts[row.name] = [*row.tokens[row.prompt :], *[None] * (row.length - len(row.tokens))]
        return Step(number=number, events=tuple(events), stable=stable, tokens=texts, finished=finished + self._leave())

    def _read_and_draw(self, drafts: Sequence[DraftTree]) -> tuple[str, list[int]]:
        kind, hidden = self._read(drafts)
        return kind, self._draw(hidden, drafts)

    def _propose(self) -> Sequence[DraftTree]:
        """Guesses what follows each row. The first forward reads the prompts and verifies nothing."""
        drafts: Sequence[DraftTree] = ()
        if self.reader is not None:
            # The token that plain decoding would draw in this step needs no guess.
            rooms = [row.length - len(row.tokens) - 1 for row in self.rows]
            drafts = self.speculator.propose([row.name for row in self.rows], rooms)
        return drafts or [_NOTHING] * len(self.rows)

    def _read(self, drafts: Sequence[DraftTree]) -> tuple[str, Tensor]:
        """Runs the model; returns the kind of forward, and the states `[nodes, C]` that next tokens are read from."""
        rows = self.rows
        if self.reader is None:
            room = max(row.length - len(row.tokens) for row in rows)
            make = DraftReader if self.speculator.drafters else CausalReader
            self.reader = make(self.model, [row.tokens for row in rows], room, layers=self.speculator.layers)
            kind, hidden, fed = "prefill", self.reader.begin(), [len(row.tokens) for row in rows]
        else:
            last, reader = [row.tokens[-1] for row in rows], self.reader
            hidden = reader.verify(last, drafts) if isinstance(reader, DraftReader) else reader.go_on(last)
            kind = "denoise"
            fed = [1 + len(draft) for draft in drafts]
        flops = [self.model.flops(num, len(row.tokens)) for num, row in zip(fed, rows, strict=True)]
        count([row.tally for row in rows], kind, flops)
        return kind, hidden

    def _draw(self, hidden: Tensor, drafts: Sequence[DraftTree]) -> list[int]:
        """Draws the token after every node, with noise that is a function of (seed, step, position)."""
        head, noise = self.model.head, None
        nodes = [(row, depth) for row, draft in zip(self.rows, drafts, strict=True) for depth in draft.depths]
        for row, _ in nodes:
            row.tally.flops += 2.0 * head.weight.numel()
        if self.temperature > 0:
            places = on_device([len(row.tokens) + depth for row, depth in nodes], hidden.device)
            seed = [seeds.derive(row.seed, "step", row.step + depth) for row, depth in nodes]
            noise = TokenNoise(seed=seed, positions=places)
        return head_ids(head, hidden, temperature=self.temperature, noise=noise).tolist()

    def _states_of(self, place: int, row: _Row, draft: DraftTree, kind: str) -> Tensor | None:
        """Returns the states of a row's last token and its guesses, after showing drafters those of its prompt."""
        if not isinstance(self.reader, DraftReader) or not self.speculator.layers:
            return None
        if kind == "denoise":
            return self.reader.states_of(place, 1 + len(draft))
        states = self.reader.states_of(place)
        assert states is not None
        self.speculator.read_prompt(row.name, states[:-1])
        return states[-1:]

    def _take(self, row: _Row, draft: DraftTree, match: Match, kind: str, states: Tensor | None) -> None:
        """Writes tokens, and ends the text where the last is one that ends texts, or is none."""
        tokens = [token for token in match.tokens if token >= 0]
        row.tokens += tokens
        row.tally.tokens[kind] += len(tokens)
        row.tally.drafted += len(draft)
        row.tally.rejected += len(draft) + 1 - len(match.path)
        if not self.unbiased:
            row.tally.certificate = None
        if match.tokens[-1] < 0:
            row.fault = report_no_token(match.tokens[-1], row.name, len(row.tokens), row.tally)
            row.length = len(row.tokens)
            return
        if match.tokens[-1] in self.stops:
            row.length = len(row.tokens)
        self.speculator.observe(row.name, self._next(row), draft, match, states)

    def _next(self, row: _Row) -> TokenDraw:
        """Describes for drafters how the row's next token is drawn."""
        return TokenDraw(self.temperature, 1.0, row.seed, row.step, first=row.given)

    def _leave(self) -> tuple[int, ...]:
        """Removes finished rows."""
        left = [place for place, row in enumerate(self.rows) if len(row.tokens) < row.length]
        if len(left) == len(self.rows):
            return ()
        gone = [row for row in self.rows if len(row.tokens) == row.length]
        for row in gone:
            tokens = row.tokens[row.prompt :]
            stopped = "stop token" if tokens and tokens[-1] in self.stops else "length"
            self.ended[row.name] = Ended(tokens, row.fault or stopped, row.tally)
            self.speculator.leave(row.name)
        self.rows = [self.rows[place] for place in left]
        if self.reader is not None and left:
            self.reader.keep(left)
        return tuple(row.name for row in gone)


def speculator_of(model: StockTextModel, asked: Sequence[DrafterKnobs]) -> Speculator:
    """Builds drafters, with the usual cost of this model's steps over several tokens.

    Raises:
        UnsupportedError: a drafter looks ahead from masks, or reads states of a model that ranks share.
    """
    if not asked:
        return Speculator()
    processor = torch.backends.cpu.get_cpu_capability() if model.device.type == "cpu" else None
    num_weights = model.num_weights
    if model.head.shard is not None:  # ranks with fewer weights than others still guess as many tokens
        num_weights = largest(model.head.shard.axis, num_weights)
    drafters = tuple(knobs.build(model, None) for knobs in asked)
    for knobs, drafter in zip(asked, drafters, strict=True):
        if drafter.masks:
            raise UnsupportedError(
                f"{type(knobs).__name__} looks ahead from masks, which the model does not take here; use it with "
                "LocalEngine, or ngram and jacobi here"
            )
        if drafter.layers and model.head.shard is not None:
            raise UnsupportedError(
                f"{type(knobs).__name__} reads states of the model, which ranks share; run it on one rank, or use "
                "ngram and jacobi"
            )
    costs = costs_by_tokens(usual_costs(num_weights, processor, "plain"))
    return Speculator(drafters, costs, vocabulary=model.vocab_size)
