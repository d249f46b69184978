"""Runs on every rank: pipelines and models with `StepCache`, to be compared between numbers of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from partsong import CfgParallel, DataParallel, DisplacedPatch, PartialPatch, Ring, StepCache, Ulysses
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, parallelize
from partsong.parallel.step_cache.tables import CacheCalibration
from tests.parallel.pipelines import PIPES
from tests.parallel.ranks import gathered, staying_connected

STEPS = 8
#: Between the changes that the tiny models' first blocks make, so that some steps are left out and some are not.
CACHES = {
    name: StepCache(threshold=threshold, warmup_steps=1, max_skips=2)
    for name, threshold in (("Wan", 0.27), ("Flux", 1.05), ("SD3", 1.2), ("PixArt", 0.83))
}
#: The same for the sum of the changes of their modulated inputs.
SUMMED = replace(CACHES["SD3"], measure="input", calibration=CacheCalibration(polynomial=(1.0, 0.0)), threshold=1.5)
#: The same two, decided by what the step before has measured.
LATE = replace(CACHES["SD3"], decide="late", threshold=1.6)
LATE_SUMMED = replace(SUMMED, decide="late", threshold=1.2)
#: The same for the sum of the changes of what is not noise.
SPECTRAL = replace(CACHES["SD3"], measure="spectral", threshold=1.3)
LATE_SPECTRAL = replace(SPECTRAL, decide="late")
VIDEO = replace(SPECTRAL, threshold=0.9)
MASKED = StepCache(warmup_steps=1, mask="0011", forecast="linear")


@dataclass
class Made:
    """Of one generation; `decisions` holds for every step and branch which samples' blocks were left out."""

    output: Tensor
    computed: int
    skipped: int
    decisions: dict[tuple[int, int], tuple[bool, ...]]


def made(
    name: str, strategies: tuple[Strategy, ...], mesh: Mesh, batch: int = 1, cache: StepCache | None = None
) -> Made:
    """One generation of a tiny pipeline in float64."""
    pipe = PIPES[name].make()
    with parallelize(pipe, *strategies, cache or CACHES[name], mesh=mesh) as plan:
        output = PIPES[name].call(pipe, batch, num_inference_steps=STEPS)
        denoiser = plan.denoisers[0]
        cached, is_split = denoiser.attachments[0], denoiser.seen.calls[1][0].is_split
        own = {(each.step, each.branch): each.left_out for each in cached.decisions}
        everyone = [(denoiser.batch.axis.index, own)]
        if mesh.world_size > 1:
            everyone = gathered(everyone[0])
        return Made(output, cached.computed, cached.skipped, _merged(everyone, is_split))


def _merged(everyone: list[Any], is_split: bool) -> dict[tuple[int, int], tuple[bool, ...]]:
    """Puts together what ranks with different samples, or with different branches of guidance, decided."""
    by_share: dict[int, Any] = {}
    for share, own in everyone:
        assert by_share.setdefault(share, own) == own  # ranks that hold parts of the same samples
    if not is_split:
        return {key: left_out for own in by_share.values() for key, left_out in own.items()}
    keys = by_share[0].keys()
    return {key: tuple(left for _, own in sorted(by_share.items()) for left in own[key]) for key in keys}


def counted(mesh: Mesh, *strategies: Strategy, name: str = "SD3") -> tuple[list[int], list[int]]:
    """Bytes sent by every rank in a generation, and what each predicted of itself."""
    pipe = PIPES[name].make()
    with parallelize(pipe, *strategies, mesh=mesh) as plan:
        with Ledger(flops=False) as ledger:
            PIPES[name].call(pipe, num_inference_steps=STEPS)
        return gathered(int(ledger.summary()["bytes_sent"])), gathered(plan.explain().bytes_total()[mesh.rank])


def alone(name: str, batch: int = 1, cache: StepCache | None = None) -> Made:
    """On one rank."""
    with Mesh() as mesh:
        return made(name, (), mesh, batch, cache)


@staying_connected
def ranks(nproc: int, every: bool) -> dict[Any, Any]:
    """On two ranks, or asked for everything, all; else what is there on four ranks only."""
    found: dict[Any, Any] = {"counted": []}
    if nproc == 2 or every:
        found |= _alike(nproc, every)
    if nproc == 4 or every:
        with Mesh(cfg=2, ulysses=nproc // 2) as mesh:
            found["Wan", 1, "cfg"] = made("Wan", (CfgParallel(), Ulysses()), mesh)
            found["SD3", 2] = made("SD3", (CfgParallel(), Ulysses()), mesh, batch=2)
            found["counted"].append(counted(mesh, CfgParallel(), Ulysses(), CACHES["Wan"], name="Wan"))
    return found


def _alike(nproc: int, every: bool) -> dict[Any, Any]:
    """What any number of ranks can do; each way to count bytes once, or all of them."""
    found: dict[Any, Any] = {}
    with Mesh(ulysses=nproc) as mesh:
        found["Wan", 1] = made("Wan", (Ulysses(),), mesh)
        found["SD3", 2, "summed"] = made("SD3", (Ulysses(),), mesh, 2, SUMMED)
        found["SD3", 2, "late"] = made("SD3", (Ulysses(),), mesh, 2, LATE)
        found["SD3", 2, "late summed"] = made("SD3", (Ulysses(),), mesh, 2, LATE_SUMMED)
        found["SD3", 2, "spectral"] = made("SD3", (Ulysses(),), mesh, 2, SPECTRAL)
        caches = (StepCache(threshold=1e-12, warmup_steps=2), SUMMED, LATE, SPECTRAL, MASKED, LATE_SUMMED)
        found["counted"] = [counted(mesh, Ulysses(), cache) for cache in caches[: None if every else 4]]
        if every:
            found["SD3", 2, "late spectral"] = made("SD3", (Ulysses(),), mesh, 2, LATE_SPECTRAL)
            found["counted"] += [counted(mesh, Ulysses(), cache) for cache in (CACHES["SD3"], LATE_SPECTRAL)]
    with Mesh(ring=nproc) as mesh:
        found["Flux", 1] = made("Flux", (Ring(),), mesh)
        found["Wan", 1, "video"] = made("Wan", (Ring(),), mesh, 1, VIDEO)
    with Mesh(patch=nproc) as mesh:
        beside = [(DisplacedPatch(), MASKED), (PartialPatch(portion=0.5), CACHES["SD3"])]
        beside += [(DisplacedPatch(), CACHES["SD3"]), (PartialPatch(portion=0.5), MASKED)] if every else []
        found["counted"] += [counted(mesh, *each) for each in beside]
    with Mesh(data=nproc) as mesh:
        found["PixArt", 4] = made("PixArt", (DataParallel(),), mesh, batch=4)
    return found
