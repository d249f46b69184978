"""Runs a recorded call on a simulated clock: a host that begins operators, a device that computes, links that carry."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from partsong.parallel.ranks.mesh import HOST_LANE
from partsong.planner.hardware import Device, Link, Machine
from partsong.planner.operators import OperatorWork
from partsong.planner.part_loops import QueueSteps
from partsong.planner.steps import PatchSteps, PlainSteps, TracedSteps, Tracer, WindowSteps
from partsong.planner.subject import Subject
from partsong.planner.trace import CallPart, CallTrace, Post, PostedAt, Wait

__all__ = ["Clock", "GenerationTime", "StepTime", "StepsTime", "clock_generation", "clock_steps", "replay"]

#: The lane of a rank's copies from its host's memory, and what they go over.
_BUS = ("bus", HOST_LANE)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Says how long calls take.

    Attributes:
        first: seconds of a call of the warm-up.
        steady: seconds of a later one.
        waiting: seconds of a later one in which the device waits for messages.
        hosted: seconds of a later one in which it waits for the host.
    """

    first: float
    steady: float
    waiting: float
    hosted: float

    def calls(self, number: int, warmup: int) -> float:
        """Returns the seconds of a number of calls in a row."""
        warm = min(warmup, number)
        return warm * self.first + (number - warm) * self.steady


@dataclass(frozen=True, slots=True)
class StepsTime:
    """Says how long the steps of a generation take on one rank.

    Attributes:
        seconds: of all steps.
        waiting: of those, in which the device waits for messages.
    """

    seconds: float
    waiting: float = 0.0


@dataclass(frozen=True, slots=True)
class GenerationTime:
    """Says how long a generation takes.

    Attributes:
        steps: of the denoiser.
        encoding: seconds of the text encoders.
        decoding: seconds of the autoencoder.
        repeated: seconds of what devices do beside their part of the steps.
        waits_for: what a device waits for.
    """

    steps: StepsTime
    encoding: float
    decoding: float
    repeated: float = 0.0
    waits_for: str = "messages"

    @property
    def seconds(self) -> float:
        """Returns the seconds of the whole generation."""
        return self.encoding + self.steps.seconds + self.decoding + self.repeated

    @property
    def reason(self) -> str:
        """Says in one sentence where the time goes."""
        steps, total = self.steps, max(self.seconds, 1e-9)
        waits = 100 * steps.waiting / total
        parts = [f"{100 * (steps.seconds - steps.waiting) / total:.0f} % computing steps"]
        parts += [f"{waits:.0f} % waiting for {self.waits_for}"] if waits >= 1 else []
        parts += [f"{100 * self.repeated / total:.0f} % beside them"] if self.repeated / total >= 0.01 else []
        parts += [f"{100 * self.decoding / total:.0f} % decoding"] if self.decoding / total >= 0.01 else []
        parts += [f"{100 * self.encoding / total:.0f} % reading the prompt"] if self.encoding / total >= 0.01 else []
        return ", ".join(parts)


