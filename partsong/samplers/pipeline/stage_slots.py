"""Passes work through a pipeline of stages, one per rank, slot by slot.

In every slot each stage works on one item and one exchange moves the results, so all ranks make the same sequence of
exchanges: no message can overtake or block another, on any backend.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from partsong.parallel.cuts.staged_blocks import PartLayout
from partsong.parallel.ranks.collectives import Pending, exchange
from partsong.parallel.ranks.mesh import Axis

__all__ = ["StageItem", "StageSlots"]


@dataclass(frozen=True, slots=True)
class StageItem:
    """Holds one call of the denoiser on its way through all stages.

    Attributes:
        arguments: of the call, by name.
        layout: of that call.
        part: the patch that is worked on; None is the whole input.
    """

    arguments: Mapping[str, Any]
    layout: PartLayout
    part: int | None

    def empty_input(self, stage: int) -> Tensor:
        """Allocates room for the input of a stage."""
        return self.layout.empty_input(self.part, stage)

    def empty_output(self) -> Tensor:
        """Allocates room for the output of the last stage."""
        return self.layout.empty_output(self.part)


Item = TypeVar("Item", bound=StageItem)


class StageSlots(Generic[Item]):
    """Holds the items in the pipeline and the pending messages.

    An item enters in slot t. Stage s works on it in slot ``t + lead * s``, and its result is on every rank
    ``lead * size`` slots after it entered.

    Args:
        axis: the ranks; their order is that of the stages.
        lead: slots between one stage and the next. With 2 a message travels while the next item is computed.
        work: computes this rank's stage on an item, given the message of the previous stage (None in the first).
        name: of the exchange, for errors.

    Attributes:
        slot: the current slot.
        items: those in the pipeline, by the slot they entered in.
    """

    def __init__(self, axis: Axis, lead: int, work: Callable[[Item, Tensor | None], Tensor], name: str) -> None:
        self.axis, self.lead, self.name = axis, lead, name
        self.slot, self.items = 0, dict[int, Item]()
        self._work = work
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._pending: deque[Pending] = deque()

    def wait(self) -> None:
        """Waits for the messages that this slot reads."""
        if self.slot >= self.lead:
            self._pending.popleft().wait()

    def take(self, slot: int) -> tuple[Item, Tensor] | None:
        """Removes the item that entered in a slot, with its result; None where none entered."""
        item = self.items.pop(slot, None)
        return None if item is None else (item, self._outputs.pop(slot))

    def run(self) -> None:
        """Works on the item whose turn it is on this rank, exchanges the results, and goes on to the next slot."""
        size, index, lead, slot = self.axis.size, self.axis.index, self.lead, self.slot
        mine, before, last = slot - lead * index, slot - lead * (index - 1), slot - lead * (size - 1)
        is_last = index == size - 1
        sends: dict[int, Tensor] = {}
        recvs: dict[int, Tensor] = {}
        if (item := self.items.get(mine)) is not None:
            result = self._work(item, self._inputs.pop(mine, None))
            if is_last:
                self._outputs[mine] = result
            sends = dict.fromkeys(range(size - 1) if is_last else (index + 1,), result)
        if index > 0 and (item := self.items.get(before)) is not None:
            recvs[index - 1] = self._inputs[before] = item.empty_input(index)
        if not is_last and (item := self.items.get(last)) is not None:
            recvs[size - 1] = self._outputs[last] = item.empty_output()
        self._pending.append(exchange(self.axis, sends, recvs, name=self.name))
        self.slot += 1
