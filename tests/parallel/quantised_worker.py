"""Runs on every rank: quantised models and pipelines under each strategy, against the serial quantised one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers.utils import logging
from torch import nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)

from partsong import (
    CfgParallel,
    DisplacedPatch,
    PatchPipeline,
    Ring,
    SyncPatch,
    TensorParallel,
    Ulysses,
    generate,
)
from partsong.errors import PartsongError
from partsong.parallel import Mesh, Strategy, mesh_for, parallelize
from partsong.parallel.hooks.model_hooks import sample_of
from tests.parallel.families import FAMILIES
from tests.parallel.pipelines import PIPES, STEPS
from tests.parallel.ranks import error, gathered

STRATEGIES: Mapping[str, Strategy] = {
    "CfgParallel": CfgParallel(),
    "Ulysses": Ulysses(),
    "Ring": Ring(),
    "SyncPatch": SyncPatch(),
    "DisplacedPatch": DisplacedPatch(warmup_steps=STEPS),
    "TensorParallel": TensorParallel(),
}

#: By what torchao makes of a model's linear layers, with the type of everything else. Groups of 8 are those of a head.
QUANTISERS: Mapping[str, tuple[Callable[[], Any], torch.dtype]] = {
    "int8": (Int8WeightOnlyConfig, torch.float32),
    "int8 by groups": (lambda: Int8WeightOnlyConfig(granularity=PerGroup(4)), torch.float32),
    "int4 by groups": (lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(4)), torch.float32),
    "fp8": (Float8WeightOnlyConfig, torch.float64),
    "int8 dynamic": (Int8DynamicActivationInt8WeightConfig, torch.float32),
}
MODELS = ("SD3", "Flux", "Wan")
SIDE = 8
#: A quantiser, a model and a strategy by name.
Case = tuple[str, str, str]


def quantised(model: nn.Module, quantiser: str) -> nn.Module:
    """The model with quantised blocks, as checkpoints have them: what is outside of them stays as it is."""
    make, dtype = QUANTISERS[quantiser]
    model = model.to(dtype)
    quantize_(model, make(), filter_fn=lambda layer, name: isinstance(layer, nn.Linear) and "blocks." in name)
    return model


def outcome(run: Callable[[], torch.Tensor], want: torch.Tensor) -> float | str:
    """The distance from what was wanted, or why it was refused."""
    try:
        return error(run(), want)
    except PartsongError as problem:
        return str(problem)


def cases(pairs: list[Case]) -> dict[Case, list[float | str]]:
    """The outcome of every case on each rank; what a model returns afterwards is compared under the name ``alone``."""
    logging.set_verbosity_error()
    results: dict[Case, list[float | str]] = {}
    with Mesh(data=2), torch.no_grad():
        for quantiser, name in dict.fromkeys(case[:2] for case in pairs):
            family, dtype = FAMILIES[name], QUANTISERS[quantiser][1]
            model, named = quantised(family.model(SIDE, dtype), quantiser), family.call(SIDE, 2, dtype)
            want = sample_of(model(**named))
            for strategy in (case[2] for case in pairs if case[:2] == (quantiser, name)):
                chosen = STRATEGIES[strategy]
                with Mesh(**mesh_for((chosen,), 2)) as mesh:

                    def run(m: Any = model, n: Any = named, c: Any = chosen, on: Any = mesh) -> torch.Tensor:
                        with parallelize(m, c, mesh=on):
                            return sample_of(m(**n))

                    results[quantiser, name, strategy] = gathered(outcome(run, want))
            after = sample_of(model(**named))
            results[quantiser, name, "alone"] = gathered(0.0 if torch.equal(after, want) else error(after, want))
    return results
