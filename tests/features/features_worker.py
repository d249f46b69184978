"""Runs on every rank: pipelines with a feature under a plan, against the same pipelines with it alone."""

from __future__ import annotations

import functools
import traceback
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from diffusers.utils import logging
from torch import Tensor

from partsong.errors import PartsongError
from partsong.ledger import Ledger
from partsong.parallel import Mesh, mesh_for, parallelize
from tests.features.features import FEATURES, Feature
from tests.features.groups import GROUPS
from tests.newer_names import NotThere, or_reason, theirs
from tests.parallel.ranks import gathered
from tests.pipelines.case import Through, denoisers, distance

#: Name of a feature, name of a group, and whether the feature comes "before" or "after" `parallelize`.
Cell = tuple[str, str, str]
#: In the place of a group: the feature on one process without a plan.
ALONE = "alone"


@dataclass(frozen=True)
class Outcome:
    """What became of a cell on one rank.

    Attributes:
        kind: ``ran``, ``refused``, or ``foreign``, an error that is not ours.
        errors: relative distances to the serial twin: of two pictures under the plan, and of one after it.
        sent: bytes that the ledger counted in the second picture.
        predicted: bytes that `Plan.explain` predicted.
        text: what was said where it did not run.
        steps: calls of the denoiser that were complete before it was refused.
    """

    kind: str
    errors: tuple[float, ...] = ()
    sent: int = 0
    predicted: int = 0
    text: str = ""
    steps: int = 0


def outcomes(nproc: int, cells: list[Cell]) -> dict[Cell, list[Outcome]]:
    """Every cell's outcome on each rank; of one without a group, how far the feature moves the picture."""
    logging.set_verbosity_error()
    results: dict[Cell, list[Outcome]] = {}
    with Mesh(data=nproc):  # keeps the ranks connected from one plan to the next
        for name in dict.fromkeys(name for name, _, _ in cells):
            twin = Twin(FEATURES[name])
            for cell in (cell for cell in cells if cell[0] == name):
                outcome = _alone(twin) if cell[1] == ALONE else _outcome(twin, cell[1], cell[2] == "after")
                results[cell] = gathered(outcome)
    return results


class Twin:
    """A feature on one process without a plan; nothing is computed before somebody asks."""

    def __init__(self, feature: Feature) -> None:
        self.feature = feature

    @functools.cached_property
    def _pipe(self) -> Any:
        pipe = self.feature.case().make()
        self.feature.first(pipe)
        return pipe

    @functools.cached_property
    def _plain(self) -> list[Tensor]:
        """The picture before the feature is put on."""
        return self.feature.case(has_it=False).run(self._pipe)

    @functools.cached_property
    def _picture(self) -> list[Tensor] | str:
        _ = self._plain if self.feature.shows else None

        def with_it() -> list[Tensor]:
            self.feature.put(self._pipe)
            return self.feature.case().run(self._pipe)

        return or_reason(lambda: theirs(with_it))

    @property
    def picture(self) -> list[Tensor]:
        """The picture with the feature."""
        if isinstance(self._picture, str):
            raise NotThere(self._picture)
        return self._picture

    @property
    def moved(self) -> float:
        """How far the feature moves the picture."""
        return distance(self.picture, self._plain) if self.feature.shows else 0.0


def _alone(twin: Twin) -> Outcome:
    moved = or_reason(lambda: twin.moved)
    return Outcome("foreign", text=moved) if isinstance(moved, str) else Outcome("ran", (moved,))


def _outcome(twin: Twin, group: str, is_after: bool) -> Outcome:
    feature = twin.feature
    case, strategies = feature.case(), GROUPS[group]
    pipe = case.make()
    calls: list[int] = []
    try:
        feature.first(pipe)
        if not is_after:
            feature.put(pipe)
        mesh = Mesh(**mesh_for(strategies, dist.get_world_size()))
        with mesh, parallelize(pipe, *strategies, mesh=mesh) as plan:
            through = Through(plan)
            if is_after:
                feature.case(has_it=False).run(through)
                feature.put(pipe)
            for part in denoisers(pipe):
                part.register_forward_hook(lambda *_: calls.append(1))
            errors = [distance(case.run(through), twin.picture)]
            with Ledger(flops=False) as ledger:
                errors.append(distance(case.run(through), twin.picture))
            predicted = plan.explain().bytes_total()[mesh.rank]
        errors.append(distance(case.run(pipe), twin.picture))
    except PartsongError as problem:
        return Outcome("refused", text=str(problem), steps=len(calls))
    except Exception:  # noqa: BLE001 - the test tells of it
        return Outcome("foreign", text=traceback.format_exc())
    return Outcome("ran", tuple(errors), int(ledger.summary()["bytes_sent"]), predicted)
