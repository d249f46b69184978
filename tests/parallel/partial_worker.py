"""Runs on every rank: PartialPatch against its definition simulated in one process, its bytes, and its choices."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils import logging
from torch import Tensor

from partsong import CfgParallel, DisplacedPatch, PartialPatch, TokenRing, Ulysses
from partsong.errors import UnsupportedError
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Plan, Strategy, mesh_for, parallelize
from partsong.parallel.attention_call import AttentionCall, attend_locally
from partsong.parallel.exchange.partial_patch import PartialStage
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.shards import split_sizes
from tests.parallel.displaced_worker import STREAMS, TIMES, Simulated, calls_of, simulate
from tests.parallel.families import FAMILIES, dit
from tests.parallel.ranks import error, gathered, on_first
from tests.parallel.rotating_twin import Rotating
from tests.tiny_models.weights import randomize

SIDE = 6


@dataclass(frozen=True)
class Case:
    """One strategy on one family, and what it is composed with."""

    family: str
    strategy: PartialPatch
    branches: int = 1
    beside: tuple[Strategy, ...] = ()


def cases(nproc: int) -> dict[str, Case]:
    """What is compared with the definition: odd and even token counts, one stream and two, masks, two orders."""
    found = {
        "one stream": Case("DiT", PartialPatch(portion=0.3), branches=2),
        "kept": Case("DiT", PartialPatch(portion=1.3, warmup_steps=1, order=0)),
        "one step before": Case("DiT", PartialPatch(portion=0.5, warmup_steps=1, far=0.5)),
        "masks": Case("PixArt masked", PartialPatch(portion=0.6, far=0.3)),
        "text first": Case("Flux", PartialPatch(portion=0.3)),
        "text last": Case("SD3", PartialPatch(portion=0.5, warmup_steps=3, far=0.6)),
        "auto": Case("SD3", PartialPatch(portion="auto", error_budget=0.3), branches=2),
    }
    if nproc == 4:
        two = PartialPatch(degree=2, portion=0.3)
        found["text between"] = Case("Flux", two, beside=(Ulysses(),))
        auto = PartialPatch(degree=2, portion="auto", error_budget=0.4)
        found["auto in guidance branches"] = Case("DiT", auto, 2, (CfgParallel(),))
        found["auto, ranks without heads"] = Case("one head", auto, beside=(Ulysses(),))
    return found


def _model(family: str) -> Any:
    if family != "one head":
        return FAMILIES[family].model(SIDE, torch.float64)
    torch.manual_seed(3)
    model = dit(SIDE, num_attention_heads=1)
    randomize(model, 0.5)
    return model.eval().to(torch.float64)


def _generation(plan: Plan, model: Any, calls: list[dict[str, Any]], branches: int) -> tuple[list[Tensor], Ledger]:
    """All steps, with the clock driven as a pipeline drives it."""
    plan.clock.driven = True
    plan.clock.begin(TIMES)
    outputs = []
    with Ledger(flops=False) as ledger:
        for step in range(len(TIMES)):
            outputs += [model(**call).sample for call in calls[step * branches : (step + 1) * branches]]
            plan.clock.advance()
            plan.close_record()
    return outputs, ledger


def _portions(plan: Plan, layers: int) -> list[float]:
    stage = next(stage for stage in plan.denoisers[0].stages if isinstance(stage, PartialStage))
    return [stage.portion(layer) for layer in range(layers)]


def _case(case: Case, nproc: int) -> list[dict[str, Any]]:
    family = "DiT" if case.family == "one head" else case.family
    model, calls = _model(case.family), calls_of(family, SIDE, case.branches)
    chosen = (case.strategy, *case.beside)
    parts, layers = case.strategy.degree or nproc, sum(streams is not None for streams in STREAMS[family])
    merged = nproc // parts if any(isinstance(other, Ulysses) for other in case.beside) else 1
    knobs = (parts, case.strategy.warmup_steps, case.strategy.order, STREAMS[family], merged)
    with Mesh(**mesh_for(chosen, nproc)) as mesh, parallelize(model, *chosen, mesh=mesh) as plan:
        _generation(plan, model, calls, case.branches)  # the second generation begins anew
        got, ledger = _generation(plan, model, calls, case.branches)
        predicted, portions = plan.explain().bytes_total(), _portions(plan, layers)
        plan.undo()

        def twins() -> tuple[list[Tensor], list[Tensor], list[list[int]]]:
            rotating = Rotating(parts, case.strategy, STREAMS[family], portions, merged)
            want = simulate(model, calls, case.branches, rotating)
            whole = simulate(model, calls, case.branches, Simulated(*knobs))
            return (
                want,
                whole,
                [[rotating.rows_sent(step, part) for step in range(len(TIMES))] for part in range(parts)],
            )

        want, whole, rows = on_first(twins)
        mine = {
            "portions": portions,
            "rows_by_step": rows[mesh.axis("patch").index],
            "errors": [error(g, w) for g, w in zip(got, want, strict=True)],
            "from_displaced": [error(g, w) for g, w in zip(got, whole, strict=True)],
            "counted": int(ledger.summary()["bytes_sent"]),
            "bytes_by_step": [int(record["bytes_sent"]) for record in ledger.records],
            "predicted": predicted,
        }
        return gathered(mine)


def _covers_everything(nproc: int) -> list[bool]:
    """Whether every output is that of DisplacedPatch, bit for bit."""
    same = []
    some = (("DiT", 0), ("SD3", 1), ("DiT", 1), ("SD3", 0))
    for family, order in some if nproc == 2 else some[:2]:
        calls, outputs = calls_of(family, SIDE, 1), []
        strategies = (PartialPatch(portion=nproc - 1, order=order), DisplacedPatch(order=order))
        for strategy in strategies:
            model = _model(family)
            with Mesh(patch=nproc) as mesh, parallelize(model, strategy, mesh=mesh) as plan:
                outputs.append(_generation(plan, model, calls, 1)[0])
        same.append(all(torch.equal(one, other) for one, other in zip(*outputs, strict=True)))
    return same


#: How fast the attention of each layer falls with the square of the distance in tokens; 0 sees all alike.
SHARPNESS = (2.0, 0.02, 0.0)
BUDGETS = (1e-6, 0.05, 0.5)
TOKENS = 41


def attention_inputs(layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[1, 1, L, 2]` with logits ``2 c x y - c y^2`` at scale 1: a bell around each token."""
    place = torch.arange(TOKENS, dtype=torch.float64)
    q = torch.stack((2 * SHARPNESS[layer] * place, torch.full_like(place, -SHARPNESS[layer])), dim=1)
    k = torch.stack((place, place.square()), dim=1)
    v = torch.randn(TOKENS, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(layer))
    return q[None, None], k[None, None], v[None, None]


