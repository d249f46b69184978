"""Gives each rank some experts of a mixture, and sends their predictions to all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from partsong.errors import ArgumentError, UnsupportedError
from partsong.knobs import AboveZero, Count
from partsong.parallel.adapters import Adapter
from partsong.parallel.expert_parallel.mixture import ExpertMixture
from partsong.parallel.hooks.arguments import AsCalled
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, signature_of
from partsong.parallel.ranks.collectives import all_gather, broadcast
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.ranks.shards import offsets, split_sizes
from partsong.parallel.strategy import Cut, Kind, Strategy

__all__ = ["ExpertParallel", "PlacedExperts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertParallel(Strategy):
    """Gives each rank an expert of an `ExpertMixture`, which computes the samples that the router sends to it.

    Experts were trained separately, and they run separately too: nothing moves inside them. In every call the first
    rank asks the router for the weight of each expert for each sample, every rank runs its experts on the samples with
    weight, and the velocities go to all ranks, which add them up in the same order. The result is the same on any
    number of ranks, to the last bit. Exact where it leaves the mixture's own `top_k` and `temperature` as they are.

    Use it when the model is a mixture of separately trained experts.

    Args:
        degree: number of ranks, at most the number of experts; None takes all ranks that other strategies leave.
        top_k: experts asked for a sample; None takes the mixture's own number.
        temperature: what the router's logits are divided by; None takes the mixture's own.

    Source: Decentralized Diffusion Models, arXiv 2501.05450; Paris, arXiv 2510.03434.

    Example:
        >>> ExpertParallel().kind, ExpertParallel(top_k=1).kind
        ('exact', 'approximate')
    """

    axes: ClassVar[tuple[str, ...]] = ("expert",)

    degree: Count | None = None
    top_k: Count | None = None
    temperature: AboveZero | None = None

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """Returns ``approximate`` where it uses fewer experts than the mixture or another temperature."""
        return "exact" if self.top_k is None and self.temperature is None else "approximate"

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses a single model."""
        return None if adapter.mixes else f"it is one model, and an ExpertMixture has several; {adapter.instead}"

    def unpredictable(self) -> str:
        """Says that the samples of an expert depend on the picture."""
        return "which samples go to which expert depends on the picture; sample once and ask explain()"

    def cut(self, module: nn.Module, adapter: Adapter, mesh: Mesh, clock: StepClock) -> PlacedExperts:
        """Returns the experts of this rank.

        Raises:
            UnsupportedError: the model is not a mixture.
            ArgumentError: there are more ranks than experts, or `top_k` is more than all experts.
        """
        if not isinstance(module, ExpertMixture):
            raise UnsupportedError(f"ExpertParallel on {adapter.model}: {self.refuses(adapter)}")
        ranks, experts = mesh.axis("expert").size, module.num_experts
        if ranks > experts:
            raise ArgumentError(f"ExpertParallel: {ranks} ranks for {experts} experts; use at most {experts} ranks")
        if self.top_k is not None and self.top_k > experts:
            raise ArgumentError(f"ExpertParallel: top_k={self.top_k} of {experts} experts; use at most {experts}")
        return PlacedExperts(module, mesh, self)


class PlacedExperts(Cut):
    """Runs this rank's experts of a mixture.

    Args:
        mixture: the model.
        mesh: the ranks; those of axis ``expert`` share the experts.
        strategy: the knobs.
    """

    def __init__(self, mixture: ExpertMixture, mesh: Mesh, strategy: ExpertParallel) -> None:
        self.mixture, self.strategy = mixture, strategy
        self.axis, self.sizes = mesh.axis("expert"), dict[str, tuple[int, ...]]()
        sizes = split_sizes(mixture.num_experts, self.axis.size)
        self.owners = [rank for rank, size in enumerate(sizes) for _ in range(size)]
        start = offsets(sizes)[self.axis.index]
        self.own = range(start, start + sizes[self.axis.index])
        self._sent: tuple[int, ...] = ()

    def attach(self, hooks: HookSet) -> None:
        """Loads this rank's experts, and puts the hook on the mixture."""
        for number in self.own:
            self.mixture.expert(number)
        hooks.add(self.mixture, AroundHook(self._run, signature_of(self.mixture)), "experts")

    def begin_forward(self, sample: Any) -> None:
        """Prepares nothing: samples are routed in the call."""

    def _run(self, forward: AsCalled, named: dict[str, Any]) -> Any:
        mixture, weights = self.mixture, self._weights(named)
        asked, given = dict(mixture.asked(weights)), (named, forward.positions)
        own = {number: mixture.velocity(number, asked[number], *given) for number in self.own if number in asked}
        velocities = self._gathered(mixture.latents(named), asked, own)
        return mixture.result(named, mixture.mixed(named, weights, velocities))

    def _weights(self, named: Mapping[str, Any]) -> Tensor:
        """Asks the router on the first rank: ranks that round differently would send samples to different experts."""
        mixture, latents = self.mixture, self.mixture.latents(named)
        if self.axis.index == 0:
            weights = mixture.weights(named, self.strategy.top_k, self.strategy.temperature)
        else:
            weights = latents.new_empty(len(latents), mixture.num_experts, dtype=_weight_type(mixture.dtype))
        return broadcast(self.axis, weights, name="weights of experts")

    def _gathered(
        self, latents: Tensor, asked: Mapping[int, Sequence[int]], own: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Sends the velocities of all experts to all ranks."""
        counts = [len(rows) for rows in asked.values()]
        sizes = [0] * self.axis.size
        for number, count in zip(asked, counts, strict=True):
            sizes[self.owners[number]] += count
        buffer = latents.new_empty(sum(counts), *latents.shape[1:])
        parts = dict(zip(asked, buffer.split(counts), strict=True))
        for number, velocity in own.items():
            parts[number].copy_(velocity)
        all_gather(self.axis, buffer, sizes, name="velocities of experts").wait()
        itemsize = _weight_type(latents.dtype).itemsize
        row_bytes, weight_bytes = latents[0].nbytes, len(latents) * self.mixture.num_experts * itemsize
        self._sent = tuple(size * row_bytes + weight_bytes * (rank == 0) for rank, size in enumerate(sizes))
        return parts

    def call_notes(self) -> tuple[int, ...]:
        """Returns how much each rank of the axis sent to each other one."""
        return self._sent

    def recall(self, notes: Any) -> None:
        """Prepares `predict` for a call with that traffic."""
        self._sent = self._sent if notes is None else notes

    def predict(self, batch: int, tokens: dict[str, int], itemsize: int, index: int, step: tuple[int, bool]) -> int:
        """Returns the bytes the rank at `index` sends in one call like the one that is recalled."""
        return self._sent[index] * (self.axis.size - 1)

    def describe(self, tokens: Mapping[str, int]) -> str:
        """Says what is shared out."""
        return f"{self.mixture.num_experts} experts"


def _weight_type(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
