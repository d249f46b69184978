"""Puts torch's `fully_shard` on the blocks of a model, and takes it off again.

torch has no way to take it off, so `take_off` undoes private changes of torch. All code for that is in this file.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from partsong.errors import UnsupportedError
from partsong.parallel.cuts.block_units import refuse_packed
from partsong.parallel.hooks.kept_objects import allow_copies, refuse_copies, refuse_loads
from partsong.parallel.ranks.collectives import Pending, all_gather
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.pieces import WeightPiece
from partsong.parallel.ranks.stops import stopped_together

__all__ = ["TorchShards"]

logger = logging.getLogger(__name__)

#: Attributes that `fully_shard` leaves on its modules.
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


class TorchShards:
    """Shares out the weights of blocks, each of which is gathered when it is called.

    Args:
        module: the model.
        units: its blocks, inner ones before those that hold them.
        axis: the ranks.
        device: where blocks are gathered; shares move there.

    Attributes:
        sizes: bytes of a share of each block, with padding where shares do not divide.
        sent: bytes that this rank has sent for gathers of others; may be reset.

    Raises:
        UnsupportedError: a block has weights that are not plain tensors.
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module], axis: Axis, device: torch.device) -> None:
        self.module, self.axis, self.device, self.sent = module, axis, device, 0
        owned = _own_weights(units)
        refuse_packed(
            module, (weight for own in owned.values() for weight in own), by="ShardedWeights", how="shared out"
        )
        self.units: list[Any] = [*owned]
        self.sizes = [sum(_share_bytes(weight, axis.size) for weight in own) for own in owned.values()]
        shared = set().union(*owned.values())
        named = ((part, *each) for part in module.modules() for each in part.named_parameters(recurse=False))
        self._weights = [(part, name, weight) for part, name, weight in named if weight in shared]
        self._order: list[FSDPModule] = []
        self._watches: list[Any] = []
        self._guards: list[Any] = []
        self._placed: list[Any] = []
        self._is_freed = self._has_room = False

    def put_on(self) -> None:
        """Replaces the weights of every block by this rank's share."""
        mesh = DeviceMesh.from_group(self.axis.group, self.device.type)
        whole = set(self.module.parameters()).difference(weight for _, _, weight in self._weights)
        gather = _Gather(self)
        for unit in self.units:
            self._placed.append(unit)
            refuse_copies(unit)
            _put_on(unit, mesh, whole).set_custom_all_gather(gather)
            self._watches.append(unit.register_forward_pre_hook(self._note))
        # The root keeps its own weights, but blocks can be gathered ahead only below one root.
        self._placed.append(self.module)
        _put_on(self.module, mesh, whole)
        self._watches.append(self.module.register_forward_hook(self._gather_ahead))
        for part in dict.fromkeys(part for part, _, _ in self._weights):
            self._guards.append(part.register_state_dict_pre_hook(self._refuse_save))
            self._guards.append(refuse_loads(part))
        self._is_freed = True
        for _, _, weight in self._weights:
            weight.data = weight.data.new_empty(0)  # the object comes back; only its memory is freed

    def piece_of(self, part: nn.Module, name: str) -> WeightPiece | None:
        """Says which rows of a weight this rank holds; None where it holds all."""
        if not isinstance(weight := getattr(part, name), DTensor):
            return None
        most = _share_rows(weight, self.axis.size)
        return WeightPiece(0, ((min(self.axis.index * most, len(weight)), len(weight.to_local())),))

    def begin_forward(self) -> None:
        """Begins to gather the first block, once that is known."""
        if torch.is_inference_mode_enabled() and not self._has_room:
            # What torch allocates within inference mode could not be written to outside of it, when weights are made
            # whole again. It allocates each block once.
            with torch.inference_mode(False), torch.no_grad():
                for unit in self.units:
                    unit.unshard()
                    unit.reshard()
        self._has_room = True
        self.sent = 0
        self._follow_casts()
        if self._order:
            self._order[0].unshard(async_op=True)

    def _refuse_save(self, part: nn.Module, *named: Any) -> None:
        raise UnsupportedError(
            f"each rank has a share of the weights of this {type(self.module).__name__} under ShardedWeights, so they "
            "cannot be read or saved; call undo() on every rank first"
        )

    def _note(self, unit: Any, args: Any) -> None:
        """Remembers the order in which blocks are called; the check of an inferred row calls them twice."""
        if unit not in self._order:
            self._order.append(unit)

    def _gather_ahead(self, module: nn.Module, args: Any, output: Any) -> None:
        """Lets every block gather the one that was called after it, from the next call on."""
        self._stop_watching()
        for unit, after in zip(self._order, self._order[1:], strict=False):
            unit.set_modules_to_forward_prefetch([after])

    def _stop_watching(self) -> None:
        for watch in self._watches:
            watch.remove()
        self._watches.clear()

    def take_off(self, *, after_error: bool) -> None:
        """Puts the whole weights back into the blocks.

        Args:
            after_error: finds out first whether every rank has stopped here. If not, there is nobody to gather the
                weights from, and the model refuses further calls.
        """
        self._stop_watching()
        for guard in self._guards:
            guard.remove()
        is_lost = self._is_freed and not self._gather_all(after_error)
        now = [getattr(part, name) for part, name, _ in self._weights]
        for module in self._placed:
            _take_off(module)
        for unit in self.units:
            allow_copies(unit)
        for (part, name, weight), held in zip(self._weights, now, strict=True):
            if weight.is_meta:  # read in shares: there are no whole weights to restore
                setattr(part, name, nn.Parameter(held.data, requires_grad=weight.requires_grad))
                continue
            if self._is_freed:
                weight.data = weight.data.to(held.dtype) if is_lost else held.data
            setattr(part, name, weight)
        for part in self.module.modules():
            for mark in _MARKS:
                vars(part).pop(mark, None)
        self._placed.clear()
        if is_lost:
            self.module.register_forward_pre_hook(_refuse)
            logger.warning(
                "the weights of %s were shared out when a call failed: load it again", type(self.module).__name__
            )

    def _gather_all(self, after_error: bool) -> bool:
        """Gathers the weights of every block, and says whether it could."""
        if after_error:
            is_read = not any(getattr(part, name).is_meta for part, name, _ in self._weights)
            if not stopped_together(self.axis, ready=is_read):
                return False
        self._follow_casts()
        for unit in self.units:
            unit.unshard()
        return True

    def _follow_casts(self) -> None:
        """Drops the room for whole weights where the shares were cast or moved: torch keeps it from the first call."""
        for group in (group for unit in self.units for group in _groups(fully_shard.state(unit))):
            for weight in group.fsdp_params:
                room, share = weight.all_gather_outputs[:1], weight.sharded_param
                if room and (room[0].dtype, room[0].device) != (share.dtype, share.device):
                    weight.all_gather_outputs = []
                    del weight._unsharded_param
                    # Of the group before torch 2.15, since then of each weight.
                    holder = weight if hasattr(weight, "mp_policy") else group
                    weight.init_dtype_attrs(holder.mp_policy)


