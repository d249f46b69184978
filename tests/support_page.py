"""Writes the page of what each family of models runs under; `tests.tables` files it as docs/support.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from partsong.parallel.adapters import ADAPTERS
from partsong.parallel.strategy import Kind
from partsong.samplers.support import denoising, support_rows

_CLASSES = get_args(Kind)

_HEAD = """# Support

What each family of models runs under; `partsong list support MODEL` prints one of them, for the name of a family, a
model or a pipeline. This page is written from the code by `python -m tests.tables`. A plan asks the same question
before any work and raises the reason.

*exact* equals one rank up to rounding, *approximate* drifts and equals it at a setting its page names, *bounded* comes
with a certificate. With [compressed exchange](wires.md) Ulysses, Ring, Usp and TokenRing are *approximate*. Every cell
that is not refused is in the tests, against the serial model: those of older families on 1 to 4 ranks, those of newer
ones on 2 ranks and, with their pipelines, on 2 and 3.

More ranks than there are rows, heads, blocks or tokens to share out are refused for their number, with the largest that
fits: that depends on the size of a picture, and is in no table.

Numbers in brackets are reasons, below. After the families the same is shown as one [matrix](#matrix).

## Families
"""
_TAIL = """
A transformer without a row is given one inferred from its structure where that is plain (embed, self-attending
blocks, project; the text by cross-attention). Its first call is computed serially as well and refused where the two
differ. Image-to-image, inpainting and ControlNet pipelines of a family work as the family does. Where a model's tokens
or rows are cut, so are those of its ControlNet, and each rank computes its share of the residuals: for Flux, SD3,
Qwen-Image, HunyuanDiT, Sana and the UNets, `ControlNetUnionModel` and `SparseControlNetModel` included. Other
ControlNets run whole on every rank, such as Z-Image's, which shares layers with the model, and those that average over
the picture.
"""


def support_page() -> str:
    """The support page, as Markdown."""
    rows, reasons = support_rows(), _reasons()
    numbers = {reason: number for number, reason in enumerate(dict.fromkeys(reasons.values()), 1)}
    families = [_family(row, reasons, numbers) for row in rows]
    lines = [
        "",
        "## Matrix",
        "",
        "| " + " | ".join(["architecture", *(f"`{name}`" for name in list(rows[0])[2:])]) + " |",
    ]
    lines.append("|---" * (len(rows[0]) - 1) + "|")
    for row in rows:
        cells = [
            f"{cell} [{numbers[reasons[row['model'], name]]}]" if cell == "refused" else cell
            for name, cell in list(row.items())[2:]
        ]
        lines.append(f"| {row['architecture']} (`{row['model']}`) | " + " | ".join(cells) + " |")
    notes = ["## Reasons", "", *(f"[{number}] {reason}.\n" for reason, number in numbers.items()), "## Arguments", ""]
    return "\n".join([_HEAD, *families, *lines, "", *notes, *_arguments(), _TAIL])


def _family(row: Mapping[str, str], reasons: Mapping[tuple[str, str], str], numbers: Mapping[str, int]) -> str:
    """Writes what one family runs under, as an item of a list."""
    by_class: dict[str, list[str]] = {}
    for strategy, cell in list(row.items())[2:]:
        why = f" [{numbers[reasons[row['model'], strategy]]}]" if cell == "refused" else ""
        by_class.setdefault(cell, []).append(strategy + why)
    parts = (f"*{cell}* {', '.join(by_class[cell])}" for cell in (*_CLASSES, "refused") if cell in by_class)
    return f"- **{row['architecture']}** (`{row['model']}`): {'; '.join(parts)}"


def _reasons() -> dict[tuple[str, str], str]:
    pairs = ((adapter, kind) for adapter in ADAPTERS.values() for kind in denoising())
    reasons = {(adapter.model, kind.__name__): kind().refuses(adapter) for adapter, kind in pairs}
    return {pair: reason for pair, reason in reasons.items() if reason is not None}


def _arguments() -> list[str]:
    """Lists the arguments of a model's forward that are refused where its tokens are cut."""
    lines = ["These arguments of the models are refused where tokens or rows are cut:", ""]
    lines += ["| model | argument | why |", "|---|---|---|"]
    for adapter in ADAPTERS.values():
        lines += [f"| `{adapter.model}` | `{name}` | {reason} |" for name, reason in adapter.refused.items()]
    return lines
