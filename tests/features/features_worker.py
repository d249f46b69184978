"""Runs on every rank: pipelines with a feature under a plan, against the same pipelines with it alone."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from diffusers.utils import logging
from torch import Tensor

from partsong.errors import PartsongError
from partsong.parallel import Mesh, mesh_for, parallelize
from partsong.samplers import generate
from tests.features.features import FEATURES, Feature
from tests.features.groups import GROUPS
from tests.parallel.ranks import gathered
from tests.pipelines.case import Case, distance

#: Name of a feature, name of a group, and whether the feature comes "before" or "after" `parallelize`.
Cell = tuple[str, str, str]


@dataclass(frozen=True)
class Outcome:
    """What became of a cell on one rank.

    Attributes:
        kind: ``ran``, ``refused``, or ``foreign``, an error that is not ours.
        errors: relative distances to the serial twin: of two pictures under the plan, and of one after it.
        text: what was said where it did not run.
        work: calls of the denoiser before it was refused.
    """

    kind: str
    errors: tuple[float, ...] = ()
    text: str = ""
    work: int = 0


class Through:
    """Stands for a pipeline under a plan: a call goes through the plan's loop."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan

    def __call__(self, **arguments: Any) -> Any:
        return generate(self.plan, **arguments)


def outcomes(cells: list[Cell]) -> dict[Cell, list[Outcome]]:
    """Every cell's outcome on each rank."""
    logging.set_verbosity_error()
    results: dict[Cell, list[Outcome]] = {}
    with Mesh(data=2):  # keeps the ranks connected from one plan to the next
        for name in dict.fromkeys(name for name, _, _ in cells):
            feature = FEATURES[name]
            twin = feature.made().make()
            feature.first(twin)
            feature.put(twin)
            want = feature.made().run(twin)
            for cell in (cell for cell in cells if cell[0] == name):
                results[cell] = gathered(_outcome(feature, want, *cell[1:]))
    return results


def _outcome(feature: Feature, want: list[Tensor], group: str, when: str) -> Outcome:
    case = feature.made()
    pipe = case.make()
    strategies = GROUPS[group]
    try:
        feature.first(pipe)
        if when == "before":
            feature.put(pipe)
        with Mesh(**mesh_for(strategies, 2)) as mesh, parallelize(pipe, *strategies, mesh=mesh) as plan:
            through = Through(plan)
            if when == "after":
                case.run(through)
                feature.put(pipe)
            errors = [distance(case.run(through), want) for _ in range(2)]
        errors.append(distance(case.run(pipe), want))
    except PartsongError as problem:
        return Outcome("refused", text=str(problem))
    except Exception:  # noqa: BLE001 - the test tells of it
        return Outcome("foreign", text=traceback.format_exc())
    return Outcome("ran", tuple(errors))