class _Gather:
    """Gathers the weights of a block with the messages of this package, which are named and counted.

    On a CPU all blocks are gathered into one buffer, one after the other: torch copies a block out of it before the
    next one begins. The system clears new memory, so a buffer for each would cost a hundredth of a step. A GPU's
    allocator reuses buffers by itself.
    """

    def __init__(self, shards: TorchShards) -> None:
        self.shards = shards
        self._room: Tensor | None = None
        self._filled_by: _Gathered | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a buffer for the shares of all ranks."""
        is_taken = self._filled_by is not None and self._filled_by.is_under_way  # by a block that was skipped
        if is_taken or device.type != "cpu":
            return torch.empty(*size, dtype=dtype, device=device)
        needed = math.prod(size) * dtype.itemsize
        if self._room is None or self._room.nbytes < needed:
            self._room = torch.empty(needed, dtype=torch.uint8, device=device)
        return self._room[:needed].view(dtype).view(*size)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        """Begins a gather; this rank's share is in place."""
        axis = self.shards.axis
        self.shards.sent += input_tensor.nbytes * (axis.size - 1)
        sizes = [input_tensor.numel()] * axis.size
        gathered = _Gathered(all_gather(axis, output_tensor, sizes, name="gather of weights"))
        if self._room is not None and output_tensor.data_ptr() == self._room.data_ptr():
            self._filled_by = gathered
        return gathered


