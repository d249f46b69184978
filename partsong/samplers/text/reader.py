"""Runs the model for the active positions: decides what to compute, what to keep, and who sees whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from partsong.samplers.text.caches import NoCache, TextCache
from partsong.samplers.text.canvas import Canvas, Work
from partsong.samplers.text.model import KeyStore, MixingTextModel, TextModel
from partsong.samplers.text.tally import Tally, count

__all__ = ["Reader", "pick"]


def pick(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the set positions of each row, in order: indices `[B, K]`, and which of them are real."""
    most = max(int(mask.sum(1).max()), 1)
    index = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    return index, mask.gather(1, index)


@dataclass(slots=True, eq=False)
class _Batch:
    """Holds some rows of the canvas in one forward."""

    rows: Tensor
    compute: Tensor
    kind: str
    clean: bool = False


class Reader:
    """Computes the hidden states of the active positions, with a model and a policy of what to keep.

    It reads the canvas anew in every step. There is one tally for each row of the original batch, and a row has
    `shadows` places for masked copies of decided positions.
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

    def read(
        self, step: int, work: Work, index: Tensor, real: Tensor, shadow: Tensor | None
    ) -> tuple[Tensor, Tensor | None, list]:
        """Returns the hidden states that the distributions of some positions are read from.

        Args:
            step: number of the step.
            work: the active positions of the rows.
            index: int64 `[B, K]`, positions within the texts.
            real: bool `[B, K]`.
            shadow: bool `[B, K]`, positions that are also read while masked themselves, or None.

        Returns:
            Hidden states `[B, K, C]`, those of the shadows or None, and the kind of forward of each row.
        """
        at = (index - int(self.model.adapter.shifted)).clamp(min=0)
        kinds = ["denoise"] * len(index)
        parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
        for batch in self._batches(step, work, at, real):
            hidden, place, twins = self._forward(batch, at, None if batch.clean else shadow)
            self.known[batch.rows] |= batch.compute
            self.stale[batch.rows] &= ~batch.compute
            if batch.clean and self.model.adapter.noise == "uniform":
                continue
            here = place.gather(1, at[batch.rows])[..., None].expand(-1, -1, hidden.shape[2])
            parts.append((batch.rows, hidden.gather(1, here), twins))
            for row in batch.rows.tolist():
                kinds[row] = batch.kind
        rows = torch.cat([rows for rows, *_ in parts]).argsort()
        hidden = torch.cat([hidden for _, hidden, _ in parts])[rows]
        twins = None if shadow is None else torch.cat([twins for *_, twins in parts if twins is not None])[rows]
        return hidden, twins, kinds

    def _batches(self, step: int, work: Work, at: Tensor, real: Tensor) -> list[_Batch]:
        """Decides what has to be computed; rows that compute everything get a separate batch."""
        canvas, adapter = self.canvas, self.model.adapter
        visible = canvas.inside & (canvas.group <= work.high[:, None])
        if adapter.noise == "none":
            visible = visible & ~canvas.undecided
        front, layered = work.front, canvas.layered
        every = self.cache.refresh_every
        whole = self.is_new | ((self.since >= every) if every is not None else torch.zeros_like(self.is_new))
        if self.cache.refresh_blocks and not layered:
            whole = whole | (front != self.front)
        if self.keys is None:
            whole = torch.ones_like(whole)
        lower = (canvas.group < work.low[:, None]) & self.stale
        to_read = torch.zeros_like(visible).scatter_(1, at, real)
        compute = visible & torch.where(whole[:, None], True, self.cache.fresh(canvas, work, step) | lower)
        compute = compute | to_read
        names = ["prefill" if new else "refresh" for new in self.is_new.tolist()]
        self.since = torch.where(whole, 1, self.since + 1)
        self.front, self.is_new = front, torch.zeros_like(self.is_new)
        if adapter.noise == "uniform":
            return self._split_finished(compute, canvas.group < work.low[:, None], names)
        if self.keys is None:
            return [_Batch(torch.arange(len(whole), device=whole.device), compute, "denoise")]
        kinds = [name if is_whole else "denoise" for name, is_whole in zip(names, whole.tolist(), strict=True)]
        batches = []
        for kind in ("prefill", "refresh", "denoise"):
            mine = torch.tensor([k == kind for k in kinds], device=whole.device)
            batches.append(_Batch(mine.nonzero().flatten(), compute[mine], kind, adapter.noise == "none"))
        return [batch for batch in batches if len(batch.rows)]

    def _split_finished(self, compute: Tensor, lower: Tensor, names: list[str]) -> list[_Batch]:
        """Puts finished text into a forward of its own, for models that encode it differently."""
        batches = []
        stored = compute & lower & self.stale
        for name, kind in (("prefill", "prefill"), ("refresh", "store")):
            mine = torch.tensor([n == name for n in names], device=lower.device) & stored.any(1)
            if mine.any():
                batches.append(_Batch(mine.nonzero().flatten(), stored[mine], kind, clean=True))
        everyone = torch.arange(len(compute), device=compute.device)
        return [*batches, _Batch(everyone, compute & ~lower, "denoise")]

    def _forward(self, batch: _Batch, at: Tensor, shadow: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Calls the model once: hidden states, the query of every position, and the shadows' hidden states."""
        canvas, rows, length = self.canvas, batch.rows, self.canvas.tokens.shape[1]
        index, there = pick(batch.compute)
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
            mine = pick(shadow[rows])
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
        self._count(batch, known)
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

    def _count(self, batch: _Batch, known: Tensor) -> None:
        queries, keys = batch.compute.sum(1).tolist(), known.sum(1).tolist()
        flops = [self.model.flops(q, k) for q, k in zip(queries, keys, strict=True)]
        count([self.tallies[name] for name in self.canvas.rows[batch.rows].tolist()], batch.kind, flops)

    def count_head(self, rows: Tensor, real: Tensor) -> None:
        """Notes that the head was applied to some positions, bool `[B, K]`, of the texts in some rows, int64 `[B]`."""
        vocab, width = self.model.head.weight.shape
        for name, reads in zip(rows.tolist(), real.sum(1).tolist(), strict=True):
            self.tallies[name].flops += 2.0 * vocab * width * reads

    def mark_stale(self, written: Tensor) -> None:
        """Notes that positions (bool `[B, L]`) have changed, and with them the keys of all that can see them."""
        group = self.canvas.group
        low = torch.where(written, group, torch.iinfo(torch.int64).max).amin(1, keepdim=True)
        self.stale |= group >= low

    def set_temperatures(self, heats: list[float | None]) -> None:
        """Passes each row's temperature to models that read their own last prediction."""
        if hasattr(self.keys, "temperature") and None not in heats:
            self.keys.temperature = torch.tensor(heats, device=self.canvas.tokens.device)  # type: ignore[union-attr]

    def keep(self, rows: Tensor) -> None:
        """Forgets all rows but these, and duplicates rows that are named twice, as the canvas has done already."""
        if self.keys is not None:
            self.keys.keep(rows)
        for name in ("known", "stale", "since", "front", "is_new"):
            setattr(self, name, getattr(self, name)[rows])
