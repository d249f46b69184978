"""Messages through memory that ranks of one machine share: what arrives, and what happens when something does not."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from partsong.parallel.ranks import shared_memory
from partsong.parallel.ranks.launch import launch
from partsong.parallel.ranks.shared_memory import ENTRIES, ROOM, SharedMemory, machine_of
from tests.parallel.shared_memory_worker import gathered

pytestmark = pytest.mark.skipif(not machine_of(), reason="ranks share memory on Linux with an x86 processor")


def pair(timeout: float = 20.0) -> tuple[Any, Any]:
    """Returns the way from rank 0 to rank 1 and the other way, in one process."""
    both = [SharedMemory(rank, 2, timeout) for rank in (0, 1)]
    places = [(os.getpid(), memory.file) for memory in both]
    assert all(memory.connect(places) for memory in both)
    return both[0].peer(1), both[1].peer(0)


def numbers(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(4))
def test_messages_arrive_whatever_the_order_of_calls(seed: int) -> None:
    # Of 300 messages each is sent, asked for and waited for at times drawn anew; sizes up to a sixteenth of the room.
    draw = random.Random(seed)
    there, back = pair()
    calls = [(draw.random(), kind, number) for number in range(300) for kind in ("send", "ask")]
    sent = [numbers(draw.choice((1, 7, 1000, 40_000, ROOM // 64)), number) for number in range(300)]
    got = [torch.empty_like(part) for part in sent]
    keys = [(number % 3, number % 50) for number in range(300)]  # the same name comes again
    works = []
    order = sorted(calls, key=lambda call: call[0])
    # Messages of one name are sent and asked for in their order, as ranks do.
    for kind in ("send", "ask"):
        for key in set(keys):
            alike = [place for place, (_, what, number) in enumerate(order) if what == kind and keys[number] == key]
            for place, number in zip(alike, sorted(order[one][2] for one in alike), strict=True):
                order[place] = (0.0, kind, number)
    for _, kind, number in order:
        key = keys[number]
        works.append(there.send(sent[number], key) if kind == "send" else back.receive(got[number], key))
        if draw.random() < 0.3:
            draw.choice(works).is_completed()
    draw.shuffle(works)
    for work in works:
        work.wait()
    for one, other in zip(sent, got, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(("count", "size"), [(12, ROOM // 8), (3 * ENTRIES, 4)])
def test_what_finds_no_space_is_sent_once_there_is_some(count: int, size: int) -> None:
    there, back = pair()
    sent = [torch.full((size // 4,), float(number)) for number in range(count)]
    works = [there.send(part, (0, number)) for number, part in enumerate(sent)]
    assert works[0].is_completed() and not works[-1].is_completed()
    for number, part in enumerate(sent):
        got = torch.empty_like(part)
        back.receive(got, (0, number)).wait()
        assert torch.equal(got, part)
    works[-1].wait()


def test_both_fill_their_rooms_and_neither_waits_for_ever() -> None:
    ways = pair()
    sent = [[torch.full((ROOM // 12,), float(10 * place + number)) for number in range(6)] for place in (0, 1)]
    got: list[list[Tensor]] = [[], []]

    def talk(place: int) -> None:
        works = [ways[place].send(part, (0, number)) for number, part in enumerate(sent[place])]
        for work in works[:1]:
            work.wait()
        for number in reversed(range(6)):
            got[place].append(torch.empty(ROOM // 12))
            ways[place].receive(got[place][-1], (0, number)).wait()

    threads = [threading.Thread(target=talk, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60.0)
    for place in (0, 1):
        assert all(torch.equal(one, other) for one, other in zip(got[place], sent[1 - place][::-1], strict=True))


def test_an_empty_room_is_filled_from_its_start() -> None:
    there, back = pair()
    for number in range(5):
        there.send(numbers(1000), (0, number))
        back.receive(torch.empty(1000), (0, number)).wait()
    assert list(there._out._live) == [(0, 4032)]  # the last one, at the beginning: 4,000 bytes in lines of 64


def test_another_size_is_named() -> None:
    there, back = pair()
    there.send(numbers(10), (0, 1))
    with pytest.raises(RuntimeError, match="rank 0 sent 40 bytes where 20 were expected"):
        back.receive(torch.empty(5), (0, 1)).wait()


def test_what_was_sent_before_the_end_still_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (SharedMemory(rank, 2, 20.0) for rank in (0, 1))
    places = [(os.getpid(), memory.file) for memory in (first, second)]
    assert first.connect(places) and second.connect(places)
    back = second.peer(0)
    first.peer(1).send(numbers(10), (0, 1))
    first.close()
    got = torch.empty(10)
    back.receive(got, (0, 1)).wait()
    assert torch.equal(got, numbers(10))
    with pytest.raises(RuntimeError, match="connection closed by rank 0"):
        back.receive(got, (0, 2)).wait()


def test_a_wait_ends_with_its_time() -> None:
    _, back = pair(timeout=0.05)
    with pytest.raises(RuntimeError, match="timed out after 0 s, waiting for rank 0"):
        back.receive(torch.empty(1), (0, 1)).wait()
    with pytest.raises(RuntimeError, match="timed out"):
        back.receive(torch.empty(1), (0, 2)).wait(timedelta(milliseconds=20))


@pytest.fixture
def other_process() -> Iterator[tuple[int, int]]:
    """Starts a process with a file of rooms of its own, and returns where it is."""
    script = (
        "from partsong.parallel.ranks.shared_memory import SharedMemory; import os, sys\n"
        "memory = SharedMemory(1, 2, 20.0); print(os.getpid(), memory.file, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        process, file = map(int, other.stdout.readline().split())
        yield process, file
        other.kill()


def test_a_killed_process_is_noticed_at_once(other_process: tuple[int, int]) -> None:
    memory = SharedMemory(0, 2, 20.0)
    assert memory.connect([None, other_process])
    work = memory.peer(1).receive(torch.empty(1), (0, 1))
    os.kill(other_process[0], 9)
    with pytest.raises(RuntimeError, match="connection closed by rank 1"):
        work.wait()


def test_rooms_that_cannot_be_opened_are_not_used() -> None:
    memory = SharedMemory(0, 2, 20.0)
    assert not memory.connect([None, (os.getpid(), 9999)])


def test_machines_differ_by_their_networks_and_can_be_told_apart_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    here, links = machine_of(), os.readlink
    elsewhere = lambda path: "net:[7]" if str(path).endswith("/net") else links(path)  # noqa: E731
    monkeypatch.setattr(shared_memory.os, "readlink", elsewhere)
    assert machine_of() not in ("", here)
    monkeypatch.setenv(shared_memory.VARIABLE, "0")
    assert machine_of() == ""


def test_ranks_of_one_machine_share_memory_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, through_memory = launch(gathered, 3)
    assert shared
    monkeypatch.setenv(shared_memory.VARIABLE, "0")
    apart, through_sockets = launch(gathered, 3)
    assert not apart and torch.equal(through_memory, through_sockets)
    assert torch.equal(through_memory, torch.arange(3.0).repeat_interleave(ROOM // 4))


def test_the_file_goes_with_its_process() -> None:
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    launch(gathered, 2)
    assert not Path("/dev/shm").exists() or set(Path("/dev/shm").iterdir()) == before
