"""Says which strategy works on which architecture; the strategies themselves decide, so table and behaviour agree."""

from __future__ import annotations

import re
from difflib import get_close_matches
from inspect import signature

from partsong.errors import ArgumentError
from partsong.parallel.adapters import ADAPTERS, Adapter
from partsong.parallel.strategy import Strategy
from partsong.samplers.registry import strategies

__all__ = ["denoising", "rows_for", "support_of", "support_rows"]


def support_rows() -> list[dict[str, str]]:
    """Returns a row per architecture: its family, its class, and for each strategy its class or ``refused``."""
    return [
        {"architecture": adapter.family, "model": adapter.model}
        | {kind.__name__: "refused" if kind().refuses(adapter) else kind().kind for kind in denoising()}
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
    for kind in denoising():
        reason = kind().refuses(adapter)
        cell = "refused" if reason else kind().kind
        rows.append({"model": adapter.model, "strategy": kind.__name__, "class": cell, "reason": reason or ""})
    return rows


def denoising() -> list[type[Strategy]]:
    """Lists the strategies for the denoiser; the page of `ParallelVae` covers the autoencoders."""
    return [kind for kind in strategies().values() if kind.denoises]
