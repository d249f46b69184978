"""Samples every picture or video of a comparison on the ranks: serially, and then with each strategy.

The model is loaded once. Each call makes one picture or video; all ranks begin it together, and it ends when the last
rank is done. The first call with every strategy is a short one that is not timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partsong.evals.pictures.shelf import Frames, Record, Shelf
from partsong.jobs.compare import WARM_UP_STEPS, gather, on_all_ranks
from partsong.jobs.images import ImageJob, check_image_call, draw_images
from partsong.jobs.pipelines import RANK_TIMEOUT, open_pipeline
from partsong.jobs.videos import VideoJob, check_video_call, draw_video, enough_frames, on_one_rank
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Plan, Strategy, parallelize
from partsong.progress import progress

__all__ = ["SERIAL", "ComparingJob", "Way", "is_sampled", "sample", "ways_of"]

#: The name of the pipeline with nothing attached.
SERIAL = "serial"


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Describes one way to sample.

    Attributes:
        name: as on the command line.
        strategies: what is attached.
        degrees: size of each mesh axis.
        twin: name of the serial one it is compared with; None for a serial one itself.
    """

    name: str
    strategies: tuple[Strategy, ...] = ()
    degrees: Mapping[str, Any] = field(default_factory=dict)
    twin: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparingJob:
    """Says what to sample, in plain values that can be sent to ranks.

    Attributes:
        base: the job that all samples share; its prompt, strategies and number are replaced. Its `out` is the folder
            that keeps the samples.
        prompts: one for each picture; the number of a class for a pipeline of classes.
        texts: the prompts in the user's words.
        ways: serial ones first.
        settings: see `Shelf`.
    """

    base: ImageJob | VideoJob
    prompts: tuple[str | int, ...]
    texts: tuple[str, ...]
    ways: tuple[Way, ...]
    settings: Mapping[str, Any]

    @property
    def videos(self) -> bool:
        """Says whether the samples are videos."""
        return isinstance(self.base, VideoJob)


def ways_of(named: Mapping[str, tuple[tuple[Strategy, ...], Mapping[str, Any]]], *, videos: bool) -> list[Way]:
    """Returns ways to sample: those of the strategies, behind the serial ones that they are compared with.

    Some loops of videos change the result by themselves, such as one that makes a video in panels. Their serial twin is
    the same loop on one rank, as in ``partsong video --compare``. The twin of all others is the pipeline itself.

    Args:
        named: strategies and degrees of the mesh by name.
        videos: whether videos are sampled.
    """
    serial: dict[str, Way] = {}
    parallel = []
    for name, (strategies, degrees) in named.items():
        loops = on_one_rank(strategies) if videos else ()
        parts = [part for part, strategy in zip(name.split("+"), strategies, strict=True) if strategy.loops_alone]
        twin = " ".join([SERIAL, *(parts if videos else [])])
        serial.setdefault(twin, Way(name=twin, strategies=loops))
        parallel.append(Way(name=name, strategies=strategies, degrees=degrees, twin=twin))
    return [*(serial or {SERIAL: Way(name=SERIAL)}).values(), *parallel]


def is_sampled(comparison: ComparingJob) -> bool:
    """Says whether the folder holds every sample already, so that no model is needed.

    Raises:
        ArgumentError: the folder holds another comparison.
    """
    if not comparison.base.out.is_dir():
        return False
    shelf = Shelf(comparison.base.out, comparison.settings)
    shelf.close()
    names = [way.name for way in comparison.ways]
    return all(shelf.has(name, number, text) for name in names for number, text in enumerate(comparison.texts))


def sample(comparison: ComparingJob) -> bool:
    """Samples on this rank what the folder does not hold yet; rank 0 writes it there.

    Returns:
        Whether this is rank 0.

    Raises:
        ArgumentError: the folder holds another comparison, or the pipeline refuses the call.
        UnsupportedError: a strategy does not fit the model; nothing was sampled.
        NotANumberError: a sample holds a NaN.
    """
    job = comparison.base
    job.prepare_process()
    check_video_call(job) if isinstance(job, VideoJob) else check_image_call(job)
    with ExitStack() as opened:
        parallel = [way for way in comparison.ways if way.twin is not None]
        meshes = {m.name: opened.enter_context(Mesh(**m.degrees, timeout=RANK_TIMEOUT)) for m in parallel}
        mesh = next(iter(meshes.values())) if meshes else opened.enter_context(Mesh())
        pipe = open_pipeline(job, mesh)
        for way in parallel:  # all of them first, so that none is refused after another was sampled
            parallelize(pipe, *way.strategies, mesh=meshes[way.name]).undo()
        shelf = Shelf(job.out, comparison.settings) if mesh.is_main else None
        for way in comparison.ways:
            if way.twin is None:
                _sample_serially(comparison, way, pipe, mesh, shelf)
            else:
                _sample_together(comparison, way, pipe, meshes[way.name], shelf)
        if shelf is not None:
            shelf.close()
        return mesh.is_main


