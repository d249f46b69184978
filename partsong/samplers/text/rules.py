"""Holds the rules that only ever decide: each accepts some undecided positions of a step and never looks back.

All but `LLaDA` choose positions by the model's distribution, never by the token that was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from partsong.knobs import Count, Number, Share, check_value
from partsong.samplers.text.rule import Choice, Rule, View, commit, rank_of, within_entropy, within_pairs

__all__ = [
    "Dependency",
    "Entropy",
    "EntropyBound",
    "Factor",
    "Hierarchy",
    "KLStable",
    "LLaDA",
    "Quota",
    "Threshold",
    "VariationBound",
]


#: An entropy, a divergence or a mutual information.
Nats = Annotated[float, Number(0.0, 1000.0)]
#: The meaning of "surest".
Order = Literal["max_prob", "margin", "entropy", "random", "left"]


def _score(view: View, by: Order) -> Tensor:
    """Orders positions, the highest first: `[B, K]`."""
    if by == "random":
        return view.random("order")
    if by == "left":
        return -view.index.double()
    return -view.entropy if by == "entropy" else getattr(view, by)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota(Rule):
    """A fixed number of tokens per step, the surest first.

    Attributes:
        per_step: tokens per step.
        steps: steps per block instead: its undecided positions are distributed evenly, the rest to the first steps.
        by: the meaning of "surest": "max_prob", "margin" (to the runner-up), "entropy", "random" or "left" (to right).

    Source: LLaDA, arXiv 2502.09992; Dream's margin and entropy orders, arXiv 2508.15487.

    >>> Quota(per_step=2).steps is None
    True
    """

    per_step: Count = 1
    steps: Count | None = None
    by: Order = "max_prob"

    def choose(self, view: View) -> Choice:
        """Takes the best few."""
        score = self._score(view)
        return commit(view, rank_of(score, view.real & view.undecided) < self._quota(view)[:, None], score)

    def _quota(self, view: View) -> Tensor:
        if self.steps is None:
            return torch.full_like(view.step, self.per_step)
        return view.block_total // self.steps + (view.block_step < view.block_total % self.steps)

    def _score(self, view: View) -> Tensor:
        return _score(view, self.by)


@dataclass(frozen=True, kw_only=True, slots=True)
class LLaDA(Quota):
    """LLaDA's own order, for parity: the surest *drawn* tokens first. At temperature > 0 it is a biased sampler.

    A position is taken because its draw was likely, so likely tokens come out too often: on tasks whose answers are
    known the total variation from the model's own distribution is about 0.5, at one token per step. At temperature 0
    it is `Quota`.

    Source: LLaDA, arXiv 2502.09992 ("low confidence remasking"). The same bias: arXiv 2604.00375.

    >>> LLaDA.unbiased
    False
    """

    unbiased: ClassVar[bool] = False

    def _score(self, view: View) -> Tensor:
        return view.token_prob


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold(Rule):
    """All positions whose most likely token is at least this likely, and always the surest.

    Attributes:
        threshold: probability. It cannot see how many positions there are: n independent choices that are each
            right with probability n / (n + 1) may well not all be right together.

    Source: Fast-dLLM, arXiv 2505.22618 (there with the drawn token's probability).

    >>> Threshold().threshold
    0.9
    """

    threshold: Share = 0.9

    def choose(self, view: View) -> Choice:
        """Takes the sure ones."""
        return commit(view, view.max_prob >= self.threshold, view.max_prob)


@dataclass(frozen=True, kw_only=True, slots=True)
class Factor(Rule):
    """The n surest positions, n the largest number for which the n-th is at least 1 - factor / (n + 1) likely.

    Where all n are that sure, the likeliest tokens one by one are the likeliest together.

    Attributes:
        factor: up to 1.0 that argument holds, for the likeliest tokens; Fast-dLLM uses 1.0 and more. Drawn tokens
            (temperature 1) keep to the model's distribution only with far less, so the default is less.

    Source: Fast-dLLM, arXiv 2505.22618, theorem 1.

    >>> Factor(factor=1.0).validate()
    """

    factor: Annotated[float, Number(0.0, 100.0, above=True)] = 0.3

    def choose(self, view: View) -> Choice:
        """Takes as many of the surest as hold their bound."""
        waiting = view.real & view.undecided
        rank = rank_of(view.max_prob, waiting)
        holds = (view.max_prob >= 1 - self.factor / (rank + 2)) & waiting
        most = torch.where(holds, rank, -1).amax(1, keepdim=True)
        return commit(view, rank <= most, view.max_prob)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entropy(Rule):
    """All positions of low entropy, and always the lowest.

    Attributes:
        threshold: nats. dParallel and d3LLM use 0.5 with models trained for it; eight even choices of one in eight
            are 0.38 nats each, and would all be made at once.

    Source: dParallel, arXiv 2509.26488; d3LLM.

    >>> Entropy().threshold
    0.2
    """

    threshold: Nats = 0.2

    def choose(self, view: View) -> Choice:
        """Takes the certain ones."""
        return commit(view, view.entropy <= self.threshold, -view.entropy)


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyBound(Rule):
    """The most positions, by rising entropy, whose entropies but the largest sum to at most gamma. The default rule.

    That sum bounds the mutual information of a step's tokens, and so the Kullback-Leibler divergence of writing them
    together from writing them one at a time. Summed over the steps it is the certificate of a text. It bounds the
    error of writing in parallel under the model's own conditionals at temperature 1, not the model's error.

    Attributes:
        gamma: nats per step.

    Source: EB-Sampler, arXiv 2505.24857.

    >>> EntropyBound(gamma=0.1).validate()
    """

    gamma: Nats = 0.1

    def choose(self, view: View) -> Choice:
        """Takes as many as the bound allows."""
        return commit(view, within_entropy(view.entropy, view.real & view.undecided, self.gamma), -view.entropy)


@dataclass(frozen=True, kw_only=True, slots=True)
class KLStable(Rule):
    """Positions that are sure and whose distribution has stopped moving; where there are none, the surest.

    Attributes:
        threshold: probability of the most likely token.
        divergence: nats by which a distribution may differ from that of the previous step.
        history: steps in a row in which it must not have moved more.

    Source: KLASS, arXiv 2511.05664.

    >>> KLStable().history
    2
    """

    remembers: ClassVar[bool] = True
    threshold: Share = 0.9
    divergence: Nats = 0.01
    history: Count = 2

    def choose(self, view: View) -> Choice:
        """Takes the sure and settled ones."""
        still = view.noted("steps without moving", 0)
        still = torch.where(view.divergence() < self.divergence, still + 1, 0)
        view.note("steps without moving", still)
        return commit(view, (still >= self.history) & (view.max_prob > self.threshold), view.max_prob)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hierarchy(Rule):
    """All sure positions, and from every run of neighbouring undecided ones its surest if that is fairly sure.

    Attributes:
        threshold: probability above which any position is taken.
        low_threshold: the same for the surest of a run: far apart, they tell little of each other.

    Source: dInfer's hierarchical decoder, arXiv 2510.08666.

    >>> Hierarchy().low_threshold
    0.5
    """

    threshold: Share = 0.92
    low_threshold: Share = 0.5

    def validate(self) -> None:
        """Refuses knobs out of range, and a low threshold above the other one."""
        super(Hierarchy, self).validate()
        check_value("low_threshold", self.low_threshold, Annotated[float, Number(0.0, self.threshold)], "Hierarchy: ")

    def choose(self, view: View) -> Choice:
        """Takes the sure ones and the peaks."""
        waiting = view.real & view.undecided
        apart = torch.ones_like(waiting)
        apart[:, 1:] = ~waiting[:, :-1] | ~waiting[:, 1:] | (view.index[:, 1:] != view.index[:, :-1] + 1)
        run = apart.cumsum(1)
        # Runs are few and short, so each position is compared with all others of its row.
        rank = rank_of(view.max_prob, waiting)
        same = (run[:, :, None] == run[:, None, :]) & waiting[:, None, :]
        first = torch.where(same, rank[:, None, :], rank.shape[1]).amin(2)
        peak = (rank == first) & (view.max_prob > self.low_threshold)
        return commit(view, peak | (view.max_prob > self.threshold), view.max_prob)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dependency(Rule):
    """Positions that tell little of each other, by rising entropy, as long as their mutual information stays small.

    Needs a probe: a function that gives the pairwise mutual information of the active positions (see `decode`).
    Sums of pairs do not bound what three positions tell together, so this rule has no certificate of its own.

    Attributes:
        budget: nats of mutual information a position may share with those accepted in the same step.

    Source: PUNT, arXiv 2510.21961, and the analysis of ParallelBench, arXiv 2510.04767.

    >>> Dependency().budget
    0.05
    """

    probes: ClassVar[bool] = True
    budget: Nats = 0.05

    def choose(self, view: View) -> Choice:
        """Takes nearly independent positions, one after the other."""
        waiting, score = view.real & view.undecided, -view.entropy
        accept, _ = within_pairs(view.mutual_information(), score, waiting, self.budget, together=False)
        return commit(view, accept, score)


@dataclass(frozen=True, kw_only=True, slots=True)
class VariationBound(Rule):
    """Positions by falling confidence, as long as the sum of what each pair of them tells of each other stays small.

    What a pair tells is a total variation: by how much knowing one token changes the distribution of the other, in the
    mean. Where these changes add up (sub-additivity), their sum over all pairs bounds the total variation of the tokens
    drawn together from those drawn one after another. Summed over the steps it is the second certificate of a text,
    `Tally.variation`. It holds as far as the dependences do: exactly for a probe that measures them, and within its
    errors for a head that predicts them. Changes need not add up: of three bits with an even sum each pair is
    independent.

    Attributes:
        delta: total variation per step, 0 to 1.
        by: the order in which positions are tried, as for `Quota`; "random" is foreseen best by the drafts of `verify`.
        head: the folder of a `DependenceHead`. Default: the folder "dependence" beside the model's weights. With
            `probe=` of `decode` none is read.

    Source: DEMASK, arXiv 2604.02560.

    >>> VariationBound(delta=0.05).validate()
    """

    noise: ClassVar[tuple[str, ...]] = ("mask",)
    weighs: ClassVar[bool] = True
    delta: Share = 0.01
    by: Order = "max_prob"
    head: str | Path | None = None

    def choose(self, view: View) -> Choice:
        """Takes as many as the bound allows."""
        waiting, score = view.real & view.undecided, _score(view, self.by)
        accept, total = within_pairs(view.dependence(), score, waiting, self.delta, together=True)
        return replace(commit(view, accept, score), variation=total)
