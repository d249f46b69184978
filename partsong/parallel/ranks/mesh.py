"""Arranges the ranks of a run along named axes."""

from __future__ import annotations

import copy
import itertools
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from partsong.accelerator import accelerator, is_on_host
from partsong.errors import ArgumentError
from partsong.knobs import Count, check_knobs
from partsong.parallel.ranks.axes import AXES, TOKEN_AXES, check_same_shares, check_shares, shares_along
from partsong.parallel.ranks.backend import agreed_backend, few_blocks
from partsong.parallel.ranks.health import Heartbeat, note_failure
from partsong.parallel.ranks.script_errors import print_errors_in_a_line
from partsong.parallel.ranks.shards import split_sizes
from partsong.parallel.ranks.shared_memory import SharedMemory
from partsong.parallel.ranks.traffic import BusTraffic

__all__ = ["AXES", "HOST_LANE", "TOKEN_AXES", "Axis", "Mesh", "Network"]

#: Lane of the copies that a rank makes from its host's memory, which a `Network` sees as messages to itself.
HOST_LANE = "host"

#: Environment variable with the device type of meshes that are given none.
DEVICE = "PARTSONG_DEVICE"

_OPENED = itertools.count()


class Network(Protocol):
    """Describes a listener for messages that are only predicted."""

    def post(self, sent: Mapping[int, int], received: Mapping[int, int], *, lane: str = "") -> Any:
        """Notes messages of a rank to and from others, and returns an object with a method ``wait``.

        Args:
            sent: bytes to each global rank.
            received: bytes from each global rank.
            lane: messages of one lane are carried out one after the other, those of others beside them.
        """
        ...


@dataclass(frozen=True, slots=True)
class Axis:
    """Describes one named axis as one rank sees it.

    Attributes:
        name: the axis' name, several joined by ``*`` for a flattened axis, ``alone`` where there is one rank.
        ranks: global ranks along the axis, in order.
        index: this rank's place in `ranks`.
        group: the process group, None when the axis has a single rank.
        dry: exchanges are only counted, for `partsong.parallel.predict`.
        network: is notified of messages where exchanges are only counted; None for nobody.
        lane: names the messages of the axis that are carried out one after the other, for `network`.
        calls: numbers the exchanges on this axis. All its ranks make the same ones; other groups of the mesh need not.
        shares: relative speed of each place, the same in all groups of the mesh; None where all are equal.
        doubts: not empty where a call failed since the last exchange, so that ranks may have stopped elsewhere.
        is_fused: whether the ranks' library moves all parts of one tensor in one operation of the device, as NCCL does.
        traffic: takes note of each exchange; one for all axes of a mesh.
        shared: carries messages between ranks of one machine; None where some are elsewhere.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    group: Any = None
    dry: bool = False
    network: Network | None = None
    lane: str = ""
    calls: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)
    shares: tuple[float, ...] | None = None
    doubts: list[str] = field(default_factory=list, repr=False, compare=False)
    is_fused: bool = False
    traffic: BusTraffic = field(default_factory=BusTraffic, repr=False, compare=False)
    shared: SharedMemory | None = field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Returns the number of ranks along the axis."""
        return len(self.ranks)

    def split(self, total: int, least: int = 1) -> tuple[int, ...]:
        """Returns how much of a length each rank takes: by its share, or as evenly as possible.

        Args:
            total: the length.
            least: the least a rank takes where there are shares and `total` is large enough.

        Example:
            >>> Axis("ulysses", (0, 1), 0).split(9), Axis("ulysses", (0, 1), 0, shares=(2.0, 1.0)).split(9)
            ((5, 4), (6, 3))
        """
        return split_sizes(total, self.size, self.shares, least)

    def by_sockets(self) -> Axis:
        """Returns the axis with messages that share no memory, for long waits, which then take no processor time."""
        return replace(self, shared=None)

    @property
    def told_shares(self) -> str:
        """Says by which shares a length is cut, as the end of a phrase; empty where they are equal."""
        return "" if self.shares is None else f" by shares {' : '.join(f'{share:g}' for share in self.shares)}"


