"""Holds what partsong knows of each architecture as data: where tokens enter and leave, and which attention mixes them.

To support a new transformer, add a row to `cross`, `joint`, `pairs` or `sequences`. Video transformers go to `video` or
`video_2026`, those of sounds to `audio`, those whose input stays whole to `uncut`, UNets to `unet`, and UNets with
temporal layers to `temporal`. Cuts that many rows share have names in `shared_cuts`. Other packages add rows by entry
points (see `partsong.plugins`). Where a diffusers class has a context-parallel plan of its own (``_cp_plan``), a row
may leave out `splits` and `gather`; they are then read from that plan. A plain model without a row gets an inferred
one, which its first call checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import audio, cross, joint, pairs, sequences, temporal, uncut, unet, video, video_2026
from partsong.parallel.adapters.given import given_row
from partsong.parallel.adapters.infer import inferred
from partsong.parallel.adapters.row import Adapter, Frames, Mixing, Split, places
from partsong.plugins import Registry

__all__ = ["ADAPTERS", "Adapter", "Frames", "Split", "adapter_for", "places"]


def _read(thing: Any) -> Adapter:
    """Checks that a plug-in provides a row."""
    if not isinstance(thing, Adapter):
        raise TypeError(f"{thing!r} is not an Adapter")
    return thing


#: The supported architectures by the class name of their transformer; those of plug-ins last.
ADAPTERS: Mapping[str, Adapter] = Registry(
    "partsong.adapters",
    (
        *(*cross.ROWS, *joint.ROWS, *pairs.ROWS, *sequences.ROWS, *video.ROWS, *video_2026.ROWS, *audio.ROWS),
        *(*unet.ROWS, *temporal.ROWS, *uncut.ROWS),
    ),
    name=lambda row: row.model,
    read=_read,
)


def adapter_for(module: nn.Module, given: Adapter | None = None) -> Adapter:
    """Returns the row of a model with its cuts filled in, or an inferred row where `ADAPTERS` has none.

    Args:
        module: the model.
        given: a caller's row, which is taken if it is for a model of this class.

    Raises:
        ArgumentError: the caller's row names what the model does not have.
        UnsupportedError: the architecture is not in `ADAPTERS`, and not plain enough to infer a row for it.
    """
    name = type(module).__name__
    if given is not None and given.model == name:
        return given_row(given, module)
    if isinstance(module, Mixing):
        return ADAPTERS[name].mixing(adapter_for(module.like))
    if name in ADAPTERS:
        return ADAPTERS[name].resolved(module)
    try:
        return inferred(module)
    except UnsupportedError as problem:
        raise UnsupportedError(
            f"{name} is not a supported architecture, and none could be inferred: {problem}; "
            f"partsong list support shows the {len(list(ADAPTERS.values()))} that are, and parallelize() takes a row "
            "of your own with adapter="
        ) from None
