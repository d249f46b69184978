"""Runs on every rank: counts what one step in the middle of a generation does, under a plan and without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from diffusers.utils import logging
from torch import nn

from partsong import (
    ClipParallel,
    CrossAttentionCache,
    DisplacedPatch,
    LaggedLayers,
    LatentParallel,
    OffloadWeights,
    ParallelVae,
    PartialPatch,
    PatchPipeline,
    Ring,
    ShardedWeights,
    StepCache,
    StructureGuidance,
    TokenRing,
    Ulysses,
)
from partsong.kernels.dispatch import force_backend
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Plan, Strategy, cross_attention_cache, mesh_for, parallelize
from partsong.parallel.exchange.wires import WireName
from partsong.samplers import generate
from tests.gpu_ready.operators import Operators
from tests.gpu_ready.repeated_calls import RepeatedCalls
from tests.gpu_ready.units import slope
from tests.parallel import equivalence_worker
from tests.parallel.ranks import gathered
from tests.pipelines.case import Case, denoisers
from tests.pipelines.cases import CASES

WIRES: tuple[WireName, ...] = ("fp8", "int8", "4bit", "2bit", "1bit", "lowrank")
_SINGLE = equivalence_worker.strategies(2)
#: Strategies by what they are called in the table; those that a warm-up makes exact run without one here.
STRATEGIES: dict[str, tuple[Strategy, ...]] = {
    **{name: chosen for name, chosen in _SINGLE.items() if len(chosen) == 1 and chosen[0].kind == "exact"},
    "ShardedWeights": (Ulysses(), ShardedWeights()),
    "OffloadWeights": (Ulysses(), OffloadWeights()),
    "DisplacedPatch": (DisplacedPatch(),),
    "PartialPatch": (PartialPatch(portion=0.5),),
    "LaggedLayers": (LaggedLayers(),),
    "StepCache": (Ulysses(), StepCache(threshold=0.0)),
    "StepCache, late": (Ulysses(), StepCache(threshold=0.0, decide="late")),
    "CrossAttentionCache": (Ulysses(), CrossAttentionCache()),
    "PatchPipeline": (PatchPipeline(),),
    "StructureGuidance": (StructureGuidance(),),
    "ParallelVae": (Ulysses(), ParallelVae()),
    "ClipParallel": (ClipParallel(),),
    "LatentParallel": (LatentParallel(),),
    **{f"Ring, {wire}": (Ring(wire=wire),) for wire in WIRES},
    **{f"DisplacedPatch, {wire}": (DisplacedPatch(wire=wire),) for wire in WIRES},
    **{f"{kind.__name__}, {wire}": (kind(wire=wire),) for kind in (Ulysses, TokenRing) for wire in WIRES[:2]},
}
#: Samples of a call, where these are shared out.
SAMPLES = {"DataParallel": 2}
#: A generation of either length is past every warm-up, so what the longer one does more is of steps in the middle.
LENGTHS = (6, 8)
#: The tiny models' hidden states are larger than this, and what is made for each sample or head is not.
TILE = 256
#: A pipeline and a strategy by name.
Pair = tuple[str, str]


@dataclass(frozen=True)
class Step:
    """What one step does on one rank beyond what the pipeline alone does in it.

    Attributes:
        waits: of the host, by what waits and where.
        late: numbers that were on their way to the host since the step before.
        uploads: of Python's numbers to the device.
        fresh: memory larger than a tile, asked for by partsong's own code.
        messages: that are sent.
        changed: operators of a call that a GPU's graph could not repeat, since the step before had others; None where
            the strategy makes no whole calls.
        moved: operators that read or write kept memory elsewhere than in the step before.
    """

    waits: dict[str, float]
    late: dict[str, float]
    uploads: dict[str, float]
    fresh: dict[str, float]
    messages: float
    changed: int | None
    moved: int | None


def _counted(generation: Callable[[int], Any], models: Sequence[nn.Module]) -> Step:
    """What a step does: the difference of two generations, shared out over the steps that one has more."""
    seen: list[tuple[Operators, float]] = []
    generation(4)  # what it leaves for the next one is what every generation does
    for steps in LENGTHS:
        with Operators(TILE) as operators, Ledger(flops=False) as ledger:
            generation(steps)
        seen.append((operators, ledger.summary()["messages"]))
    calls = RepeatedCalls(models)
    with calls.recording():
        generation(LENGTHS[1])
    (short, sent), (long, sent_more) = seen
    more = LENGTHS[1] - LENGTHS[0]
    return Step(
        slope(short.waits, long.waits, more),
        slope(short.late, long.late, more),
        slope(short.uploads, long.uploads, more),
        slope(short.fresh, long.fresh, more),
        (sent_more - sent) / more,
        *calls.differences(LENGTHS[1]),
    )


def steps(nproc: int, pairs: list[Pair]) -> dict[tuple[str, str], list[Step]]:
    """A step of every pair on each rank; under the name ``alone``, that of so many samples without a plan."""
    logging.set_verbosity_error()
    results: dict[tuple[str, str], list[Step]] = {}
    # The kernel of the CPU looks for empty rows; those of GPUs write what they need themselves. Texts on a CPU are
    # compared by their numbers, those on GPUs by their memory.
    on_gpu = mock.patch.object(cross_attention_cache, "is_on_host", return_value=False)
    with Mesh(data=nproc), force_backend("naive"), on_gpu:
        for name in dict.fromkeys(name for name, _ in pairs):
            case = CASES[name]
            pipe = case.make()
            models = denoisers(pipe)
            for samples in {SAMPLES.get(chosen, 1) for other, chosen in pairs if other == name}:
                results[name, f"alone, {samples}"] = gathered(
                    _counted(partial(_generation, pipe, case, samples), models)
                )
            for chosen in (chosen for other, chosen in pairs if other == name):
                strategies = STRATEGIES[chosen]
                with Mesh(**mesh_for(strategies, nproc)) as mesh, parallelize(pipe, *strategies, mesh=mesh) as plan:
                    samples = SAMPLES.get(chosen, 1)
                    results[name, chosen] = gathered(_counted(partial(_generation, plan, case, samples), models))
    return results


def _generation(source: Any, case: Case, samples: int, steps: int) -> None:
    """One generation of a pipeline, or under a plan."""
    torch.manual_seed(3)
    named = {"generator": torch.Generator().manual_seed(9), **case.call(samples), "num_inference_steps": steps}
    if isinstance(source, Plan):
        generate(source, **named)
    else:
        source(**named)