class Mesh:
    """Arranges ranks along axes, whose degrees multiply to the number of ranks.

    Works under ``torchrun``, under `launch`, and in a plain process, where every axis has one rank and every collective
    is a no-op. Use it as a context manager, or leave the process group to the program.

    Args:
        cfg: ranks over the guidance branches.
        data: ranks over images or prompts.
        pipe: ranks over layers.
        patch: ranks over image patches that exchange one-step-old activations.
        clip: ranks over clips of a video.
        stage: ranks over timesteps.
        ring: ranks that pass key/value blocks around.
        ulysses: ranks that share the heads.
        time: ranks over points of a trajectory that are solved together.
        expert: ranks over separately trained models.
        tensor: ranks over the heads and columns of layers.
        shares: how fast each rank is, in any unit, in the order of ranks. Strategies that cut tokens or rows give each
            rank its share of them; all else stays in equal parts. Default: all ranks are equal.
        device: the torch device type; None is that of the environment variable ``PARTSONG_DEVICE``, and without one
            ``cuda`` where there is a GPU, else ``cpu``.
        timeout: seconds until a stuck collective fails.

    Raises:
        ArgumentError: a degree is not a positive integer, the degrees do not multiply to the number of ranks, or the
            shares are not one positive number for each rank, the same on all of them.

    Example:
        >>> with Mesh() as mesh:
        ...     mesh.world_size, mesh.axis("ulysses").size
        (1, 1)
    """

    def __init__(
        self,
        cfg: int = 1,
        data: int = 1,
        pipe: int = 1,
        patch: int = 1,
        clip: int = 1,
        stage: int = 1,
        ring: int = 1,
        ulysses: int = 1,
        time: int = 1,
        expert: int = 1,
        tensor: int = 1,
        *,
        shares: Sequence[float] | None = None,
        device: str | None = None,
        timeout: float = 120.0,
    ) -> None:
        print_errors_in_a_line()
        degrees = (data, time, cfg, expert, pipe, stage, clip, patch, ring, ulysses, tensor)
        self.degrees = dict(zip(AXES, degrees, strict=True))
        self.rank, self.world_size = _rank_and_world()
        check_degrees(self.degrees, self.world_size)
        self.shares = check_shares(shares, self.world_size)
        self.device = _local_device(device, self.world_size)
        self._timeout = timedelta(seconds=timeout)
        self._owns_group = _start_group(self.device, self.world_size, self._timeout)
        self._axes: dict[tuple[str, ...], Axis] = {}
        self.traffic = BusTraffic()
        self._shared: SharedMemory | None = None
        self._heartbeat = Heartbeat.start(self.rank, self.world_size)
        self._device_mesh = self._build()
        try:
            check_same_shares(self.shares, self.world_size)
        except ArgumentError:
            self.close()
            raise
        if self.world_size > 1 and dist.get_backend() == "gloo":
            self._shared = SharedMemory.meet(self.rank, self.world_size, timeout)

    def _build(self) -> DeviceMesh | None:
        if self.world_size == 1:
            return None
        # Size-1 axes need no communicator; the mesh holds the others, in AXES order.
        names = tuple(name for name, degree in self.degrees.items() if degree > 1)
        shape = tuple(self.degrees[name] for name in names)
        mesh = dist.device_mesh.init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        for name in names:
            self._limit(mesh.get_group(name))
        _await_connections(None)
        return mesh

    def _limit(self, group: Any) -> None:
        """Gives a group this mesh's timeout: torch gives it only to the group of all ranks."""
        dist.distributed_c10d._set_pg_timeout(self._timeout, group)

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """Returns the torch `DeviceMesh` of the axes larger than one; None in a plain process."""
        return self._device_mesh

    @property
    def is_main(self) -> bool:
        """Says whether this is rank 0, the one that prints and writes files."""
        return self.rank == 0

    def print(self, *values: object) -> None:
        """Prints on rank 0 only."""
        if self.is_main:
            print(*values, flush=True)  # noqa: T201 - printing is what was asked for

    def axis(self, *names: str) -> Axis:
        """Returns one axis by name, or several flattened into one (outermost first).

        Args:
            *names: names out of `AXES`.

        Raises:
            ArgumentError: an unknown name.
        """
        for name in names:
            if name not in AXES:
                raise ArgumentError(f"no mesh axis {name!r}; the axes are {', '.join(AXES)}")
        shared = tuple(name for name in AXES if name in names and self.degrees[name] > 1)
        if shared not in self._axes:
            self._axes[shared] = self._make_axis(shared)
        return self._axes[shared]

    def on_host(self, *names: str) -> Axis:
        """Returns an axis of the same ranks whose messages lie in the host's memory, so no device waits for them."""
        return self._beside(names, "host")

    def lane(self, *names: str) -> Axis:
        """Returns an axis of the same ranks for bulk messages, so that small ones of the axis do not queue behind them.

        A library that moves messages by kernels, such as NCCL, carries out those of one group one after the other.
        """
        return self._beside(names, "lane")

    def _beside(self, names: tuple[str, ...], kind: str) -> Axis:
        """Returns an axis of the same ranks with a group of its own, where their library is not gloo."""
        axis = self.axis(*names)
        if not axis.is_fused:
            return axis
        key = (kind, axis.name)
        if key not in self._axes:
            backend = "gloo" if kind == "host" else dist.get_backend(axis.group)
            more = {} if backend == "gloo" else {"pg_options": few_blocks(backend)}
            group = dist.new_group(
                list(axis.ranks), backend=backend, timeout=self._timeout, use_local_synchronization=True, **more
            )
            _await_connections(group)
            fresh = {"calls": itertools.count(), "doubts": [], "is_fused": backend != "gloo"}
            self._axes[key] = replace(axis, group=group, **fresh)
        return self._axes[key]

    def alone(self) -> Mesh:
        """Returns a mesh of just this rank, for work it does by itself, such as checking a result."""
        mesh = copy.copy(self)
        mesh.degrees, mesh.rank, mesh.world_size = dict.fromkeys(AXES, 1), 0, 1
        mesh.shares, mesh._axes, mesh._device_mesh, mesh._owns_group = None, {}, None, False
        mesh._shared = None
        return mesh

    def _make_axis(self, names: tuple[str, ...]) -> Axis:
        if self._device_mesh is None or not names:
            return Axis("alone", (self.rank,), 0, traffic=self.traffic)
        sub = self._device_mesh[names]
        if len(names) > 1:
            sub = sub._flatten("_".join(names))
            self._limit(sub.get_group())
            _await_connections(sub.get_group())
        ranks = tuple(int(rank) for rank in sub.mesh.flatten().tolist())
        shares = shares_along(names, self.degrees, self.shares)
        group = sub.get_group()
        is_fused = dist.get_backend(group) != "gloo"
        more: dict[str, Any] = {"shares": shares, "is_fused": is_fused, "traffic": self.traffic}
        if self._shared is not None and self._shared.reaches(ranks):
            more["shared"] = self._shared
        return Axis("*".join(names), ranks, ranks.index(self.rank), group, **more)

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owns_group and isinstance(error, Exception):
            note_failure(error)
        self.close(failed=error is not None)

    def close(self, *, failed: bool = False) -> None:
        """Ends the process group if this mesh started it.

        Args:
            failed: an error ended the work, so messages may be pending that nobody answers any more. They are dropped:
                NCCL would wait for them until its timeout, and hide the error until then.
        """
        self._heartbeat.stop()
        if self._shared is not None:
            self._shared.close()
            self._shared = None
        if self._owns_group and dist.is_initialized():
            if failed and dist.get_backend() != "gloo":
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()
            self._owns_group = False

    def abandon(self) -> None:
        """Notes that an error has ended a call: before the next message ranks check that all stopped at the same one.

        Every axis does so when it is used again. Without that check a rank that stopped elsewhere would be sent
        messages of one call and read them as those of another.
        """
        for axis in self._axes.values():
            axis.doubts.append(axis.name)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={degree}" for name, degree in self.degrees.items() if degree > 1)
        return f"Mesh({axes or 'one rank'}; rank {self.rank} of {self.world_size}, {self.device})"


