"""Holds denoisers that were trained separately on clusters of the data, and the router that weights them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from partsong.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from partsong.parallel.adapters import adapter_for
from partsong.parallel.cuts.batch_rules import BatchRules
from partsong.parallel.expert_parallel.noise_expert import NoiseExpert
from partsong.parallel.expert_parallel.routing import expert_weights
from partsong.parallel.hooks.arguments import ArgumentNames
from partsong.parallel.hooks.model_hooks import as_called, signature_of
from partsong.parallel.hooks.samples import sample_of

__all__ = ["ExpertMixture"]

#: An expert, or a function that makes it at first use.
Expert = nn.Module | Callable[[], nn.Module]


class ExpertMixture(nn.Module):
    """Predicts with several denoisers, weighted by a router for every sample and every call.

    Put it in place of a pipeline's denoiser: ``pipe.transformer = ExpertMixture(experts, router)``. It is called like
    its experts. The velocity of a mixture of distributions is the sum of the experts' velocities, weighted by the
    posterior p(expert | noisy sample, timestep), which the router estimates. An expert computes only the samples
    routed to it. One process computes one expert after the other; `ExpertParallel` gives them ranks.

    Args:
        experts: models that take the same arguments and predict the same of the same input: all velocities, or all
            noise (see `NoiseExpert`). One may be given as a function that makes it, which is called when the expert is
            first needed on a rank: a rank holds no others.
        router: takes arguments of the experts by name and returns logits `[samples, experts]`, or a picture with a
            channel for every expert, over whose places the logits are averaged. A transformer of diffusers with two
            layers will do.
        top_k: experts asked for a sample; None asks all.
        temperature: what the router's logits are divided by.
        like: a model of the experts' class that is never run and may be on the ``meta`` device, from which to learn
            their arguments and configuration. None takes the first expert.

    Raises:
        ArgumentError: fewer than two experts, or knobs out of bounds.
        ArgumentTypeError: an expert is neither a module nor a function, or the router is not a module.

    Source: Decentralized Diffusion Models, arXiv 2501.05450.
    """

    def __init__(
        self,
        experts: Sequence[Expert],
        router: nn.Module,
        *,
        top_k: int | None = None,
        temperature: float = 1.0,
        like: nn.Module | None = None,
    ) -> None:
        super().__init__()
        _check(experts, router)
        expert_weights(torch.zeros(1, len(experts)), top_k=top_k, temperature=temperature)  # checks both
        self.router, self.top_k, self.temperature = router, top_k, temperature
        self._makers = list(experts)
        self.loaded = nn.ModuleDict({str(n): each for n, each in enumerate(experts) if isinstance(each, nn.Module)})
        first = like if like is not None else self.expert(0)
        # In a tuple, so that torch does not register it as a layer: it may have no values.
        self._like = (first.model if isinstance(first, NoiseExpert) else first,)
        self._sample, self._rules = _arguments_of(self.like)

    @property
    def like(self) -> nn.Module:
        """Returns a model of the experts' class; only its signature and configuration may be used."""
        return self._like[0]

    @property
    def num_experts(self) -> int:
        """Returns the number of experts."""
        return len(self._makers)

    @property
    def config(self) -> Any:
        """Returns the experts' configuration."""
        return self.like.config

    @property
    def dtype(self) -> torch.dtype:
        """Returns the router's type, which is that of all weights."""
        return next(self.router.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Returns the device of the router, where all experts are."""
        return next(self.router.parameters()).device

    @property
    def forward_signature(self) -> inspect.Signature:
        """Returns the signature of the experts' forward."""
        return signature_of(self.like)

    def cache_context(self, name: str) -> Any:
        """Returns a context that does nothing: the caches of diffusers keep one state for one model."""
        return nullcontext()

    def expert(self, number: int) -> nn.Module:
        """Returns an expert, made at first use with the type and on the device of the router."""
        name = str(number)
        if name not in self.loaded:
            maker: Any = self._makers[number]
            fresh = maker().to(self.device)
            is_cast = next(fresh.parameters()).dtype == self.dtype
            self.loaded[name] = fresh if is_cast else fresh.to(self.dtype)
        return self.loaded[name]

    def forward(self, *args: Any, **named: Any) -> Any:
        """Predicts the velocity of every sample; arguments and result are those of the experts."""
        names = ArgumentNames(self.forward_signature)
        given, positions = names.of(args, named), names.positions(args)
        weights = self.weights(given)
        velocities = {number: self.velocity(number, rows, given, positions) for number, rows in self.asked(weights)}
        return self.result(given, self.mixed(given, weights, velocities))

    def weights(self, named: Mapping[str, Any], top_k: int | None = None, temperature: float | None = None) -> Tensor:
        """Asks the router for the weight of every expert for every sample, `[samples, experts]`.

        Args:
            named: arguments of the call.
            top_k: experts asked for a sample; None takes the mixture's own.
            temperature: what the logits are divided by; None takes the mixture's own.

        Raises:
            UnsupportedError: the router returns something else.
        """
        known = signature_of(self.router).parameters
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
        output = self.router(**{name: value for name, value in named.items() if takes_all or name in known})
        logits = sample_of(output)
        if logits.ndim < 2 or logits.shape[:2] != (len(self.latents(named)), self.num_experts):
            raise UnsupportedError(
                f"the router returned {list(logits.shape)} for {len(self.latents(named))} samples and "
                f"{self.num_experts} experts; it must begin with samples and experts"
            )
        logits = logits if logits.ndim == 2 else logits.flatten(2).mean(dim=2)
        chosen, warmth = top_k or self.top_k, self.temperature if temperature is None else temperature
        return expert_weights(logits, top_k=chosen, temperature=warmth)

    def latents(self, named: Mapping[str, Any]) -> Tensor:
        """Returns the noisy samples of a call.

        Raises:
            UnsupportedError: they are a list, so samples may differ in shape.
        """
        latents = named[self._sample]
        if not isinstance(latents, Tensor):
            raise UnsupportedError(f"{type(self.like).__name__} takes a list of latents; a mixture needs one tensor")
        return latents

    def asked(self, weights: Tensor) -> Iterator[tuple[int, list[int]]]:
        """Yields every expert that has a weight, and the samples that ask it, both in order."""
        for number, column in enumerate(weights.T.tolist()):
            rows = [row for row, weight in enumerate(column) if weight]
            if rows:
                yield number, rows

    def velocity(self, number: int, rows: list[int], named: Mapping[str, Any], positions: Sequence[str] = ()) -> Tensor:
        """Asks one expert about some samples.

        Args:
            number: of the expert.
            rows: the samples.
            named: arguments of the call.
            positions: names of those that came by position.

        Raises:
            UnsupportedError: it is not known how an argument depends on the batch, or the expert returns another shape.
        """
        latents = self.latents(named)
        given = named if len(rows) == len(latents) else self._rules.cut(named, rows, len(latents))
        velocity = sample_of(as_called(self.expert(number), positions)(**given))
        if velocity.shape != (len(rows), *latents.shape[1:]):
            raise UnsupportedError(
                f"expert {number} returned {list(velocity.shape)} for latents of {[len(rows), *latents.shape[1:]]}; "
                "experts must predict a velocity for every latent"
            )
        return velocity

    def mixed(self, named: Mapping[str, Any], weights: Tensor, velocities: Mapping[int, Tensor]) -> Tensor:
        """Adds up the experts' predictions in their order, so that the sum is the same wherever they were computed."""
        latents = self.latents(named)
        total = torch.zeros_like(latents)
        for number, rows in self.asked(weights):
            velocity = velocities[number]
            own = weights[rows, number].to(velocity).view(-1, *[1] * (velocity.ndim - 1))
            total[rows] += own * velocity
        return total

    def result(self, named: Mapping[str, Any], velocity: Tensor) -> Any:
        """Returns a velocity in the experts' output format."""
        if not named.get("return_dict", True):
            return (velocity,)
        from diffusers.models.modeling_outputs import Transformer2DModelOutput  # takes seconds

        return Transformer2DModelOutput(sample=velocity)  # type: ignore[arg-type]


def _arguments_of(model: nn.Module) -> tuple[str, BatchRules]:
    """Says which argument of a model holds the noisy samples, and how the others depend on the batch."""
    try:
        adapter = adapter_for(model)
    except UnsupportedError:
        adapter = None
    if adapter is None or (adapter.inferred and adapter.whole is not None):
        # A user's own model: arguments as long as the first belong to samples.
        names = tuple(signature_of(model).parameters)
        return names[0], BatchRules(model=type(model).__name__, batched=names)
    return adapter.sample, BatchRules.of(adapter)


def _check(experts: Sequence[Expert], router: nn.Module) -> None:
    if len(experts) < 2:
        raise ArgumentError(f"a mixture of {len(experts)} experts; give two or more")
    for number, expert in enumerate(experts):
        if not isinstance(expert, nn.Module) and not callable(expert):
            raise ArgumentTypeError(f"expert {number} is a {type(expert).__name__}; give a module or a function")
    if not isinstance(router, nn.Module):
        raise ArgumentTypeError(f"the router is a {type(router).__name__}; give a module")
