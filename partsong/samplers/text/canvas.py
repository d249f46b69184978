"""Holds the texts of a batch while they are decoded, and the active positions of each.

A GPU's host waits where it asks for a number. So the loop computes on the device what it has to know of a step, and
brings it over once (`read_rows`); with these numbers shapes are known, and marked positions are found without asking.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partsong.samplers.text.model import TextAdapter
from partsong.samplers.text.rule import Change, Choice, View

__all__ = ["Canvas", "Grid", "RowNumbers", "Work", "open_canvas", "pick", "places_of", "read_rows"]

#: Block number of positions that belong to no text, above all others.
_NOWHERE = torch.iinfo(torch.int64).max

#: Numbers on the host by what they count, each a list with one number for each row.
RowNumbers = dict[str, list[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Says how a text is cut into blocks, and how many are active at once.

    Attributes:
        block_size: positions of a block.
        origin: where the first block begins: at the first token of the "sequence", or after the "prompt".
        open_blocks: active blocks at a time. With more than one, a block joins as soon as the one before it has
            decided `open_at` of its positions (D2F, arXiv 2508.09192; d3LLM's multi-block decoding).
        open_at: a fraction.
    """

    block_size: int
    origin: str = "prompt"
    open_blocks: int = 1
    open_at: float = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Holds the active positions of a canvas in a step.

    Attributes:
        front: int64 `[B]`, the first block with something pending; the largest integer where nothing is.
        places: bool `[B, L]`, positions of the active blocks.
        low: int64 `[B]`, the lowest group among them.
        high: int64 `[B]`, the highest.
    """

    front: Tensor
    places: Tensor
    low: Tensor
    high: Tensor


@dataclass(slots=True, eq=False)
class Canvas:
    """Holds the state of B texts of at most L positions; row b uses the first ``length[b]``.

    Attributes:
        tokens: int64 `[B, L]`; an undecided position holds what the model is fed there.
        undecided: bool `[B, L]`.
        pending: bool `[B, L]`, what keeps a block active: undecided positions and, with rules that revise, those that
            may still change.
        free: bool `[B, L]`, what the decoder may write: neither prompt nor given.
        length: int64 `[B]`.
        prompt: int64 `[B]`, tokens of the prompt.
        block: int64 `[B, L]`, the block of each position; below 0 in the prompt, where the grid begins after it.
        group: int64 `[B, L]`, a token sees those of its own and of lower groups.
        rows: int64 `[B]`, the row of the original batch.
        step: int64 `[B]`, steps a text has made.
        decided_at: int64 `[B, L]`, the step in which a position got its token; -1 for what was given.
        decided_by: int64 `[B, L]`, the number in `tally.KINDS` of the forward that decided a position.
        front: int64 `[B]`, the first active block; -1 before the first step.
        block_step: int64 `[B]`, steps since that block began.
        block_total: int64 `[B]`, undecided positions when it began.
        grid: how it is cut.
        layered: there is more than one group, so lower groups do not depend on what comes after them.
        mask_share: `[B, L]`, how much of the mask's embedding is read in place of the token's; None where rules do not
            mix.
    """

    tokens: Tensor
    undecided: Tensor
    pending: Tensor
    free: Tensor
    length: Tensor
    prompt: Tensor
    block: Tensor
    group: Tensor
    rows: Tensor
    step: Tensor
    decided_at: Tensor
    decided_by: Tensor
    front: Tensor
    block_step: Tensor
    block_total: Tensor
    grid: Grid
    layered: bool
    mask_share: Tensor | None = None

    @property
    def inside(self) -> Tensor:
        """Marks the positions that belong to a text, bool `[B, L]`."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.length[:, None]

    def work(self) -> Work:
        """Returns the active positions of each row. It costs a few passes, so call it once a step."""
        inside = self.inside
        front = torch.where(self.pending, self.block, _NOWHERE).amin(1)
        until = self._open_until(front, inside) if self.grid.open_blocks > 1 else front
        places = (self.block >= front[:, None]) & (self.block <= until[:, None]) & inside
        return Work(
            front=front,
            places=places,
            low=torch.where(places, self.group, _NOWHERE).amin(1),
            high=torch.where(places, self.group, -_NOWHERE).amax(1),
        )

    def _open_until(self, front: Tensor, inside: Tensor) -> Tensor:
        """Returns the last active block `[B]`."""
        last = front
        for _ in range(self.grid.open_blocks - 1):
            mine = (self.block == last[:, None]) & self.free & inside
            done = (mine & ~self.undecided).sum(1)
            last = torch.where((last < _NOWHERE) & (done >= self.grid.open_at * mine.sum(1)), last + 1, last)
        return last

    def begin(self, front: Tensor) -> None:
        """Notes for each row whether a new block is the first active one, `[B]`."""
        moved = front != self.front
        total = (self.undecided & (self.block == front[:, None])).sum(1)
        self.block_step = torch.where(moved, 0, self.block_step)
        self.block_total = torch.where(moved, total, self.block_total)
        self.front = front

    def write(self, view: View, choice: Choice, filler: int | None) -> Tensor:
        """Writes what a rule chose, which ends a step, and returns the positions that it touched: bool `[B, L]`.

        Args:
            view: what the rule saw.
            choice: what it chose.
            filler: the token at undecided positions; None leaves what the rule wrote there.
        """
        change = Change.of(view, choice)
        token = torch.where(choice.write, choice.token, view.current)
        if filler is not None:
            token = torch.where(choice.undecided, filler, token)
        decided = torch.where(change.new | change.other, self.step[:, None], self.decided_at.gather(1, view.index))
        for target, values in (
            (self.tokens, token),
            (self.undecided, choice.undecided),
            (self.pending, choice.pending),
            (self.decided_at, decided),
        ):
            _put(target, view.index, view.real, values)
        self.step = self.step + 1
        self.block_step = self.block_step + 1
        places = torch.zeros_like(self.undecided)
        _put(places, view.index, view.real, choice.write | change.edits)
        if self.mask_share is not None and choice.mask_share is not None:
            before = self.mask_share.clone()
            _put(self.mask_share, view.index, view.real, choice.mask_share)
            places |= self.mask_share != before
        return places

    def end(self, stops: Tensor, settled: bool) -> None:
        """Ends texts at their first stop token.

        Args:
            stops: int64, the stop tokens.
            settled: whether a stop token counts only when nothing before it is pending.
        """
        if not len(stops):
            return
        here = torch.isin(self.tokens, stops) & self.free & ~self.undecided & self.inside
        if settled:
            here = here & (self.pending.cumsum(1) == 0)
        places = torch.arange(here.shape[1], device=here.device)
        first = torch.where(here, places, _NOWHERE).amin(1)
        # Given tokens after it must still be reached.
        given = self.inside & ~self.free
        first = torch.where((given & (places > first[:, None])).any(1), _NOWHERE, first)
        self.length = self.length.minimum(torch.where(first < _NOWHERE, first + 1, self.length))
        self.undecided = self.undecided & self.inside
        self.pending = self.pending & self.inside

    def cut(self, rows: Tensor) -> None:
        """Ends the texts of some rows, bool `[B]`, before their first undecided position."""
        first = torch.where(
            self.undecided & self.inside, torch.arange(self.tokens.shape[1], device=rows.device), _NOWHERE
        )
        self.length = torch.where(rows, self.length.minimum(first.amin(1)), self.length)
        self.undecided = self.undecided & self.inside
        self.pending = self.pending & self.inside & ~rows[:, None]

    def keep(self, rows: Tensor) -> None:
        """Forgets all rows but these, int64 `[n]`; a row named twice is held twice."""
        for name in self._tensors():
            setattr(self, name, getattr(self, name)[rows])

    def equals(self, rows: Tensor, other: Canvas, those: Tensor) -> Tensor:
        """Says which rows, int64 `[n]`, hold the same text as those of another canvas of the same shape: bool `[n]`."""
        same = self.length[rows] == other.length[those]
        for name in ("tokens", "undecided", "pending"):
            same = same & (getattr(self, name)[rows] == getattr(other, name)[those]).all(1)
        return same

    def copy(self) -> Canvas:
        """Returns a canvas of its own with the same texts."""
        return dataclasses.replace(self, **{name: getattr(self, name).clone() for name in self._tensors()})

    @staticmethod
    def join(canvases: Sequence[Canvas]) -> Canvas:
        """Returns one canvas with the rows of several of one grid and length, in order."""
        first = canvases[0]
        rows = {name: torch.cat([getattr(canvas, name) for canvas in canvases]) for name in first._tensors()}
        return dataclasses.replace(first, **rows)

    def _tensors(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self) if isinstance(getattr(self, field.name), Tensor)]


