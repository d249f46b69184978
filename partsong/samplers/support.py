"""Says which strategy works on which architecture; the strategies themselves decide, so table and behaviour agree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from inspect import signature
from typing import get_args

from partsong.errors import ArgumentError
from partsong.parallel.adapters import ADAPTERS, Adapter
from partsong.parallel.strategy import Kind, Strategy
from partsong.samplers.registry import strategies

__all__ = ["rows_for", "support_of", "support_rows", "support_table"]

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

Numbers in brackets are reasons, below. Behind the families is the same as one [matrix](#matrix).

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


def support_rows() -> list[dict[str, str]]:
    """Returns a row per architecture: its family, its class, and for each strategy its class or ``refused``."""
    return [
        {"architecture": adapter.family, "model": adapter.model}
        | {kind.__name__: "refused" if kind().refuses(adapter) else kind().kind for kind in _denoising()}
        for adapter in ADAPTERS.values()
    ]


def rows_for(name: str) -> list[Adapter]:
    """Returns the rows that a name stands for: a family, the class of a model, or the class of a diffusers pipeline.

    Raises:
        ArgumentError: nothing has that name; names the nearest.
    """
    rows = {adapter.family.lower(): [adapter] for adapter in ADAPTERS.values()}
    rows |= {adapter.model.lower(): [adapter] for adapter in ADAPTERS.values()}
    known = rows.get(name.lower()) or [ADAPTERS[kind] for kind in _denoisers_of(name) if kind in ADAPTERS]
    if not known:
        near = get_close_matches(name.lower(), rows, 3, 0.4)
        meant = [rows[word][0].family for word in near]
        raise ArgumentError(
            f"{name!r} is no family, model or pipeline with a row"
            + (f"; did you mean {' or '.join(dict.fromkeys(meant))}?" if meant else "; see partsong list support")
        )
    return known


def _denoisers_of(pipeline: str) -> list[str]:
    """Lists the classes of models that a pipeline of diffusers takes, in the order of its parts."""
    import diffusers

    kind = getattr(diffusers, pipeline, None) if pipeline.endswith("Pipeline") else None
    parts = signature(kind.__init__).parameters.values() if isinstance(kind, type) else ()
    # Annotations are text or classes, and a part may be one of several classes.
    return list(dict.fromkeys(word for part in parts for word in re.findall(r"\w+", str(part.annotation))))


def support_of(adapter: Adapter) -> list[dict[str, str]]:
    """Lists for one architecture every strategy, its class or ``refused``, and why."""
    rows = []
    for kind in _denoising():
        reason = kind().refuses(adapter)
        cell = "refused" if reason else kind().kind
        rows.append({"model": adapter.model, "strategy": kind.__name__, "class": cell, "reason": reason or ""})
    return rows


def support_table() -> str:
    """Writes the support page, as Markdown."""
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
    """Writes the strategies of one family, as an item of a list."""
    by_class: dict[str, list[str]] = {}
    for strategy, cell in list(row.items())[2:]:
        why = f" [{numbers[reasons[row['model'], strategy]]}]" if cell == "refused" else ""
        by_class.setdefault(cell, []).append(strategy + why)
    parts = (f"*{cell}* {', '.join(by_class[cell])}" for cell in (*_CLASSES, "refused") if cell in by_class)
    return f"- **{row['architecture']}** (`{row['model']}`): {'; '.join(parts)}"


def _denoising() -> list[type[Strategy]]:
    """Lists the strategies for the denoiser; the page of `ParallelVae` covers the autoencoders."""
    return [kind for kind in strategies().values() if kind.denoises]


def _reasons() -> dict[tuple[str, str], str]:
    pairs = ((adapter, kind) for adapter in ADAPTERS.values() for kind in _denoising())
    reasons = {(adapter.model, kind.__name__): kind().refuses(adapter) for adapter, kind in pairs}
    return {pair: reason for pair, reason in reasons.items() if reason is not None}


def _arguments() -> list[str]:
    """Lists the arguments of a model's forward that are refused where its tokens are cut."""
    lines = ["These arguments of the models are refused where tokens or rows are cut:", ""]
    lines += ["| model | argument | why |", "|---|---|---|"]
    for adapter in ADAPTERS.values():
        lines += [f"| `{adapter.model}` | `{name}` | {reason} |" for name, reason in adapter.refused.items()]
    return lines
