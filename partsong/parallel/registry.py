"""Strategies by name, for command lines and reports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import get_args, get_type_hints

from partsong.errors import ArgumentError
from partsong.parallel.cfg_parallel import CfgParallel
from partsong.parallel.clip_parallel import ClipParallel
from partsong.parallel.data_parallel import DataParallel
from partsong.parallel.displaced_patch import DisplacedPatch
from partsong.parallel.dual_parallel import DualParallel
from partsong.parallel.dynamic_sequence import DynamicSequence
from partsong.parallel.parallel_vae import ParallelVae
from partsong.parallel.partial_patch import PartialPatch
from partsong.parallel.patch_pipeline import PatchPipeline
from partsong.parallel.ring import Ring
from partsong.parallel.step_cache import StepCache
from partsong.parallel.strategy import Strategy
from partsong.parallel.structure_guidance import StructureGuidance
from partsong.parallel.sync_patch import SyncPatch
from partsong.parallel.timestep_pipeline import TimestepPipeline
from partsong.parallel.token_ring import TokenRing
from partsong.parallel.ulysses import Ulysses
from partsong.parallel.usp import Usp

__all__ = ["STRATEGIES", "parse_strategy"]

_CLASSES = (
    CfgParallel,
    DataParallel,
    Ulysses,
    Ring,
    Usp,
    TokenRing,
    DynamicSequence,
    SyncPatch,
    DisplacedPatch,
    PartialPatch,
    PatchPipeline,
    ClipParallel,
    DualParallel,
    TimestepPipeline,
    StructureGuidance,
    ParallelVae,
    StepCache,
)


def _kebab(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


#: Strategy classes by their kebab-case name.
STRATEGIES: Mapping[str, type[Strategy]] = MappingProxyType({_kebab(c.__name__): c for c in _CLASSES})


def parse_strategy(text: str) -> Strategy:
    """Reads ``NAME[:key=value,...]``.

    Raises:
        ArgumentError: an unknown name or key, or a value of another type; names the legal ones.

    Example:
        >>> parse_strategy("displaced-patch:warmup_steps=4")
        DisplacedPatch(degree=None, warmup_steps=4)
    """
    name, _, options = text.partition(":")
    if name not in STRATEGIES:
        raise ArgumentError(f"no strategy {name!r}; the strategies are {', '.join(STRATEGIES)}")
    knobs = [knob.name for knob in fields(STRATEGIES[name])]
    values: dict[str, int | float | str | tuple[int, ...] | None] = {}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in knobs:
            raise ArgumentError(f"strategy {name} has no option {key!r}; its options are {', '.join(knobs)}")
        if key in values:
            raise ArgumentError(f"strategy {name}: {key} is given twice")
        values[key] = _read(name, STRATEGIES[name], key, value)
    strategy = STRATEGIES[name](**values)
    strategy.validate()
    return strategy


def _read(name: str, strategy: type[Strategy], key: str, text: str) -> int | float | str | tuple[int, ...] | None:
    """A knob's value: a number where it takes numbers, a word where it takes words, ``3+5`` for several, ``none``."""
    types = get_type_hints(strategy)[key]
    accepted = set(get_args(types)) or {types}
    if type(None) in accepted and text == "none":
        return None
    if int in accepted and re.fullmatch(r"-?\d+", text):
        return int(text)
    if float in accepted and re.fullmatch(r"-?\d*\.?\d+(e-?\d+)?", text):
        return float(text)
    if str in accepted and re.fullmatch(r"[a-z_]+", text):
        return text
    if tuple[int, ...] in accepted and re.fullmatch(r"\d+(\+\d+)*", text):
        return tuple(map(int, text.split("+")))
    names = {int: "a whole number", float: "a number", str: "a word", tuple[int, ...]: "numbers such as 3+5"}
    wanted = " or ".join(words for kind, words in names.items() if kind in accepted)
    raise ArgumentError(f"strategy {name}: {key}={text!r} is not {wanted}")
