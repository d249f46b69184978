"""partsong samples generative models with many workers at once, and measures what that changes.

Importing this package is cheap and loads no torch: the names below are looked up on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partsong.errors import (
        ArgumentError,
        ArgumentTypeError,
        DistributedError,
        OutputError,
        PartsongError,
        RankError,
        UnsupportedError,
    )
    from partsong.ledger import Ledger
    from partsong.parallel import (
        CfgParallel,
        ClipParallel,
        DataParallel,
        DisplacedPatch,
        DualParallel,
        DynamicSequence,
        Mesh,
        ParallelVae,
        PartialPatch,
        PatchPipeline,
        Plan,
        Ring,
        StepCache,
        StructureGuidance,
        SyncPatch,
        TimestepPipeline,
        TokenRing,
        Ulysses,
        Usp,
        mesh_for,
        parallelize,
        parse_strategy,
        predict,
    )
    from partsong.parallel.ranks import launch
    from partsong.samplers import generate, stream
    from partsong.samplers.text import BlockDecoder, decode, decode_steps, load_text_model, parse_cache, parse_rule

__version__ = "0.1.0"

_HOMES = {
    "partsong.errors": (
        "ArgumentError",
        "ArgumentTypeError",
        "DistributedError",
        "OutputError",
        "PartsongError",
        "RankError",
        "UnsupportedError",
    ),
    "partsong.ledger": ("Ledger",),
    "partsong.parallel": (
        "CfgParallel",
        "ClipParallel",
        "DataParallel",
        "DisplacedPatch",
        "DualParallel",
        "DynamicSequence",
        "Mesh",
        "ParallelVae",
        "PartialPatch",
        "PatchPipeline",
        "Plan",
        "Ring",
        "StepCache",
        "StructureGuidance",
        "SyncPatch",
        "TimestepPipeline",
        "TokenRing",
        "Ulysses",
        "Usp",
        "launch",
        "mesh_for",
        "parallelize",
        "parse_strategy",
        "predict",
    ),
    "partsong.samplers": ("generate", "stream"),
    "partsong.samplers.text": (
        "BlockDecoder",
        "decode",
        "decode_steps",
        "load_text_model",
        "parse_cache",
        "parse_rule",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BlockDecoder",
    "CfgParallel",
    "ClipParallel",
    "DataParallel",
    "DisplacedPatch",
    "DistributedError",
    "DualParallel",
    "DynamicSequence",
    "Ledger",
    "Mesh",
    "OutputError",
    "ParallelVae",
    "PartialPatch",
    "PartsongError",
    "PatchPipeline",
    "Plan",
    "RankError",
    "Ring",
    "StepCache",
    "StructureGuidance",
    "SyncPatch",
    "TimestepPipeline",
    "TokenRing",
    "Ulysses",
    "UnsupportedError",
    "Usp",
    "decode",
    "decode_steps",
    "generate",
    "launch",
    "load_text_model",
    "mesh_for",
    "parallelize",
    "parse_cache",
    "parse_rule",
    "parse_strategy",
    "predict",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'partsong' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