def clock_generation(traced: TracedSteps, tracer: Tracer, machine: Machine, steps: int, sharers: int) -> GenerationTime:
    """Puts a whole generation on a clock.

    Args:
        traced: its steps.
        tracer: of its model and size.
        machine: what it runs on.
        steps: how many.
        sharers: ranks that share its decoding.
    """
    size, decoding = tracer.size, 0.0
    if tracer.decoding is not None:
        grown = tracer.decoding.grown(-(-size.pixels // sharers))
        decoding = sum(machine.device.seconds(work) for work in grown) * size.batch
    encoding = _encoding(tracer.subject, machine.device, size.batch)
    repeated = 0.0
    if machine.ranks > 1 and machine.device.repeated:
        alone = clock_steps(tracer.trace([], 1, steps), replace(machine, ranks=1, per_node=1, across=None))
        repeated = machine.device.repeated * alone.seconds * (1 - 1 / machine.ranks)
    return GenerationTime(clock_steps(traced, machine), encoding, decoding, repeated)


def clock_steps(traced: TracedSteps, machine: Machine) -> StepsTime:
    """Puts the steps of a generation on a clock.

    Args:
        traced: what the steps are made of.
        machine: what they run on, with as many ranks as they were traced for.
    """
    if isinstance(traced, PatchSteps):
        return _patches(traced, machine)
    if isinstance(traced, QueueSteps):
        return _queue(traced, machine)
    if isinstance(traced, WindowSteps):
        part = _plain(traced.part, replace(machine, ranks=traced.part.ranks))
        return _with_exchange(part, machine, traced.rounds, traced.exchanged)
    return _plain(traced, machine)


def _patches(traced: PatchSteps, machine: Machine) -> StepsTime:
    """Fills a pipeline of stages, and from then on keeps every stage at work."""
    stages, patches, hop = traced.stages, traced.patches, traced.whole.trace.handed
    whole = _plain(traced.whole, replace(machine, ranks=1))
    patch = replay(traced.patch, replace(machine, ranks=patches)).steady
    link = machine.between(0, machine.ranks - 1)
    sending = link.latency + link.post + hop / patches / link.bandwidth
    # With two patches per stage a message travels while the next patch is computed.
    stage = max(patch / stages, sending) if patches >= 2 * stages else patch / stages + sending
    first = whole.seconds + stages * (link.latency + hop / link.bandwidth)
    later = (traced.steps - traced.warm) * traced.calls * patches * stage + (stages - 1) * stage
    return StepsTime(traced.warm * first + later)


def _queue(traced: QueueSteps, machine: Machine) -> StepsTime:
    """Lets blocks pass the ranks, each of which takes the next one as soon as it has sent the last."""
    link = machine.between(0, machine.ranks - 1)
    moved = traced.handed * (machine.ranks if link.shared else 1)
    sending = link.post + link.latency + moved / link.bandwidth if traced.handed else 0.0
    computing = replay(traced.visit, replace(machine, ranks=1)).steady / traced.layers
    waiting = max(0.0, sending - computing) if traced.hides else sending
    times = traced.visits + traced.late
    return StepsTime(times * (computing + waiting), times * waiting)


def _plain(traced: PlainSteps, machine: Machine) -> StepsTime:
    call = replay(traced.trace, replace(machine, ranks=traced.sharing))
    seconds = call.calls(traced.steps, traced.trace.warmup) * traced.calls
    total = StepsTime(seconds, call.waiting * traced.steps * traced.calls)
    if traced.exchanged:
        total = _with_exchange(total, machine, traced.steps, traced.exchanged)
    return replace(total, seconds=total.seconds * traced.left)


def _with_exchange(total: StepsTime, machine: Machine, times: int, size: int) -> StepsTime:
    """Adds an exchange that nothing hides, among all ranks."""
    link = machine.between(0, machine.ranks - 1)
    moved = size * (machine.ranks if link.shared else 1)
    seconds = times * (link.post + link.latency + moved / link.bandwidth)
    return StepsTime(total.seconds + seconds, total.waiting + seconds)


def _encoding(subject: Subject, device: Device, batch: int) -> float:
    """Returns the seconds of the text encoders: a pass over their weights, or its arithmetic where that is longer."""
    itemsize = subject.dtype.itemsize
    branches = 2 if subject.branches > 1 else 1
    seconds = 0.0
    for encoder in subject.encoders:
        flops = 2.0 * encoder.parameters * encoder.tokens * batch * branches
        seconds += max(encoder.parameters * itemsize / device.bandwidth, flops / (device.flops * device.matmul))
    return seconds


def replay(trace: CallTrace, machine: Machine, *, rank: int = 0) -> StepTime:
    """Simulates a first call and calls of the steady state, one after another.

    Other ranks are taken to be as fast as this one, so that what they send leaves when this rank sends as well.

    Args:
        trace: what the rank does.
        machine: what it runs on.
        rank: which one it is.
    """
    posts = (event for part in trace.steady for event in part.events if isinstance(event, Post))
    is_shared = any(post.lane != HOST_LANE for post in posts)
    clock = Clock(machine, rank, attend=machine.device.attend if is_shared else 0.0)
    clock.run(trace.first)
    first = clock.now
    # What a call left under way delays the next one; the one after that is like all that follow.
    for _ in range(2 if _looks_back(trace.steady) else 1):
        clock.run(trace.steady)
    before, waited, hosted = clock.now, clock.waited, clock.hosted
    clock.run(trace.steady)
    return StepTime(first, clock.now - before, clock.waited - waited, clock.hosted - hosted)


def _looks_back(parts: Sequence[CallPart]) -> bool:
    """Says whether a call waits for messages of the one before."""
    return any(isinstance(event, Wait) and event.calls for part in parts for event in part.events)


class Clock:
    """Holds when the host, the device and the links of one rank are free.

    Args:
        machine: what the rank runs on.
        rank: which one it is.
        attend: seconds that the host takes for every attention, besides its operators and messages.
    """

    def __init__(self, machine: Machine, rank: int, *, attend: float = 0.0) -> None:
        self.machine, self.rank, self.attend = machine, rank, attend
        self.host = self.device = self.waited = self.hosted = 0.0
        #: When each lane of a link has carried out what was posted.
        self._free: dict[tuple[str, str], float] = defaultdict(float)
        self._done: dict[PostedAt, float] = {}
        self._calls = 0
        #: The last copy from the host's memory.
        self._copying: PostedAt | None = None

    @property
    def now(self) -> float:
        """Returns when everything that was begun is done."""
        return max(self.host, self.device)

    def run(self, parts: Iterable[CallPart]) -> None:
        """Makes one call."""
        parts = tuple(parts)
        jumps = not _looks_back(parts)
        place = 0
        for part in parts:
            done, rate = 0, None
            while done < part.times:
                before = self._state()
                self._run_part(part, place + done)
                done += 1
                last, rate = rate, [after - earlier for after, earlier in zip(self._state(), before, strict=True)]
                left = part.times - done
                if jumps and left > 1 and last is not None and self._is_steady(last, rate):
                    self._jump(rate, left - 1, place + done - 1)
                    done += left - 1
            place += part.times
        self._calls += 1

    def _state(self) -> tuple[float, ...]:
        return self.host, self.device, max(self._free.values(), default=0.0), self.waited, self.hosted

    def _is_steady(self, last: Sequence[float], rate: Sequence[float]) -> bool:
        """Says whether equal parts take equally long from here on: whatever is slowest stays the slowest."""
        same = all(abs(now - then) <= 1e-9 + 1e-6 * abs(now) for now, then in zip(rate, last, strict=True))
        host, device, link = rate[:3]
        stays = host <= device + 1e-12 if self.device >= self.host else device <= host + 1e-12
        return same and stays and link <= max(host, device) + 1e-12

    def _jump(self, rate: Sequence[float], times: int, place: int) -> None:
        """Lets a number of equal parts go by at once."""
        host, device, link, waited, hosted = (each * times for each in rate)
        self.host, self.device = self.host + host, self.device + device
        self.waited, self.hosted = self.waited + waited, self.hosted + hosted
        for name in self._free:
            self._free[name] += link
        for message in [message for message in self._done if message.call == self._calls and message.part == place]:
            moved = message._replace(part=place + times)
            self._done[moved] = self._done[message] + device
            self._copying = moved if self._copying == message else self._copying

    def _run_part(self, part: CallPart, place: int) -> None:
        posted = 0
        for event in part.events:
            if isinstance(event, OperatorWork):
                self._compute(event)
            elif isinstance(event, Post):
                message = PostedAt(self._calls, place, posted)
                self._done[message] = self._copy(event, message) if event.lane == HOST_LANE else self._send(event)
                posted += 1
            else:
                self._wait(event, place)

    def _compute(self, work: OperatorWork) -> None:
        device = self.machine.device
        begins = device.begins(work) + (self.attend if work.kind == "attention" else 0.0)
        self.host += begins
        if device.host:
            self.host = self.device = max(self.host, self.device + begins) + device.seconds(work)
            return
        if self.host > self.device:
            self.hosted += self.host - self.device
            self.device = self.host
        self.device += device.seconds(work)

    def _copy(self, post: Post, message: PostedAt) -> float:
        """Copies from the host's memory once the exchanges and the copies before are done."""
        seconds = sum(post.received.values()) / self.machine.device.bus
        if self.machine.device.host:  # the rank copies by itself
            self.host = self.device = self.now + seconds
            return self.now
        self._free[_BUS] = max(self.now, *self._free.values(), 0.0) + seconds
        self._copying = message
        return self._free[_BUS]

    def _hold_copy(self, begins: float, ends: float) -> None:
        """Lets a copy yield to an exchange."""
        if self._copying is not None and self._free[_BUS] > begins:
            self._free[_BUS] += ends - begins
            self._done[self._copying] = self._free[_BUS]

    def _send(self, post: Post) -> float:
        peers = sorted({*post.sent, *post.received})
        by_link: dict[str, tuple[Link, list[int]]] = {}
        for peer in peers:
            link = self.machine.between(self.rank, peer)
            by_link.setdefault(link.name, (link, []))[1].append(peer)
        done = self.now if self.machine.device.host else self.device
        for name, (link, mine) in by_link.items():
            self.host += link.post
            begins = max(self.device, self.host, self._free[name, post.lane])
            sent, received = (sum(way.get(peer, 0) for peer in mine) for way in (post.sent, post.received))
            moved = sent * self.machine.ranks if link.shared else max(sent, received)
            moved *= self.machine.per_node if link is self.machine.across else 1
            moving = moved / link.bandwidth
            ends = (
                begins
                + link.latency
                + link.per_message * (len(mine) - 1)
                + self._beside(name, post.lane, begins, moving)
            )
            if link.busy:
                self.host = self.device = max(self.host, self.device) + link.busy * (ends - begins)
            self._free[name, post.lane] = ends
            self._hold_copy(begins, ends)
            done = max(done, ends)
        return done

    def _beside(self, name: str, lane: str, begins: float, moving: float) -> float:
        """Returns the seconds of a transfer that shares its link with those of other lanes, and delays them."""
        for other, free in self._free.items():
            if other[0] == name and other[1] != lane and free > begins:
                shared = min(moving, free - begins)
                self._free[other] += shared
                moving += shared
        return moving

    def _wait(self, wait: Wait, place: int) -> None:
        message = PostedAt(self._calls - wait.calls, place + wait.parts, wait.number)
        done = self._done.get(message, 0.0)
        if done > self.device:
            self.waited += done - self.device
            self.device = done
        if self.machine.device.host:
            self.host = self.device = self.now
