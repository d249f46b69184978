"""Says which strategy works on which architecture; the strategies themselves decide, so table and behaviour agree."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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


def rows_for(name: str, others: Mapping[str, str] | None = None) -> list[Adapter]:
    """Returns the rows that a name stands for: that of a family, the class of a model or of a diffusers pipeline.

    Where nothing has just this name, it is taken as a part of one: ``qwen``, ``z image``, ``WanImage``. Letters and
    digits count, and not their case.

    Args:
        name: what is asked for.
        others: more names, such as those of a hub, each with the class of its model.

    Raises:
        ArgumentError: nothing has a name with that in it; names the nearest.
    """
    names = [(_plain(text), adapter) for adapter in ADAPTERS.values() for text in (adapter.family, adapter.model)]
    names += [(_plain(text), ADAPTERS[kind]) for text, kind in (others or {}).items()]
    asked = _plain(name)
    whole = [adapter for text, adapter in names if text == asked] or _rows_of(_denoisers_of(name))
    known = whole or [adapter for text, adapter in names if asked and asked in text] or _rows_of(_taken_with(asked))
    if not known:
        near = get_close_matches(asked, [text for text, _ in names], 3, 0.4)
        meant = dict.fromkeys(adapter.family for word in near for text, adapter in names if text == word)
        raise ArgumentError(
            f"{name!r} is no part of a family, model or pipeline with a row"
            + (f"; did you mean {' or '.join(meant)}?" if meant else "; see partsong list support")
        )
    return list({adapter.model: adapter for adapter in known}.values())


def _plain(name: str) -> str:
    """Returns the letters and digits of a name, in lower case."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _rows_of(kinds: Iterable[str]) -> list[Adapter]:
    return [ADAPTERS[kind] for kind in kinds if kind in ADAPTERS]


def _taken_with(part: str) -> list[str]:
    """Lists the classes of models that pipelines with a part of a name take."""
    import diffusers

    pipelines = [name for name in dir(diffusers) if name.endswith("Pipeline") and part in name.lower()]
    return [kind for name in pipelines if part for kind in _denoisers_of(name)]


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
