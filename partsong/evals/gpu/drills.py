"""The stage `drills`: a rank that fails in one of the ways ranks fail has to be named within seconds."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from partsong.errors import PartsongError
from partsong.evals.gpu.findings import Equipment, Finding, at_most, holds
from partsong.evals.gpu.tiny_pipelines import TINY
from partsong.parallel import Mesh, launch, parallelize
from partsong.samplers.registry import Ulysses

__all__ = ["DRILLS", "NAMED", "drills", "words_of"]

#: Seconds within which the failed rank is named.
NAMED = 15.0
VICTIM = 1


def _raise() -> None:
    raise ValueError("bad luck")


def _send(number: str) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), getattr(signal, number))


#: What the victim does in the middle of its third step, by what has to be read in the error.
_FAILS: Mapping[str, tuple[Callable[[], None], str]] = {
    "raise": (_raise, "bad luck"),
    "SIGKILL": (_send("SIGKILL"), "rank 1"),
    "SIGSTOP": (_send("SIGSTOP"), "rank 1"),
}
#: What the victim asks for instead; the first latents of another number of steps are others.
_OTHER = "rank 1 was given another"
_ASKS: Mapping[str, tuple[dict[str, Any], str]] = {
    "another prompt": ({"prompt": 1}, _OTHER),
    "another step count": ({"steps": 5}, _OTHER),
}
DRILLS = (*_FAILS, *_ASKS)


def drills(equipment: Equipment) -> Iterator[Finding]:
    """Runs each drill on two ranks."""
    for how in DRILLS:
        if how.startswith("SIG") and not hasattr(signal, how):
            continue  # Windows cannot stop a process
        with tempfile.TemporaryDirectory() as folder:
            file, text = Path(folder) / "failed at", "no error"
            try:
                launch(_on_rank, 2, how, equipment.device, str(file))
            except PartsongError as error:
                text = "\n".join((f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())))
            seconds = time.time() - float(file.read_text())
        words = words_of(how)
        yield holds(f"{how} is reported", words in text, text.splitlines()[0], f"an error with {words!r}")
        yield at_most(f"{how}: seconds until it is reported", round(seconds, 1), NAMED)


def words_of(how: str) -> str:
    """Returns what has to be read in the error of a drill."""
    return (_FAILS.get(how) or _ASKS[how])[1]


@torch.no_grad()
def _on_rank(how: str, device: str, file: str) -> None:
    with Mesh(ulysses=2, device=device) as mesh:
        row = TINY["Flux"]
        pipe, steps = row.make(mesh.device, torch.float32), 4
        is_victim = mesh.rank == VICTIM

        def fail(pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
            if is_victim and step == 2 and how in _FAILS:
                Path(file).write_text(str(time.time()))
                _FAILS[how][0]()
            return given

        asked = {"steps": steps} | (_ASKS[how][0] if is_victim and how in _ASKS else {})
        if is_victim and how in _ASKS:
            Path(file).write_text(str(time.time()))
        with parallelize(pipe, Ulysses(), mesh=mesh):
            pipe(**row.call(mesh.device, torch.float32, **asked), callback_on_step_end=fail)
