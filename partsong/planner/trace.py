"""Records what one rank does in a call of a denoiser: operators, messages and waits, in order, from shapes alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partsong.errors import PartsongError
from partsong.parallel.plan.dry_run import DryRun
from partsong.parallel.plan.live_bytes import LiveBytes
from partsong.parallel.plan.remembered_shapes import RememberedShapes
from partsong.parallel.strategy import Strategy
from partsong.planner.operators import OperatorWork, work_of
from partsong.planner.shallow import EqualBlocks, runs_of, shallow

__all__ = [
    "KERNEL_CHOICES",
    "CallPart",
    "CallTrace",
    "Event",
    "Post",
    "PostedAt",
    "Recorder",
    "Wait",
    "blocks_are_equal",
    "trace_calls",
]

#: Environment variables that choose kernels, and with them what is traced.
KERNEL_CHOICES = ("PARTSONG_ATTENTION", "PARTSONG_TUNED")


class PostedAt(NamedTuple):
    """Names a message by where it was posted.

    Attributes:
        call: in which call.
        part: in which part of the call.
        number: how many were posted before it in that part.
    """

    call: int
    part: int
    number: int


class Post(NamedTuple):
    """Begins an exchange with other ranks.

    Attributes:
        sent: bytes to each global rank.
        received: bytes from each global rank.
        lane: exchanges of one lane follow each other, those of others go on beside them.
    """

    sent: dict[int, int]
    received: dict[int, int]
    lane: str = ""


class Wait(NamedTuple):
    """Waits for an exchange.

    Attributes:
        calls: how many calls ago it was posted.
        parts: how many parts further on; negative for earlier parts.
        number: which one of that part.
    """

    calls: int
    parts: int
    number: int


Event = OperatorWork | Post | Wait


@dataclass(frozen=True, slots=True)
class CallPart:
    """Describes a part of a call that may stand for several equal ones.

    Attributes:
        events: what happens in it.
        times: how often it happens.
    """

    events: tuple[Event, ...]
    times: int = 1

    @property
    def sent(self) -> int:
        """Returns the bytes that it sends each time."""
        return sum(sum(event.sent.values()) for event in self.events if isinstance(event, Post))


@dataclass(frozen=True, slots=True)
class CallTrace:
    """Holds what one rank does in a first call and in one of the steady state.

    Attributes:
        first: the first call, which differs where a strategy warms up.
        steady: a call like all later ones.
        warmup: how many calls are like the first.
        working: bytes of tensors alive at the peak of a call.
        kept: bytes of those that stay until the next call.
        weights: bytes of the weights that stay on the rank.
        checks: bytes by which ranks compare their arguments in the first call, and in a later one.
        returned: bytes of what the denoiser returns.
        handed: bytes that one block hands on to the next.
        keys: bytes of the keys and values of all attentions among picture tokens, without those to a shorter text.
        blocks: how many equal ones the denoiser has.
    """

    first: tuple[CallPart, ...]
    steady: tuple[CallPart, ...]
    warmup: int
    working: int
    weights: int
    kept: int = 0
    checks: tuple[int, int] = (0, 0)
    returned: int = 0
    handed: int = 0
    keys: int = 0
    blocks: int = 1

    def silent(self) -> CallTrace:
        """Returns a trace without its messages."""
        return replace(self, first=_computing(self.first), steady=_computing(self.steady))


def _computing(call: Sequence[CallPart]) -> tuple[CallPart, ...]:
    return tuple(replace(part, events=tuple(e for e in part.events if isinstance(e, OperatorWork))) for part in call)


def trace_calls(
    module: nn.Module,
    strategies: Sequence[Strategy],
    ranks: int,
    inputs: Mapping[str, Any],
    *,
    rank: int = 0,
    shapes: RememberedShapes | None = None,
    whole: bool = False,
    fused: bool = True,
) -> CallTrace:
    """Traces calls of a denoiser under a plan on one of many ranks that need not exist.

    Of a run of equal blocks only three are traced: the one in the middle stands for all between the first and the last.

    Args:
        module: a denoiser; it may live on the ``meta`` device.
        strategies: as for `parallelize`.
        ranks: how many there are.
        inputs: the module's arguments for one call, full size.
        rank: whose calls are traced.
        shapes: what earlier traces have remembered; None begins anew.
        whole: whether every block is traced; see `blocks_are_equal`.
        fused: whether the ranks are GPUs, as for `DryRun`.

    Raises:
        UnsupportedError: as for `predict`.
    """
    shapes = RememberedShapes() if shapes is None else shapes
    begin = functools.partial(DryRun, module, strategies, ranks, inputs, rank=rank, shapes=shapes, fused=fused)
    weights = sum(weight.nbytes for weight in module.parameters())
    if any(strategy.cuts_weights or strategy.offloads for strategy in strategies):
        with begin() as deep:
            weights = deep.weight_bytes()
    every = runs_of(module)
    # Blocks inside of others are a part of what is copied for these.
    deep = any(strategy.cuts_blocks or (strategy.offloads and _are_nested(module, every)) for strategy in strategies)
    runs = [] if whole or deep else every
    first = every[0].blocks[every[0].start] if every else None
    try:
        trace = _traced(begin, weights, Recorder(runs, first))
    except (PartsongError, RuntimeError, TypeError, LookupError, AttributeError):
        if not runs:
            raise
        # The model's code counts its blocks, or pairs those at the beginning with those at the end.
        trace = _traced(begin, weights, Recorder([], first))
    return replace(trace, blocks=max(1, sum(run.length for run in every)))


def _are_nested(module: nn.Module, runs: Sequence[EqualBlocks]) -> bool:
    lists = {run.blocks for run in runs}
    outer = (part for part in module.modules() if isinstance(part, nn.ModuleList) and part not in lists)
    return any(not lists.isdisjoint(part.modules()) for part in outer)


def blocks_are_equal(module: nn.Module, inputs: Mapping[str, Any], shapes: RememberedShapes) -> bool:
    """Says whether one block may stand for all equal ones: some models treat every fifth differently.

    Args:
        module: a denoiser.
        inputs: the module's arguments for one call.
        shapes: what earlier traces have remembered.
    """
    some, every = (trace_calls(module, [], 1, inputs, shapes=shapes, whole=whole) for whole in (False, True))
    return _arithmetic(some.steady) == _arithmetic(every.steady)


def _arithmetic(call: Sequence[CallPart]) -> tuple[float, int]:
    """Returns the operations of a call, and its operators that make any."""
    work = [(event.flops, part.times) for part in call for event in part.events if isinstance(event, OperatorWork)]
    return sum(flops * times for flops, times in work), sum(times for flops, times in work if flops)


def _traced(begin: Callable[..., DryRun], weights: int, recorder: Recorder) -> CallTrace:
    with shallow(recorder.runs), recorder.hooked(), begin(network=recorder) as run:
        given = (leaf for leaf in tree_leaves(run.inputs) if isinstance(leaf, Tensor))
        with LiveBytes(itertools.chain(run.state.values(), given)) as live:
            recorder.live = live
            # What a call leaves under way is waited for in the next one.
            for _ in range(run.calls + 1 if run.calls > 1 else 1):
                recorder.begin_call()
                with recorder:
                    returned = _bytes(run.call())
            keys = recorder.keys
            recorder.begin_call()
            kept = live.now + recorder.deeper()
        by_step, rank = run.plan.explain().bytes_by_step, run.plan.mesh.rank
    calls = recorder.calls
    # Comparisons are counted but not posted, because the other ranks need not exist.
    first, steady = by_step[0][rank], by_step[len(by_step) // 2][rank]
    return CallTrace(
        first=calls[0],
        steady=calls[-1],
        warmup=run.warmup,
        working=live.peak + recorder.deeper(),
        weights=weights,
        kept=kept,
        checks=(first - sum(part.sent for part in calls[0]), steady - sum(part.sent for part in calls[-1])),
        returned=returned,
        handed=recorder.handed,
        keys=keys,
    )


def _bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


class _Handle:
    def __init__(self, recorder: Recorder, message: PostedAt) -> None:
        self.recorder, self.message = recorder, message

    def wait(self) -> None:
        self.recorder.wait(self.message)

    def is_completed(self) -> bool:
        return True  # nothing is under way, so nothing needs its memory


class Recorder(TorchDispatchMode):
    """Notes operators, messages and waits in order; it is the network of the ranks, too."""

    def __init__(self, runs: Sequence[EqualBlocks], first: nn.Module | None) -> None:
        super().__init__()
        self.runs, self.first = runs, first
        self.handed = self.keys = 0
        self.calls: list[tuple[CallPart, ...]] = []
        self.live: LiveBytes | None = None
        self._parts: list[list[Event]] | None = None
        self._times: list[int] = []
        self._posted = 0
        self._marks: list[int] = []
        self._grown: list[int] = []

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Begins a part wherever the block that stands for others begins, and where the block after it does."""
        removable, taken = [], {}
        if self.first is not None:
            removable.append(self.first.register_forward_hook(self._note_handed))
        for run in self.runs:
            start = run.start - taken.get(id(run.blocks), 0)
            taken[id(run.blocks)] = taken.get(id(run.blocks), 0) + run.between - 1
            for place, times in ((start + 1, run.between), (start + 2, 1)):
                hook = run.blocks[place].register_forward_pre_hook(functools.partial(self._begin_part, times))
                removable.append(hook)
        try:
            yield
        finally:
            for hook in removable:
                hook.remove()

    def begin_call(self) -> None:
        """Closes the call before, and begins another."""
        if self._parts is not None:
            ends = zip(self._parts, self._times, strict=True)
            self.calls.append(tuple(CallPart(tuple(events), times) for events, times in ends))
        self._parts, self._times, self._posted = [[]], [1], 0
        self.keys = 0

    def _note_handed(self, block: nn.Module, given: Any, output: Any) -> None:
        self.handed = max(self.handed, _bytes(output))

    def _begin_part(self, times: int, *call: Any) -> None:
        assert self._parts is not None and self.live is not None
        if self._times[-1] > 1:
            self._grown.append((self.live.now - self._marks.pop()) * (self._times[-1] - 1))
        if times > 1:
            self._marks.append(self.live.now)
        self._parts.append([])
        self._times.append(times)
        self._posted = 0

    def deeper(self) -> int:
        """Returns the bytes that the blocks which were not traced keep from one call to the next."""
        return sum(self._grown)

    def post(self, sent: Mapping[int, int], received: Mapping[int, int], *, lane: str = "") -> _Handle:
        """Notes messages, but for those that are sent while the plan is put on."""
        if self._parts is None:
            return _Handle(self, PostedAt(0, 0, 0))
        self._parts[-1].append(Post(dict(sent), dict(received), lane))
        self._posted += 1
        return _Handle(self, PostedAt(len(self.calls), len(self._parts) - 1, self._posted - 1))

    def wait(self, message: PostedAt) -> None:
        """Notes that the rank waits for messages."""
        if self._parts is not None:
            calls = len(self.calls) - message.call
            parts = message.part - (len(self._parts) - 1)
            self._parts[-1].append(Wait(calls, parts, message.number))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if (work := work_of(func, args, kwargs or {}, output)) is not None:
            assert self._parts is not None
            self._parts[-1].append(work)
            if work.kind == "attention":
                query, key, value = args[:3]
                self.keys += (key.nbytes + value.nbytes) * self._times[-1] if key.shape[-2] >= query.shape[-2] else 0
        return output
