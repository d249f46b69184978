"""Runs the decoding loop: reads the positions at work, lets the rule choose, writes, until nothing is pending."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from partsong import seeds
from partsong.errors import UnsupportedError
from partsong.kernels.token_divergence import token_divergence
from partsong.kernels.token_head import TokenNoise, token_stats
from partsong.kernels.token_state import TokenStats
from partsong.samplers.text.canvas import Canvas
from partsong.samplers.text.events import Event, Step, events_of, stable_lengths
from partsong.samplers.text.heads import barred, log_probs
from partsong.samplers.text.model import TextModel
from partsong.samplers.text.reader import Reader, pick
from partsong.samplers.text.rule import Choice, Rule, View
from partsong.samplers.text.tally import KINDS, Tally

__all__ = ["Ended", "Loop", "Probe"]

#: Of hidden states `[B, K, C]`, positions `[B, K]` and rows `[B]`: pairwise mutual information `[B, K, K]`, in nats.
Probe = Callable[[Tensor, Tensor, Tensor], Tensor]

_NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True)
class Ended:
    """Holds a finished text: its tokens after the prompt, why it ended, and what it cost."""

    tokens: list[int]
    stopped: str
    tally: Tally


class Loop:
    """Decodes the texts of a canvas; iterate over it for the steps.

    What `decode` has too is as there. `row_seeds` holds the seed of each row's noise, and `watched` says whether steps
    carry events and texts.
    """

    def __init__(
        self,
        model: TextModel,
        canvas: Canvas,
        rule: Rule,
        reader: Reader,
        *,
        temperature: float,
        row_seeds: list[int],
        stop_token_ids: tuple[int, ...],
        probe: Probe | None,
        watched: bool,
    ) -> None:
        self.model, self.canvas, self.rule, self.reader = model, canvas, rule, reader
        self.temperature, self.seeds, self.probe, self.watched = temperature, row_seeds, probe, watched
        device = canvas.tokens.device
        self.stops = torch.tensor(stop_token_ids, dtype=torch.int64, device=device)
        self.filler = model.mask_token_id if model.mask_token_id is not None else 0
        self.bias = barred(model.head, (self.filler,) if model.adapter.noise == "mask" else ())
        self.barred = barred(model.head, rule.bars, self.bias)
        self.front = torch.full_like(canvas.length, -1)
        self.block_step, self.block_total = torch.zeros_like(canvas.length), torch.zeros_like(canvas.length)
        self.memory: dict[str, Tensor] = {}
        # Which kind of forward decided a position.
        self.kinds = torch.zeros_like(canvas.tokens)
        self.last: tuple[Tensor, Tensor] | None = None
        self.ended: dict[int, Ended] = {}

    def __iter__(self) -> Iterator[Step]:
        number = 0
        finished = self._leave()
        while len(self.canvas.rows):
            step = self._step(number, finished)
            yield step
            finished, number = (), number + 1
        assert not self.canvas.pending.any()

    @torch.no_grad()
    def _step(self, number: int, finished: tuple[int, ...]) -> Step:
        canvas = self.canvas
        work = canvas.work()
        self._begin(work.front)
        mine = work.places & canvas.free
        index, real = pick(mine & canvas.undecided if self.rule.reads == "undecided" else mine)
        undecided = canvas.undecided.gather(1, index) & real
        shadow = real & ~undecided if self.rule.shadows else None
        hidden, twins, kinds = self.reader.read(number, work, index, real, shadow)
        view = self._view(number, index, real, hidden, twins)
        choice = self.rule.choose(view)
        events = events_of(canvas, view, choice) if self.watched else ()
        self._write(number, view, choice, kinds)
        self.block_step += 1
        self._stop()
        return self._report(number, events, finished)

    def _begin(self, front: Tensor) -> None:
        """Notes where a new block begins."""
        canvas = self.canvas
        moved = front != self.front
        total = (canvas.undecided & (canvas.block == front[:, None])).sum(1)
        self.block_step = torch.where(moved, 0, self.block_step)
        self.block_total = torch.where(moved, total, self.block_total)
        self.front = front

    def _view(self, number: int, index: Tensor, real: Tensor, hidden: Tensor, twins: Tensor | None) -> View:
        canvas = self.canvas
        stats = self._stats(number, index, real, hidden)

        def spread(values: Tensor, fill: float) -> Tensor:
            whole = torch.full(real.shape, fill, dtype=values.dtype, device=values.device)
            whole[real] = values
            return whole

        undecided = canvas.undecided.gather(1, index) & real
        current = canvas.tokens.gather(1, index)
        return View(
            real=real,
            index=index,
            block=canvas.block.gather(1, index) - self.front[:, None],
            undecided=undecided,
            current=current,
            token=spread(stats.token, 0),
            token_prob=spread(stats.token_prob, 0.0),
            argmax=spread(stats.argmax, 0),
            max_prob=spread(stats.max_prob, 0.0),
            margin=spread(stats.margin, 0.0),
            entropy=spread(stats.entropy, torch.inf),
            step=torch.full_like(canvas.length, number),
            block_step=self.block_step,
            block_total=self.block_total,
            eager=self.temperature == 0,
            length=canvas.tokens.shape[1],
            memory=self.memory,
            divergence=lambda: self._divergence(index, real, hidden),
            current_prob=None if twins is None else self._current_prob(twins, current, real & ~undecided),
            mutual_information=lambda: self._mutual_information(hidden, index),
            random=lambda name: self._random(name, number, index),
            random_token=lambda: (self._random("token", number, index) * self.model.vocab_size).long(),
        )

    def _stats(self, number: int, index: Tensor, real: Tensor, hidden: Tensor) -> TokenStats:
        """Computes the statistics of the real positions, one after another."""
        row = torch.arange(len(real), device=real.device)[:, None].expand_as(real)[real]
        flat, places = hidden[real], index[real]
        step_seeds = [seeds.derive(seed, "step", number) for seed in self.seeds]
        self._count_head(real)

        def stats_of(mine: Tensor | slice, heat: float | None, bias: Tensor | None) -> TokenStats:
            head = self.model.head
            draws = self.temperature > 0 or heat is not None
            noise = TokenNoise(seed=[step_seeds[r] for r in row[mine].tolist()], positions=places[mine])
            return token_stats(
                flat[mine],
                head.weight,
                bias=bias,
                softcap=head.softcap,
                logit_scale=head.logit_scale / (1.0 if heat is None else heat),
                temperature=self.temperature if heat is None else 1.0,
                noise=noise if draws else None,
            )

        if self.rule.heat(0) is None and "barred" not in self.memory:
            return stats_of(slice(None), None, self.bias)
        kinds = self._kinds()
        self.reader.set_temperatures([heat for heat, _ in kinds])
        parts = []
        for kind in sorted(set(kinds), key=str):
            mine = torch.tensor([kinds[r] == kind for r in row.tolist()], device=row.device).nonzero().flatten()
            parts.append((mine, stats_of(mine, kind[0], self.barred if kind[1] else self.bias)))
        return _join(parts)

    def _kinds(self) -> list[tuple[float | None, bool]]:
        """Says what the logits of each row are divided by, and whether some tokens are barred there."""
        barred_rows = self.memory.get("barred", torch.zeros_like(self.canvas.length, dtype=torch.bool))
        heats = [self.rule.heat(step) for step in self.block_step.tolist()]
        return list(zip(heats, barred_rows.tolist(), strict=True))

    def _count_head(self, real: Tensor) -> None:
        vocab, width = self.model.head.weight.shape
        for tally, reads in zip(self.reader.tallies, real.sum(1).tolist(), strict=True):
            tally.flops += 2.0 * vocab * width * reads

    def _divergence(self, index: Tensor, real: Tensor, hidden: Tensor) -> Tensor:
        """Measures the divergence from the step before; infinite for positions that were not looked at then."""
        rows, length, width = len(index), self.canvas.tokens.shape[1], hidden.shape[2]
        wide = index[..., None].expand(-1, -1, width)
        now = hidden.new_zeros(rows, length, width).scatter_(1, wide, torch.where(real[..., None], hidden, 0.0))
        seen = torch.zeros(rows, length, dtype=torch.bool, device=real.device).scatter_(1, index, real)
        divergence = torch.full(real.shape, torch.inf, device=real.device)
        if self.last is not None:
            both = real & self.last[1].gather(1, index)
            head, old = self.model.head, self.last[0].gather(1, wide)
            divergence[both] = token_divergence(
                hidden[both],
                old[both],
                head.weight,
                bias=self.bias,
                softcap=head.softcap,
                logit_scale=head.logit_scale,
            ).to(divergence.dtype)
        self.last = (now, seen)
        return divergence

    def _current_prob(self, twins: Tensor, current: Tensor, shadowed: Tensor) -> Tensor:
        """Says how likely the tokens that stand here are in the eyes of their shadows."""
        probs = torch.ones(shadowed.shape, device=shadowed.device)
        if shadowed.any():
            log_prob, _ = log_probs(self.model.head, twins[shadowed], current[shadowed], self.bias)
            probs[shadowed] = log_prob.exp().to(probs.dtype)
        return probs

    def _mutual_information(self, hidden: Tensor, index: Tensor) -> Tensor:
        if self.probe is None:
            raise UnsupportedError("this rule needs the mutual information of positions; give decode a probe")
        return self.probe(hidden, index, self.canvas.rows)

    def _random(self, name: str, number: int, index: Tensor) -> Tensor:
        length = self.canvas.tokens.shape[1]
        drawn = [seeds.uniform(seeds.derive(seed, name, number), (length,), device=index.device) for seed in self.seeds]
        return torch.stack(drawn).gather(1, index)

    def _write(self, number: int, view: View, choice: Choice, kinds: list[str]) -> None:
        canvas, real = self.canvas, view.real
        new = choice.write & view.undecided & ~choice.undecided
        changed = choice.write & ~view.undecided & (choice.token != view.current)
        edits = changed | (choice.undecided & ~view.undecided & real)
        self._note(view, new, edits, kinds)
        token = torch.where(choice.write, choice.token, view.current)
        if self.model.adapter.noise != "uniform":
            token = torch.where(choice.undecided, self.filler, token)
        _put(canvas.tokens, view.index, real, token)
        _put(canvas.undecided, view.index, real, choice.undecided)
        _put(canvas.pending, view.index, real, choice.pending)
        decided = torch.where(new | changed, number, canvas.decided_at.gather(1, view.index))
        _put(canvas.decided_at, view.index, real, decided)
        written = torch.zeros_like(canvas.undecided)
        _put(written, view.index, real, choice.write | edits)
        self.reader.mark_stale(written)

    def _note(self, view: View, new: Tensor, edits: Tensor, kinds: list[str]) -> None:
        """Notes in the tallies what was decided."""
        accepted = torch.where(new, view.entropy, 0.0)
        spent = (accepted.sum(1) - accepted.amax(1)).clamp(min=0.0).tolist()
        numbers = torch.tensor([KINDS.index(kind) for kind in kinds], device=new.device)
        _put(self.kinds, view.index, new, numbers[:, None].expand_as(view.index))
        changes = edits.sum(1).tolist()
        is_bound = self.rule.unbiased and not self.rule.revises
        for row, tally in enumerate(self.reader.tallies):
            tally.edits += changes[row]
            tally.certificate = tally.certificate + spent[row] if is_bound and tally.certificate is not None else None

    def _stop(self) -> None:
        """Ends texts at their first stop token; with rules that revise only when all before it is settled."""
        canvas = self.canvas
        if not len(self.stops):
            return
        here = torch.isin(canvas.tokens, self.stops) & canvas.free & ~canvas.undecided & canvas.inside
        if self.rule.revises:
            here = here & (canvas.pending.cumsum(1) == 0)
        places = torch.arange(here.shape[1], device=here.device)
        first = torch.where(here, places, _NEVER).amin(1)
        # What was given after it must still be reached.
        given = canvas.inside & ~canvas.free
        first = torch.where((given & (places > first[:, None])).any(1), _NEVER, first)
        canvas.length = canvas.length.minimum(torch.where(first < _NEVER, first + 1, canvas.length))
        canvas.undecided &= canvas.inside
        canvas.pending &= canvas.inside

    def _report(self, number: int, events: tuple[Event, ...], finished: tuple[int, ...]) -> Step:
        canvas, stable, tokens = self.canvas, {}, {}
        if self.watched:
            lengths = stable_lengths(canvas, self.rule.revises)
            for row, name in enumerate(canvas.rows.tolist()):
                begin, end = int(canvas.prompt[row]), int(canvas.length[row])
                open_ = canvas.undecided[row, begin:end].tolist()
                values = canvas.tokens[row, begin:end].tolist()
                tokens[name] = [None if waits else value for value, waits in zip(values, open_, strict=True)]
                stable[name] = lengths[row]
        return Step(number=number, events=events, stable=stable, tokens=tokens, finished=finished + self._leave())

    def _leave(self) -> tuple[int, ...]:
        """Lets rows go in which nothing is pending."""
        canvas = self.canvas
        done = ~canvas.pending.any(1)
        if not done.any():
            return ()
        names = canvas.rows.tolist()
        gone = []
        for row in done.nonzero().flatten().tolist():
            begin, end = int(canvas.prompt[row]), int(canvas.length[row])
            tokens = canvas.tokens[row, begin:end].tolist()
            stopped = "stop token" if tokens and tokens[-1] in self.stops.tolist() else "length"
            # What was decided after the end of a text is nobody's token.
            for kind in self.kinds[row][canvas.free[row] & canvas.inside[row]].tolist():
                self.reader.tallies[row].tokens[KINDS[kind]] += 1
            self.ended[names[row]] = Ended(tokens, stopped, self.reader.tallies[row])
            gone.append(names[row])
        rows = (~done).nonzero().flatten()
        canvas.keep(rows)
        self.reader.keep(rows)
        self.seeds = [self.seeds[row] for row in rows.tolist()]
        for name in ("front", "block_step", "block_total", "kinds"):
            setattr(self, name, getattr(self, name)[rows])
        self.memory = {name: kept[rows] for name, kept in self.memory.items()}
        self.last = None if self.last is None else (self.last[0][rows], self.last[1][rows])
        return tuple(gone)


def _put(target: Tensor, index: Tensor, real: Tensor, values: Tensor) -> None:
    """Writes values `[B, K]` at the real ones of some positions."""
    rows = torch.arange(len(index), device=index.device)[:, None].expand_as(index)
    target[rows[real], index[real]] = values[real].to(target.dtype)


def _join(parts: list[tuple[Tensor, TokenStats]]) -> TokenStats:
    if len(parts) == 1:
        return parts[0][1]
    order = torch.cat([mine for mine, _ in parts]).argsort()
    names = TokenStats.__dataclass_fields__
    return TokenStats(**{name: torch.cat([getattr(stats, name) for _, stats in parts])[order] for name in names})
