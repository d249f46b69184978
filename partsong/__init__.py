"""partsong samples generative models with many workers at once, and measures what that changes.

Importing this package is cheap and loads no torch: the names below are looked up on first use.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    from partsong.jobs.loading import load_pipeline
    from partsong.ledger import Ledger
    from partsong.parallel import (
        ExpertMixture,
        Mesh,
        NoiseExpert,
        Plan,
        Strategy,
        capture,
        launch,
        measure_shares,
        mesh_for,
        parallelize,
        predict,
    )
    from partsong.samplers import generate, stream
    from partsong.samplers.registry import *  # noqa: F403 - every strategy
    from partsong.samplers.registry import parse_strategy
    from partsong.samplers.text import (
        BlockDecoder,
        SpeculativeDecoder,
        decode,
        decode_steps,
        load_text_model,
        parse_cache,
        parse_rule,
    )

__version__ = "0.1.0"

_REGISTRY = "partsong.samplers.registry"
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
    "partsong.jobs.loading": ("load_pipeline",),
    "partsong.ledger": ("Ledger",),
    "partsong.parallel": (
        "ExpertMixture",
        "Mesh",
        "NoiseExpert",
        "Plan",
        "capture",
        "launch",
        "measure_shares",
        "mesh_for",
        "parallelize",
        "predict",
    ),
    "partsong.samplers": ("generate", "stream"),
    "partsong.samplers.text": (
        "BlockDecoder",
        "SpeculativeDecoder",
        "decode",
        "decode_steps",
        "load_text_model",
        "parse_cache",
        "parse_rule",
    ),
    _REGISTRY: ("parse_strategy",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def _strategies() -> Mapping[str, type[Strategy]]:
    """Returns the strategy classes by their names; loads torch."""
    return {row.strategy.__name__: row.strategy for row in import_module(_REGISTRY).BUILT_IN}


def __getattr__(name: str) -> Any:
    # The registry names the strategies, and reading it loads torch, so `__all__` is made on demand.
    if name == "__all__":
        return sorted([*_HOME_OF, *_strategies()])
    if name in _HOME_OF:
        value = getattr(import_module(_HOME_OF[name]), name)
    elif name[0].isupper() and name in _strategies():
        value = _strategies()[name]
    else:
        # Python also asks here for submodules before it imports them, whose names are lower case.
        names = __dir__() if name[0].isupper() else sorted(_HOME_OF)
        raise AttributeError(f"module 'partsong' has no attribute {name!r}; it has {', '.join(names)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_strategies()})
