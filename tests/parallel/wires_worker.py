"""Runs on every rank: strategies with wires against their definition or the serial model, with bases and bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils import logging
from torch import Tensor

from partsong import DisplacedPatch, PartialPatch, Ring, StepCache, TokenRing, Ulysses, Usp
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Plan, Strategy, mesh_for, parallelize
from partsong.parallel.cuts.rows import RowLevels, RowSplit
from partsong.parallel.exchange.displaced_borders import DisplacedBorders
from partsong.parallel.exchange.displaced_patch import DisplacedStage
from partsong.parallel.exchange.known_rows import KnownRows
from partsong.parallel.exchange.ring import WiredRingStage
from partsong.parallel.exchange.wires import EIGHT_BIT, WIRES, border_wire_of
from partsong.parallel.hooks.clock import StepClock
from tests.parallel.displaced_worker import STREAMS, TIMES, calls_of, simulate
from tests.parallel.families import FAMILIES
from tests.parallel.ranks import error, gathered, on_first
from tests.parallel.rotating_twin import Passing, Rotating
from tests.parallel.unets import UNETS

SIDE = 6


@dataclass(frozen=True)
class Case:
    """One strategy with a wire on one family."""

    family: str
    strategy: Any
    branches: int = 1
    beside: tuple[Strategy, ...] = ()
    dtype: torch.dtype = torch.float64

    @property
    def twin(self) -> str:
        """What it is compared with: a definition, or the serial model alone."""
        follows = self.dtype == torch.float64 and not self.beside and self.strategy.wire != "lowrank"
        kinds = {DisplacedPatch: "rotating", PartialPatch: "rotating", Ring: "passing"}
        return kinds.get(type(self.strategy), "serial") if follows else "serial"


def cases(nproc: int) -> dict[str, Case]:
    """Every wire on every strategy that takes it, in turns over families, orders, warm-ups and types."""
    names: list[Any] = list(WIRES)
    found = {f"displaced {name}": Case("DiT", DisplacedPatch(wire=name), branches=2) for name in names}
    found |= {f"ring {name}": Case("SD3", Ring(wire=name)) for name in names}
    found["displaced half"] = Case("Flux", DisplacedPatch(wire="1bit"), dtype=torch.bfloat16)
    found["ring half"] = Case("DiT", Ring(wire="2bit"), dtype=torch.bfloat16)
    found["displaced held"] = Case("SD3", DisplacedPatch(wire="2bit", order=0))
    found["displaced at once"] = Case("SD3", DisplacedPatch(wire="1bit", warmup_steps=1))
    found["ring masks"] = Case("PixArt masked", Ring(wire="1bit"))
    found["partial 1bit"] = Case("Flux", PartialPatch(wire="1bit", portion=0.3))
    found["partial int8"] = Case("DiT", PartialPatch(wire="int8", portion=0.5), branches=2)
    for name in names[: len(EIGHT_BIT)]:
        found |= {f"ulysses {name}": Case("SD3", Ulysses(wire=name)), f"usp {name}": Case("DiT", Usp(wire=name))}
        found[f"token ring {name}"] = Case("PixArt masked", TokenRing(wire=name))
    cache = (StepCache(mask="01"),)  # leaves out the third of five steps
    found["displaced beside a cache"] = Case("DiT", DisplacedPatch(wire="1bit"), beside=cache)
    found["ring beside a cache"] = Case("DiT", Ring(wire="2bit"), beside=cache)
    if nproc == 4:
        found["displaced beside ulysses"] = Case("DiT", DisplacedPatch(degree=2, wire="1bit"), beside=(Ulysses(),))
        found["ring beside ulysses"] = Case("Flux", Ring(degree=2, wire="1bit"), beside=(Ulysses(wire="int8"),))
    return found


def _bases(plan: Plan) -> dict[str, bytes]:
    """All that this rank knows of others' and of its own rows by a wire, for each layer, wave and branch."""
    found: dict[str, bytes] = {}
    for stage in (stage for denoiser in plan.denoisers for stage in denoiser.stages):
        known, is_first = dict[Any, KnownRows](), False
        if isinstance(stage, DisplacedStage):
            for key, slots in stage.rotating.items():
                slots.settle()
                known[key] = slots.known
        if isinstance(stage, WiredRingStage) and stage.wire.is_residual:
            known = {key: rows for key, (rows, _) in stage.known.items()}
            is_first = plan.clock.step == 0  # then nothing older is known
        for key, rows in known.items():
            buffers = [rows.last] if rows.older is None or is_first else [rows.older, rows.last]
            text = b"".join(buffer.contiguous().view(torch.uint8).numpy().tobytes() for buffer in buffers)
            found[str(key)] = hashlib.sha256(text).digest()
    return found


def _generation(
    plan: Plan, model: Any, calls: list[dict[str, Any]], branches: int
) -> tuple[list[Tensor], list[dict[str, bytes]], int]:
    """Outputs, what is known after every step, and the bytes sent; the clock is driven as a pipeline drives it."""
    plan.clock.driven = True
    plan.clock.begin(TIMES)
    outputs, bases = [], []
    with Ledger(flops=False) as ledger:
        for step in range(len(TIMES)):
            outputs += [model(**call).sample for call in calls[step * branches : (step + 1) * branches]]
            bases.append(_bases(plan))
            plan.clock.advance()
    return outputs, bases, int(ledger.summary()["bytes_sent"])


