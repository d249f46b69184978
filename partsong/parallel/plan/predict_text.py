"""Predicts what ranks that share a language model send and hold, from shapes alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from partsong.errors import UnsupportedError
from partsong.parallel.plan.dry_run import DryMesh, FusedAttention, MixedValues, without_numbers
from partsong.parallel.plan.explain import Explanation
from partsong.parallel.plan.live_bytes import LiveBytes
from partsong.parallel.plan.memory import Memory
from partsong.parallel.ranks.mesh import Network
from partsong.parallel.strategy import Strategy, mesh_for
from partsong.parallel.text.plan import TextPlan

__all__ = ["TextRun", "predict_text", "predict_text_memory"]


class _Sent:
    """Adds up the bytes of messages that are only predicted."""

    def __init__(self) -> None:
        self.bytes = 0

    def post(self, sent: Mapping[int, int], received: Mapping[int, int], *, lane: str = "") -> _Sent:
        """Counts what one message carries."""
        self.bytes += sum(sent.values())
        return self

    def wait(self) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        """Returns True: nothing is under way."""
        return True


class TextRun:
    """Makes calls of a language model on one of several ranks, without values; use it as a context manager.

    Args:
        model: of transformers.
        strategies: as for `parallelize`.
        ranks: how many there are.
        rank: whose calls these are.
        inputs: the arguments of a call.
        network: is notified of every message; None only counts bytes.
        experts: whether experts compute, each as many tokens as are expected on average; else they return at once.
        fused: whether ranks have a library that moves all parts of a tensor in one operation, as GPUs do.
    """

    def __init__(
        self,
        model: Any,
        strategies: Sequence[Strategy],
        ranks: int,
        rank: int,
        inputs: Any,
        *,
        network: Network | None = None,
        experts: bool = False,
        fused: bool = False,
    ) -> None:
        self.sent, self._model = _Sent(), model
        # Which expert a token goes to takes values; no messages are sent inside.
        self._experts = [part for part in model.modules() if any(x.ndim == 3 for x in part.parameters(recurse=False))]
        counts = {part: max(len(weight) for weight in part.parameters(recurse=False)) for part in self._experts}
        mesh: Any = DryMesh(mesh_for(strategies, ranks), ranks, rank, network or self.sent, fused=fused)
        self.plan = TextPlan(model, strategies, mesh, owns_mesh=False)
        tensors = itertools.chain(model.named_parameters(), model.named_buffers())
        self.state = {name: tensor.detach().to("meta") for name, tensor in tensors}
        self.inputs = tree_map(without_numbers, dict(inputs))
        for part in self._experts:
            vars(part)["forward"] = partial(_expected, part, counts[part]) if experts else _chosen

    def call(self, **more: Any) -> Any:
        """Returns the model's output, for the arguments it was made with, and others instead or beside them."""
        inputs = {**self.inputs, **tree_map(without_numbers, more)}
        has_values = any(isinstance(value, Tensor) and not value.is_meta for value in tree_leaves(inputs))
        try:
            with torch.no_grad(), MixedValues() if has_values else nullcontext(), FusedAttention():
                return torch.func.functional_call(self._model, self.state, kwargs=inputs)
        except RuntimeError as problem:
            raise UnsupportedError(
                f"{type(self._model).__name__} does something that takes more than shapes ({problem}); count the bytes "
                "of a call with a Ledger instead"
            ) from problem

    def __enter__(self) -> TextRun:
        return self

    def __exit__(self, *error: object) -> None:
        for part in self._experts:
            vars(part).pop("forward")
        self.plan.undo()


def _chosen(states: Tensor, *routes: Any, **named: Any) -> Tensor:
    return torch.empty_like(states)


def _expected(part: Any, experts: int, states: Tensor, chosen: Tensor, *weights: Tensor) -> Tensor:
    """Computes what a rank's experts do on average, where every token chooses at random.

    Args:
        part: the layer, with the weights of this rank's experts.
        experts: how many the layer has on all ranks.
        states: `[tokens, C]`.
        chosen: `[tokens, k]`.
        *weights: those of the choices, which do not matter here.
    """
    here, (tokens, each) = len(part.down_proj), chosen.shape
    asked = max(1, round(here * (1.0 - (1.0 - each / experts) ** tokens)))
    rows = max(1, round(tokens * each * here / experts / asked))
    for expert in range(asked):
        inner = functional.linear(states[:1].expand(rows, -1), _by_outputs(part.gate_up_proj[expert], states.shape[1]))
        opened = functional.silu(inner[:, : inner.shape[1] // 2]) * inner[:, inner.shape[1] // 2 :]
        functional.linear(opened, _by_outputs(part.down_proj[expert], opened.shape[1]))
    return torch.empty_like(states)


def _by_outputs(weight: Tensor, inputs: int) -> Tensor:
    """Returns a weight as `[outputs, inputs]`; some models store it the other way."""
    return weight if weight.shape[1] == inputs else weight.T


def predict_text(model: Any, strategies: Sequence[Strategy], ranks: int, inputs: Mapping[str, Any]) -> Explanation:
    """Predicts what each rank sends in a call of a language model; arguments and errors as those of `predict`."""
    sent, lines = list[int](), tuple[str, ...]()
    for rank in range(ranks):
        with TextRun(model, strategies, ranks, rank, inputs) as run:
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
    with TextRun(model, strategies, ranks, rank, inputs) as run:
        given = (leaf for leaf in tree_leaves(run.inputs) if isinstance(leaf, Tensor))
        with LiveBytes(itertools.chain(run.state.values(), given)) as live:
            output = run.call()
            with_output = live.now
            del output
            kept = with_output - live.now
        tensors = {id(tensor): tensor for tensor in model.parameters()}.values()
        weights = sum(tensor.nbytes for tensor in tensors) - run.plan.spared()
        return Memory(weights, live.peak, kept)