def _put(target: Tensor, index: Tensor, real: Tensor, values: Tensor) -> None:
    """Writes values `[B, K]` at the real ones of some positions, which are all different within a row."""
    target.scatter_(1, index, torch.where(real, values.to(target.dtype), target.gather(1, index)))


def open_canvas(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int | None]],
    *,
    grid: Grid,
    adapter: TextAdapter,
    filler: int,
    device: torch.device,
) -> Canvas:
    """Makes a canvas of prompts and positions for their answers.

    Args:
        prompts: token ids of each row; None never occurs in them, a position to fill is part of the answer.
        answers: per row and position, a token that is given or None for one to decide.
        grid: how to cut the texts.
        adapter: who sees whom.
        filler: the token at undecided positions.
        device: where the tensors go.
    """
    rows = len(prompts)
    lengths = [len(p) + len(a) for p, a in zip(prompts, answers, strict=True)]
    tokens = torch.full((rows, max(lengths)), filler, dtype=torch.int64)
    undecided = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        whole = [*prompt, *(filler if token is None else token for token in answer)]
        tokens[row, : len(whole)] = torch.tensor(whole, dtype=torch.int64)
        undecided[row, : len(whole)] = torch.tensor([False] * len(prompt) + [token is None for token in answer])
    tokens, undecided = tokens.to(device), undecided.to(device)
    length, prompt = (torch.tensor(x, device=device) for x in (lengths, [len(p) for p in prompts]))
    places, zeros = torch.arange(tokens.shape[1], device=device), torch.zeros_like(length)
    start = zeros if grid.origin == "sequence" else prompt
    return Canvas(
        tokens=tokens,
        undecided=undecided,
        pending=undecided.clone(),
        free=undecided.clone(),
        length=length,
        prompt=prompt,
        block=(places - start[:, None]).div(grid.block_size, rounding_mode="floor"),
        group=_groups(places.expand_as(tokens), prompt, adapter),
        rows=torch.arange(rows, device=device),
        step=zeros,
        decided_at=torch.full_like(tokens, -1),
        decided_by=torch.zeros_like(tokens),
        front=torch.full_like(length, -1),
        block_step=zeros,
        block_total=zeros,
        grid=grid,
        layered=adapter.attention != "full",
    )


