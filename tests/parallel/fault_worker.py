"""Runs on every rank: programs in which one rank fails, in one of the ways ranks fail."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from collections.abc import Callable
from typing import Any

import torch

from partsong import Ring, Ulysses
from partsong.errors import ArgumentError, DistributedError, UnsupportedError
from partsong.parallel import Mesh, parallelize
from partsong.parallel.ranks import health, stops
from partsong.parallel.ranks.collectives import agree, broadcast, exchange, ring_exchange
from tests.parallel.families import FAMILIES
from tests.pipelines.cases import CASES

VICTIM_STEP = 3


def value_of(value: dict[str, Any]) -> dict[str, Any]:
    return {**value, "rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"]), "pid": os.getpid()}


class Opaque(Exception):
    """Cannot be sent to another process."""

    def __reduce__(self) -> Any:
        raise pickle.PicklingError("no")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "argument": lambda: ArgumentError("height=7 does not fit"),
    "opaque": lambda: Opaque("cannot travel"),
}


def raise_on(victim: int, kind: str) -> None:
    if int(os.environ["RANK"]) == victim:
        raise ERRORS[kind]()


def refuse_while_others_connect() -> None:
    """Rank 1 refuses; rank 0 says what gloo says when its peers are gone before it has reached them."""
    if os.environ["RANK"] == "1":
        raise UnsupportedError("no such thing")
    raise RuntimeError("[../gloo.cpp:12] Gloo connectFullMesh failed with timeout")


def unpicklable_result() -> Any:
    return lambda: None


def _loop(mesh: Mesh, at_step: Callable[[int], None]) -> None:
    """A denoising loop that would run for hours."""
    family = FAMILIES["DiT"]
    model, named = family.model(8, torch.float32), family.call(8, 1, torch.float32)
    strategy = Ring() if mesh.world_size == 2 else Ulysses()
    with parallelize(model, strategy, mesh=mesh), torch.no_grad():
        for step in range(100_000):
            at_step(step)
            model(**{**named, "timestep": torch.full((1,), 1_000_000 - step)})


def fail_in_loop(victim: int, how: str, folder: str) -> None:
    """Every rank samples; at step 3 the victim dies, stops, leaves or raises."""
    with Mesh(**{"ring" if os.environ["WORLD_SIZE"] == "2" else "ulysses": int(os.environ["WORLD_SIZE"])}) as mesh:
        with open(os.path.join(folder, str(mesh.rank)), "w") as file:
            file.write(str(os.getpid()))

        def at_step(step: int) -> None:
            if mesh.rank == victim and step == VICTIM_STEP:
                _fail(how)

        try:
            _loop(mesh, at_step)
        except _LeftEarly:
            return


class _LeftEarly(Exception):
    pass


def break_off(victim: int, folder: str) -> None:
    """The victim alone is interrupted between two steps, catches that and calls its pipeline anew."""
    health.BROKEN_OFF /= 4  # it is how long the others are patient, not whether

    def interrupted(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        if mesh.rank == victim:
            with open(os.path.join(folder, str(mesh.rank)), "w") as file:
                file.write(str(os.getpid()))
            raise KeyboardInterrupt
        return given

    case = CASES["FluxPipeline"]
    pipe = case.make()
    with Mesh(ulysses=2) as mesh, parallelize(pipe, Ulysses(), mesh=mesh):
        with contextlib.suppress(KeyboardInterrupt):
            case.run(pipe, callback_on_step_end=interrupted)
        case.run(pipe)


def break_off_own_loop(victim: int, folder: str) -> None:
    """The victim alone is interrupted between two calls of a program that calls the model itself; it begins anew."""
    model, named = FAMILIES["DiT"].model(8, torch.float64), FAMILIES["DiT"].call(8, 2, torch.float64)
    timesteps = torch.linspace(900.0, 100.0, 5)
    with Mesh(ulysses=2) as mesh, parallelize(model, Ulysses(), mesh=mesh), torch.no_grad():
        for picture in range(2):
            for step, timestep in enumerate(timesteps):
                if mesh.rank == victim and picture == 0 and step == 3:
                    with open(os.path.join(folder, str(mesh.rank)), "w") as file:
                        file.write(str(os.getpid()))
                    break
                model(**{**named, "timestep": timestep.expand(2)})


def _fail(how: str) -> None:
    if how in ("SIGKILL", "SIGSTOP", "SIGSEGV"):
        os.kill(os.getpid(), getattr(signal, how))
    if how == "exit":
        os._exit(7)
    if how == "return":
        raise _LeftEarly
    raise ValueError("bad luck at step 3")


def return_while_awaited(victim: int) -> str:
    """The victim returns and keeps its process group open; the others wait for its message."""
    health.DEPARTED /= 4  # it is how long the others are patient, not whether
    mesh = Mesh(ring=int(os.environ["WORLD_SIZE"]))
    axis = mesh.axis("ring")
    agree(axis, [1.0])
    if mesh.rank == victim:
        mesh._heartbeat.stop()  # the goodbye of a rank that thinks it is done; its sockets stay open
        signal.pause()
    exchange(axis, {}, {victim: torch.empty(3)}, name="a message that never comes").wait()
    return "unreachable"


def disagree(leaves: bool) -> str:
    """Rank 0 asks for a ring exchange where rank 1 broadcasts; returns what each says.

    Args:
        leaves: rank 1 takes twice as long to look for whom to blame, and rank 0 has gone by then.
    """
    if leaves and os.environ["RANK"] == "1":
        health.PERIOD *= 2
    with Mesh(ring=2, timeout=3.0) as mesh:
        axis, tensor = mesh.axis("ring"), torch.ones(4)
        try:
            if mesh.rank == 0:
                ring_exchange(axis, tensor, torch.empty(4), name="ring of rank 0").wait()
            else:
                broadcast(axis, tensor, name="broadcast of rank 1")
        except Exception as error:  # noqa: BLE001 - the text is what the test reads
            return f"{type(error).__name__}: {error}"
    return "no error"


def disagree_everywhere(folder: str, leaves: bool) -> None:
    text = disagree(leaves)
    with open(os.path.join(folder, os.environ["RANK"]), "w") as file:
        file.write(text)


def go_on_after_a_failure(stops_alone: bool) -> str:
    """A call fails on all ranks, and the next one uses the same mesh.

    Args:
        stops_alone: rank 1 fails an exchange later than rank 0.
    """
    stops.TIMEOUT = 2.0
    with Mesh(ring=2) as mesh:
        axis, tensor = mesh.axis("ring"), torch.full((2,), float(mesh.rank))
        if mesh.rank == 1 and stops_alone:
            next(axis.calls)
        mesh.abandon()
        try:
            got = torch.empty(2)
            ring_exchange(axis, tensor, got).wait()
        except DistributedError as error:
            return str(error)
        return str(got.tolist())


def limits(seconds: float) -> list[float]:
    """Timeouts of the groups of a mesh, in seconds."""
    with Mesh(cfg=2, ulysses=2, timeout=seconds) as mesh:
        groups = [mesh.axis(*names).group for names in (("cfg",), ("ulysses",), ("cfg", "ulysses"))]
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        return [backend.options._timeout.total_seconds() for backend in backends]
