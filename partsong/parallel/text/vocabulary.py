"""Shares out a language model's vocabulary: a rank holds the embeddings and the head's rows of a run of tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.ranks.collectives import gather_tokens
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.pieces import WeightPiece
from partsong.parallel.ranks.shards import split_sizes
from partsong.parallel.ranks.sums import sum_over
from partsong.parallel.text.shard import SHARD, VocabularyShard

__all__ = ["cut_vocabulary"]


def cut_vocabulary(model: Any, axis: Axis, hooks: HookSet) -> dict[tuple[nn.Module, str], WeightPiece]:
    """Leaves a run of tokens in a model's embeddings and in its head, which may be one tensor.

    A lookup is summed over the ranks, and the logits of a call of the head are gathered.

    Returns:
        Which rows of a weight this rank holds, by the layer and the name of the weight.
    """
    inputs, output = model.get_input_embeddings(), model.get_output_embeddings()
    shard = VocabularyShard(axis, tuple(split_sizes(len(output.weight), axis.size)))
    is_tied = bool(model.config.get_text_config().tie_word_embeddings)
    pieces = {(output, name): WeightPiece(0, ((shard.first, shard.size),)) for name, _ in output.named_parameters()}
    for _, name in pieces:
        hooks.put(output, name, nn.Parameter(shard.mine(getattr(output, name).detach()), requires_grad=False))
    hooks.put(output, "out_features", shard.size)
    vars(output)[SHARD] = shard
    hooks.on_remove(partial(vars(output).pop, SHARD))
    hooks.on_remove(output.register_forward_hook(partial(_gathered, shard)).remove)
    if is_tied or len(inputs.weight) == shard.total:
        whole = inputs.weight
        part = output.weight if is_tied else nn.Parameter(shard.mine(whole.detach()), requires_grad=False)
        # An encoder and a decoder have a table each, with one weight.
        tables = [each for each in model.modules() if isinstance(each, nn.Embedding) and each.weight is whole]
        for table in tables or [inputs]:
            hooks.put(table, "weight", part)
            pieces[table, "weight"] = pieces[output, "weight"]
            vars(table)["forward"] = partial(_looked_up, table.forward, shard)
            hooks.on_remove(partial(vars(table).pop, "forward"))
    return pieces


def _looked_up(forward: Any, shard: VocabularyShard, tokens: Tensor) -> Tensor:
    local = tokens - shard.first
    is_mine = (local >= 0) & (local < shard.size)
    rows = forward(local.clamp(0, max(shard.size - 1, 0)))
    return sum_over(shard.axis, torch.where(is_mine[..., None], rows, 0.0), name="embeddings")


def _gathered(shard: VocabularyShard, head: nn.Module, given: tuple[Any, ...], logits: Tensor) -> Tensor:
    return gather_tokens(shard.axis, logits, shard.sizes, -1, name="logits")
