"""Runs one forward of the model for each block of a slot, in lockstep, and exchanges their keys in every attention.

Every forward has the shape of its own block, so its bits do not depend on who else is in flight on this rank. Each runs
in a thread of its own, which pauses in every attention with the block's keys (see `PausedThread`). When all have come
to that attention, and the keys of other ranks have arrived, each goes on with the keys that it sees. The keys of one
block travel while the next block of the rank is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partsong.errors import UnsupportedError
from partsong.parallel.ranks.collectives import Pending, exchange
from partsong.parallel.ranks.mesh import Axis
from partsong.samplers.cascade_pipeline.clean_keys import CleanKeys
from partsong.samplers.cascade_pipeline.frames import CascadeFrames
from partsong.samplers.cascade_pipeline.slots import Slot
from partsong.samplers.long_video.staged_frames import KeysAround
from partsong.samplers.pipeline.paused_thread import PausedThread, Returned

__all__ = ["JointForwards"]


@dataclass(frozen=True, slots=True)
class _Keys:
    """Holds what a forward pauses with: the keys and values `[2, B, H, L, D]` of its block in one attention."""

    layer: int
    pair: Tensor


@dataclass(slots=True)
class _Forward:
    """Holds the forward of one block: its thread, what of the model's hooks belongs to it, and where it has come to.

    Attributes:
        around: the keys that it goes on with.
        event: the keys with which it pauses, or its end.
    """

    thread: PausedThread
    state: dict[str, Any]
    around: KeysAround | None = None
    event: _Keys | Returned | None = None


class JointForwards:
    """Runs the forwards of this rank's blocks beside those of other ranks.

    Args:
        axis: the ranks.
        stage: the model.
        keys: takes in clean keys.
        device: on which the model computes.

    Attributes:
        forward_bytes: of the keys and values of one block in a whole forward; 0 before the first.
    """

    def __init__(self, axis: Axis, stage: CascadeFrames, keys: CleanKeys, device: torch.device) -> None:
        self.axis, self.stage, self.keys, self.device = axis, stage, keys, device
        self.forward_bytes = 0
        self._running: PausedThread | None = None

    def around(self, layer: int, k: Tensor, v: Tensor) -> KeysAround:
        """Pauses the running forward with its keys, until it gets those around it; in the forward's thread."""
        assert self._running is not None
        around: KeysAround = self._running.pause(_Keys(layer, torch.stack((k, v))))
        return around

    def run(self, slot: Slot, branch: int, calls: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
        """Makes one call of the model for every block of this rank.

        Args:
            slot: the blocks in flight.
            branch: number of the call within the step.
            calls: for each of this rank's blocks, oldest first, what calls the model.

        Returns:
            What each call returned.
        """
        if not calls:
            self._sit_out(slot)
            return {}
        threads = {block: PausedThread(call, self.device, "partsong-forward") for block, call in calls.items()}
        forwards = {block: _Forward(thread, self.stage.state()) for block, thread in threads.items()}
        attentions = moved = 0
        try:
            while met := self._meet(slot, forwards):
                attentions, moved = attentions + 1, moved + next(iter(met.values())).nbytes
                layer = next(each.event.layer for each in forwards.values() if isinstance(each.event, _Keys))
                self._distribute(slot, (layer, branch), met, forwards)
        finally:
            for thread in threads.values():
                thread.close()
        self._check(attentions)
        self.forward_bytes = moved
        return {block: each.event.value for block, each in forwards.items() if isinstance(each.event, Returned)}

    def _meet(self, slot: Slot, forwards: Mapping[int, _Forward]) -> dict[int, Tensor]:
        """Lets each forward run to its next attention, and returns the keys of all blocks there; none at the end."""
        met: dict[int, Tensor] = {}
        pending: list[Pending] = []
        own = slot.of(self.axis.index)
        for turn in range(slot.turns):
            if turn < len(own):
                each = forwards[own[turn]]
                self._advance(each)
                if isinstance(each.event, _Keys):
                    met[own[turn]] = each.event.pair
            if met:
                pending.append(self._post(slot, turn, own, met))
        for messages in pending:
            messages.wait()
        return met

    def _advance(self, forward: _Forward) -> None:
        self.stage.resume(forward.state)
        self._running = forward.thread
        forward.event = forward.thread.send(forward.around)
        forward.state = self.stage.state()

    def _post(self, slot: Slot, turn: int, own: list[int], met: dict[int, Tensor]) -> Pending:
        """Posts the keys of this rank's block of a turn, and makes room for those of the others."""
        peers = [rank for rank in slot.working if rank != self.axis.index]
        like = next(iter(met.values()))
        sends = dict.fromkeys(peers, met[own[turn]]) if turn < len(own) else {}
        recvs: dict[int, Tensor] = {}
        for peer in peers:
            if turn < len(theirs := slot.of(peer)):
                recvs[peer] = met[theirs[turn]] = torch.empty_like(like)
        return exchange(self.axis, sends, recvs, name="keys of blocks")

    def _distribute(
        self, slot: Slot, place: tuple[int, int], met: Mapping[int, Tensor], forwards: Mapping[int, _Forward]
    ) -> None:
        """Gives each forward the keys that it sees."""
        present = {block: (met[block][0], met[block][1]) for block in slot.steps if block != slot.clean}
        if slot.clean is not None:
            self.keys.take_in(place, slot.clean, *met[slot.clean])
        for block, each in forwards.items():
            each.around = self.keys.around(place, block, {} if block == slot.clean else present)
        if slot.clean is not None:
            self.keys.drop_old(place)

    def _sit_out(self, slot: Slot) -> None:
        """Counts the exchanges of the others, so that later ones match."""
        for _ in range(slot.turns * len(self.stage.layers)):
            exchange(self.axis, {}, {}, name="keys of blocks")

    def _check(self, attentions: int) -> None:
        if attentions != len(self.stage.layers):
            raise UnsupportedError(
                f"{self.stage.adapter.model}: a call made {attentions} attentions, and the model has "
                f"{len(self.stage.layers)}; blocks in flight meet in each one once, so use TimestepPipeline"
            )
