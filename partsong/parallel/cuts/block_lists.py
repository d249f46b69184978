"""Lists the blocks of a transformer in order of execution, and what each passes on to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter
from partsong.parallel.adapters.row import IMAGE

__all__ = ["READ_FROM_OUTSIDE", "Block", "blocks_of", "chain_only", "chain_reason", "runs_reason"]

#: Models that use a layer of a block outside calls of that block -> the number of the block.
READ_FROM_OUTSIDE = {"DiTTransformer2DModel": 0}


@dataclass(frozen=True, slots=True)
class Block:
    """Describes one block.

    Attributes:
        name: path of the module.
        module: the block.
        names: arguments of which it returns new values, in order.
        is_last: whether it is the last of its list.
    """

    name: str
    module: nn.Module
    names: tuple[str, ...]
    is_last: bool

    @property
    def picture(self) -> int:
        """Returns which of the arguments holds the picture's tokens: ``hidden_states``, or else the first."""
        return self.names.index("hidden_states") if "hidden_states" in self.names else 0


def chain_reason(adapter: Adapter) -> str | None:
    """Says why a model's blocks are not a chain in which each takes the output of the one before; None if they are."""
    mixed = any(streams != (IMAGE,) for streams in adapter.attention.values())
    reasons = {
        "it works on rows of an image, not on tokens": adapter.rows,
        adapter.whole or "": adapter.whole is not None,
        "frames are a batch to it, not tokens of one sequence": bool(adapter.frames and adapter.frames.mixers),
        "no row says how its blocks follow each other": adapter.inferred,
        "blocks that attend within a frame take turns with blocks that attend along time": bool(adapter.factored),
        "a module between its first and its last block needs all tokens at once": adapter.gathers_inside,
        "its row does not say what its blocks return": mixed and not adapter.blocks,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def runs_reason(adapter: Adapter) -> str | None:
    """Says why ranks cannot have a run of a model's blocks each; None if they can."""
    reason = chain_reason(adapter)
    if reason is None and adapter.long_skips:
        reason = "long skip connections lead from its first blocks to its last, across runs"
    return reason


def chain_only(adapter: Adapter) -> Adapter:
    """Returns a row in which blocks with attention outside the chain get all tokens."""
    lists = {path.partition(".")[0] for path in adapter.attention}
    outside = lists.difference(adapter.blocks) if adapter.blocks else frozenset[str]()
    if not outside:
        return adapter

    def inside(entries: Mapping[str, Any]) -> Mapping[str, Any]:
        return {path: entry for path, entry in entries.items() if path.partition(".")[0] not in outside}

    splits, gather = inside(adapter.splits or {}), inside(adapter.gather or {})
    return replace(adapter, attention=inside(adapter.attention), splits=splits, gather=gather)


def blocks_of(module: nn.Module, adapter: Adapter) -> list[Block]:
    """Lists the blocks, first to last.

    Raises:
        UnsupportedError: the model has no such list.
    """
    # Where the row names no lists, those with self-attention over the picture are taken; they return one value.
    paths = (*adapter.attention, *adapter.linear_attention)
    lists = adapter.blocks or {path.partition(".")[0]: ("hidden_states",) for path in paths}
    blocks = []
    for name, names in lists.items():
        children = getattr(module, name, None)
        if not isinstance(children, nn.ModuleList):
            raise UnsupportedError(f"{adapter.model} has no list of blocks {name!r} here; use Ulysses")
        last = len(children) - 1
        blocks += [Block(f"{name}.{n}", block, names, n == last) for n, block in enumerate(children)]
    return blocks