def _sample_serially(comparison: ComparingJob, way: Way, pipe: Any, mesh: Mesh, shelf: Shelf | None) -> None:
    """Samples on rank 0 while the others wait."""
    missing = _missing(comparison, way, mesh, shelf)
    with _attached(pipe, way, mesh.alone()) if shelf is not None else nullcontext() as target:
        for number in progress(missing, way.name, unit="sample"):
            if shelf is not None:
                if number == missing[0]:
                    _draw(comparison, way, number, target, warm_up=True)
                start = time.perf_counter()
                drawn = _draw(comparison, way, number, target)
                rows = [[time.perf_counter() - start, 0.0]] + [[0.0, 0.0]] * (mesh.world_size - 1)
                _keep(shelf, comparison, way, number, "exact", drawn, rows)
            gather(mesh, [0.0], "wait for the serial twin")


def _sample_together(comparison: ComparingJob, way: Way, pipe: Any, mesh: Mesh, shelf: Shelf | None) -> None:
    """Samples on all ranks."""
    missing = _missing(comparison, way, mesh, shelf)
    with parallelize(pipe, *way.strategies, mesh=mesh) as plan:
        for number in progress(missing, way.name, unit="sample"):
            if number == missing[0]:
                with Ledger():  # the first use of a ledger costs time too
                    _draw(comparison, way, number, plan, warm_up=True)
            drawn, rows = on_all_ranks(mesh, lambda number=number: _draw(comparison, way, number, plan))
            if shelf is not None:
                _keep(shelf, comparison, way, number, plan.kind, drawn, rows)


def _missing(comparison: ComparingJob, way: Way, mesh: Mesh, shelf: Shelf | None) -> list[int]:
    """Returns the numbers that the folder of rank 0 lacks, the same on every rank."""
    texts = enumerate(comparison.texts)
    there = [float(shelf is not None and shelf.has(way.name, number, text)) for number, text in texts]
    return [number for number, is_there in enumerate(gather(mesh, there, "samples that are there")[0]) if not is_there]


@contextmanager
def _attached(pipe: Any, way: Way, mesh: Mesh) -> Iterator[Any]:
    if not way.strategies:
        yield pipe
        return
    with parallelize(pipe, *way.strategies, mesh=mesh) as plan:
        yield plan


def _draw(
    comparison: ComparingJob, way: Way, number: int, target: Any, *, warm_up: bool = False
) -> tuple[Frames | None, float | None]:
    """Returns the frames on ranks that have them, and when the first of a video were done."""
    prompt, steps = comparison.prompts[number], WARM_UP_STEPS if warm_up else None
    if isinstance(comparison.base, ImageJob):
        job = replace(comparison.base, prompt=prompt, first=number)
        return draw_images(job, target, steps), None
    pipe = target.target if isinstance(target, Plan) else target
    job = replace(comparison.base, prompt=prompt, first=number, strategies=way.strategies)
    run = draw_video(enough_frames(job, pipe), target, steps=steps)
    return (np.concatenate(run.frames) if run.frames else None), run.first


def _keep(
    shelf: Shelf,
    comparison: ComparingJob,
    way: Way,
    number: int,
    kind: str,
    drawn: tuple[Frames | None, float | None],
    rows: list[list[float]],
) -> None:
    frames, first = drawn
    assert frames is not None  # rank 0 always has them
    record = Record(
        way=way.name,
        number=number,
        prompt=comparison.texts[number],
        kind=kind,
        seconds=max(row[0] for row in rows),
        first_frame_seconds=first,
        bytes_sent=tuple(int(row[1]) for row in rows),
    )
    shelf.keep(record, frames)