def _twins(case: Case, nproc: int, model: Any, calls: list[dict[str, Any]]) -> tuple[list[Tensor], list[Tensor]]:
    """What the model answers alone, and by the definition where the case has one."""
    serial, streams = [model(**call).sample for call in calls], STREAMS[case.family]
    if case.twin == "rotating":
        shared = sum(each is not None for each in streams)
        portion = getattr(case.strategy, "portion", float(nproc))
        known = Rotating(nproc, case.strategy, streams, [portion] * shared)
        return serial, simulate(model, calls, case.branches, known)
    if case.twin == "passing":
        return serial, simulate(model, calls, case.branches, Passing(nproc, case.strategy, streams))
    return serial, serial


def _case(case: Case, nproc: int) -> list[dict[str, Any]]:
    model = FAMILIES[case.family].model(SIDE, case.dtype)
    calls = [
        {
            name: value.to(case.dtype) if torch.is_tensor(value) and value.dtype == torch.float64 else value
            for name, value in call.items()
        }
        for call in calls_of(case.family, SIDE, case.branches)
    ]
    chosen = (case.strategy, *case.beside)
    with Mesh(**mesh_for(chosen, nproc)) as mesh, parallelize(model, *chosen, mesh=mesh) as plan:
        if nproc == 2:  # the second generation begins anew
            _generation(plan, model, calls, case.branches)
        got, bases, counted = _generation(plan, model, calls, case.branches)
        told = plan.explain()
        plan.undo()
        serial, want = on_first(lambda: _twins(case, nproc, model, calls))
        return gathered(
            {
                "errors": [error(g, w) for g, w in zip(got, want, strict=True)],
                "drifts": [error(g, s) for g, s in zip(got, serial, strict=True)],
                "bases": bases,
                "counted": counted,
                "predicted": told.bytes_total(),
                "said": (told.kind, told.rounded),
                "patch": mesh.axis("patch").ranks,
                "ring": mesh.axis("ring").ranks,
            }
        )


#: Border rows alone: the wire, and the order of the forecast.
ROWS = [(name, order) for name in ("none", "int8", "1bit") for order in (0, 1)]
HEIGHT, LENGTH = 11, 37


def images() -> list[Tensor]:
    """An image for every step, of more than one chunk a row and not of a whole number."""
    draw = torch.Generator().manual_seed(4)
    first, change = (torch.randn(2, 3, HEIGHT, LENGTH, dtype=torch.float64, generator=draw) for _ in range(2))
    return [first + step * step * 0.1 * change for step in range(len(TIMES))]


def rows(nproc: int) -> dict[tuple[str, int], list[list[Tensor]]]:
    """What every rank convolves in every step: its rows and those around them, under displaced borders."""
    results = {}
    with Mesh(patch=nproc) as mesh:
        axis = mesh.axis("patch")
        for name, order in ROWS:
            clock = StepClock()
            clock.driven = True
            clock.begin(TIMES)
            borders = DisplacedBorders(axis, clock, 2, order, wire=border_wire_of(name))  # type: ignore[arg-type]
            split = RowSplit(torch.nn.Conv2d(3, 4, 3, padding=1), axis, borders, (), lambda _: False)
            split.begin(RowLevels((HEIGHT,), nproc), 0, 2)
            mine = []
            for image in images():
                own = image[:, :, split.own]
                above, below = borders.ghosts(0, own[:, :, :1], own[:, :, -1:])
                mine.append([None if part is None else part.clone() for part in (above, below)])
                clock.advance()
            borders.reset()
            results[name, order] = gathered(mine)
    return results


def unets(every: bool) -> dict[str, list[dict[str, Any]]]:
    """UNets under strategies with wires, or with one: bytes, and what both ends know of border rows at the end."""
    results = {}
    model = UNETS["SD"].model(torch.float64)
    calls = UNETS["SD"].calls((16, 16), torch.float64, tuple(map(float, TIMES)))
    some = (DisplacedPatch(wire="1bit"), DisplacedPatch(wire="fp8", order=0), PartialPatch(wire="lowrank"))
    for strategy in some if every else some[:1]:
        with parallelize(model, strategy) as plan, Ledger(flops=False) as ledger:
            for call in calls:
                model(**call)
            predicted, bases = plan.explain().bytes_total()[plan.mesh.rank], _bases(plan)
            results[repr(strategy)] = gathered(
                {"counted": int(ledger.summary()["bytes_sent"]), "predicted": predicted, "bases": bases}
            )
    return results


def run(nproc: int, names: list[str], every: bool) -> dict[str, Any]:
    """These cases, of this number of ranks, and what is not a case."""
    logging.set_verbosity_error()
    with Mesh(data=nproc), torch.no_grad():  # keeps the ranks connected from one mesh to the next
        found: dict[str, Any] = {name: _case(cases(nproc)[name], nproc) for name in names}
        return found | {"rows": rows(nproc), "unets": unets(every or nproc == 2)}
