"""Splits any diffusers pipeline over the ranks of a vLLM-Omni worker: a custom pipeline on its adapter for diffusers.

The adapter alone refuses every kind of parallelism. This class reads the same parallel configuration, and puts
partsong's strategies on the pipeline that the adapter has loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from vllm_omni.diffusion.models.diffusers_adapter.pipeline_diffusers_adapter import DiffusersAdapterPipeline

from partsong import (
    CfgParallel,
    Mesh,
    ParallelVae,
    Ring,
    TensorParallel,
    Ulysses,
    UnsupportedError,
    Usp,
    parallelize,
)
from partsong.parallel import Strategy

__all__ = ["PartsongPipeline", "strategies_of"]

#: Numbers of ranks in vLLM-Omni's configuration that mean nothing here.
_OTHERS = ("pipeline_parallel_size", "data_parallel_size", "allgather_degree", "text_encoder_tp_size")


def strategies_of(config: Any) -> tuple[list[Strategy], dict[str, int]]:
    """Reads a parallel configuration as strategies and the degrees of a mesh.

    Args:
        config: vLLM-Omni's ``DiffusionParallelConfig``.

    Raises:
        UnsupportedError: it asks for parallelism that has no counterpart here.
    """
    asked = [name for name in _OTHERS if (getattr(config, name, None) or 1) > 1]
    if getattr(config, "use_hsdp", False):
        asked.append("use_hsdp")
    if asked:
        raise UnsupportedError(
            f"{', '.join(asked)}: partsong reads cfg_parallel_size, tensor_parallel_size, ulysses_degree, ring_degree "
            "and vae_patch_parallel_size; leave the others at 1"
        )
    degrees = {
        "cfg": config.cfg_parallel_size,
        "ring": config.ring_degree,
        "ulysses": config.ulysses_degree,
        "tensor": config.tensor_parallel_size,
    }
    strategies: list[Strategy] = []
    if degrees["cfg"] > 1:
        strategies.append(CfgParallel())
    if degrees["ring"] > 1 and degrees["ulysses"] > 1:
        strategies.append(Usp())
    elif degrees["ring"] > 1 or degrees["ulysses"] > 1:
        strategies.append(Ring() if degrees["ring"] > 1 else Ulysses())
    if degrees["tensor"] > 1:
        strategies.append(TensorParallel())
    if config.vae_patch_parallel_size > 1:
        strategies.append(ParallelVae())
    return strategies, degrees


class PartsongPipeline(DiffusersAdapterPipeline):
    """Runs a diffusers pipeline on all ranks of a worker group, which answer every request together.

    Args:
        od_config: vLLM-Omni's configuration; `strategies_of` says what is read from its ``parallel_config``.
        device: of this rank; None takes that of its local number.

    Raises:
        UnsupportedError: the configuration or the model cannot be split so; all ranks refuse alike, and the message
            says what can.
    """

    def __init__(self, *, od_config: Any, device: Any = None) -> None:
        super().__init__(od_config=od_config, device=device)
        strategies, degrees = strategies_of(od_config.parallel_config)
        mesh = Mesh(**degrees)
        self.device = mesh.device if device is None else device
        super().load_weights()
        self.plan = parallelize(self._pipeline, *strategies, mesh=mesh)

    def load_weights(self, weights: Iterable[Any] = ()) -> None:
        """Does nothing: a custom pipeline has its weights when it is made."""

    def _raise_unsupported_features(self) -> None:
        """Lets the adapter refuse what it cannot do, as if one rank were asked for."""
        asked = self.od_config
        self.od_config = copy.copy(asked)
        self.od_config.parallel_config = type(asked.parallel_config)()
        try:
            super()._raise_unsupported_features()
        finally:
            self.od_config = asked
