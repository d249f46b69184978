"""What a rank of a vLLM-Omni worker does, with a stand-in for the adapter that the custom pipeline is built on."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.documents import ROOT
from tests.pipelines.cases import CASES

MODULE = "vllm_omni.diffusion.models.diffusers_adapter.pipeline_diffusers_adapter"


@dataclass
class Parallel:
    """Has the numbers of ``DiffusionParallelConfig``."""

    pipeline_parallel_size: int = 1
    data_parallel_size: int | None = None
    tensor_parallel_size: int = 1
    ulysses_degree: int = 1
    ring_degree: int = 1
    allgather_degree: int = 1
    cfg_parallel_size: int = 1
    vae_patch_parallel_size: int = 1
    text_encoder_tp_size: int = 1
    use_hsdp: bool = False


@dataclass
class Config:
    """Has what the adapter reads of ``OmniDiffusionConfig``."""

    model: str
    parallel_config: Parallel = field(default_factory=Parallel)
    cache_backend: str = "none"


class Adapter(nn.Module):
    """Loads a pipeline, calls it for a request, and refuses several ranks, as vLLM-Omni's adapter does."""

    def __init__(self, *, od_config: Config, device: Any = None) -> None:
        super().__init__()
        self.od_config, self.device = od_config, device
        self._pipeline: Any = None
        self._raise_unsupported_features()

    def _raise_unsupported_features(self) -> None:
        if self.od_config.parallel_config != Parallel():
            raise NotImplementedError("parallelism is not supported with the diffusers backend")
        if self.od_config.cache_backend != "none":
            raise NotImplementedError("caches are not supported with the diffusers backend")

    def load_weights(self) -> None:
        self._pipeline = CASES[self.od_config.model].make()
        self._pipeline.to(self.device)

    def forward(self, request: Any) -> Any:
        with torch.inference_mode():
            return CASES[self.od_config.model].run(self._pipeline, **request)


def load() -> Any:
    """Loads the integration with the stand-in in the adapter's place."""
    stub: Any = ModuleType(MODULE)
    stub.DiffusersAdapterPipeline = Adapter
    parts = MODULE.split(".")
    for end in range(1, len(parts)):
        sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    sys.modules[MODULE] = stub
    path = ROOT / "integrations" / "vllm_omni" / "partsong_pipeline.py"
    spec = importlib.util.spec_from_file_location("partsong_pipeline", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw(model: str, parallel: dict[str, int], calls: int) -> list[list[torch.Tensor]]:
    """Answers requests on this rank, in the process group of the worker."""
    module = load()
    if parallel:
        dist.init_process_group("gloo")
    pipeline = module.PartsongPipeline(od_config=Config(model, Parallel(**parallel)))
    pipeline.load_weights(iter(()))
    drawn = [pipeline.forward({}) for _ in range(calls)]
    pipeline.plan.undo()
    if parallel:
        dist.destroy_process_group()
    return drawn
