"""Measures mixes of strategies on one number of ranks: seconds against drift.

``python benchmarks/planner/mixes.py`` samples fresh captions one by one with every mix in turn, the serial pipeline
beside them. ``--model flux-like`` takes 100 M random parameters instead of a model of the zoo. Where ranks share cores,
wall time says little. So the table has the processor seconds of the busiest rank too: what a picture takes where every
rank has a core of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.filing import file_result, markdown_table, result_path
from partsong import parse_strategy, zoo
from partsong.evals.bench.models import BENCH_MODELS, TEXT_TOKENS, WIDTH
from partsong.jobs.compare import gather
from partsong.ledger import Ledger
from partsong.outputs import psnr
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.ranks.launch import launch
from partsong.samplers import generate
from partsong.seeds import generators

#: The name of the model that is timed without a task: a model this large is not shipped.
FLUX_LIKE = "flux-like"
#: Mixes on four ranks, as command lines name them. The empty one is the pipeline's own loop on one rank.
MIXES = (
    "",
    "ulysses",
    "cfg-parallel ulysses",
    "displaced-patch",
    "displaced-patch:wire=1bit",
    "cfg-parallel displaced-patch",
    "partial-patch",
    "patch-pipeline",
    "time-parallel",
    "time-parallel:tolerance=0.1",
    "time-parallel:window=2 cfg-parallel",
    "time-parallel:window=2,degree=2 ulysses",
    "drafted-steps:depth=4",
    "drafted-steps:depth=2 cfg-parallel",
    "drafted-steps:depth=2,degree=2 ulysses",
    "cfg-parallel ulysses step-cache",
    "cfg-parallel displaced-patch step-cache",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to sample."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    model: str = "shapes"
    """A model of the zoo, or flux-like: 100 M random parameters, 256 tokens, 20 steps with guidance."""
    nproc: int = 4
    """Ranks, one thread each."""
    mixes: tuple[str, ...] = MIXES
    """Strategies of each mix, as command lines name them, with spaces between."""
    captions: int = 25
    """How many fresh captions."""
    seed: int = 0
    """Seed of captions and noise."""


def main(config: Config) -> None:
    """Runs the study and writes the files."""
    rows = launch(_on_rank, config.nproc, config)
    subject = (
        "20 steps with guidance at 256 tokens (random weights, PSNR of the latents in their own range)"
        if config.model == FLUX_LIKE
        else "its default steps and guidance"
    )
    note = (
        f"`{config.model}` at {subject}, float32, {config.captions} captions one at a time, a "
        f"thread per rank, all mixes in turn on {config.nproc} ranks. PSNR in dB to the serial pictures. *Processor* "
        "is the busiest rank's processor seconds for a picture, with what its exchanges cost it; *path* is serial by "
        "that. *Frontier* marks mixes that no other equals in path and PSNR and beats in one of them (above 100 dB "
        "counts as equal)."
    )
    columns = ("mix", "class", "processor s", "path", "wall s", "PSNR median", "worst", "facts read", "MB", "frontier")
    lines = [
        (
            each["mix"] or "serial",
            each["class"],
            f"{each['processor_seconds']:.3f}",
            f"{each['path_to_serial']:.2f}x",
            f"{each['seconds_median']:.3f}",
            f"{each['psnr_median']:.1f}",
            f"{each['psnr_min']:.1f}",
            "" if each["facts_read"] is None else f"{100 * each['facts_read']:.1f} %",
            f"{each['bytes_sent'] / 1e6:.2f}",
            "*" if each["is_frontier"] else "",
        )
        for each in rows
    ]
    title = f"Mixes on {config.nproc} ranks"
    file_result(config.out, __file__, rows, title, note, markdown_table(columns, lines))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subject:
    """Holds a pipeline, the arguments of every picture, and how a picture is read."""

    pipe: Any
    calls: list[dict[str, Any]]
    facts: Callable[[int, Any], float] | None


def _zoo_subject(config: Config) -> _Subject:
    row = zoo.MODELS[config.model]
    captions = row.task.captions(config.captions, config.seed)
    calls = [{**row.defaults, "prompt": caption, "output_type": "np"} for caption in captions]
    read = row.task.facts_read
    return _Subject(
        pipe=zoo.load(config.model), calls=calls, facts=lambda index, image: read(captions[index], image[0])
    )


def _flux_like_subject(config: Config) -> _Subject:
    draw = torch.Generator().manual_seed(config.seed)
    sizes = {"prompt_embeds": (1, TEXT_TOKENS, WIDTH), "pooled_prompt_embeds": (1, WIDTH)}
    fixed = {"height": 256, "width": 256, "num_inference_steps": 20, "true_cfg_scale": 3.0, "output_type": "latent"}
    calls = [
        fixed
        | {
            before + name: torch.randn(size, generator=draw)
            for before in ("", "negative_")
            for name, size in sizes.items()
        }
        for _ in range(config.captions)
    ]
    return _Subject(pipe=_flux(), calls=calls, facts=None)


def _flux() -> Any:
    """Builds a Flux pipeline around `flux-like`; it starts from embedded texts and ends with latents."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    torch.manual_seed(0)
    absent: Any = None
    transformer: Any = BENCH_MODELS["flux-like"].build().eval()
    return FluxPipeline(FlowMatchEulerDiscreteScheduler(), absent, absent, absent, absent, absent, transformer)


