"""Writes docs/your-cards.md and the table of docs/index.md: ``python -m tests.planner.table`` plans them anew."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from partsong.errors import ArgumentError
from partsong.jobs.planning import paste
from partsong.planner import MODELS as PUBLISHED
from partsong.planner import Machine, advise_number, machine_named, subject_named
from partsong.planner.calls import Size
from partsong.planner.steps import Tracer

PAGE = Path(__file__).parents[2] / "docs" / "your-cards.md"
#: The first page of the site, with the same in short.
FRONT = PAGE.with_name("index.md")
PLANNED = Path(__file__).with_name("plans.json")
MODELS = (
    *("sdxl", "pixart-sigma", "sd3.5-large", "flux-schnell", "flux-dev"),
    *("qwen-image", "z-image-turbo", "ltx-video", "wan-1.3b", "wan-14b"),
)
#: The title of each section, the machine, and how `partsong plan` is asked for it.
MACHINES: dict[str, tuple[Machine, str]] = {
    title: (machine_named(**fields), asked)
    for title, fields, asked in (
        ("Two RTX 3090", {"devices": "2x3090", "link": "pcie4"}, "--gpus 2x3090 --link pcie4"),
        ("Two RTX 4090", {"devices": "2x4090", "link": "pcie4"}, "--gpus 2x4090 --link pcie4"),
        ("Four RTX 4090", {"devices": "4x4090", "link": "pcie4"}, "--gpus 4x4090 --link pcie4"),
        ("Two H100", {"devices": "2xh100", "link": "nvlink"}, "--gpus 2xh100 --link nvlink"),
        ("Eight H100", {"devices": "8xh100", "link": "nvlink"}, "--gpus 8xh100 --link nvlink"),
        (
            "Two boxes with two RTX 4090 each, 10 Gbit/s between them",
            {"devices": "4x4090", "link": "pcie4", "per_node": 2, "across": "10gbit"},
            "--gpus 4x4090 --link pcie4 --per-node 2 --across 10gbit",
        ),
    )
}
HEAD = """\
# What your cards run

Which line to paste for ten public models on six machines, **predicted** by `partsong plan` from public figures of the
devices, at each model's own size and steps. Nothing here was timed on a GPU; [choosing](choosing.md) says how far
predictions were off elsewhere. Seconds are of a whole generation, memory of the fullest rank. All lines are exact: the
picture differs from that of one GPU by rounding only. A line takes fewer cards where these are faster. Where it has
`offload-weights`, nothing else fits: each rank keeps the model's weights in the host's memory, which `partsong plan`
adds up. For other cards, sizes and models ask `partsong plan`, or `partsong plan --gpus 2x3090` for all published
models at once. `python -m tests.planner.table` writes this page.
"""


def plans(models: tuple[str, ...] = MODELS, titles: tuple[str, ...] = tuple(MACHINES)) -> Iterator[tuple[str, Any]]:
    """Plans models on machines: a key for each pair, and its seconds, those of one device, memory and line."""
    for name in models:
        subject = subject_named(name)
        size = Size(height=subject.height, width=subject.width, frames=subject.frames, dtype=subject.dtype)
        tracer = Tracer(subject, size)
        for title in titles:
            machine, _ = MACHINES[title]
            try:
                advice = advise_number(subject, machine, tracer=tracer)
            except ArgumentError:
                yield f"{name}, {title}", None
                continue
            best = advice.choice
            yield (
                f"{name}, {title}",
                {
                    "seconds": f"{best.seconds:.3g}",
                    "alone": f"{advice.serial.seconds:.3g}" if advice.fits_serial else "does not fit",
                    "memory": f"{best.memory / 1e9:.1f}",
                    "line": paste(PUBLISHED[name].checkpoint, advice, subject)[0],
                },
            )


def page(cells: Mapping[str, Any]) -> str:
    """Returns the page that shows the cells."""
    parts = [HEAD]
    for title, (_, asked) in MACHINES.items():
        rows = [(name, cells[f"{name}, {title}"]) for name in MODELS]
        fitting = [(name, row) for name, row in rows if row]
        left_out = [name for name, row in rows if not row]
        parts.append(f"\n## {title}\n\n`partsong plan {asked}`\n\n")
        parts.append("| model | seconds | on one | GB a rank |\n|---|---|---|---|\n")
        parts += [
            f"| {name} | {written(row['seconds'])} | {written(row['alone'])} | {row['memory']} |\n"
            for name, row in fitting
        ]
        parts.append(f"\nDoes not fit: {', '.join(left_out)}.\n" if left_out else "")
        if "--per-node" in asked:
            parts.append("\nA line with torchrun is started on both boxes, with the address of the first in it.\n")
        parts.append("\n```\n" + "".join(f"{row['line']}\n" for _, row in fitting) + "```\n")
    return "".join(parts)


def front(text: str, cells: Mapping[str, Any]) -> str:
    """Returns the first page of the site with its table, of machines that are one box."""
    titles = [title for title, (machine, _) in MACHINES.items() if machine.across is None]
    lines = ["| model | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    for name in MODELS:
        rows = (cells[f"{name}, {title}"] for title in titles)
        shown = ("" if row is None else written(row["seconds"]) for row in rows)
        lines.append(f"| {name} | {' | '.join(shown)} |")
    begin, end = "<!-- cards: begin -->\n", "<!-- cards: end -->\n"
    before, _, rest = text.partition(begin)
    return "".join((before, begin, _FRONT, "\n".join(lines), "\n", end, rest.partition(end)[2]))


_FRONT = """Seconds of a picture or a video at the model's own size and steps, **predicted** from public figures of the
devices: nothing was timed on a GPU. An empty cell means that it does not fit. [What your cards run](your-cards.md) has
the line to paste for each, and its memory; `partsong plan` answers for other cards and sizes.

"""


def written(number: str) -> str:
    """Writes thousands out."""
    return f"{float(number):,.0f}" if "e+" in number else number


if __name__ == "__main__":
    planned = dict(plans())
    PLANNED.write_text(json.dumps(planned, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(planned), encoding="utf-8")
    FRONT.write_text(front(FRONT.read_text(encoding="utf-8"), planned), encoding="utf-8")
