"""The models that people run, at their published sizes, under every strategy on 2, 8 and 64 ranks: shapes suffice."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
from torch import nn

from partsong.errors import PartsongError
from partsong.parallel import ADAPTERS, Strategy, predict
from partsong.samplers import registry
from tests import covering
from tests.parallel.real_size import RealSize
from tests.parallel.real_size_bytes import expected
from tests.parallel.real_sizes_unets import SDXL
from tests.parallel.test_real_sizes import SIZES

MODELS: dict[str, RealSize] = {
    "SD 1.5": SIZES["UNet2DConditionModel"],
    "SDXL": SDXL,
    "SD 3.5": SIZES["SD3Transformer2DModel"],
    "Flux": SIZES["FluxTransformer2DModel"],
    "Flux 2": SIZES["Flux2Transformer2DModel"],
    "Qwen-Image": SIZES["QwenImageTransformer2DModel"],
    "Z-Image": SIZES["ZImageTransformer2DModel"],
    "Wan 14B": SIZES["WanTransformer3DModel"],
    "HunyuanVideo": SIZES["HunyuanVideoTransformer3DModel"],
    "CogVideoX": SIZES["CogVideoXTransformer3DModel"],
    "LTX-Video": SIZES["LTXVideoTransformer3DModel"],
}
RANKS = (2, 8, 64)
#: Strategies with a formula of their own in these tables; the bytes of the others are counted on tiny models.
FORMULAS = ("cfg-parallel", "data-parallel", "ulysses", "ring", "sync-patch", "displaced-patch")
#: What works on shapes alone: not loops of pipelines, nor what has no ranks of its own.
STRATEGIES = {
    name: kind
    for name, kind in registry.strategies().items()
    if kind.axes and not kind.has_loop and kind().unpredictable() is None
}
#: Refusals that depend on sizes, which docs/support.md tells beside its tables: each says how many ranks fit.
TOO_MANY = (
    r"(\d+) rows, too few to cut over \d+ ranks",
    r"\d+ heads \(or groups of heads that read the same keys\) for \d+ ranks; choose a degree of at most (\d+)",
    r"cannot be cut over \d+ ranks; use at most (\d+)",
    r"cannot be \d+ (?:runs|stages); use at most (\d+)",
    r"use at most (\d+) ranks",
)
CASES = [(model, name, ranks) for model in MODELS for name in STRATEGIES for ranks in RANKS]
#: Every other model once, its turn deciding how it is cut. The others, and what takes longest, are left to ``--full``.
QUICK = [(model, FORMULAS[turn % 5], 8 if model == "SDXL" else 2) for turn, model in enumerate(MODELS) if turn % 2]


@functools.lru_cache(maxsize=1)
def _model(name: str) -> nn.Module:
    return MODELS[name].build()


def _batch(strategy: type[Strategy], ranks: int) -> int:
    """Samples of a call: two branches of guidance, one for each rank that has samples of its own, or one."""
    return {"cfg": 2, "data": ranks}.get(strategy.axes[0], 1)


def _told(model: str, name: str, ranks: int) -> Any:
    kind, size = STRATEGIES[name], MODELS[model]
    return predict(_model(model), kind(), ranks=ranks, **size.inputs(_batch(kind, ranks)))


@pytest.mark.parametrize(("model", "name", "ranks"), CASES if covering.FULL else QUICK)
def test_runs_or_is_refused_as_the_support_page_says(model: str, name: str, ranks: int) -> None:
    kind, size = STRATEGIES[name], MODELS[model]
    reason, problem, told = kind().refuses(ADAPTERS[size.model]), "", None
    try:
        told = _told(model, name, ranks)
    except PartsongError as refusal:
        problem = str(refusal)
    assert (reason or "") in problem
    if told is None and reason is None:
        fits = next((found for pattern in TOO_MANY if (found := re.search(pattern, problem))), None)
        assert fits is not None, problem
        assert int(fits[1]) < ranks
    if told is not None and name in FORMULAS:
        assert told.bytes_per_step == expected(size, (kind(),), ranks, _batch(kind, ranks))
    elif told is not None:
        assert len(told.bytes_per_step) == ranks
        assert max(told.bytes_per_step) > 0
