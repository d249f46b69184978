"""The simulated clock against formulas written out, and its jumps against a clock that never jumps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partsong import DisplacedPatch, OffloadWeights, Ring, ShardedWeights, SyncPatch, TensorParallel, Ulysses
from partsong.parallel import Strategy
from partsong.parallel.ranks.mesh import HOST_LANE
from partsong.planner import DEVICES, LINKS, Device, Link, Machine, machine_named, subject_named
from partsong.planner.calls import Size
from partsong.planner.clock import Clock, replay
from partsong.planner.operators import OperatorWork
from partsong.planner.trace import CallPart, CallTrace, Event, Post, Wait, trace_calls

DEVICE = Device(name="toy", flops=1e12, bandwidth=1e11, memory=1e9, units=0, matmul=1.0, dispatch=0.0, least=0.0)
LINK = Link(name="toy", latency=1e-3, bandwidth=1e9)
MACHINE = Machine(device=DEVICE, link=LINK, ranks=2, per_node=2)


def work(seconds: float) -> OperatorWork:
    return OperatorWork("matmul", seconds * DEVICE.flops, 0, 1.0)


def message(megabytes: float) -> Post:
    size = round(megabytes * 1e6)
    return Post({1: size}, {1: size})


def trace_of(*parts: CallPart) -> CallTrace:
    return CallTrace(parts, parts, 0, 0, 0)


def call(*events: Event, times: int = 1) -> CallPart:
    return CallPart(events, times)


def test_what_is_waited_for_at_once_is_open() -> None:
    # 5 ms of work, and a message of 1 ms + 2 MB / (1 GB/s) = 3 ms that nothing hides, ten times.
    time = replay(trace_of(call(work(5e-3), message(2), Wait(0, 0, 0), times=10)), MACHINE)
    assert time.steady == pytest.approx(10 * (5e-3 + 3e-3))
    assert time.waiting == pytest.approx(10 * 3e-3)


@pytest.mark.parametrize(("computed", "block"), [(8e-3, 8e-3), (1e-3, 3e-3)])
def test_what_computes_meanwhile_hides_messages(computed: float, block: float) -> None:
    # A block takes the longer of its work and its message.
    time = replay(trace_of(call(message(2), work(computed), Wait(0, 0, 0), times=10)), MACHINE)
    assert time.steady == pytest.approx(10 * block)


def test_messages_of_a_step_before_delay_only_what_they_outlast() -> None:
    # Each step computes 4 ms and reads what the step before has sent, 9 ms later.
    late = replay(trace_of(call(Wait(1, 0, 0), work(4e-3), message(8))), MACHINE)
    assert late.steady == pytest.approx(4e-3 + 9e-3)
    in_time = replay(trace_of(call(work(4e-3), Wait(1, 0, 0), message(2))), MACHINE)
    assert in_time.steady == pytest.approx(4e-3)


def test_a_host_that_is_slower_than_the_device_decides() -> None:
    device = replace(DEVICE, dispatch=1e-4)
    time = replay(trace_of(call(work(1e-5), times=200)), replace(MACHINE, device=device))
    assert time.steady == pytest.approx(200e-4, rel=0.01)
    assert time.hosted == pytest.approx(200 * 9e-5, rel=0.01)
    on_host = replay(trace_of(call(work(1e-5), times=200)), replace(MACHINE, device=replace(device, host=True)))
    assert on_host.steady == pytest.approx(200 * 11e-5)


def test_an_attention_among_ranks_costs_the_host_more() -> None:
    attention, device = OperatorWork("attention", 0.0, 0, 1.0), replace(DEVICE, dispatch=1e-5, attend=1e-4)
    alone = replay(trace_of(call(attention, times=100)), replace(MACHINE, device=device))
    among = replay(trace_of(call(attention, message(0), times=100)), replace(MACHINE, device=device))
    assert alone.steady == pytest.approx(100e-5)
    assert among.steady == pytest.approx(100 * 11e-5)


def test_bulk_messages_share_a_link_but_hold_up_no_small_ones() -> None:
    bulk = Post({1: 20_000_000}, {1: 20_000_000}, "bulk")
    # 1 ms, and 2 MB at half the rate; in one lane they would wait for all of the 21 ms of bulk.
    time = replay(trace_of(call(work(30e-3), bulk, message(2), Wait(0, 0, 1))), MACHINE)
    assert time.waiting == pytest.approx(5e-3)
    # All of it takes the link as long as in one lane.
    both = replay(trace_of(call(bulk, message(2), Wait(0, 0, 1), Wait(0, 0, 0), bulk, Wait(0, 0, 2))), MACHINE)
    assert both.steady == pytest.approx(2 * 21e-3 + 2e-3)


def test_links_that_are_shared_carry_the_messages_of_all() -> None:
    parts = trace_of(call(message(10), Wait(0, 0, 0)))
    alone = replay(parts, MACHINE).steady
    shared = replay(parts, replace(MACHINE, ranks=4, link=replace(LINK, shared=True))).steady
    assert alone == pytest.approx(11e-3)
    assert shared == pytest.approx(41e-3)


def test_a_link_between_nodes_is_shared_by_a_node() -> None:
    across = Link(name="wire", latency=0.0, bandwidth=1e9)
    machine = Machine(device=DEVICE, link=LINK, ranks=4, per_node=2, across=across)
    far = Post({2: 10_000_000}, {2: 10_000_000})
    assert replay(trace_of(call(far, Wait(0, 0, 0))), machine).steady == pytest.approx(20e-3)
    assert replay(trace_of(call(message(10), Wait(0, 0, 0))), machine).steady == pytest.approx(11e-3)


def copied(megabytes: float) -> Post:
    return Post({}, {0: round(megabytes * 1e6)}, HOST_LANE)


@pytest.mark.parametrize(("computed", "block"), [(8e-3, 8e-3), (1e-3, 3e-3)])
def test_a_copy_hides_behind_a_block_that_takes_longer(computed: float, block: float) -> None:
    # 3 MB at 1 GB/s, each while the block before computes; nothing hides the first.
    machine = replace(MACHINE, device=replace(DEVICE, bus=1e9))
    come = Wait(0, -1, 0)
    parts = call(copied(3)), call(come, copied(3), work(computed), times=9), call(come, work(computed))
    time = replay(trace_of(*parts), machine)
    assert time.steady == pytest.approx(3e-3 + 9 * block + computed, rel=1e-6)


def test_a_copy_gets_what_exchanges_leave_of_the_bus() -> None:
    # Of 10 ms of work, an exchange of 1 ms + 4 MB / (1 GB/s) that is waited for later keeps a copy of 8 ms from 5.
    machine = replace(MACHINE, device=replace(DEVICE, bus=1e9))
    later = replay(trace_of(call(copied(8), message(4), work(10e-3), Wait(0, 0, 1), Wait(0, 0, 0))), machine)
    assert later.steady == pytest.approx(13e-3)
    before = replay(trace_of(call(message(4), copied(8), work(10e-3), Wait(0, 0, 0), Wait(0, 0, 1))), machine)
    assert before.steady == pytest.approx(13e-3)
    on_host = replace(machine, device=replace(machine.device, host=True))
    assert replay(trace_of(call(copied(8), work(10e-3), Wait(0, 0, 0))), on_host).steady == pytest.approx(18e-3)


@pytest.mark.parametrize(
    "mix",
    [
        *((Ulysses(),), (Ring(),), (SyncPatch(),), (TensorParallel(),), (ShardedWeights(),), (DisplacedPatch(),)),
        *((Ulysses(), OffloadWeights()), (Ring(), OffloadWeights(resident=0.5))),
    ],
    ids=repr,
)
def test_jumps_change_nothing(mix: tuple[Strategy, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_named("flux-dev")
    trace = trace_calls(subject.denoiser, mix, 4, subject.call(Size(height=512, width=512)))
    machines = [machine_named("4xh100", "nvlink"), machine_named("4xl20", "1gbit"), machine_named("4x4090", "pcie4")]
    quick = [replay(trace, machine) for machine in machines]
    monkeypatch.setattr(Clock, "_is_steady", lambda *rates: False)
    slow = [replay(trace, machine) for machine in machines]
    for one, other in zip(quick, slow, strict=True):
        assert one.steady == pytest.approx(other.steady, rel=1e-6)
        assert one.waiting == pytest.approx(other.waiting, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("link", ["nvlink", "pcie4", "10gbit"])
@pytest.mark.parametrize("mix", [Ulysses(waves=1), SyncPatch(), TensorParallel()], ids=repr)
def test_a_step_is_the_sum_of_its_work_and_its_open_messages(mix: object, link: str) -> None:
    """These post and wait one after the other, so that all can be added up."""
    subject, device = subject_named("flux-dev"), replace(DEVICES["h100"], dispatch=0.0)
    trace = trace_calls(subject.denoiser, [mix], 4, subject.call(Size(height=1024, width=1024)))
    line = replace(LINKS[link], post=0.0)
    total, hidden = 0.0, 0.0
    for part in trace.steady:
        under_way: list[float] = []
        for event in part.events:
            if isinstance(event, OperatorWork):
                total += device.seconds(event) * part.times
                hidden += device.seconds(event) * part.times * bool(under_way)
            elif isinstance(event, Post):
                took = line.latency + max(sum(event.sent.values()), sum(event.received.values())) / line.bandwidth
                under_way.append(took)
                total += took * part.times
            elif under_way:
                under_way.pop()
    simulated = replay(trace, Machine(device=device, link=line, ranks=4, per_node=4)).steady
    # What is computed while a message is under way may be hidden; nothing else may.
    assert total - hidden - 1e-9 <= simulated <= total + 1e-9


def test_more_devices_and_faster_links_never_take_longer() -> None:
    subject = subject_named("pixart-sigma")
    given = subject.call(Size(height=1024, width=1024, batch=2))
    traces = [trace_calls(subject.denoiser, [Ulysses()], ranks, given) for ranks in (1, 2, 4)]
    times = [replay(trace, machine_named("4xa100", "nvlink3")).steady for trace in traces]
    assert times == sorted(times, reverse=True)
    links = [replay(traces[2], machine_named("4xa100", link)).steady for link in ("nvlink3", "10gbit", "1gbit")]
    assert links == sorted(links)
