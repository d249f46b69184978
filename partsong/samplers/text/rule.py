"""Defines what a decoding rule sees and returns; the rules themselves are in files of their own.

A rule looks at the distributions of the active positions and chooses which tokens to write. It sees statistics of a
position (`max_prob`, `entropy` ...) and the token that was drawn there. The choice of *positions* must not depend
on the drawn token. A rule that accepts a position because its draw was likely draws likely tokens too often, even one
token at a time and with a perfect model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from partsong.knobs import check_fields

__all__ = ["Change", "Choice", "Rule", "View", "best", "commit", "rank_of", "within_entropy", "within_pairs"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class View:
    """Shows a rule the active positions, `[B, K]`: K is the most of any row, and `real` marks those that exist.

    Attributes:
        real: bool, the others are filler: probabilities 0, entropy infinite.
        index: int64, position within the text.
        block: int64, 0 for the first active block, 1 for the next.
        undecided: bool.
        current: int64, the present token.
        token: int64, drawn from the model's distribution; its argmax at temperature 0. Where there is none it is
            negative, and what a rule chooses for that row does not count.
        token_prob: probability of `token` at temperature 1.
        argmax: int64, the most likely token.
        max_prob: its probability.
        margin: `max_prob` less the probability of the runner-up.
        entropy: in nats.
        step: int64 `[B]`, steps this row has made.
        block_step: int64 `[B]`, steps since its first block began.
        block_total: int64 `[B]`, undecided positions when that block began.
        eager: whether tokens are argmaxes (temperature 0).
        length: L, positions of the canvas.
        memory: tensors `[B, L, ...]` that the rule keeps from step to step; rows leave with their text.
        divergence: KL divergence `[B, K]` of the distributions of this step from those of the previous step, in nats;
            infinite where there was none. Costs a pass over the vocabulary.
        current_prob: probability `[B, K]` of `current` in a second forward where each active position is masked
            by itself; only for rules with ``shadows``.
        mutual_information: pairwise `[B, K, K]` in nats, where a probe was given.
        dependence: pairwise `[B, K, K]`, 0 to 1: by how much, in total variation, knowing the token at one position
            changes the distribution at another, in the mean over that token. Measured by a probe or predicted by a
            head, and never more than the two distributions allow.
        random: uniform numbers `[B, K]` of this step, a function of seed, position and step; the argument
            selects a stream.
        random_token: a uniform token for each position, likewise.
    """

    real: Tensor
    index: Tensor
    block: Tensor
    undecided: Tensor
    current: Tensor
    token: Tensor
    token_prob: Tensor
    argmax: Tensor
    max_prob: Tensor
    margin: Tensor
    entropy: Tensor
    step: Tensor
    block_step: Tensor
    block_total: Tensor
    eager: bool
    length: int
    memory: dict[str, Tensor]
    divergence: Callable[[], Tensor]
    current_prob: Tensor | None
    mutual_information: Callable[[], Tensor]
    dependence: Callable[[], Tensor]
    random: Callable[[str], Tensor]
    random_token: Callable[[], Tensor]

    @property
    def lost(self) -> Tensor:
        """Marks the positions without a token to draw, bool `[B, K]`; see `no_token`."""
        lost = self.token < 0
        return self.real & (lost if self.current_prob is None else lost | self.current_prob.isnan())

    def noted(self, name: str, fill: int) -> Tensor:
        """Returns the values noted under a name for these positions, int64 `[B, K]`, or `fill` before."""
        if name not in self.memory:
            self.memory[name] = torch.full((len(self.index), self.length), fill, device=self.index.device)
        return self.memory[name].gather(1, self.index)

    def note(self, name: str, values: Tensor) -> None:
        """Keeps values `[B, K]` for the next step, where positions are real."""
        kept = self.memory[name]
        old = kept.gather(1, self.index)
        kept.scatter_(1, self.index, torch.where(self.real, values.to(kept.dtype), old))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Choice:
    """Holds a rule's choice for the positions of a `View`; all `[B, K]`.

    Attributes:
        write: bool, positions that get `token`.
        token: int64.
        undecided: bool, positions that are undecided afterwards.
        pending: bool, positions that keep their block active; at least the undecided.
        inserted: bool or None, positions whose token inserted a new position, for the events of a stream.
        deleted: bool or None, positions whose token was removed.
        mask_share: or None, how much of the mask's embedding the next forward reads in place of the token's, 0 to 1;
            from rules that mix.
        variation: or None, `[B]`: a bound on the total variation of the tokens written, drawn together, from the same
            ones drawn one after another; from rules that compute one.
    """

    write: Tensor
    token: Tensor
    undecided: Tensor
    pending: Tensor
    inserted: Tensor | None = None
    deleted: Tensor | None = None
    mask_share: Tensor | None = None
    variation: Tensor | None = None

    def except_in(self, rows: Tensor, view: View) -> Choice:
        """Returns the choice without any change in some rows, bool `[B]`."""
        kept = ~rows[:, None]
        moved = [None if each is None else each & kept for each in (self.inserted, self.deleted)]
        undecided, pending = (torch.where(kept, x, view.undecided) for x in (self.undecided, self.pending))
        return replace(
            self, write=self.write & kept, undecided=undecided, pending=pending, inserted=moved[0], deleted=moved[1]
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Change:
    """Holds the changes that a choice makes; all bool `[B, K]`.

    Attributes:
        new: undecided positions that get a token.
        other: decided positions that get another token.
        taken: decided positions that are undecided again.
    """

    new: Tensor
    other: Tensor
    taken: Tensor

    @property
    def edits(self) -> Tensor:
        """Marks decided positions that lose their token."""
        return self.other | self.taken

    @staticmethod
    def of(view: View, choice: Choice) -> Change:
        """Compares a choice with what the rule saw."""
        return Change(
            new=choice.write & view.undecided & ~choice.undecided,
            other=choice.write & ~view.undecided & (choice.token != view.current),
            taken=choice.undecided & ~view.undecided & view.real,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule(ABC):
    """Decides which tokens a step writes. Derive a frozen dataclass of knobs from it and write `choose`.

    Attributes:
        reads: which positions it sees: the "undecided" ones of the active blocks, or all "free" ones in them.
        noise: kinds of models it fits, as in `TextAdapter.noise`.
        revises: it may change tokens that it wrote; a text then ends only when nothing is pending.
        moves: it may move tokens to other places of their block.
        shadows: it needs the model's distribution of decided positions, each masked by itself.
        probes: it needs the mutual information of positions.
        weighs: it needs the dependence of positions, from a probe or a head.
        mixes: it lets the model read a mixture of a token and the mask.
        remembers: its choice depends on earlier steps, by the memory or the divergence of a `View`.
        unbiased: drawn texts follow the model's own conditionals, if positions are accepted one at a time.
    """

    reads: ClassVar[Literal["undecided", "free"]] = "undecided"
    noise: ClassVar[tuple[str, ...]] = ("mask", "none")
    revises: ClassVar[bool] = False
    moves: ClassVar[bool] = False
    shadows: ClassVar[bool] = False
    probes: ClassVar[bool] = False
    weighs: ClassVar[bool] = False
    mixes: ClassVar[bool] = False
    remembers: ClassVar[bool] = False
    unbiased: ClassVar[bool] = True

    @property
    def bars(self) -> tuple[int, ...]:
        """Lists tokens that are not offered to the rows of ``view.memory["barred"]``."""
        return ()

    def validate(self) -> None:
        """Refuses knobs out of range with an ArgumentError; also checks knobs that bound each other."""
        check_fields(self)

    def heat(self, block_step: int) -> float | None:
        """Returns the temperature of a step's draws and statistics; None takes that of `decode`."""
        return None

    @abstractmethod
    def choose(self, view: View) -> Choice:
        """Chooses what to write in this step."""


