"""Writes the demo as one HTML page that needs no other file, with pictures, a table and bars."""

from __future__ import annotations

import base64
import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from partsong.jobs.demo import DemoJob, Method

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Bar", "bars", "picture", "render_page", "render_sheet"]

TILE = 148
#: PSNR in dB of a full bar. Rounding of 32-bit floats leaves 100 to 145 dB, and equal images are drawn as full.
FULL_PSNR = 150.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Describes one bar of a chart.

    Attributes:
        label: the method.
        kind: the class of the method, which gives the colour.
        share: length, where 1 is the whole width.
        text: the value in words.
    """

    label: str
    kind: str
    share: float
    text: str


def render_page(job: DemoJob, methods: Sequence[Method], hardware: str) -> str:
    """Returns the page as text.

    Args:
        job: what was sampled.
        methods: what `run_demo` measured, the serial twin first.
        hardware: a line about the machine.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Captions and versions are text, so any markup in them is escaped.
    folder = Path(__file__).with_name("templates")
    environment = Environment(loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("demo.html.j2").render(
        job=job,
        columns=[_column(method) for method in methods],
        speed=bars([(m.name, m.kind, m.speedup, f"{m.speedup:.2f}x") for m in methods]),
        closeness=bars([(m.name, m.kind, _finite(m.psnr), _psnr(m.psnr)) for m in methods[1:]], full=FULL_PSNR),
        hardware=hardware,
        tile=TILE,
    )


def render_sheet(job: DemoJob, methods: Sequence[Method]) -> Image.Image:
    """Draws only the pictures, a row for each caption and a column for each method, as one image on white.

    Args:
        job: what was sampled.
        methods: what `run_demo` measured.
    """
    from PIL import Image, ImageDraw, ImageFont

    tile, gap, left, top = 128, 10, 176, 40  # in pixels; a tile is one picture
    size = (left + len(methods) * (tile + gap), top + len(job.captions) * (tile + gap))
    sheet = Image.new("RGB", size, "white")
    draw, ink = ImageDraw.Draw(sheet), "#1d1c1a"
    for column, method in enumerate(methods):
        x = left + column * (tile + gap)
        draw.text((x + tile / 2, top / 2), method.name, ink, ImageFont.load_default(15), anchor="mm")
        for row, pixels in enumerate(method.images):
            enlarged = Image.fromarray(pixels).resize((tile, tile), Image.Resampling.LANCZOS)
            sheet.paste(enlarged, (x, top + row * (tile + gap)))
    for row, caption in enumerate(job.captions):
        lines = "\n".join(textwrap.wrap(caption, 22))
        middle = top + row * (tile + gap) + tile / 2
        draw.multiline_text((gap, middle), lines, ink, ImageFont.load_default(14), anchor="lm", spacing=5)
    return sheet


def bars(values: Sequence[tuple[str, str, float, str]], full: float | None = None) -> list[Bar]:
    """Makes bars of (label, kind, value, text). `full` is the value of the whole width; None is the largest value."""
    whole = full or max((value for _, _, value, _ in values), default=1.0)
    return [
        Bar(label=label, kind=kind, share=min(1.0, value / whole), text=text) for label, kind, value, text in values
    ]


def picture(pixels: NDArray[np.uint8], size: int = TILE * 2) -> str:
    """Returns an image as a data URI, enlarged so that browsers on dense screens show it sharp."""
    from PIL import Image

    image = Image.fromarray(pixels)
    scale = max(1, round(size / max(image.size)))
    buffer = io.BytesIO()
    image.resize((image.width * scale, image.height * scale), Image.Resampling.LANCZOS).quantize(255).save(
        buffer, "PNG", optimize=True
    )
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _column(method: Method) -> dict[str, Any]:
    cells = []
    for pixels, facts in zip(method.images, method.facts, strict=True):
        details = "\n".join(f"{'yes' if held else 'NO'}  {fact}" for fact, held in facts.items())
        cells.append({"picture": picture(pixels), "held": sum(facts.values()), "facts": len(facts), "details": details})
    return {"name": method.name, "kind": method.kind, "cells": cells, "row": _row(method)}


def _row(method: Method) -> dict[str, str]:
    held = sum(sum(facts.values()) for facts in method.facts)
    known = sum(len(facts) for facts in method.facts)
    sent = sorted({round(count / 1e6, 2) for count in method.bytes_sent})
    serial = method.name == "serial"
    return {
        "name": method.name,
        "kind": "one process" if serial else method.kind,
        "seconds": f"{method.seconds:.2f}",
        "speedup": f"{method.speedup:.2f}x",
        "psnr": "" if serial else _psnr(method.psnr),
        "worst": "" if serial else _psnr(method.psnr_worst),
        "difference": "" if serial else f"{method.max_abs_diff:.1g}",
        "facts": f"{held} of {known}",
        "sent": "" if serial else " to ".join(f"{count:.2f}" for count in (sent[0], sent[-1])[: len(sent)]),
        "waiting": "" if serial else f"{method.waiting:.0%}",
    }


def _psnr(value: float) -> str:
    return "equal" if math.isinf(value) else f"{value:.1f} dB"


def _finite(value: float) -> float:
    return FULL_PSNR if math.isinf(value) else value
