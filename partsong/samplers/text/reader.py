"""Runs the model for the active positions: decides what to compute, what to keep, and who sees whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from partsong.parallel.ranks.later import on_device
from partsong.samplers.text.caches import NoCache, TextCache
from partsong.samplers.text.canvas import Canvas, RowNumbers, Work, pick, places_of
from partsong.samplers.text.model import KeyStore, MixingTextModel, TextModel
from partsong.samplers.text.tally import KINDS, Tally, count

__all__ = ["Aim", "Reader"]


@dataclass(frozen=True, slots=True, eq=False)
class Aim:
    """Holds what the next forward reads and computes, on the device.

    Attributes:
        asked: bool `[B, L]`, positions whose distributions are wanted.
        shadow: bool `[B, L]`, those that are also read while masked themselves; None for rules without shadows.
        front: int64 `[B]`, the first active block.
        whole: bool `[B]`, rows in which everything is computed.
        compute: bool `[B, L]`.
        stored: bool `[B, L]`, finished text that gets a forward of its own before, for models that encode it
            differently; None for the others.
    """

    asked: Tensor
    shadow: Tensor | None
    front: Tensor
    whole: Tensor
    compute: Tensor
    stored: Tensor | None


@dataclass(slots=True, eq=False)
class _Batch:
    """Holds some rows of the canvas in one forward.

    Attributes:
        rows: int64 `[n]`.
        numbers: the same on the host.
        compute: bool `[n, L]`.
        kind: one of `tally.KINDS`.
        queries: how many positions are computed in each.
        keys: how many are known afterwards.
        clean: whether finished text is encoded.
    """

    rows: Tensor
    numbers: list[int]
    compute: Tensor
    kind: str
    queries: list[int]
    keys: list[int]
    clean: bool = False


class Reader:
    """Computes the hidden states of the active positions, with a model and a policy of what to keep.

    It reads the canvas anew in every step: `aim` decides on the device what to compute, and `read` does so. There is
    one tally for each row of the original batch, and a row has `shadows` places for masked copies of decided positions.
    """

    def __init__(
        self, model: TextModel, cache: TextCache, canvas: Canvas, tallies: list[Tally], shadows: int = 0
    ) -> None:
        self.model, self.cache, self.canvas, self.tallies, self.room = model, cache, canvas, tallies, shadows
        rows, length = canvas.tokens.shape
        needs_keys = not isinstance(cache, NoCache) or model.adapter.noise == "uniform"
        self.keys: KeyStore | None = model.key_store(rows, length + shadows) if needs_keys else None
        empty = torch.zeros_like(canvas.undecided)
        self.known, self.stale = empty, ~empty
        self.since = torch.zeros_like(canvas.length)
        self.front = torch.full_like(canvas.length, -1)
        self.is_new = torch.ones_like(canvas.length, dtype=torch.bool)

    def aim(self, step: int, work: Work, asked: Tensor, shadow: Tensor | None) -> Aim:
        """Decides what the next forward has to compute.

        Args:
            step: number of the step.
            work: the active positions of the rows.
            asked: bool `[B, L]`, positions whose distributions are wanted.
            shadow: bool `[B, L]`, those that are also read while masked themselves, or None.
        """
        canvas, adapter = self.canvas, self.model.adapter
        visible = canvas.inside & (canvas.group <= work.high[:, None])
        if adapter.noise == "none":
            visible = visible & ~canvas.undecided
        every = self.cache.refresh_every
        whole = self.is_new | ((self.since >= every) if every is not None else torch.zeros_like(self.is_new))
        if self.cache.refresh_blocks and not canvas.layered:
            whole = whole | (work.front != self.front)
        if self.keys is None:
            whole = torch.ones_like(whole)
        lower = canvas.group < work.low[:, None]
        fresh = self.cache.fresh(canvas, work, step) | (lower & self.stale)
        compute = visible & torch.where(whole[:, None], True, fresh) | self._read_at(asked)
        stored = None
        if adapter.noise == "uniform":
            stored, compute = compute & lower & self.stale, compute & ~lower
        return Aim(asked, shadow, work.front, whole, compute, stored)

    def _read_at(self, asked: Tensor) -> Tensor:
        """Marks the positions from which the distributions of others are read, bool `[B, L]`."""
        if not self.model.adapter.shifted:
            return asked
        at = torch.zeros_like(asked)
        at[:, :-1] = asked[:, 1:]
        at[:, 0] |= asked[:, 0]
        return at

    def columns(self, aim: Aim) -> dict[str, Tensor]:
        """Counts what `read` has to know of every row, `[B]` each, for `read_rows`."""
        known = self.known if aim.stored is None else self.known | aim.stored
        inside = self.canvas.inside
        counts = {
            "new": self.is_new,
            "whole": aim.whole,
            "queries": aim.compute.sum(1),
            "keys": ((known | aim.compute) & inside).sum(1),
        }
        if aim.shadow is not None:
            counts["shadows"] = aim.shadow.sum(1)
        if aim.stored is not None:
            counts |= {"stored": aim.stored.sum(1), "stored keys": (known & inside).sum(1)}
        return counts

    def read(
        self, aim: Aim, numbers: RowNumbers, index: Tensor, real: Tensor, shadow: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns the hidden states that the distributions of some positions are read from.

        Args:
            aim: what to compute.
            numbers: of the rows, with those of `columns`.
            index: int64 `[B, K]`, positions within the texts.
            real: bool `[B, K]`.
            shadow: bool `[B, K]`, positions that are also read while masked themselves, or None.

        Returns:
            Hidden states `[B, K, C]`, those of the shadows or None, and for each row its forward's number in
            `tally.KINDS`, int64 `[B]`.
        """
        at = (index - int(self.model.adapter.shifted)).clamp(min=0)
        kinds = torch.full_like(aim.front, KINDS.index("denoise"))
        batches = self._batches(aim, numbers)
        self.since = torch.where(aim.whole, 1, self.since + 1)
        self.front, self.is_new = aim.front, torch.zeros_like(self.is_new)
        parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for batch in batches:
            hidden, place, twins = self._forward(batch, numbers, at, None if batch.clean else shadow)
            self.known[batch.rows] |= batch.compute
            self.stale[batch.rows] &= ~batch.compute
            if batch.clean and self.model.adapter.noise == "uniform":
                continue
            here = place.gather(1, at[batch.rows])[..., None].expand(-1, -1, hidden.shape[2])
            parts.append((batch.rows, hidden.gather(1, here), twins))
            kinds.index_fill_(0, batch.rows, KINDS.index(batch.kind))
        rows = torch.cat([rows for rows, *_ in parts]).argsort()
        hidden = torch.cat([hidden for _, hidden, _ in parts])[rows]
        twins = None if shadow is None else torch.cat([twins for *_, twins in parts if twins is not None])[rows]
        return hidden, twins, kinds

    def _batches(self, aim: Aim, numbers: RowNumbers) -> list[_Batch]:
        """Groups the rows by what is computed in them; finished text may need a forward of its own."""
        everyone = list(range(len(numbers["new"])))
        if self.keys is None or aim.stored is not None:
            return [
                *self._finished(aim.stored, numbers),
                *self._batch("denoise", everyone, aim.whole, aim.compute, numbers["queries"], numbers["keys"]),
            ]
        batches, new, whole = list[_Batch](), numbers["new"], numbers["whole"]
        for kind, marks, is_whole, is_new in (
            ("prefill", self.is_new, 1, 1),
            ("refresh", aim.whole & ~self.is_new, 1, 0),
            ("denoise", ~aim.whole, 0, 0),
        ):
            rows = [row for row in everyone if (whole[row], new[row]) == (is_whole, is_new)]
            clean = self.model.adapter.noise == "none"
            batches += self._batch(kind, rows, marks, aim.compute, numbers["queries"], numbers["keys"], clean=clean)
        return batches

    def _finished(self, stored: Tensor | None, numbers: RowNumbers) -> list[_Batch]:
        """Puts finished text into forwards of its own, for models that encode it differently."""
        batches = list[_Batch]()
        if stored is None:
            return batches
        queries, keys, has = numbers["stored"], numbers["stored keys"], stored.any(1)
        for kind, marks, is_new in (("prefill", self.is_new, 1), ("store", ~self.is_new, 0)):
            rows = [row for row, new in enumerate(numbers["new"]) if new == is_new and queries[row]]
            batches += self._batch(kind, rows, marks & has, stored, queries, keys, clean=True)
        return batches

    def _batch(
        self,
        kind: str,
        numbers: list[int],
        marks: Tensor,
        compute: Tensor,
        queries: list[int],
        keys: list[int],
        *,
        clean: bool = False,
    ) -> list[_Batch]:
        """Makes a batch of some rows, which are marked on the device too, bool `[B]`; none for no rows."""
        if not numbers:
            return []
        rows = places_of(marks, len(numbers))
        mine = compute if len(numbers) == len(compute) else compute[rows]
        counts = ([queries[row] for row in numbers], [keys[row] for row in numbers])
        return [_Batch(rows, numbers, mine, kind, *counts, clean)]

    def _forward(
        self, batch: _Batch, numbers: RowNumbers, at: Tensor, shadow: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Calls the model once: hidden states, the query of every position, and the shadows' hidden states."""
        canvas, rows, length = self.canvas, batch.rows, self.canvas.tokens.shape[1]
        index, there = pick(batch.compute, max(batch.queries))
        tokens = canvas.tokens[rows].gather(1, index)
        # A text that ended at a stop token no longer holds the tokens of its kept keys.
        known = (self.known[rows] | batch.compute) & canvas.inside[rows]
        visible = self._visible(rows, index, known)
        visible[..., 0] |= ~there  # padding sees something, so that nothing is divided by zero
        slots, positions = torch.where(there, index, length + self.room), index
        place = torch.zeros(len(rows), length, dtype=torch.int64, device=index.device)
        place.scatter_(1, index, torch.arange(index.shape[1], device=index.device).expand_as(index))
        mine = None
        if self.room:
            visible = torch.cat([visible, visible.new_zeros(*visible.shape[:2], self.room)], 2)
        if shadow is not None:
            mine = pick(shadow[rows], max(numbers["shadows"][row] for row in batch.numbers))
            extra = self._shadows(rows, at[rows].gather(1, mine[0]), known)
            tokens, positions, slots, visible = (
                torch.cat(pair, 1) for pair in zip((tokens, positions, slots, visible), extra, strict=True)
            )
        if self.keys is None:
            slots, visible = (
                torch.arange(slots.shape[1], device=slots.device).expand_as(slots),
                visible.gather(2, slots.clamp(max=visible.shape[2] - 1)[:, None, :].expand(-1, slots.shape[1], -1)),
            )
            visible[:, :, : index.shape[1]] &= (
                there[:, None, :]
                | torch.eye(*visible.shape[1:], dtype=torch.bool, device=visible.device)[:, : index.shape[1]]
            )
        self._count(batch, numbers["name"])
        hidden = self._hidden(batch, index, (tokens, positions, slots, visible))
        twins = None
        if mine is not None and shadow is not None:
            twins = torch.zeros(len(rows), shadow.shape[1], hidden.shape[2], dtype=hidden.dtype, device=hidden.device)
            twins.scatter_(1, mine[0][..., None].expand(-1, -1, hidden.shape[2]), hidden[:, index.shape[1] :])
        return hidden[:, : index.shape[1]], place, twins

    def _hidden(self, batch: _Batch, index: Tensor, call: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        """Calls the model with tokens, positions, slots and visibility; it reads mixtures where the rule mixes."""
        some = None if len(batch.rows) == len(self.canvas.length) else batch.rows
        if self.canvas.mask_share is None:
            return self.model.forward(*call, self.keys, some, clean=batch.clean)
        assert isinstance(self.model, MixingTextModel), "check_request refuses rules that mix for other models"
        share = self.canvas.mask_share[batch.rows].gather(1, index)
        return self.model.forward_mixed(call[0], share, *call[1:], self.keys, some)

    def _visible(self, rows: Tensor, index: Tensor, known: Tensor) -> Tensor:
        """Returns what each position sees, bool `[B, Q, L]`."""
        group = self.canvas.group[rows]
        return (group[:, None, :] <= group.gather(1, index)[:, :, None]) & known[:, None, :]

    def _shadows(self, rows: Tensor, index: Tensor, known: Tensor) -> tuple[Tensor, ...]:
        """Adds masked copies of decided tokens: they see all but the original, and nothing sees them."""
        length, (num, most) = self.canvas.tokens.shape[1], index.shape
        assert self.model.mask_token_id is not None and most <= self.room
        visible = self._visible(rows, index, known).scatter(2, index[..., None], False)
        own = torch.eye(most, self.room, dtype=torch.bool, device=index.device).expand(num, -1, -1)
        slots = (length + torch.arange(most, device=index.device)).expand_as(index)
        return torch.full_like(index, self.model.mask_token_id), index, slots, torch.cat([visible, own], 2)

    def _count(self, batch: _Batch, names: list[int]) -> None:
        flops = [self.model.flops(q, k) for q, k in zip(batch.queries, batch.keys, strict=True)]
        count([self.tallies[names[row]] for row in batch.numbers], batch.kind, flops)

    def count_head(self, names: list[int], asked: list[int]) -> None:
        """Notes that the head was applied to so many positions of each of these texts."""
        vocab, width = self.model.head.weight.shape
        for name, reads in zip(names, asked, strict=True):
            self.tallies[name].flops += 2.0 * vocab * width * reads

    def mark_stale(self, written: Tensor) -> None:
        """Notes that positions (bool `[B, L]`) have changed, and with them the keys of all that can see them."""
        group = self.canvas.group
        low = torch.where(written, group, torch.iinfo(torch.int64).max).amin(1, keepdim=True)
        self.stale |= group >= low

    def set_temperatures(self, heats: list[float | None]) -> None:
        """Passes each row's temperature to models that read their own last prediction."""
        if hasattr(self.keys, "temperature") and None not in heats:
            self.keys.temperature = on_device(heats, self.canvas.tokens.device)  # type: ignore[union-attr]

    def keep(self, rows: Tensor) -> None:
        """Forgets all rows but these, and duplicates rows that are named twice, as the canvas has done already."""
        if self.keys is not None:
            self.keys.keep(rows)
        for name in ("known", "stale", "since", "front", "is_new"):
            setattr(self, name, getattr(self, name)[rows])
