"""Decodes texts of causal models, whose next place is always the one after the last: the lean twin of `Loop`.

The general loop asks in every step which positions are at work, who sees whom, what is known of each and what the rule
makes of it. With a causal model all of that is known: a step has one place in every row, every rule that only decides
takes it, and the keys of all before it stay. What remains is one token a row, and a few Python lists. Tokens, events,
tallies and noise are those of the general loop, which the tests hold it to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from partsong import seeds
from partsong.kernels.token_head import TokenNoise, token_ids
from partsong.samplers.text.caches import DualCache, PrefixCache
from partsong.samplers.text.causal_reader import CausalReader
from partsong.samplers.text.events import Event, Step
from partsong.samplers.text.loop import Ended
from partsong.samplers.text.request import DecodeRequest
from partsong.samplers.text.rules import Entropy, EntropyBound, Factor, Hierarchy, KLStable, LLaDA, Quota, Threshold
from partsong.samplers.text.runner import StockTextModel
from partsong.samplers.text.tally import Tally, count

__all__ = ["CausalLoop", "is_plainly_causal"]

#: Rules that take the only position there is.
_DECIDING = (Quota, LLaDA, Threshold, Factor, Entropy, EntropyBound, KLStable, Hierarchy)
#: Caches that keep the keys of all decided tokens; without refreshes they are the same for a causal model.
_KEEPING = (PrefixCache, DualCache)


def is_plainly_causal(request: DecodeRequest) -> bool:
    """Says whether `CausalLoop` decodes this as the general loop would."""
    adapter, cache = request.model.adapter, request.cache
    causal = adapter.noise == "none" and adapter.attention == "causal" and adapter.shifted and not adapter.transform
    known = type(request.model) is StockTextModel and type(request.rule) in _DECIDING
    return causal and known and type(cache) in _KEEPING and cache.refresh_every is None


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
    """

    name: int
    seed: int
    tally: Tally
    tokens: list[int]
    prompt: int
    given: int
    length: int

    @property
    def step(self) -> int:
        """Counts the tokens that were drawn, which is the number of the next one's step."""
        return len(self.tokens) - self.given


class CausalLoop:
    """Decodes texts of a causal model, a token of every row in a step; iterate over it for the steps.

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
            sizes = {"prompt": len(prompt), "given": len(text), "length": len(prompt) + len(answer)}
            self.rows.append(_Row(name, request.row_seeds[name], tallies[name], text, **sizes))
        self.ended: dict[int, Ended] = {}
        self.reader: CausalReader | None = None

    def __iter__(self) -> Iterator[Step]:
        number, finished = 0, self._leave()
        while self.rows:
            step = self._step(number, finished)
            yield step
            finished, number = (), number + 1

    @torch.inference_mode()
    def _step(self, number: int, finished: tuple[int, ...]) -> Step:
        kind, hidden = self._read()
        drawn = self._draw(hidden)
        events: list[Event] = []
        for row, token in zip(self.rows, drawn, strict=True):
            if self.watched:
                events.append(Event(kind="commit", row=row.name, position=len(row.tokens), token=token))
            self._take(row, token, kind)
        stable: dict[int, int] = {}
        texts: dict[int, list[int | None]] = {}
        for row in self.rows if self.watched else ():
            stable[row.name] = len(row.tokens) - row.prompt
            texts[row.name] = [*row.tokens[row.prompt :], *[None] * (row.length - len(row.tokens))]
        return Step(number=number, events=tuple(events), stable=stable, tokens=texts, finished=finished + self._leave())

    def _read(self) -> tuple[str, Tensor]:
        """Runs the model; returns the kind of forward, and the states `[B, C]` that next tokens are read from."""
        rows = self.rows
        if self.reader is None:
            room = max(row.length - len(row.tokens) for row in rows)
            self.reader = CausalReader(self.model, [row.tokens for row in rows], room)
            kind, hidden, fed = "prefill", self.reader.begin(), [len(row.tokens) for row in rows]
        else:
            kind, hidden, fed = "denoise", self.reader.go_on([row.tokens[-1] for row in rows]), [1] * len(rows)
        flops = [self.model.flops(num, len(row.tokens)) for num, row in zip(fed, rows, strict=True)]
        count([row.tally for row in rows], kind, flops)
        return kind, hidden

    def _draw(self, hidden: Tensor) -> list[int]:
        """Draws the next token of every row, with noise that is a function of (seed, step, position)."""
        rows, head, noise = self.rows, self.model.head, None
        for row in rows:
            row.tally.flops += 2.0 * head.weight.numel()
        if self.temperature > 0:
            places = torch.tensor([len(row.tokens) for row in rows], device=hidden.device)
            noise = TokenNoise(seed=[seeds.derive(row.seed, "step", row.step) for row in rows], positions=places)
        return token_ids(
            hidden,
            head.weight,
            bias=head.bias,
            softcap=head.softcap,
            logit_scale=head.logit_scale,
            temperature=self.temperature,
            noise=noise,
        ).tolist()

    def _take(self, row: _Row, token: int, kind: str) -> None:
        """Writes a token, and ends the text where it is one that ends texts."""
        row.tokens.append(token)
        row.tally.tokens[kind] += 1
        if not self.unbiased:
            row.tally.certificate = None
        if token in self.stops:
            row.length = len(row.tokens)

    def _leave(self) -> tuple[int, ...]:
        """Lets rows go that have all their tokens."""
        left = [place for place, row in enumerate(self.rows) if len(row.tokens) < row.length]
        if len(left) == len(self.rows):
            return ()
        gone = [row for row in self.rows if len(row.tokens) == row.length]
        for row in gone:
            tokens = row.tokens[row.prompt :]
            stopped = "stop token" if tokens and tokens[-1] in self.stops else "length"
            self.ended[row.name] = Ended(tokens, stopped, row.tally)
        self.rows = [self.rows[place] for place in left]
        if self.reader is not None and left:
            self.reader.keep(left)
        return tuple(row.name for row in gone)
