"""Describes devices and links by the few numbers that predict how long work and messages take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from partsong.planner.operators import OperatorWork

__all__ = ["Device", "Link", "Machine"]

#: Share of the time of operators without arithmetic that remains in compiled blocks, where about three become one.
_FUSED = 0.33
#: How many times as fast as memory a cache is if it holds all that an operator reads and writes.
_CACHED = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Describes what one rank computes on.

    Attributes:
        name: what people call it.
        flops: multiplications and additions per second at best, in the type that models run in.
        bandwidth: bytes per second to and from its memory.
        memory: bytes.
        cache: bytes that stay on the chip from one operator to the next.
        units: multiprocessors. A result with few tiles keeps only some of them busy.
        matmul: share of `flops` that matrix multiplications reach when every unit is busy.
        attention: the same for fused attention.
        dispatch: seconds that the host takes to begin an operator.
        attend: seconds that it takes for an attention among ranks, besides its operators and messages.
        least: seconds that the shortest operator takes on the device.
        bus: bytes per second that it copies from its host's memory.
        host: whether the device is the host itself, so that beginning and computing follow each other.
        repeated: share of the time of one device that each of several spends beside its part of the work.
        fused: whether blocks are compiled: what only moves numbers is fused into fewer and shorter operators.
        source: where the numbers come from.
        measured: whether they were measured on this machine.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    cache: float = 0.0
    units: int = 1
    matmul: float = 0.7
    attention: float = 0.55
    dispatch: float = 8e-6
    attend: float = 25e-6
    least: float = 2e-6
    bus: float = 20e9
    host: bool = False
    repeated: float = 0.0
    fused: bool = False
    source: str = ""
    measured: bool = False

    def seconds(self, work: OperatorWork) -> float:
        """Returns how long an operator takes on the device, apart from its beginning."""
        moving = work.bytes / self.bandwidth / (_CACHED if work.bytes <= self.cache else 1.0)
        if work.kind == "memory":
            return max(self.least, moving) * (_FUSED if self.fused else 1.0)
        rate = self.flops * (self.matmul if work.kind == "matmul" else self.attention)
        # On average the last round of tiles keeps half of the units busy.
        rounds = 1.0 + 0.5 * self.units / max(work.tiles, 1.0)
        return max(self.least, moving, work.flops / rate * rounds)

    def begins(self, work: OperatorWork) -> float:
        """Returns how long the host takes to begin an operator."""
        return self.dispatch * (_FUSED if self.fused and work.kind == "memory" else 1.0)

    def slower(self, factor: float) -> Device:
        """Returns a device on which all work takes `factor` times as long."""
        return replace(
            self,
            flops=self.flops / factor,
            bandwidth=self.bandwidth / factor,
            dispatch=self.dispatch * factor,
            attend=self.attend * factor,
            least=self.least * factor,
            bus=self.bus / factor,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Describes how long messages between ranks take.

    Attributes:
        name: what people call it.
        latency: seconds that an exchange takes however small it is.
        per_message: seconds that each further message of an exchange takes.
        bandwidth: bytes per second that a rank sends, and receives at the same time.
        post: seconds that the host takes to begin an exchange.
        shared: whether all ranks together have this bandwidth, as on a bus or behind one token bucket.
        busy: share of a transfer during which the rank's own processor is at work too.
        source: where the numbers come from.
        measured: whether they were measured on this machine.
    """

    name: str
    latency: float
    bandwidth: float
    per_message: float = 0.0
    post: float = 0.0
    shared: bool = False
    busy: float = 0.0
    source: str = ""
    measured: bool = False

    def slower(self, factor: float) -> Link:
        """Returns a link on which all messages take `factor` times as long."""
        return replace(
            self,
            latency=self.latency * factor,
            per_message=self.per_message * factor,
            post=self.post * factor,
            bandwidth=self.bandwidth / factor,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Describes equal devices in one or more nodes.

    Attributes:
        device: each of them.
        link: between those of a node.
        ranks: how many there are in all.
        per_node: how many are in a node.
        across: the link between nodes, which all devices of a node share; the one inside where None.
    """

    device: Device
    link: Link
    ranks: int
    per_node: int
    across: Link | None = None

    def between(self, rank: int, peer: int) -> Link:
        """Returns the link between two ranks."""
        if self.across is None or rank // self.per_node == peer // self.per_node:
            return self.link
        return self.across