def _groups(places: Tensor, prompt: Tensor, adapter: TextAdapter) -> Tensor:
    if adapter.attention == "full":
        return torch.zeros_like(places)
    if adapter.attention == "causal":
        return places.clone()
    assert adapter.block_size is not None
    start = prompt[:, None] if adapter.block_origin == "prompt" else 0
    # Positions before the first block are cut like those after, counting backwards.
    return (places - start).div(adapter.block_size, rounding_mode="floor")


def pick(mask: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Returns the set positions of each row, in order.

    Args:
        mask: bool `[B, L]`.
        most: the most that any row has; 0 counts as 1.

    Returns:
        Indices `[B, most]`, all different within a row, and which of them are set.

    >>> pick(torch.tensor([[False, True, True]]), 2)[0].tolist()
    [[1, 2]]
    """
    index = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, : max(most, 1)]
    return index, mask.gather(1, index)


def places_of(mask: Tensor, count: int) -> Tensor:
    """Returns where a mask of any shape is set, int64 `[count]`, counted through its elements in order.

    Args:
        mask: bool.
        count: how many are set.

    >>> places_of(torch.tensor([[False, True], [True, False]]), 2).tolist()
    [1, 2]
    """
    if count == mask.numel():
        return torch.arange(count, device=mask.device)
    return (~mask).flatten().to(torch.uint8).argsort(stable=True)[:count]


def read_rows(columns: Mapping[str, Tensor]) -> RowNumbers:
    """Brings several numbers of each row to the host in one copy.

    Args:
        columns: by name, `[B]` each: bool, whole numbers, float32 or float64.

    Returns:
        The same names; bools as 0 and 1, the others to the last bit.

    >>> read_rows({"row": torch.tensor([4, 5]), "open": torch.tensor([True, False]), "nats": torch.tensor([0.5, 2.0])})
    {'row': [4, 5], 'open': [1, 0], 'nats': [0.5, 2.0]}
    """
    table = torch.stack([_as_words(column) for column in columns.values()]).tolist()
    return {
        name: _as_floats(words, column.element_size()) if column.is_floating_point() else words
        for (name, column), words in zip(columns.items(), table, strict=True)
    }


def _as_words(column: Tensor) -> Tensor:
    """Returns int64 numbers; those of floats have the same bits."""
    if not column.is_floating_point():
        return column.long()
    return column.view(torch.int64 if column.element_size() == 8 else torch.int32).long()


def _as_floats(words: list[int], size: int) -> list[float]:
    whole, broken = ("q", "d") if size == 8 else ("i", "f")
    count = len(words)
    return list(struct.unpack(f"{count}{broken}", struct.pack(f"{count}{whole}", *words)))