def _choices(nproc: int) -> list[dict[float, dict[int, float]]]:
    """What every rank chooses for each layer at each budget."""
    sizes, chosen = split_sizes(TOKENS, nproc), {}
    with Mesh(patch=nproc) as mesh:
        axis = mesh.axis("patch")
        for budget in BUDGETS:
            clock = StepClock()
            (stage,) = PartialPatch(portion="auto", warmup_steps=1, error_budget=budget).stages(mesh, clock)
            clock.begin((3.0, 2.0, 1.0))
            for _, layer in itertools.product(range(2), range(len(SHARPNESS))):
                for clock.branch, seen in enumerate((layer, 0)):  # the second needs least, and the first decides
                    q, k, v = (x.split(list(sizes), dim=2)[axis.index] for x in attention_inputs(seen))
                    stage.run(AttentionCall(layer, q, k, v, sizes, axis.index, scale=1.0), attend_locally)
                if layer == len(SHARPNESS) - 1:
                    clock.advance()
            assert isinstance(stage, PartialStage)
            chosen[budget] = dict(stage.portions)
            stage.reset()
        return gathered(chosen)


def _beside_a_ring() -> str:
    chosen = (PartialPatch(degree=2), TokenRing(degree=2))
    with Mesh(patch=2, ring=2) as mesh:
        try:
            parallelize(_model("DiT"), *chosen, mesh=mesh)
        except UnsupportedError as refusal:
            return str(refusal)
    return ""


def run(nproc: int, names: list[str]) -> dict[str, Any]:
    """Everything of one number of ranks, in one launch: these cases, and what is not a case."""
    logging.set_verbosity_error()
    with Mesh(data=nproc), torch.no_grad():  # keeps the ranks connected from one mesh to the next
        return {
            "cases": {name: _case(cases(nproc)[name], nproc) for name in names},
            "everything": _covers_everything(nproc),
            "choices": _choices(nproc),
            "beside a ring": _beside_a_ring() if nproc == 4 else "",
        }