def rank_of(score: Tensor, among: Tensor) -> Tensor:
    """Ranks positions among some by falling score, `[B, K]`; ties go to the earlier one.

    Positions outside `among` come after all others.
    """
    order = torch.where(among, score, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order)
    return rank.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))


def within_entropy(entropy: Tensor, among: Tensor, gamma: float) -> Tensor:
    """Marks the most positions, by rising entropy, whose entropies but the largest sum to at most gamma: `[B, K]`."""
    rank = rank_of(-entropy, among)
    ordered = torch.zeros_like(entropy).scatter_(1, rank, torch.where(among, entropy, 0.0))
    before = ordered.cumsum(1) - ordered  # the largest of the first k is the k-th
    return (before.gather(1, rank) <= gamma) & among


def within_pairs(
    shared: Tensor, score: Tensor, among: Tensor, budget: float, *, together: bool
) -> tuple[Tensor, Tensor]:
    """Takes positions by falling score while what they share with those taken before stays within a budget.

    One that shares too much is left out, and the next is tried.

    Args:
        shared: `[B, K, K]`, 0 or more.
        score: `[B, K]`.
        among: bool `[B, K]`.
        budget: the most that all pairs together may share, or else each position with those before it.
        together: which of the two.

    Returns:
        What is taken, bool `[B, K]`, and the sum over all its pairs, `[B]`.
    """
    order = rank_of(score, among).argsort(1)
    taken, spent = torch.zeros_like(among), torch.zeros_like(shared[:, 0])
    total, rows = torch.zeros_like(spent[:, 0]), torch.arange(len(order), device=order.device)
    for place in range(order.shape[1]):
        here = order[:, place]
        more = spent[rows, here]
        take = among[rows, here] & ((total + more if together else more) <= budget)
        taken[rows, here] = take
        total += torch.where(take, more, 0.0)
        spent += torch.where(take[:, None], shared[rows, here], 0.0)
    return taken, total


def best(score: Tensor, among: Tensor) -> Tensor:
    """Marks the position of the highest score among some, the earliest of equals: bool `[B, K]`."""
    return (rank_of(score, among) == 0) & among


def commit(view: View, accept: Tensor, score: Tensor) -> Choice:
    """Writes what is accepted, and the best of the first block where a row accepts nothing.

    Args:
        view: what the rule saw.
        accept: bool `[B, K]`; only undecided positions count.
        score: orders positions, the highest first.
    """
    waiting = view.real & view.undecided
    accept = accept & waiting
    first = waiting & (view.block == torch.where(waiting, view.block, view.block.amax()).amin(1, keepdim=True))
    accept = torch.where(accept.any(1, keepdim=True), accept, best(score, first))
    left = view.undecided & view.real & ~accept
    return Choice(write=accept, token=view.token, undecided=left, pending=left)
