"""Measures a few-step model against its teacher: ``python benchmarks/steps/few_steps.py --model FOLDER``.

The folder is what `zoo/recipes/train_shapes_few.py` exports. Measured are facts that are read from pictures of fresh
captions, how far pictures of one caption are apart, calls of the transformer, and seconds per picture. The student
samples by its own scheduler and by the consistency sampler.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from diffusers import DiffusionPipeline
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.filing import file_result, markdown_table, result_path, spread
from partsong import zoo
from partsong.samplers.denoising.consistency import consistency, flow_estimate, trigflow_times
from partsong_zoo.scoring import FactScore
from partsong_zoo.shapes.grammar import captions
from partsong_zoo.shapes.reader import facts

#: Pictures of one call.
BATCH = 20
#: Times of the consistency sampler between the first and the last, by steps.
BETWEEN: dict[int, Sequence[float]] = {1: (), 2: (1.2,), 4: (1.4, 1.2, 0.9)}

#: Draws the latents of captions, one seed each.
Sampler = Callable[[Sequence[str], Sequence[int]], Tensor]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to sample."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    model: Path
    """Folder of the student."""
    captions: int = 200
    """How many fresh captions."""
    spread: int = 30
    """Captions whose pictures are compared with each other."""
    each: int = 8
    """Pictures of each of them."""
    timed: int = 7
    """Pictures of each case that are timed one by one, in turns."""
    seed: int = 0
    """Seed of captions and noise."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Describes one way to sample.

    Attributes:
        name: for the table.
        pipeline: whose transformer is called.
        calls: of the transformer per picture.
        asked: arguments of the pipeline's call; None for the consistency sampler.
        between: that sampler's times.
    """

    name: str
    pipeline: Any
    calls: int
    asked: dict[str, Any] | None = None
    between: Sequence[float] = field(default=())

    def latents(self, texts: Sequence[str], seeds: Sequence[int]) -> Tensor:
        """Draws latents `[texts, 4, 16, 16]`."""
        draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        if self.asked is not None:
            return self.pipeline(list(texts), generator=draws, output_type="latent", **self.asked).images
        return _consistent(self.pipeline, list(texts), draws, self.between)

    @torch.no_grad()
    def images(self, latents: Tensor) -> NDArray[np.float32]:
        """Decodes latents to pictures `[batch, 64, 64, 3]` in [0, 1]."""
        vae = self.pipeline.vae
        decoded = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample
        return (decoded / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()


@torch.no_grad()
def _consistent(pipeline: Any, texts: list[str], draws: list[torch.Generator], between: Sequence[float]) -> Tensor:
    """Samples with the library's consistency sampler."""
    tokens, _, pooled, _ = pipeline.encode_prompt(
        texts, None, None, do_classifier_free_guidance=False, max_sequence_length=1
    )

    def velocity(latents: Tensor, level: float) -> Tensor:
        time_of = torch.full((len(texts),), 1000 * level)
        return pipeline.transformer(latents, tokens, pooled, time_of, return_dict=False)[0]

    def noise(step: int) -> Tensor:
        return torch.stack([torch.randn(4, 16, 16, generator=draw) for draw in draws])

    return consistency(flow_estimate(velocity), noise, trigflow_times(len(between) + 1, between=between))


def cases(student: Any) -> list[Case]:
    """Lists the ways to sample; the others are compared with the first."""
    teacher, guided = zoo.load("shapes"), dict(zoo.MODELS["shapes"].defaults)
    alone = {"guidance_scale": 1.0, "max_sequence_length": 1, "height": 64, "width": 64}
    rows = [
        Case(
            name=f"shapes, {steps} guided steps",
            pipeline=teacher,
            calls=2 * steps,
            asked=guided | {"num_inference_steps": steps},
        )
        for steps in (28, 4)
    ]
    rows += [
        Case(name=f"shapes-few, {steps}", pipeline=student, calls=steps, asked=alone | {"num_inference_steps": steps})
        for steps in (4, 2, 1)
    ]
    rows += [
        Case(name=f"shapes-few, {steps} by consistency", pipeline=student, calls=steps, between=BETWEEN[steps])
        for steps in (4, 2, 1)
    ]
    for pipeline in (teacher, student):
        pipeline.set_progress_bar_config(disable=True)
    return rows


def main(config: Config) -> None:
    """Samples and writes the files."""
    torch.set_num_threads(1)
    student = DiffusionPipeline.from_pretrained(config.model)
    listed = cases(student)
    rows = [{"case": case.name, "calls": case.calls, **_read(case, config), **_apart(case, config)} for case in listed]
    for row, seconds in zip(rows, _timed(listed, config), strict=True):
        row["seconds"] = seconds
    note = (
        f"Facts read from pictures of {config.captions} fresh captions, in percent with the standard error over "
        f"captions; how far the latents of {config.each} pictures of one caption are apart, as a share of the "
        f"teacher's, over {config.spread} captions; calls of the transformer per picture; and seconds per picture, one "
        f"at a time and in turns, on one thread, medians of {config.timed}, with text encoders and without the "
        f"autoencoder. *By consistency*: clean estimates and fresh noise at the times in `BETWEEN` of the script."
    )
    spreads = {row["case"]: spread(row["seconds"]) for row in rows}
    file_result(config.out, __file__, rows, "Few steps", note, _table(rows), spreads=spreads)


def _batches(case: Case, texts: Sequence[str], seeds: Sequence[int]) -> Tensor:
    parts = range(0, len(texts), BATCH)
    return torch.cat([case.latents(texts[at : at + BATCH], seeds[at : at + BATCH]) for at in parts])


def _read(case: Case, config: Config) -> dict[str, Any]:
    """Reads the facts of fresh captions."""
    texts = captions(config.captions, config.seed)
    latents = _batches(case, texts, [config.seed + number for number in range(len(texts))])
    images = np.concatenate([case.images(part) for part in latents.split(BATCH)])
    result = FactScore(captions=texts, facts=[facts(text, image) for text, image in zip(texts, images, strict=True)])
    return {
        "facts_read": result.facts_read,
        "standard_error": result.standard_error,
        "all_right": result.all_right,
        "by_kind": {kind: round(share, 4) for kind, (share, _) in result.by_kind().items()},
    }


def _apart(case: Case, config: Config) -> dict[str, float]:
    """Measures the mean distance of latents of one caption, over pairs."""
    distances = list[float]()
    for number, text in enumerate(captions(config.spread, config.seed + 1)):
        latents = case.latents([text] * config.each, [1000 * number + index for index in range(config.each)])
        distances += [float((one - other).norm()) for one, other in itertools.combinations(latents, 2)]
    return {"distance": statistics.fmean(distances)}


def _timed(listed: Sequence[Case], config: Config) -> list[list[float]]:
    """Times pictures of every case in turns."""
    seconds: list[list[float]] = [[] for _ in listed]
    for number, text in enumerate(captions(config.timed + 1, config.seed)):
        for case, spent in zip(listed, seconds, strict=True):
            start = time.perf_counter()
            case.latents([text], [number])
            if number:  # the first picture of a case also warms it up
                spent.append(time.perf_counter() - start)
    return seconds


def _table(rows: Sequence[dict[str, Any]]) -> str:
    base = rows[0]
    lines = [
        (
            row["case"],
            row["calls"],
            f"{100 * row['facts_read']:.1f} ± {100 * row['standard_error']:.1f}",
            f"{100 * (row['facts_read'] - base['facts_read']):+.1f}",
            f"{100 * row['all_right']:.1f}",
            ", ".join(f"{kind} {100 * share:.0f}" for kind, share in row["by_kind"].items()),
            f"{row['distance'] / base['distance']:.2f}",
            f"{statistics.median(row['seconds']):.3f}",
            f"{statistics.median(base['seconds']) / statistics.median(row['seconds']):.1f}x",
        )
        for row in rows
    ]
    heads = ("case", "calls", "facts read", "to teacher", "all right", "by kind", "diversity", "s", "faster")
    return markdown_table(heads, lines)


if __name__ == "__main__":
    main(tyro.cli(Config))
