"""Runs on every rank: tiny pipelines under strategies, against what the same pipeline makes alone."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace
from typing import Any

from diffusers.utils import logging

from partsong import DisplacedPatch, PartialPatch
from partsong.errors import PartsongError
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.adapters import adapter_for
from tests.newer_names import or_reason, theirs
from tests.parallel import equivalence_worker
from tests.parallel.ranks import gathered, on_first
from tests.pipelines.case import Case, denoisers, distance
from tests.pipelines.cases import CASES

#: Displaced and partial patches are exact as long as all steps are warm-up.
_WARM = {"DisplacedPatch": DisplacedPatch(warmup_steps=99), "PartialPatch": PartialPatch(warmup_steps=99)}
#: Strategies for few models, which have tests of their own.
_ELSEWHERE = ("DynamicSequence", "ExpertParallel", "LaggedLayers")
#: What every pipeline is tried with: each strategy of the matrix of models.
STRATEGIES: dict[str, Strategy] = {
    name: _WARM.get(name, chosen[0])
    for name, chosen in equivalence_worker.strategies(2).items()
    if len(chosen) == 1 and name not in _ELSEWHERE
}
#: Pipelines whose models compute norms in single precision, whatever the type of their weights, by how they begin. Sums
#: over ranks come in another order than in one matrix product, and such a norm rounds what that changes.
SINGLE = ("AnyFlow", "BriaFibo2", "NucleusMoE", "QwenImage", "Sana", "ZImage")
ROUNDED = 2e-7
#: A pipeline by name, and a strategy by name.
Pair = tuple[str, str]


@dataclass(frozen=True)
class Outcome:
    """What became of one pipeline under one strategy on one rank.

    Attributes:
        kind: ``ran``, ``refused`` by `parallelize`, ``refused late`` by the call, or ``foreign``, a traceback that is
            not ours.
        error: relative distance to the serial result.
        sent: bytes that the ledger counted.
        predicted: bytes that `Plan.explain` predicted.
        text: what was said where it did not run.
        expected: why it has to be refused, as its row says; None where it has to run.
    """

    kind: str
    error: float = 0.0
    sent: int = 0
    predicted: int = 0
    text: str = ""
    expected: str | None = None


def outcomes(nproc: int, pairs: list[Pair]) -> dict[Pair, list[Outcome]]:
    """Every pair's outcome on each rank; under the name ``alone``, how far a pipeline is from itself after it all."""
    logging.set_verbosity_error()
    with Mesh(data=nproc):  # keeps the ranks connected from one strategy's mesh to the next
        return _outcomes(nproc, pairs)


def _outcomes(nproc: int, pairs: list[Pair]) -> dict[Pair, list[Outcome]]:
    results: dict[Pair, list[Outcome]] = {}
    for name in dict.fromkeys(name for name, _ in pairs):
        case, strategies = CASES[name], [strategy for other, strategy in pairs if other == name]
        pipe = case.make()
        alone = on_first(lambda: or_reason(lambda: theirs(lambda: case.run(pipe))))  # noqa: B023 - called at once
        if isinstance(alone, str):
            results |= {(name, each): [Outcome("foreign", text=alone)] * nproc for each in (*strategies, "alone")}
            continue
        for strategy in strategies:
            outcome = _outcome(case, pipe, alone, STRATEGIES[strategy], nproc)
            results[name, strategy] = gathered(replace(outcome, expected=_expected(case, pipe, strategy)))
        results[name, "alone"] = [on_first(lambda: Outcome("ran", error=distance(case.run(pipe), alone)))]  # noqa: B023
    return results


def _expected(case: Case, pipe: Any, strategy: str) -> str | None:
    reasons = (STRATEGIES[strategy].refuses(adapter_for(part)) for part in denoisers(pipe))
    return case.refused.get(strategy) or next((reason for reason in reasons if reason is not None), None)


def _outcome(case: Case, pipe: Any, alone: Any, strategy: Strategy, nproc: int) -> Outcome:
    with Mesh(**mesh_for((strategy,), nproc)) as mesh:
        try:
            plan = parallelize(pipe, strategy, mesh=mesh)
        except PartsongError as problem:
            return Outcome("refused", text=str(problem))
        except Exception:  # noqa: BLE001 - the test tells of it
            return Outcome("foreign", text=traceback.format_exc())
        try:
            with plan, Ledger(flops=False) as ledger:
                got = case.run(pipe)
                predicted = plan.explain().bytes_total()[mesh.rank]
        except PartsongError as problem:
            return Outcome("refused late", text=str(problem))
        except Exception:  # noqa: BLE001 - the test tells of it
            return Outcome("foreign", text=traceback.format_exc())
    hooked = [
        type(module).__name__ for part in denoisers(pipe) for module in part.modules() if "forward" in vars(module)
    ]
    assert not hooked, f"hooks are left on {hooked}"
    return Outcome("ran", distance(got, alone), int(ledger.summary()["bytes_sent"]), predicted)
