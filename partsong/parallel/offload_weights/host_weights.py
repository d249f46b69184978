"""Keeps the weights of a model's blocks in the host's memory, and brings in each block while the one before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partsong.accelerator import is_on_host, memory_left, synchronize
from partsong.parallel.cuts.block_units import own_weights
from partsong.parallel.cuts.dry_blocks import DryBlocks
from partsong.parallel.hooks.kept_objects import allow_copies, refuse_copies, refuse_loads
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.hooks.replaced_method import Method, ReplacedMethods
from partsong.parallel.offload_weights.chunk_copies import ChunkCopies
from partsong.parallel.offload_weights.packed_block import PackedBlock, weights_that_stay
from partsong.parallel.protocols import Cut, Shards
from partsong.parallel.ranks.collectives import Pending
from partsong.parallel.ranks.mesh import HOST_LANE, Mesh
from partsong.parallel.ranks.pieces import WeightPiece

__all__ = ["HostWeights"]

#: Share of a device's memory that weights may take of what a call has left.
_USED = 0.5


class HostWeights(Shards):
    """Offloads the weights of blocks, each of which is copied to the device while the block before it runs.

    The weights of a block are views of one of two rooms on the device, which the blocks use in turn, in the order of
    their calls. The rooms are there as long as the plan, so no memory is allocated in a step, and what was read from a
    room by the compute stream is read before the copy stream writes there: each waits for an event of the other.

    Args:
        module: the model.
        units: its blocks.
        mesh: the ranks, each of which keeps all weights.
        share: of the bytes of each block that stay on the device, from 0 to 1; None begins with none of them, and once
            a call has been made lets as many stay as half of what it has left of the device's memory.
        chunk_bytes: bytes of a chunk.

    Attributes:
        resident: bytes of blocks' weights that stay on the device.
        copied: bytes copied to the device in the current call.

    Raises:
        UnsupportedError: a block has weights that are not plain tensors.
    """

    axes = ()
    holds = "its blocks' weights in the host's memory"

    def __init__(
        self, module: nn.Module, units: Sequence[nn.Module], mesh: Mesh, *, share: float | None, chunk_bytes: int
    ) -> None:
        self.module, self.axis, self.device, self._mesh = module, mesh.axis(), mesh.device, mesh
        owned = own_weights(module, units, by="OffloadWeights", how="offloaded in one piece")
        staying = {weight for own in owned.values() for weight in weights_that_stay(own, share or 0.0)}
        self._is_open = share is None
        self.resident, self._staying = sum(w.nbytes for w in staying), [(weight, weight.device) for weight in staying]
        # Only what fills its memory can be copied in one piece.
        leaving = {
            unit: [w for w in own if w not in staying and w.nbytes and _is_dense(w)] for unit, own in owned.items()
        }
        pinned = not is_on_host(self.device)
        self.blocks = [
            PackedBlock(unit, weights, chunk_bytes=chunk_bytes, pinned=pinned)
            for unit, weights in leaving.items()
            if weights
        ]
        self._order, self._called = list(range(len(self.blocks))), list[int]()
        self._rooms, self._free = list[Tensor](), list[torch.Event | None]([None, None])
        self._holds: dict[int, int] = {}
        self._chunks: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._methods = ReplacedMethods()
        sizes = [block.size for block in self.blocks]
        self.dry = DryBlocks([block.unit for block in self.blocks], sizes, self._post, unpacks=False)

    def attach(self, hooks: HookSet) -> None:
        """Moves the weights to the host, with hooks on the blocks that bring them in."""
        if self.axis.dry:
            self.dry.attach(hooks)
            return
        hooks.on_remove(self._take_off)
        self.copies = ChunkCopies(self.device)
        hooks.on_remove(self._mesh.traffic.watch(self.copies.note))
        self._put_on()
        for place, block in enumerate(self.blocks):
            for removable in self._hooked(place, block):
                hooks.on_remove(removable.remove)

    def _hooked(self, place: int, block: PackedBlock) -> Iterator[Any]:
        unit = block.unit
        # Not hooks of the plan, which calls without its hooks would leave out: a block has its weights in any call.
        yield unit.register_forward_pre_hook(_uncompiled(self._enter, place))
        yield unit.register_forward_hook(_uncompiled(self._leave, place))
        for part in unit.modules():
            yield part.register_state_dict_post_hook(partial(_save, block))
        yield refuse_loads(unit, self.holds)
        self._methods.replace(unit, "_apply", partial(self._casting, block))
        refuse_copies(unit)

    def _put_on(self) -> None:
        with _values():
            for weight, _ in self._staying:
                weight.data = weight.data.to(self.device)
            self._make_rooms()
            for block in self.blocks:
                block.pack()
                self._place(block)

    def _make_rooms(self) -> None:
        """Makes two rooms, each for the largest of every second block."""
        sizes = [max((self.blocks[place].size for place in self._order[turn::2]), default=0) for turn in range(2)]
        if [room.nbytes for room in self._rooms] != sizes:
            self._rooms = [torch.zeros(size, dtype=torch.uint8, device=self.device) for size in sizes]

    def _place(self, block: PackedBlock) -> None:
        place = self.blocks.index(block)
        self._chunks[place] = block.place_in(self._rooms[self._turn(place)])

    def _turn(self, place: int) -> int:
        """Says in which of the two rooms a block is."""
        return self._order.index(place) % 2

    def _arrange(self) -> None:
        """Gives each block its room."""
        with _values():
            self._make_rooms()
            for block in self.blocks:
                self._place(block)

    def _casting(self, block: PackedBlock, method: Method) -> Method:
        """Lets a block's ``_apply`` cast the weights in the host's memory, and move the others only."""

        def apply(convert: Callable[[Tensor], Tensor], *more: Any) -> Any:
            away = {id(weight) for weight in block.weights}
            method(lambda tensor: tensor.data if id(tensor) in away else convert(tensor), *more)
            synchronize(self.device)
            if block.cast(convert):
                self._arrange()
            return block.unit

        return apply

    def _take_off(self) -> None:
        """Puts the weights back where they were."""
        self._methods.restore()
        self.copies.forget()
        synchronize(self.device)
        with _values():
            for block in self.blocks:
                allow_copies(block.unit)
                if block.is_packed:
                    block.restore()
            for weight, device in self._staying:
                weight.data = weight.data.to(device)
        self._rooms, self._chunks = [], {}

    def begin_forward(self, batch: int, cut: Cut | None) -> None:
        """Begins to copy the first block."""
        if self.axis.dry:
            self.dry.post(0)
            return
        self.copies.copied = 0
        self.copies.forget()
        if self._is_open and self._called:
            self._settle()
        if self._called != self._order and sorted(self._called) == sorted(self._order):
            self._order = self._called  # blocks are not called in the order of their lists
            self._arrange()
        self._called, self._holds = [], {}
        self._free = [self._event(), self._event()]  # whatever an earlier call, broken off, has left to compute
        if self._order:
            self._begin(self._order[0])

    def _settle(self) -> None:
        """Lets weights stay where the last call has left memory; the other half is for what follows, as decoding."""
        self._is_open = False
        share = min(1.0, memory_left(self.device) * _USED / max(1, self.spared()))
        synchronize(self.device)
        with _values():
            for block in self.blocks:
                self._staying += block.keep(weights_that_stay(block.weights, share), self.device)
        self.resident = sum(weight.nbytes for weight, _ in self._staying)
        self._arrange()

    def _event(self) -> torch.Event | None:
        """Marks what the device has been given to compute so far."""
        if is_on_host(self.device):
            return None
        event = torch.Event(self.device)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def _begin(self, place: int) -> None:
        turn = self._turn(place)
        self._holds[turn] = place
        self.copies.begin(place, self._chunks[place], self._free[turn])

    def _enter(self, place: int) -> None:
        """Waits for a block's weights, and begins to copy those of the next one."""
        if self._holds.get(self._turn(place)) != place:  # not the one that was expected
            self.copies.forget()
            self._holds.clear()
            self._begin(place)
        self.copies.finish()
        self._called.append(place)
        ahead = self._order.index(place) + 1
        if ahead < len(self._order) and self._order[ahead] not in self._holds.values():
            self._begin(self._order[ahead])

    def _leave(self, place: int) -> None:
        """Frees a block's room for the block after the next one."""
        self._free[self._turn(place)] = self._event()

    @property
    def copied(self) -> int:
        """Returns the bytes copied to the device in the current call."""
        return self.copies.copied

    @property
    def rooms(self) -> int:
        """Returns the bytes of the rooms on the device."""
        return sum(room.nbytes for room in self._rooms)

    def _post(self, place: int, room: Tensor) -> Any:
        """Begins a copy on a rank that need not exist."""
        network, rank = self.axis.network, self.axis.ranks[0]
        if network is None:
            return Pending("copy")
        return network.post({}, {rank: room.nbytes}, lane=HOST_LANE)

    def call_notes(self) -> int:
        """Returns 0: nothing is sent."""
        return 0

    def predict(self, notes: Any, batch: int, place: int, index: int) -> int:
        """Returns 0: nothing is sent."""
        return 0

    def spared(self) -> int:
        """Returns the bytes of the blocks' weights that are in the host's memory."""
        return sum(weight.nbytes for block in self.blocks for weight in block.weights)

    def piece_of(self, part: nn.Module, name: str) -> WeightPiece | None:
        """Returns None: a rank keeps whole weights."""
        return None

    def describe(self) -> str:
        """Says in words what is offloaded."""
        return f"the weights of {len(self.blocks)} blocks"

    def kept(self) -> str:
        """Says where the weights are, and how much is copied."""
        copied = sum(block.size for block in self.blocks)
        return (
            f"{self.describe()} in the host's memory, but for {self.resident:,} bytes; {copied:,} bytes are copied to "
            "the device in each call"
        )


def _uncompiled(act: Callable[[int], None], place: int) -> Any:
    """Makes a hook of a function of a block's place, which ``torch.compile`` leaves as it is."""

    def hook(*call: Any) -> None:
        act(place)

    return torch.compiler.disable(hook)


def _is_dense(weight: Tensor) -> bool:
    formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    dims = (None, 4, 5)
    return any(
        (dim is None or weight.ndim == dim) and weight.is_contiguous(memory_format=form)
        for form, dim in zip(formats, dims, strict=True)
    )


def _save(block: PackedBlock, part: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    """Saves the values of a layer's own weights, and not what is in their room just now."""
    places = {id(weight): place for place, weight in enumerate(block.weights)}
    for name, weight in part.named_parameters(recurse=False, remove_duplicate=False):
        if id(weight) in places and prefix + name in state:
            state[prefix + name] = block.value(places[id(weight)])


@contextmanager
def _values() -> Iterator[None]:
    """Lets tensors be made that can be written to in any mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield
