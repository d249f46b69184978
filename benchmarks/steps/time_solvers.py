"""Compares methods that solve for several steps at once: ``python benchmarks/steps/time_solvers.py``.

All walk the same pipeline in one process, so rounds are calls of the model one after the other, as they would be with a
rank for every point of a round. Everything but the pipeline's own loop is this project's own implementation.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from benchmarks.filing import file_result, markdown_table, result_path
from benchmarks.steps.chords import chords
from benchmarks.steps.parareal import parareal
from benchmarks.steps.reused_outputs import reused_outputs
from benchmarks.steps.step_rule import StepRule
from partsong import TimeParallel, zoo
from partsong.outputs import psnr
from partsong.parallel import parallelize
from partsong.samplers.denoising.drafts import drafts
from partsong.samplers.denoising.fixed_point import Evaluate, Solution, SolverStep, picard
from partsong.samplers.time_parallel.loop import Solve, solve_over_time
from partsong.samplers.time_parallel.scheduled import ScheduledStep
from partsong.seeds import generators


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to sample."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    captions: int = 50
    """How many fresh captions."""
    seed: int = 0
    """Seed of captions and noise."""


def solvers() -> dict[str, Solve]:
    """Lists the solvers by name."""
    every: dict[str, Solve] = {}
    for window, tolerance in itertools.product((2, 4, 8), (0.02, 0.05, 0.1)):
        every[f"Picard, window {window}, tolerance {tolerance}"] = functools.partial(
            _picard, window=window, tolerance=tolerance
        )
    for num in (2, 3, 4):
        every[f"drafts, {num}"] = functools.partial(_drafts, num=num)
        every[f"ParaStep, {num}"] = functools.partial(_reused, num=num)
    for begins in ((0, 7), (0, 14), (0, 4, 10, 16)):
        every[f"CHORDS, {begins}"] = functools.partial(_chords, begins=begins)
    for tolerance in (0.02, 0.1):
        every[f"SRDS, tolerance {tolerance}"] = functools.partial(_parareal, tolerance=tolerance)
    return every


def _picard(
    evaluate: Evaluate, start: Tensor, steps: Sequence[SolverStep], *, window: int, tolerance: float
) -> Solution:
    return picard(evaluate, start, steps, window=window, tolerance=tolerance, bundles=True)


def _drafts(evaluate: Evaluate, start: Tensor, steps: Sequence[SolverStep], *, num: int) -> Solution:
    return drafts(evaluate, start, steps, num=num)


def _reused(evaluate: Evaluate, start: Tensor, steps: Sequence[SolverStep], *, num: int) -> Solution:
    return reused_outputs(evaluate, start, steps, num=num)


def _chords(evaluate: Evaluate, start: Tensor, steps: Sequence[SolverStep], *, begins: tuple[int, ...]) -> Solution:
    return chords(evaluate, start, _rules(steps), begins=begins)


def _parareal(evaluate: Evaluate, start: Tensor, steps: Sequence[SolverStep], *, tolerance: float) -> Solution:
    return parareal(evaluate, start, _rules(steps), tolerance=tolerance)


def _rules(steps: Sequence[SolverStep]) -> list[StepRule]:
    """Returns the steps of flow matching as numbers."""
    first = steps[0]
    assert isinstance(first, ScheduledStep)
    sigmas = first.begin.sigmas.tolist()
    return [StepRule(1.0, after - before) for before, after in itertools.pairwise(sigmas)]


def main(config: Config) -> None:
    """Samples and writes the files."""
    torch.set_num_threads(1)
    row, pipe = zoo.MODELS["shapes"], zoo.load("shapes")
    pipe.set_progress_bar_config(disable=True)
    steps, results = row.defaults["num_inference_steps"], dict[str, list[dict[str, float]]]()
    captions = row.task.captions(config.captions, config.seed)
    for caption, draw in zip(captions, generators(config.seed, config.captions), strict=True):
        state, reference = draw.get_state(), None
        plain = {f"{num} steps": num for num in (steps, 25, 21, 18, 14)}
        for name in (*plain, *solvers()):
            draw.set_state(state)
            asked = {**row.defaults, "prompt": caption, "output_type": "np", "generator": draw}
            if name in plain:
                image = pipe(**asked | {"num_inference_steps": plain[name]}).images
                found: dict[str, float] = {"rounds": plain[name], "evaluations": plain[name]}
            else:
                image, found = _solved(pipe, asked, solvers()[name])
            reference = image if reference is None else reference
            found |= {"psnr": min(psnr(image, reference), 999.0), "facts": row.task.facts_read(caption, image[0])}
            results.setdefault(name, []).append(found)
    _file(config, steps, [_row(name, pictures) for name, pictures in results.items()])


def _row(name: str, pictures: list[dict[str, float]]) -> dict[str, Any]:
    of = {key: [picture[key] for picture in pictures] for key in pictures[0]}
    return {
        "case": name,
        "rounds_median": statistics.median(of["rounds"]),
        "rounds_max": max(of["rounds"]),
        "evaluations": statistics.fmean(of["evaluations"]),
        "psnr_median": statistics.median(of["psnr"]),
        "psnr_worst": min(of["psnr"]),
        "facts_read": statistics.fmean(of["facts"]),
    }


def _file(config: Config, steps: int, rows: list[dict[str, Any]]) -> None:
    """Writes both files."""
    note = (
        f"`shapes` at {steps} steps and its default guidance, {config.captions} captions, one picture at a time. "
        "Rounds are calls of the model one after the other; evaluations count what all ranks do together. PSNR in dB "
        "against the pipeline's own loop."
    )
    columns = ("case", "rounds", "most", "evaluations", "PSNR median", "worst", "facts read")
    lines = [
        (
            each["case"],
            f"{each['rounds_median']:g}",
            f"{each['rounds_max']:g}",
            f"{each['evaluations']:.1f}",
            f"{each['psnr_median']:.1f}",
            f"{each['psnr_worst']:.1f}",
            f"{100 * each['facts_read']:.1f} %",
        )
        for each in rows
    ]
    title = "Ways to solve for several steps at once"
    file_result(config.out, __file__, rows, title, note, markdown_table(columns, lines))


def _solved(pipe: Any, asked: dict[str, Any], solve: Solve) -> tuple[Any, dict[str, float]]:
    """Calls a pipeline with a solver, and counts."""
    counted: dict[str, float] = {}

    def counting(evaluate: Evaluate, start: Tensor, steps: Sequence[SolverStep]) -> Solution:
        solution = solve(evaluate, start, steps)
        counted.update(rounds=solution.rounds, evaluations=solution.evaluations)
        return solution

    with parallelize(pipe, TimeParallel()) as plan:
        return solve_over_time(plan, asked, counting).images, counted


if __name__ == "__main__":
    main(tyro.cli(Config))