class _Gathered(dist.Work):
    """Presents pending messages as torch's own."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self.pending, self.is_under_way = pending, True

    def wait(self, timeout: Any = None) -> bool:
        """Waits until every share has arrived."""
        self.pending.wait()
        self.is_under_way = False
        return True


def _own_weights(units: Sequence[nn.Module]) -> dict[nn.Module, list[nn.Parameter]]:
    """Lists the weights of each block that no earlier block has.

    Numbers without a dim cannot be cut. If types are mixed, weights of the type with the most bytes are shared out:
    torch gathers one type, and the others, such as those of a LoRA, are small.
    """
    seen: set[nn.Parameter] = set()
    owned = {}
    for unit in units:
        own = [weight for weight in dict.fromkeys(unit.parameters()) if weight.ndim and weight not in seen]
        seen.update(own)
        sizes: Counter[torch.dtype] = Counter()
        for weight in own:
            sizes[weight.dtype] += weight.nbytes
        if own:
            owned[unit] = [weight for weight in own if weight.dtype == sizes.most_common(1)[0][0]]
    return owned


def _share_bytes(weight: Tensor, ranks: int) -> int:
    """Returns the bytes of a rank's share of a weight, which is cut along its first dim and filled up."""
    return _share_rows(weight, ranks) * (weight.numel() // max(1, len(weight))) * weight.element_size()


def _share_rows(weight: Tensor, ranks: int) -> int:
    """Returns how many rows of a weight a rank holds; the last ranks may hold fewer."""
    return -(-len(weight) // ranks)


def _put_on(module: nn.Module, mesh: DeviceMesh, whole: set[nn.Parameter]) -> Any:
    """Puts `fully_shard` on one module, and leaves some weights whole."""
    name = type(module).__name__
    sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    # Rows and rules identify a layer by the name of its class, and torch has derived a new class.
    type(sharded).__name__ = name
    return sharded


def _groups(state: Any) -> list[Any]:
    """Lists the groups of weights of a module; torch 2.9 knows one at most."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _take_off(module: nn.Module) -> None:
    """Takes `fully_shard` off one module, also where putting it on has failed halfway."""
    state: Any = fully_shard.state(module) if STATE_KEY in vars(module) else None
    if state is not None:
        handles = [getattr(state, name, None) for name in ("_pre_forward_hook_handle", "_post_forward_hook_handle")]
        for group in _groups(state):
            handles += group._module_to_pre_save_state_dict_hook_handle.values()
            handles += group._module_to_pre_load_state_dict_hook_handle.values()
            handles += [weight._post_load_hook_handle for weight in group.fsdp_params]
        for handle in handles:
            if handle is not None:
                handle.remove()
    if isinstance(module, FSDPModule):
        kind: Any = type(module)
        module.__class__ = kind.__mro__[getattr(kind, "_orig_cls_mro_index", 2)]  # older torch has no other places
    for key in (STATE_KEY, REGISTRY_KEY):
        vars(module).pop(key, None)
    _composable_state._module_state_mapping.pop(module, None)


def _refuse(module: nn.Module, args: Any) -> None:
    raise UnsupportedError(
        f"the weights of this {type(module).__name__} were shared out over ranks when a call failed, and are not whole "
        "any more; load the model again"
    )
