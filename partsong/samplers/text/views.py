"""Computes the statistics that rules see, from hidden states of any forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from partsong import seeds
from partsong.errors import UnsupportedError
from partsong.kernels.token_divergence import token_divergence
from partsong.kernels.token_head import TokenNoise, token_stats
from partsong.kernels.token_state import TokenStats
from partsong.samplers.text.canvas import Canvas
from partsong.samplers.text.heads import barred, log_probs
from partsong.samplers.text.model import TextModel
from partsong.samplers.text.rule import Rule, View

__all__ = ["Probe", "Views"]

#: Maps hidden states `[B, K, C]`, positions `[B, K]` and rows `[B]` to pairwise mutual information `[B, K, K]`, in
#: nats.
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
        probe: as in `decode`.
    """

    def __init__(
        self, model: TextModel, rule: Rule, *, temperature: float, row_seeds: list[int], probe: Probe | None
    ) -> None:
        self.model, self.rule, self.temperature, self.seeds, self.probe = model, rule, temperature, row_seeds, probe
        mask = model.mask_token_id if model.adapter.noise == "mask" else None
        self.bias = barred(model.head, () if mask is None else (mask,))
        self.barred = barred(model.head, rule.bars, self.bias)
        self.memory: dict[str, Tensor] = {}
        self.last: tuple[Tensor, Tensor] | None = None

    def view(self, canvas: Canvas, index: Tensor, real: Tensor, hidden: Tensor, twins: Tensor | None = None) -> View:
        """Shows some positions of a canvas.

        Args:
            canvas: the texts.
            index: int64 `[B, K]`, positions.
            real: bool `[B, K]`, which of them exist.
            hidden: `[B, K, C]`, the hidden states that their distributions are read from.
            twins: `[B, K, C]`, the same with each position masked by itself, for rules with shadows.
        """
        stats = self._stats(canvas, index, real, hidden)
        undecided = canvas.undecided.gather(1, index) & real
        current = canvas.tokens.gather(1, index)

        def spread(values: Tensor, fill: float) -> Tensor:
            whole = torch.full(real.shape, fill, dtype=values.dtype, device=values.device)
            whole[real] = values
            return whole

        return View(
            real=real,
            index=index,
            block=canvas.block.gather(1, index) - canvas.front[:, None],
            undecided=undecided,
            current=current,
            token=spread(stats.token, 0),
            token_prob=spread(stats.token_prob, 0.0),
            argmax=spread(stats.argmax, 0),
            max_prob=spread(stats.max_prob, 0.0),
            margin=spread(stats.margin, 0.0),
            entropy=spread(stats.entropy, torch.inf),
            step=canvas.step,
            block_step=canvas.block_step,
            block_total=canvas.block_total,
            eager=self.temperature == 0,
            length=canvas.tokens.shape[1],
            memory=self.memory,
            divergence=lambda: self._divergence(canvas, index, real, hidden),
            current_prob=None if twins is None else self._current_prob(twins, current, real & ~undecided),
            mutual_information=lambda: self._mutual_information(canvas, hidden, index),
            random=lambda name: self._random(name, canvas, index),
            random_token=lambda: (self._random("token", canvas, index) * self.model.vocab_size).long(),
        )

    def _step_seeds(self, name: str, canvas: Canvas) -> list[int]:
        """Derives a seed for each row from that of its text and the steps it has made."""
        pairs = zip(canvas.rows.tolist(), canvas.step.tolist(), strict=True)
        return [seeds.derive(self.seeds[row], name, step) for row, step in pairs]

    def _stats(self, canvas: Canvas, index: Tensor, real: Tensor, hidden: Tensor) -> TokenStats:
        """Computes the statistics of the real positions, one after another."""
        row = torch.arange(len(real), device=real.device)[:, None].expand_as(real)[real]
        flat, places = hidden[real], index[real]
        step_seeds = self._step_seeds("step", canvas) if self.temperature > 0 or self.rule.heat(0) is not None else []

        def stats_of(mine: Tensor | slice, heat: float | None, bias: Tensor | None) -> TokenStats:
            head = self.model.head
            draws = self.temperature > 0 or heat is not None
            noise = (
                TokenNoise(seed=[step_seeds[r] for r in row[mine].tolist()], positions=places[mine]) if draws else None
            )
            return token_stats(
                flat[mine],
                head.weight,
                bias=bias,
                softcap=head.softcap,
                logit_scale=head.logit_scale / (1.0 if heat is None else heat),
                temperature=self.temperature if heat is None else 1.0,
                noise=noise,
            )

        if self.rule.heat(0) is None and "barred" not in self.memory:
            return stats_of(slice(None), None, self.bias)
        kinds = self._kinds(canvas)
        parts = []
        for kind in sorted(set(kinds), key=str):
            mine = torch.tensor([kinds[r] == kind for r in row.tolist()], device=row.device).nonzero().flatten()
            parts.append((mine, stats_of(mine, kind[0], self.barred if kind[1] else self.bias)))
        return _join(parts)

    def heats(self, canvas: Canvas) -> list[float | None]:
        """Lists the temperature of each row; see `Rule.heat`."""
        return [self.rule.heat(step) for step in canvas.block_step.tolist()]

    def _kinds(self, canvas: Canvas) -> list[tuple[float | None, bool]]:
        """Returns the temperature of each row, and whether some tokens are barred there."""
        barred_rows = self.memory.get("barred", torch.zeros_like(canvas.length, dtype=torch.bool))
        return list(zip(self.heats(canvas), barred_rows.tolist(), strict=True))

    def _divergence(self, canvas: Canvas, index: Tensor, real: Tensor, hidden: Tensor) -> Tensor:
        """Measures the divergence from the previous step; infinite for positions that were not read then."""
        rows, length, width = len(index), canvas.tokens.shape[1], hidden.shape[2]
        wide = index[..., None].expand(-1, -1, width)
        now = hidden.new_zeros(rows, length, width).scatter_(1, wide, torch.where(real[..., None], hidden, 0.0))
        seen = torch.zeros(rows, length, dtype=torch.bool, device=real.device).scatter_(1, index, real)
        divergence = torch.full(real.shape, torch.inf, device=real.device)
        if self.last is not None:
            both = real & self.last[1].gather(1, index)
            head, old = self.model.head, self.last[0].gather(1, wide)
            divergence[both] = token_divergence(
                hidden[both], old[both], head.weight, bias=self.bias, softcap=head.softcap, logit_scale=head.logit_scale
            ).to(divergence.dtype)
        self.last = (now, seen)
        return divergence

    def _current_prob(self, twins: Tensor, current: Tensor, shadowed: Tensor) -> Tensor:
        """Returns the probability of the present tokens according to their shadows."""
        probs = torch.ones(shadowed.shape, device=shadowed.device)
        if shadowed.any():
            log_prob, _ = log_probs(self.model.head, twins[shadowed], current[shadowed], self.bias)
            probs[shadowed] = log_prob.exp().to(probs.dtype)
        return probs

    def _mutual_information(self, canvas: Canvas, hidden: Tensor, index: Tensor) -> Tensor:
        if self.probe is None:
            raise UnsupportedError("this rule needs the mutual information of positions; give decode a probe")
        return self.probe(hidden, index, canvas.rows)

    def _random(self, name: str, canvas: Canvas, index: Tensor) -> Tensor:
        drawn = seeds.uniform_rows(self._step_seeds(name, canvas), canvas.tokens.shape[1])
        return drawn.to(index.device).gather(1, index)

    def keep(self, rows: Tensor) -> None:
        """Forgets all rows but these; the canvas has done so already."""
        self.memory = {name: kept[rows] for name, kept in self.memory.items()}
        self.last = None if self.last is None else (self.last[0][rows], self.last[1][rows])


def _join(parts: list[tuple[Tensor, TokenStats]]) -> TokenStats:
    if len(parts) == 1:
        return parts[0][1]
    order = torch.cat([mine for mine, _ in parts]).argsort()
    names = TokenStats.__dataclass_fields__
    return TokenStats(**{name: torch.cat([getattr(stats, name) for _, stats in parts])[order] for name in names})
