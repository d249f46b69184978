"""Attaches a plan to a language model before its weights are read, so that a rank reads its share of them only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from partsong.parallel.loading.fill import fill_model
from partsong.parallel.loading.weight_files import WeightFiles
from partsong.parallel.plan.plan import parallelize
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.strategy import Strategy
from partsong.parallel.text.plan import TextPlan

__all__ = ["TextShare", "read_share"]


class TextShare:
    """Attaches strategies to a model, before its weights are read or after.

    Args:
        strategies: what to attach.
        mesh: the ranks; None makes a mesh.

    Attributes:
        plan: None before they are attached.
        reads_shares: whether there are ranks that need not read all weights.
        cuts_columns: whether all that a rank needs of a weight are some of its columns.
    """

    def __init__(self, strategies: Sequence[Strategy], mesh: Mesh | None) -> None:
        self.strategies, self.mesh = tuple(strategies), mesh
        self.plan: TextPlan | None = None
        world = int(os.environ.get("WORLD_SIZE", "1")) if mesh is None else mesh.world_size
        self.reads_shares = bool(self.strategies) and world > 1
        self.cuts_columns = self.reads_shares and not any(each.uses_all_ranks for each in self.strategies)

    def __call__(self, module: PreTrainedModel) -> TextPlan:
        """Attaches them to a module without weights."""
        self.plan = parallelize(module, *self.strategies, mesh=self.mesh)
        return self.plan

    def finished(self, module: PreTrainedModel) -> TextPlan | None:
        """Returns the plan once the weights are there; None where there are no strategies."""
        if self.plan is not None:
            self.plan.note_read()
        elif self.strategies:
            self.plan = parallelize(module, *self.strategies, mesh=self.mesh)
        return self.plan


def read_share(
    folder: Path, share: TextShare, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> PreTrainedModel | None:
    """Loads this rank's share of a causal model whose files name tensors as its class does.

    Args:
        folder: with ``config.json`` and safetensors.
        share: attaches a plan to the module before its weights are read.
        dtype: default: that of most tensors.
        device: default: the CPU.

    Returns:
        The module, or None where its files have other names, which only transformers knows how to read.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    with init_empty_weights(include_buffers=False), no_init_weights():
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    module = module.eval().requires_grad_(False)
    tied = {"lm_head.weight"} if config.get_text_config().tie_word_embeddings else set[str]()
    with WeightFiles(folder) as files:
        missing = module.state_dict().keys() - files.names.keys()
        if missing - tied or files.names.keys() - module.state_dict().keys():
            return None
        plan = share(module)
        if missing:  # one tensor in the files, and in the model once that is tied
            module.get_output_embeddings()._parameters["weight"] = nn.Parameter(torch.empty(0), requires_grad=False)
        fill_model(module, plan, files, dtype or files.most_common_dtype(), torch.device(device or "cpu"))
    module.tie_weights()
    nn.Module.to(module, torch.device(device or "cpu"))
    return module
