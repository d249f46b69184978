"""Writes what each family of models runs under; `tests.tables` puts it into docs/support.md."""

from __future__ import annotations

import functools
import re
import sys
import textwrap
from pathlib import Path

import diffusers
import diffusers.models

from partsong.parallel.adapters import ADAPTERS, Adapter
from partsong.samplers.support import denoising

_HEAD = """{counts}

Find your model's class in the first column; on the site, a field takes any part of it or of a hub name. *yes* means
that the strategy runs, in the class that the first row has for it: *exact* equals one rank up to rounding,
*approximate* drifts and equals it at a setting its page names, *bounded* comes with a certificate. *no* is refused
before any work, for the [reason](#reasons) of that number. `partsong list support NAME` prints the same for all models
that have NAME in that of their family, class, pipeline or, for published ones, hub.

## Matrix
"""
#: Advice at the end of a refusal that the page gives once, before all reasons.
_USUAL = re.compile(r"use Ulysses\b.*|use (ClipParallel, )?CfgParallel( or DataParallel)?|leave it out")


def support_part() -> str:
    """The part of the page that is written from the code, as Markdown."""
    kinds = denoising()
    groups: dict[tuple[str | None, ...], list[Adapter]] = {}
    for adapter in ADAPTERS.values():
        groups.setdefault(tuple(_reason(kind().refuses(adapter)) for kind in kinds), []).append(adapter)
    numbers = {why: number for number, why in enumerate(dict.fromkeys(w for key in groups for w in key if w), 1)}
    lines = ["| models | " + " | ".join(f"`{kind.__name__}`" for kind in kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    lines.append("| *class* | " + " | ".join(f"*{kind().kind}*" for kind in kinds) + " |")
    for key, adapters in groups.items():
        names = "<br>".join(f"{adapter.family} (`{adapter.model}`)" for adapter in adapters)
        cells = ("yes" if why is None else f"no [{numbers[why]}]" for why in key)
        lines.append(f"| {names} | {' | '.join(cells)} |")
    notes = ["## Reasons", "", _ADVICE, "", *(f"{number}. {why}." for why, number in numbers.items())]
    return "\n".join([_HEAD.format(counts=_counts()), *lines, "", *notes, "", *_arguments(), ""])


_ADVICE = """Reasons are written as errors have them, where *it* is the model. An error also names what works instead:
Ulysses for most models, and CfgParallel or DataParallel for those whose tokens and rows are not cut."""


def _reason(refusal: str | None) -> str | None:
    """Takes the usual advice off a refusal."""
    why, _, advice = (refusal or "").rpartition("; ")
    return None if refusal is None else why if _USUAL.fullmatch(advice) else refusal


def _counts() -> str:
    """Says how many models of diffusers have a row, and how many are known to diffusers' own parallelism."""
    classes = _classes()
    rows = [name for name in classes if name in ADAPTERS]
    cut = [name for name in rows if ADAPTERS[name].whole is None]
    missing = ", ".join(f"`{name}`" for name in sorted(classes.keys() - ADAPTERS.keys()))
    text = (
        f"Of the {len(classes)} transformers and UNets of diffusers {diffusers.__version__}, partsong has a row for "
        f"{len(rows)}, and cuts {len(cut)} of them into tokens or rows. diffusers' own context or tensor parallelism "
        f"has a plan for {sum(classes.values())}. Without a row are {missing}."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


@functools.cache
def _classes() -> dict[str, bool]:
    """Maps each transformer and UNet of diffusers to whether it has a plan there, read without importing them all."""
    folder = Path(diffusers.models.__file__ or "").parent
    modules: dict[str, str] = sys.modules["diffusers.models"].__dict__["_class_to_module"]
    classes = {}
    for name, module in modules.items():
        if module.partition(".")[0] in ("transformers", "unets"):
            text = (folder / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
            head, _, body = text.partition(f"\nclass {name}(")[2].partition("):\n")
            if "nn.Module" not in head:  # which is a part of a model
                classes[name] = bool(re.search(r"^    _[ct]p_plan\b", body.partition("\nclass ")[0], re.MULTILINE))
    return classes


def _arguments() -> list[str]:
    """Lists the arguments of a model's forward that are refused where its tokens are cut."""
    lines = ["## Arguments", "", "These arguments of the models are refused where tokens or rows are cut:", ""]
    lines += ["| model | argument | why |", "|---|---|---|"]
    for adapter in ADAPTERS.values():
        lines += [f"| `{adapter.model}` | `{name}` | {reason} |" for name, reason in adapter.refused.items()]
    return lines
