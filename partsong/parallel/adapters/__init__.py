"""What partsong knows of each architecture, as data: where tokens enter and leave, which attention mixes them.

Supporting a new transformer means adding a row to `cross` or `joint`, of a video to `video`, a UNet one to `unet` or,
with temporal layers, to `temporal`. Where a diffusers model class carries a context-parallel plan of its own
(``_cp_plan``), a row may leave `splits` and `gather` out and the class' plan is read.
Other packages add rows by entry points (see `partsong.plugins`).
A model without a row gets one inferred where it is plain enough, and the first call checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import cross, joint, temporal, unet, video
from partsong.parallel.adapters.infer import inferred
from partsong.parallel.adapters.row import Adapter, Frames, Split, places
from partsong.plugins import Registry

__all__ = ["ADAPTERS", "Adapter", "Frames", "Split", "adapter_for", "places"]


def _read(thing: Any) -> Adapter:
    """Reads what a plug-in offers: one row."""
    if not isinstance(thing, Adapter):
        raise TypeError(f"{thing!r} is no Adapter")
    return thing


#: The supported architectures by the class name of their transformer; those of plug-ins last.
ADAPTERS: Mapping[str, Adapter] = Registry(
    "partsong.adapters",
    (*cross.ROWS, *joint.ROWS, *video.ROWS, *unet.ROWS, *temporal.ROWS),
    name=lambda row: row.model,
    read=_read,
)


def adapter_for(module: nn.Module) -> Adapter:
    """The row of a model, resolved; one inferred where `ADAPTERS` has none.

    Raises:
        UnsupportedError: the architecture is not in `ADAPTERS`, and not plain enough to be inferred.
    """
    name = type(module).__name__
    if name in ADAPTERS:
        return ADAPTERS[name].resolved(module)
    try:
        return inferred(module)
    except UnsupportedError as problem:
        raise UnsupportedError(
            f"{name} is not a supported architecture, and none could be inferred: {problem}. Supported are "
            + ", ".join(f"{known.model} ({known.family})" for known in ADAPTERS.values())
        ) from None
