"""Predicts what ranks that share a language model send and hold, from shapes alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from partsong.errors import UnsupportedError
from partsong.parallel.plan.dry_run import DryMesh, FusedAttention, MixedValues, without_numbers
from partsong.parallel.plan.explain import Explanation
from partsong.parallel.plan.live_bytes import LiveBytes
from partsong.parallel.plan.memory import Memory
from partsong.parallel.strategy import Strategy, mesh_for
from partsong.parallel.text.plan import TextPlan

__all__ = ["predict_text", "predict_text_memory"]


class _Sent:
    """Adds up the bytes of messages that are only predicted."""

    def __init__(self) -> None:
        self.bytes = 0

    def post(self, sent: Mapping[int, int], received: Mapping[int, int], *, lane: str = "") -> _Sent:
        self.bytes += sum(sent.values())
        return self

    def wait(self) -> None:
        """Returns at once."""


class _TextRun:
    """Makes a call of a language model on one of several ranks, without values; use it as a context manager."""

    def __init__(self, model: Any, strategies: Sequence[Strategy], ranks: int, rank: int, inputs: Any) -> None:
        self.sent, self._model = _Sent(), model
        mesh: Any = DryMesh(mesh_for(strategies, ranks), ranks, rank, self.sent)
        self.plan = TextPlan(model, strategies, mesh, owns_mesh=False)
        tensors = itertools.chain(model.named_parameters(), model.named_buffers())
        self.state = {name: tensor.detach().to("meta") for name, tensor in tensors}
        self.inputs = tree_map(without_numbers, dict(inputs))
        # Which expert a token goes to takes values; no messages are sent inside.
        self._experts = [part for part in model.modules() if any(x.ndim == 3 for x in part.parameters(recurse=False))]
        for part in self._experts:
            vars(part)["forward"] = _chosen

    def call(self) -> Any:
        """Returns the model's output."""
        has_values = any(isinstance(value, Tensor) and not value.is_meta for value in tree_leaves(self.inputs))
        try:
            with torch.no_grad(), MixedValues() if has_values else nullcontext(), FusedAttention():
                return torch.func.functional_call(self._model, self.state, kwargs=self.inputs)
        except RuntimeError as problem:
            raise UnsupportedError(
                f"{type(self._model).__name__} does something that takes more than shapes ({problem}); count the bytes "
                "of a call with a Ledger instead"
            ) from problem

    def __enter__(self) -> _TextRun:
        return self

    def __exit__(self, *error: object) -> None:
        for part in self._experts:
            vars(part).pop("forward")
        self.plan.undo()


def _chosen(states: Tensor, *routes: Any, **named: Any) -> Tensor:
    return torch.empty_like(states)


def predict_text(model: Any, strategies: Sequence[Strategy], ranks: int, inputs: Mapping[str, Any]) -> Explanation:
    """Predicts what each rank sends in a call of a language model; arguments and errors as those of `predict`."""
    sent, lines = list[int](), tuple[str, ...]()
    for rank in range(ranks):
        with _TextRun(model, strategies, ranks, rank, inputs) as run:
            run.call()
            sent.append(run.sent.bytes)
            lines = (run.plan.explain(),)
    return Explanation("exact", lines, (), (), (), (tuple(sent),), (0,) * ranks)


def predict_text_memory(
    model: Any, strategies: Sequence[Strategy], ranks: int, rank: int, inputs: Mapping[str, Any]
) -> Memory:
    """Predicts what one rank holds; what is kept is the call's output, with the cache of its keys.

    What experts compute in between is left out, since it depends on which of them tokens go to.
    """
    with _TextRun(model, strategies, ranks, rank, inputs) as run:
        given = (leaf for leaf in tree_leaves(run.inputs) if isinstance(leaf, Tensor))
        with LiveBytes(itertools.chain(run.state.values(), given)) as live:
            output = run.call()
            with_output = live.now
            del output
            kept = with_output - live.now
        tensors = {id(tensor): tensor for tensor in model.parameters()}.values()
        weights = sum(tensor.nbytes for tensor in tensors) - run.plan.spared()
        return Memory(weights, live.peak, kept)
