"""Measures generations whose steps are solved for together: rounds, drift, facts read, and seconds.

``python benchmarks/steps/time_parallel.py`` samples fresh captions one by one on some numbers of ranks, with the
pipeline's own loop on one rank beside them, in turn.
"""

from __future__ import annotations

import re
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.filing import file_result, markdown_table, result_path, spread
from partsong import DraftedSteps, TimeParallel, zoo
from partsong.jobs.compare import gather
from partsong.ledger import Ledger
from partsong.outputs import psnr
from partsong.parallel import Mesh, Plan, Strategy, parallelize
from partsong.parallel.ranks.launch import launch
from partsong.samplers import generate
from partsong.seeds import generators

#: Number of ranks -> what runs on them.
CASES: dict[int, list[Strategy]] = {
    2: [TimeParallel(window=2), TimeParallel(window=2, tolerance=0.1), DraftedSteps(depth=2)],
    4: [TimeParallel(window=4), TimeParallel(window=4, tolerance=0.1), DraftedSteps(depth=3)],
}
#: Shares of the steps with which the pipeline's own loop runs, for comparison.
FEWER = (0.75, 0.5)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to sample."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    model: str = "shapes"
    """A model of the zoo."""
    nproc: list[int] = field(default_factory=lambda: list(CASES))
    """Numbers of ranks, one thread each."""
    captions: int = 100
    """How many fresh captions."""
    seed: int = 0
    """Seed of captions and noise."""


def main(config: Config) -> None:
    """Runs the study and writes the files."""
    rows: list[dict[str, Any]] = []
    for nproc in config.nproc:
        rows += launch(_on_rank, nproc, nproc, config.model, config.captions, config.seed)
        note = (
            f"`{config.model}` at its default steps and guidance, float32, one picture at a time, a thread per rank. "
            "PSNR of pictures against the pipeline's own loop, in dB. Seconds and rounds are medians over pictures; "
            "all cases of a number of ranks were timed in turn, picture by picture, each with a plan that it keeps."
        )
        spreads = {
            f"{row['case']} beside {row['beside']} ranks": row["seconds_spread"] for row in rows if row["nproc"] == 1
        }
        title, table = "Steps solved for together", _table(rows)
        file_result(config.out, __file__, rows, title, note, table, spreads=spreads)


def _on_rank(nproc: int, model: str, num_captions: int, seed: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    row, pipe = zoo.MODELS[model], _quiet_pipe(model)
    captions = row.task.captions(num_captions, seed)
    steps = row.defaults["num_inference_steps"]
    with Mesh(time=nproc, timeout=1800.0) as mesh, ExitStack() as plans:
        # A plan of its own for each case, kept from picture to picture, as a user would.
        attached = [(each, _quiet_pipe(model)) for each in CASES[nproc]]
        cases = {
            repr(each): (plans.enter_context(parallelize(other, each, mesh=mesh)), other) for each, other in attached
        }
        plain = {
            f"{round(share * steps)} steps": {"num_inference_steps": round(share * steps)} for share in (1, *FEWER)
        }
        pictures: dict[str, list[dict[str, Any]]] = {}
        for caption, draw in zip(captions, generators(seed, num_captions), strict=True):
            asked = {**row.defaults, "prompt": caption, "output_type": "np"}
            state, reference = draw.get_state(), None
            for name, more in plain.items():
                draw.set_state(state)
                one = _timed(mesh, None, pipe, asked | more | {"generator": draw})
                reference = one["image"] if reference is None else reference
                pictures.setdefault(name, []).append(one)
            for name, (plan, other) in cases.items():
                draw.set_state(state)
                pictures.setdefault(name, []).append(_timed(mesh, plan, other, asked | {"generator": draw}))
            for each in pictures.values():
                each[-1]["psnr"] = min(psnr(each[-1]["image"], reference), 999.0)
                each[-1]["facts"] = row.task.facts_read(caption, each[-1].pop("image")[0])
    return [_row(name, nproc, each) for name, each in pictures.items()]


def _quiet_pipe(model: str) -> Any:
    pipe = zoo.load(model)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _timed(mesh: Mesh, plan: Plan | None, pipe: Any, asked: dict[str, Any]) -> dict[str, Any]:
    gather(mesh, [0.0], "start of a picture")
    start = time.perf_counter()
    with Ledger(flops=False) as ledger:
        image = None
        if plan is not None:
            image = generate(plan, **asked).images
        elif mesh.is_main:  # by itself on the machine
            image = pipe(**asked).images
        seconds = time.perf_counter() - start
    sent = int(ledger.summary().get("bytes_sent", 0))
    spent = gather(mesh, [seconds, float(sent)], "end of a picture")
    if image is None:
        image = pipe(**{**asked, "num_inference_steps": 1}).images  # of the right shape, and not looked at
    kept = "" if plan is None else plan.explain().kept[0]
    rounds = int(kept.split()[0]) if kept else asked["num_inference_steps"]
    residual = float(match[1]) if (match := re.search(r"accepted: (\S+)", kept)) else 0.0
    used = {"seconds": max(row[0] for row in spent), "bytes_sent": max(int(row[1]) for row in spent)}
    return {"image": image, "rounds": rounds, "residual": residual, **used}


def _row(name: str, nproc: int, pictures: list[dict[str, Any]]) -> dict[str, Any]:
    of = {key: [picture[key] for picture in pictures] for key in pictures[0]}
    is_plain = name.endswith(" steps")
    return {
        "case": name,
        "nproc": 1 if is_plain else nproc,
        "beside": nproc,
        "num_captions": len(pictures),
        "rounds_median": statistics.median(of["rounds"]),
        "rounds_max": max(of["rounds"]),
        "psnr_median": statistics.median(of["psnr"]),
        "psnr_min": min(of["psnr"]),
        "facts_read": statistics.fmean(of["facts"]),
        "residual_max": max(of["residual"]),
        "seconds_median": statistics.median(of["seconds"]),
        "seconds_spread": spread(of["seconds"]),
        "bytes_sent": statistics.fmean(of["bytes_sent"]),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    serial = {row["beside"]: row["seconds_median"] for row in reversed(rows) if row["nproc"] == 1}
    columns = ("ranks", "case", "rounds", "most", "PSNR median", "worst", "facts read", "accepted", "s", "speed", "kB")
    lines = [
        (
            row["nproc"],
            f"`{row['case']}`",
            f"{row['rounds_median']:g}",
            row["rounds_max"],
            f"{row['psnr_median']:.1f}",
            f"{row['psnr_min']:.1f}",
            f"{100 * row['facts_read']:.1f} %",
            f"{row['residual_max']:.2g}",
            f"{row['seconds_median']:.3f}",
            f"{serial[row['beside']] / row['seconds_median']:.2f}x",
            f"{row['bytes_sent'] / 1e3:.0f}",
        )
        for row in rows
    ]
    return markdown_table(columns, lines)


if __name__ == "__main__":
    main(tyro.cli(Config))