def _on_rank(config: Config) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    subject = _flux_like_subject(config) if config.model == FLUX_LIKE else _zoo_subject(config)
    subject.pipe.set_progress_bar_config(disable=True)
    pictures: dict[str, list[dict[str, Any]]] = {mix: [] for mix in config.mixes}
    with Mesh(data=config.nproc, timeout=1800.0) as everyone:
        for index, draw in enumerate(generators(config.seed, config.captions)):
            state, reference = draw.get_state(), None
            for mix in config.mixes:
                draw.set_state(state)
                image, measured = _picture(everyone, subject.pipe, mix, subject.calls[index] | {"generator": draw})
                reference = image if reference is None else reference
                measured["psnr"] = min(_psnr_in_range(image, reference), 999.0)
                measured["facts"] = None if subject.facts is None else subject.facts(index, image)
                pictures[mix].append(measured)
    rows = [_row(mix, each) for mix, each in pictures.items()]
    for each in rows:
        each["path_to_serial"] = rows[0]["processor_seconds"] / each["processor_seconds"]
    for each in rows:
        each["is_frontier"] = not any(_beats(other, each) for other in rows)
    return rows


def _beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Says whether a mix is as fast and as close as another and better in one of both; above 100 dB is rounding."""
    ones, others = ((each["path_to_serial"], min(each["psnr_median"], 100.0)) for each in (one, other))
    return ones != others and all(mine >= theirs for mine, theirs in zip(ones, others, strict=True))


def _psnr_in_range(image: Any, reference: Any) -> float:
    """Returns the PSNR of two pictures in [0, 1], or of two latents in the range of the second."""
    if not isinstance(image, torch.Tensor):
        return psnr(image, reference)
    low, high = reference.min(), reference.max()
    return psnr(((image - low) / (high - low)).numpy(), ((reference - low) / (high - low)).numpy())


def _picture(everyone: Mesh, pipe: Any, mix: str, asked: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Samples a picture with a mix; every rank samples the serial one, and the busiest counts there too."""
    strategies: list[Strategy] = [parse_strategy(name) for name in mix.split()]
    kind, sent = "exact", 0
    gather(everyone, [0.0], "start of a picture")
    if not strategies:
        start, spent = time.perf_counter(), time.process_time()
        image = pipe(**asked).images
    else:
        with (
            Mesh(**mesh_for(strategies, everyone.world_size)) as mesh,
            parallelize(pipe, *strategies, mesh=mesh) as plan,
        ):
            start, spent = time.perf_counter(), time.process_time()
            with Ledger(flops=False) as ledger:
                image = generate(plan, **asked).images
            kind, sent = plan.kind, int(ledger.summary()["bytes_sent"])
    used = [time.perf_counter() - start, time.process_time() - spent, float(sent)]
    table = gather(everyone, used, "end of a picture")
    wall, busiest, most = (max(each) for each in zip(*table, strict=True))
    return image, {"seconds": wall, "processor": busiest, "bytes": int(most), "class": kind}


def _row(mix: str, pictures: list[dict[str, Any]]) -> dict[str, Any]:
    of = {key: [picture[key] for picture in pictures] for key in pictures[0]}
    return {
        "mix": mix,
        "class": of["class"][0],
        "num_captions": len(pictures),
        "seconds_median": statistics.median(of["seconds"]),
        "processor_seconds": statistics.median(of["processor"]),
        "psnr_median": statistics.median(of["psnr"]),
        "psnr_min": min(of["psnr"]),
        "facts_read": None if None in of["facts"] else statistics.fmean(of["facts"]),
        "bytes_sent": statistics.fmean(of["bytes"]),
    }


if __name__ == "__main__":
    main(tyro.cli(Config))
