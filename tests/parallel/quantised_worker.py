"""Runs on every rank: quantised models and pipelines under each strategy, against the serial quantised one."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from diffusers import (
    FluxTransformer2DModel,
    GGUFQuantizationConfig,
    PipelineQuantizationConfig,
    StableDiffusion3Pipeline,
    TorchAoConfig,
)
from diffusers.utils import logging
from torch import nn

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
from partsong.parallel.hooks.samples import sample_of
from tests.parallel.families import FAMILIES, flux
from tests.parallel.pipelines import PIPES, STEPS
from tests.parallel.ranks import error, gathered
from tests.tiny_models.weights import randomize

#: Only the environment of `make test-full` has it.
ao: Any = importlib.import_module("torchao.quantization")

STRATEGIES: Mapping[str, Strategy] = {
    "CfgParallel": CfgParallel(),
    "Ulysses": Ulysses(),
    "Ring": Ring(),
    "SyncPatch": SyncPatch(),
    "DisplacedPatch": DisplacedPatch(warmup_steps=STEPS),
    "TensorParallel": TensorParallel(),
}

#: By what torchao makes of a model's linear layers, with the type of everything else. A head is two groups of 4.
QUANTISERS: Mapping[str, tuple[Callable[[], Any], torch.dtype]] = {
    "int8": (ao.Int8WeightOnlyConfig, torch.float32),
    "int8 by groups": (lambda: ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(4)), torch.float32),
    "int4 by groups": (
        lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(4)),
        torch.float32,
    ),
    "fp8": (ao.Float8WeightOnlyConfig, torch.float64),
    "int8 dynamic": (ao.Int8DynamicActivationInt8WeightConfig, torch.float32),
}
MODELS = ("SD3", "Flux", "Wan")
SIDE = 8
#: A quantiser with a model, and a strategy by name.
Case = tuple[str, str]
NAMES = (*(f"{quantiser} | {model}" for quantiser in QUANTISERS for model in MODELS), "GGUF")


def quantised(model: nn.Module, quantiser: str) -> nn.Module:
    """The model with quantised blocks, as checkpoints have them: what is outside of them stays as it is."""
    make, dtype = QUANTISERS[quantiser]
    model = model.to(dtype)
    ao.quantize_(model, make(), filter_fn=lambda layer, name: isinstance(layer, nn.Linear) and "blocks." in name)
    return model


def outcome(run: Callable[[], torch.Tensor], want: torch.Tensor) -> float | str:
    """The distance from what was wanted, or why it was refused."""
    try:
        return error(run(), want)
    except PartsongError as problem:
        return str(problem)


def gguf_model() -> nn.Module:
    """A tiny Flux whose linear layers are as wide as blocks of GGUF, written to a file and read by diffusers."""
    model = flux(6, attention_head_dim=32, num_attention_heads=2, axes_dims_rope=(8, 12, 12))
    randomize(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_config(folder)
        path = str(Path(folder) / "tiny.gguf")
        writer = gguf.GGUFWriter(path, "flux")
        for name, weight in model.state_dict().items():
            is_wide = "blocks." in name and weight.ndim == 2 and weight.shape[1] % 32 == 0
            kind = gguf.GGMLQuantizationType.Q8_0 if is_wide else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quants.quantize(weight.numpy(), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        quantised = GGUFQuantizationConfig(compute_dtype=torch.float32)
        return FluxTransformer2DModel.from_single_file(
            path, config=folder, quantization_config=quantised, dtype=torch.float32
        ).eval()


def loaded(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a case and the arguments of a call."""
    quantiser, _, family = name.partition(" | ")
    if quantiser == "GGUF":
        return gguf_model(), FAMILIES["Flux"].call(SIDE, 2, torch.float32)
    dtype = QUANTISERS[quantiser][1]
    return quantised(FAMILIES[family].model(SIDE, dtype), quantiser), FAMILIES[family].call(SIDE, 2, dtype)


def cases(pairs: list[Case]) -> dict[Case, list[float | str]]:
    """The outcome of every case on each rank; what a model returns afterwards is compared under the name ``alone``.

    Where inputs are quantised too, the name ``moved`` tells how far the serial model is from itself if its input moves
    by less than single precision tells.
    """
    logging.set_verbosity_error()
    results: dict[Case, list[float | str]] = {}
    with Mesh(data=2), torch.no_grad():
        for name in dict.fromkeys(name for name, _ in pairs):
            model, named = loaded(name)
            want = sample_of(model(**named))
            for strategy in (strategy for other, strategy in pairs if other == name):
                results[name, strategy] = gathered(_under(STRATEGIES[strategy], model, named, want))
            results[name, "alone"] = gathered(error(sample_of(model(**named)), want))
            moved = named | {"hidden_states": named["hidden_states"] * (1 + 2e-7)}
            results[name, "moved"] = gathered(error(sample_of(model(**moved)), want))
    return results


def _under(strategy: Strategy, model: nn.Module, named: dict[str, Any], want: torch.Tensor) -> float | str:
    with Mesh(**mesh_for((strategy,), 2)) as mesh:

        def run() -> torch.Tensor:
            whole = _bytes(model)
            with parallelize(model, strategy, mesh=mesh):
                if type(strategy) is TensorParallel:
                    assert _bytes(model) < whole
                return sample_of(model(**named))

        return outcome(run, want)


def _bytes(model: nn.Module) -> int:
    """Bytes of all weights, those of quantised ones being the bytes of their numbers and scales."""
    total = 0
    for weight in model.parameters():
        names = weight.__tensor_flatten__()[0] if hasattr(weight, "__tensor_flatten__") else ()
        parts = [getattr(weight, name) for name in names] or [weight]
        total += sum(part.numel() * part.element_size() for part in parts)
    return total


def pipelines() -> dict[str, list[float | str]]:
    """The outcome of a pipeline that diffusers quantises as it loads it, on each rank."""
    logging.set_verbosity_error()
    results: dict[str, list[float | str]] = {}
    with Mesh(data=2), tempfile.TemporaryDirectory() as folder:
        PIPES["SD3"].make(torch.float32).save_pretrained(folder)
        config = PipelineQuantizationConfig(quant_mapping={"transformer": TorchAoConfig(ao.Int8WeightOnlyConfig())})
        parts = ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
        absent: Any = dict.fromkeys((*parts, "image_encoder", "feature_extractor"))
        pipe = StableDiffusion3Pipeline.from_pretrained(
            folder, quantization_config=config, dtype=torch.float32, **absent
        )
        pipe.set_progress_bar_config(disable=True)
        want = PIPES["SD3"].call(pipe)
        for strategy in (Ulysses(), TensorParallel(), PatchPipeline(warmup_steps=STEPS)):
            with Mesh(**mesh_for((strategy,), 2)) as mesh:

                def run(chosen: Strategy = strategy, on: Mesh = mesh) -> torch.Tensor:
                    with parallelize(pipe, chosen, mesh=on) as plan:
                        named: dict[str, Any] = PIPES["SD3"].arguments(1, torch.float32, (48, 80))
                        named["num_inference_steps"] = STEPS
                        output = generate(plan, **named, generator=torch.Generator().manual_seed(9))
                        return torch.as_tensor(next(iter(output.values())))

                results[type(strategy).__name__] = gathered(outcome(run, want))
        weight = pipe.transformer.transformer_blocks[0].attn.to_q.weight
        results["kind"] = gathered(type(weight).__name__)
    return results


def everything(pairs: list[Case]) -> tuple[dict[Case, list[float | str]], dict[str, list[float | str]]]:
    """What `cases` and `pipelines` find, on the same ranks."""
    return cases(pairs), pipelines()
