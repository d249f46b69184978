"""Holds the texts of a batch while they are decoded, and where each of them is at work."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partsong.samplers.text.model import TextAdapter

__all__ = ["Canvas", "Grid", "Work", "open_canvas"]

#: Above every block number: the block of a position that belongs to no text.
_NOWHERE = torch.iinfo(torch.int64).max


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Says how a text is cut into blocks, and how many of them are at work at once.

    Attributes:
        block_size: positions of a block.
        origin: where the first block begins: at the first token of the "sequence", or after the "prompt".
        open_blocks: blocks at work at once. With more than one, a block joins as soon as the one before it has
            decided `open_at` of its positions (D2F, arXiv 2508.09192; d3LLM's multi-block decoding).
        open_at: a fraction.
    """

    block_size: int
    origin: str = "prompt"
    open_blocks: int = 1
    open_at: float = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Says where the rows of a canvas are at work in a step.

    Attributes:
        front: int64 `[B]`, the first block with something pending; the largest integer where nothing is.
        places: bool `[B, L]`, positions of the blocks at work.
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
        pending: bool `[B, L]`, what keeps a block at work: the undecided, and with rules that revise whatever they
            may still change.
        free: bool `[B, L]`, what the decoder may write: neither prompt nor given.
        length: int64 `[B]`.
        prompt: int64 `[B]`, tokens of the prompt.
        block: int64 `[B, L]`, the block of each position; below 0 in the prompt, where the grid begins after it.
        group: int64 `[B, L]`, a token sees those of its own and of lower groups.
        rows: int64 `[B]`, the row of the batch that was asked for.
        decided_at: int64 `[B, L]`, the step in which a position got its token; -1 for what was given.
        grid: how it is cut.
        layered: there is more than one group, so lower groups do not depend on what comes after them.
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
    decided_at: Tensor
    grid: Grid
    layered: bool

    @property
    def inside(self) -> Tensor:
        """Marks the positions that belong to a text, bool `[B, L]`."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.length[:, None]

    def work(self) -> Work:
        """Returns where each row is at work. It costs a few passes, so ask once a step."""
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
        """Returns the last block at work `[B]`."""
        last = front
        for _ in range(self.grid.open_blocks - 1):
            mine = (self.block == last[:, None]) & self.free & inside
            done = (mine & ~self.undecided).sum(1)
            last = torch.where((last < _NOWHERE) & (done >= self.grid.open_at * mine.sum(1)), last + 1, last)
        return last

    def keep(self, rows: Tensor) -> None:
        """Forgets all rows but these."""
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), Tensor):
                setattr(self, field.name, value[rows])


def open_canvas(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int | None]],
    *,
    grid: Grid,
    adapter: TextAdapter,
    filler: int,
    device: torch.device,
) -> Canvas:
    """Lays out prompts and the places for their answers.

    Args:
        prompts: token ids of each row; None never occurs in them, a position to fill is part of the answer.
        answers: per row and position, a token that is given or None for one to decide.
        grid: how to cut the texts.
        adapter: who sees whom.
        filler: what stands where nothing is decided.
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
    length, prompt = (torch.tensor(x, dtype=torch.int64) for x in (lengths, [len(p) for p in prompts]))
    places = torch.arange(tokens.shape[1])
    start = torch.zeros_like(prompt) if grid.origin == "sequence" else prompt
    block = (places - start[:, None]).div(grid.block_size, rounding_mode="floor")
    return Canvas(
        tokens=tokens.to(device),
        undecided=undecided.to(device),
        pending=undecided.clone().to(device),
        free=undecided.clone().to(device),
        length=length.to(device),
        prompt=prompt.to(device),
        block=block.to(device),
        group=_groups(places.expand_as(tokens), prompt, adapter).to(device),
        rows=torch.arange(rows, device=device),
        decided_at=torch.full(tokens.shape, -1, dtype=torch.int64, device=device),
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
    # What lies before the first block is cut like what follows, counted back from it.
    return (places - start).div(adapter.block_size, rounding_mode="floor")
