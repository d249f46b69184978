"""Computes the statistics that rules see, from hidden states of any forward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from partsong import seeds
from partsong.errors import UnsupportedError
from partsong.kernels.token_head import TokenNoise
from partsong.kernels.token_state import TokenStats
from partsong.samplers.text.canvas import Canvas, RowNumbers, places_of
from partsong.samplers.text.dependence.head import DependenceHead, doubt_of, least_of_pairs
from partsong.samplers.text.heads import barred, head_divergence, head_stats, log_probs
from partsong.samplers.text.model import TextModel
from partsong.samplers.text.rule import Rule, View

__all__ = ["Probe", "Views"]

#: Maps hidden states `[B, K, C]`, positions `[B, K]` and rows `[B]` to pairwise mutual information `[B, K, K]`, in
#: nats for `Dependency`, or pairwise dependence in total variation for `VariationBound`.
Probe = Callable[[Tensor, Tensor, Tensor], Tensor]


class Views:
    """Makes the views of a decoding: statistics of hidden states, tokens drawn with each row's own noise.

    The noise is a function of (seed of the text, steps that text has made, position), so a text draws the same tokens
    in the same state, in any batch, and also beside later states of itself.

    Args:
        model: whose head turns hidden states into distributions.
        rule: the rule that reads the views.
        temperature: of the draws.
        row_seeds: one for each row of the original batch.
        probe: as in `decode`, or a head that predicts dependences.
    """

    def __init__(
        self,
        model: TextModel,
        rule: Rule,
        *,
        temperature: float,
        row_seeds: list[int],
        probe: Probe | DependenceHead | None,
    ) -> None:
        self.model, self.rule, self.temperature, self.seeds, self.probe = model, rule, temperature, row_seeds, probe
        mask = model.mask_token_id if model.adapter.noise == "mask" else None
        self.bias = barred(model.head, () if mask is None else (mask,))
        self.barred = barred(model.head, rule.bars, self.bias)
        self.memory: dict[str, Tensor] = {}
        self.last: tuple[Tensor, Tensor] | None = None

    def columns(self, canvas: Canvas, asked: Tensor) -> dict[str, Tensor]:
        """Counts what `view` has to know of every row, `[B]` each, for `read_rows`.

        Args:
            canvas: the texts.
            asked: bool `[B, L]`, the positions to show.
        """
        columns = {
            "name": canvas.rows,
            "step": canvas.step,
            "block step": canvas.block_step,
            "asked": asked.sum(1),
        }
        if self.last is not None:
            columns["seen before"] = (asked & self.last[1]).sum(1)
        if "barred" in self.memory:
            columns["barred"] = self.memory["barred"]
        return columns

    def view(
        self,
        canvas: Canvas,
        numbers: RowNumbers,
        index: Tensor,
        real: Tensor,
        hidden: Tensor,
        twins: Tensor | None = None,
    ) -> View:
        """Shows some positions of a canvas.

        Args:
            canvas: the texts.
            numbers: of its rows, with those of `columns` and, where there are twins, the number of "shadows".
            index: int64 `[B, K]`, positions, all different within a row.
            real: bool `[B, K]`, which of them exist.
            hidden: `[B, K, C]`, the hidden states that their distributions are read from.
            twins: `[B, K, C]`, the same with each position masked by itself, for rules with shadows.
        """
        places = places_of(real, sum(numbers["asked"]))
        stats = self._stats(numbers, index.flatten()[places], hidden.flatten(0, 1)[places])
        undecided = canvas.undecided.gather(1, index) & real
        current = canvas.tokens.gather(1, index)
        spread = partial(_spread, real.shape, places)
        max_prob, margin = spread(stats.max_prob, 0.0), spread(stats.margin, 0.0)
        return View(
            real=real,
            index=index,
            block=canvas.block.gather(1, index) - canvas.front[:, None],
            undecided=undecided,
            current=current,
            token=spread(stats.token, 0),
            token_prob=spread(stats.token_prob, 0.0),
            argmax=spread(stats.argmax, 0),
            max_prob=max_prob,
            margin=margin,
            entropy=spread(stats.entropy, torch.inf),
            step=canvas.step,
            block_step=canvas.block_step,
            block_total=canvas.block_total,
            eager=self.temperature == 0,
            length=canvas.tokens.shape[1],
            memory=self.memory,
            divergence=lambda: self._divergence(canvas, numbers, index, real, hidden),
            current_prob=None if twins is None else self._current_prob(numbers, twins, current, real & ~undecided),
            mutual_information=lambda: self._probed(canvas, hidden, index),
            dependence=lambda: self._dependence(canvas, hidden, index, doubt_of(max_prob, margin)),
            random=lambda name: self._random(name, canvas, numbers, index),
            random_token=lambda: (self._random("token", canvas, numbers, index) * self.model.vocab_size).long(),
        )

    def _step_seeds(self, name: str, numbers: RowNumbers) -> list[int]:
        """Derives a seed for each row from that of its text and the steps it has made."""
        pairs = zip(numbers["name"], numbers["step"], strict=True)
        return [seeds.derive(self.seeds[row], name, step) for row, step in pairs]

    def _stats(self, numbers: RowNumbers, index: Tensor, hidden: Tensor) -> TokenStats:
        """Computes the statistics of the real positions `[M]` of all rows, one after another; `hidden` is `[M, C]`."""
        asked, kinds, head = numbers["asked"], self._kinds(numbers), self.model.head
        ends = list(itertools.accumulate(asked))
        draws = self.temperature > 0 or self.rule.heat(0) is not None
        step_seeds = self._step_seeds("step", numbers) if draws else []
        parts = []
        for kind in sorted(set(kinds), key=str):
            heat, is_barred = kind
            rows = [row for row, other in enumerate(kinds) if other == kind]
            mine: Tensor | slice = slice(None)
            if len(rows) < len(kinds):
                mine = torch.cat([torch.arange(ends[row] - asked[row], ends[row], device=index.device) for row in rows])
            noise = None
            if draws:
                each = [step_seeds[row] for row in rows for _ in range(asked[row])]
                noise = TokenNoise(seed=each, positions=index[mine])
            stats = head_stats(
                head,
                hidden[mine],
                bias=self.barred if is_barred else self.bias,
                heat=1.0 if heat is None else heat,
                temperature=self.temperature if heat is None else 1.0,
                noise=noise,
            )
            parts.append((mine, stats))
        return _join(parts)

    def heats(self, numbers: RowNumbers) -> list[float | None]:
        """Lists the temperature of each row; see `Rule.heat`."""
        return [self.rule.heat(step) for step in numbers["block step"]]

    def _kinds(self, numbers: RowNumbers) -> list[tuple[float | None, bool]]:
        """Returns the temperature of each row, and whether some tokens are barred there."""
        barred_rows = map(bool, numbers.get("barred", [0] * len(numbers["name"])))
        return list(zip(self.heats(numbers), barred_rows, strict=True))

    def _divergence(self, canvas: Canvas, numbers: RowNumbers, index: Tensor, real: Tensor, hidden: Tensor) -> Tensor:
        """Measures the divergence from the previous step; infinite for positions that were not read then."""
        rows, length, width = len(index), canvas.tokens.shape[1], hidden.shape[2]
        wide = index[..., None].expand(-1, -1, width)
        now = hidden.new_zeros(rows, length, width).scatter_(1, wide, torch.where(real[..., None], hidden, 0.0))
        seen = torch.zeros(rows, length, dtype=torch.bool, device=real.device).scatter_(1, index, real)
        divergence = torch.full(real.shape, torch.inf, device=real.device)
        if self.last is not None:
            both = places_of(real & self.last[1].gather(1, index), sum(numbers["seen before"]))
            head, old = self.model.head, self.last[0].gather(1, wide)
            moved = head_divergence(head, hidden.flatten(0, 1)[both], old.flatten(0, 1)[both], self.bias)
            divergence.view(-1).index_copy_(0, both, moved.to(divergence.dtype))
        self.last = (now, seen)
        return divergence

    def _current_prob(self, numbers: RowNumbers, twins: Tensor, current: Tensor, shadowed: Tensor) -> Tensor:
        """Returns the probability of the present tokens according to their shadows."""
        probs = torch.ones(shadowed.numel(), device=shadowed.device)
        if sum(numbers["shadows"]):
            places = places_of(shadowed, sum(numbers["shadows"]))
            tokens = current.flatten()[places]
            log_prob, _ = log_probs(self.model.head, twins.flatten(0, 1)[places], tokens, self.bias)
            probs.index_copy_(0, places, log_prob.exp().to(probs.dtype))
        return probs.view(shadowed.shape)

    def _probed(self, canvas: Canvas, hidden: Tensor, index: Tensor) -> Tensor:
        """Asks the probe about pairs of positions, `[B, K, K]`."""
        if self.probe is None or isinstance(self.probe, DependenceHead):
            raise UnsupportedError("this rule needs to know what positions tell of each other; give decode a probe")
        return self.probe(hidden, index, canvas.rows)

    def _dependence(self, canvas: Canvas, hidden: Tensor, index: Tensor, doubt: Tensor) -> Tensor:
        """Predicts or measures the dependence of pairs, at most what their doubts `[B, K]` allow: `[B, K, K]`."""
        if isinstance(self.probe, DependenceHead):
            return self.probe(hidden, doubt)
        return self._probed(canvas, hidden, index).minimum(least_of_pairs(doubt))

    def _random(self, name: str, canvas: Canvas, numbers: RowNumbers, index: Tensor) -> Tensor:
        drawn = seeds.uniform_rows(self._step_seeds(name, numbers), canvas.tokens.shape[1])
        return drawn.to(index.device, non_blocking=True).gather(1, index)

    def keep(self, rows: Tensor) -> None:
        """Forgets all rows but these; the canvas has done so already."""
        self.memory = {name: kept[rows] for name, kept in self.memory.items()}
        self.last = None if self.last is None else (self.last[0][rows], self.last[1][rows])


def _spread(shape: torch.Size, places: Tensor, values: Tensor, fill: float) -> Tensor:
    """Puts values where they belong in a tensor that is filled with something else."""
    whole = torch.full((shape.numel(),), fill, dtype=values.dtype, device=values.device)
    return whole.index_copy_(0, places, values).view(shape)


def _join(parts: list[tuple[Any, TokenStats]]) -> TokenStats:
    if len(parts) == 1:
        return parts[0][1]
    order = torch.cat([mine for mine, _ in parts]).argsort()
    names = TokenStats.__dataclass_fields__
    return TokenStats(**{name: torch.cat([getattr(stats, name) for _, stats in parts])[order] for name in names})