def _await_connections(group: Any) -> None:
    """Waits until all ranks of a new group are connected: a refused rank closes it at once, and others would hang."""
    if dist.get_backend(group) == "gloo":
        dist.barrier(group)


def check_degrees(degrees: Mapping[str, int], world_size: int) -> None:
    """Refuses degrees that are not positive integers or do not multiply to the number of ranks."""
    check_knobs(dict.fromkeys(degrees, Count), degrees, "mesh axis ")
    product = math.prod(degrees.values())
    if product != world_size:
        axes = " x ".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1) or "all axes 1"
        if world_size == 1:
            script = Path(getattr(sys.modules["__main__"], "__file__", None) or "YOUR_SCRIPT.py").name
            change = f"this script has one rank; start it with torchrun --nproc-per-node {product} {script},"
        else:
            change = f"there are {world_size} ranks; start {product} rank{'s' if product > 1 else ''}"
        raise ArgumentError(
            f"the mesh degrees ({axes}) multiply to {product}, but {change} or choose degrees whose product is "
            f"{world_size}"
        )


def _rank_and_world() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _local_device(device: str | None, world_size: int) -> torch.device:
    chosen = torch.device(device or os.environ.get(DEVICE) or _usual_device(world_size))
    if is_on_host(chosen):
        return chosen
    if chosen.index is None:  # more ranks than devices share them in turn
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
        chosen = torch.device(chosen.type, local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(chosen.index)
    return chosen


def _usual_device(world_size: int) -> str:
    # The GPU of a Mac is one, and torch has no library for messages from it: several ranks are quicker without it.
    return "cpu" if (kind := accelerator()) == "mps" and world_size > 1 else kind


def _start_group(device: torch.device, world_size: int, limit: timedelta) -> bool:
    if world_size == 1 or dist.is_initialized():
        return False
    store, rank, _ = next(dist.rendezvous("env://", timeout=limit))
    # A process may open one mesh after another. Each uses keys of its own, so it never reads stale ones.
    store = dist.PrefixStore(f"partsong/{next(_OPENED)}", store)
    backend = agreed_backend(store, rank, world_size, device)
    extra: dict[str, Any] = {} if backend == "gloo" else {"device_id": device}
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit, **extra)
    return True
