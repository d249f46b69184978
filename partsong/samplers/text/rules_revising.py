"""Holds the rules that revise: they take tokens back, overwrite, move or redraw them.

Entropies do not bound the divergence of such a text, so these rules have no certificate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from partsong.errors import ArgumentError
from partsong.knobs import Count, Number, Share, Whole, check_value
from partsong.samplers.text.rule import Choice, Rule, View, commit, rank_of, within_entropy
from partsong.samplers.text.rules import Nats

__all__ = ["InsertDelete", "Renoise", "Revoke", "SoftTokens", "TokenEditing"]


#: A token's id, or a count that may be 0.
_FromZero = Annotated[int, Whole(0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _RevisingRule(Rule):
    reads: ClassVar[Literal["undecided", "free"]] = "free"
    revises: ClassVar[bool] = True
    unbiased: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Revoke(_RevisingRule):
    """Drafts boldly and takes back what the model, asked again with that token masked, no longer finds likely.

    The same forward drafts and checks: a masked copy (shadow) of each decided active position sees everything but its
    own token, and nothing sees the shadow.

    Attributes:
        draft: a position is drafted if its most likely token is more likely than this.
        verify: a token is taken back if its shadow gives it less.
        most: the fraction of undecided positions a step may draft at most, but `at_least` and `at_most` of them.
        at_least: see `most`.
        at_most: see `most`.

    Source: WINO, arXiv 2507.18578.

    >>> Revoke().verify
    0.9
    """

    shadows: ClassVar[bool] = True
    draft: Share = 0.6
    verify: Share = 0.9
    most: Share = 0.7
    at_least: Count = 5
    at_most: Count = 20

    def validate(self) -> None:
        """Refuses knobs out of range, and a most below the least."""
        super(Revoke, self).validate()
        check_value("at_most", self.at_most, Annotated[int, Whole(self.at_least)], "Revoke: ")

    def choose(self, view: View) -> Choice:
        """Drafts some positions and takes some earlier tokens back."""
        waiting = view.real & view.undecided
        cap = (self.most * waiting.sum(1)).floor().clamp(self.at_least, self.at_most)
        bold = (view.max_prob > self.draft) & (rank_of(view.max_prob, waiting) < cap[:, None])
        drafted = commit(view, bold, view.max_prob)
        assert view.current_prob is not None
        doubted = view.real & ~view.undecided & (view.current_prob < self.verify)
        # Fewer are taken back than drafted, so every step makes progress.
        fewer = drafted.write.sum(1, keepdim=True) - 1
        revoked = doubted & (rank_of(-view.current_prob, doubted) < fewer)
        undecided = drafted.undecided | revoked
        return Choice(write=drafted.write, token=view.token, undecided=undecided, pending=undecided)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEditing(_RevisingRule):
    """Decides sure positions, and overwrites decided ones where the model has become sure of another token.

    Attributes:
        threshold: a position is decided if its most likely token is more likely than this; the surest always.
        editing_threshold: a decided token is overwritten if another is more likely than this.
        max_post_steps: rounds of overwriting after all of a block is decided; it ends sooner if nothing changes.

    Source: LLaDA 2.1, arXiv 2602.08676; the idea of revising on the way also in ReDiff, arXiv 2510.19871.

    >>> TokenEditing().editing_threshold
    0.9
    """

    threshold: Share = 0.95
    editing_threshold: Share = 0.9
    max_post_steps: _FromZero = 16

    def choose(self, view: View) -> Choice:
        """Decides some positions and overwrites others."""
        decided = commit(view, view.max_prob > self.threshold, view.max_prob)
        edited = view.real & ~view.undecided & (view.argmax != view.current)
        edited = edited & (view.max_prob > self.editing_threshold)
        spent = _post_steps(view)
        edited = edited & ((spent < self.max_post_steps) | _in_block(view, view.undecided & view.real))
        settled = _settled(view, decided.write | edited, spent, self.max_post_steps)
        token = torch.where(edited, view.argmax, view.token)
        pending = decided.undecided | (view.real & ~settled)
        return Choice(write=decided.write | edited, token=token, undecided=decided.undecided, pending=pending)


def _post_steps(view: View) -> Tensor:
    """Counts the rounds `[B, K]` since the block of a position was fully decided."""
    spent = view.noted("post steps", 0)
    whole = ~_in_block(view, view.undecided & view.real)
    view.note("post steps", spent + whole)
    return spent


def _in_block(view: View, marks: Tensor) -> Tensor:
    """Says whether a mark is set anywhere in the block of a position, bool `[B, K]`."""
    return ((view.block[:, :, None] == view.block[:, None, :]) & marks[:, None, :]).any(2)


def _settled(view: View, changed: Tensor, spent: Tensor, most: int) -> Tensor:
    """Marks positions of decided blocks in which nothing changes, or may change: bool `[B, K]`."""
    busy = _in_block(view, (view.undecided & view.real) | changed)
    return ~busy | ((spent >= most) & ~_in_block(view, view.undecided & view.real & ~changed))


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftTokens(_RevisingRule):
    """Decides boldly, lets the model read each token mixed with the mask according to its doubt, and decides again.

    A token of probability p is read as ``token + weight * (1 - p) * (mask - token)``, in embeddings. So later forwards
    see how sure earlier ones were, and overwrite tokens that no longer fit. A block ends when all of it is decided and
    sure, or as with `TokenEditing` when nothing changes; its tokens are then read as they are. With a weight of 0 and
    `sure` of 1 it is `TokenEditing`. It is for models that were trained on their own guesses
    (`zoo/recipes/distil_lists.py`).

    Attributes:
        threshold: a position is decided if its most likely token is more likely than this; the surest always.
        editing_threshold: a decided token is overwritten if another is more likely than this.
        sure: a block ends when every token of it is more likely than this.
        weight: how much of the doubt is mixed in; 0 reads tokens as they are.
        max_post_steps: rounds of overwriting after all of a block is decided.

    Source: soft parallel decoding of DMax, arXiv 2604.08302.

    >>> SoftTokens().threshold
    0.5
    """

    noise: ClassVar[tuple[str, ...]] = ("mask",)
    mixes: ClassVar[bool] = True
    threshold: Share = 0.5
    editing_threshold: Share = 0.0
    sure: Share = 0.9
    weight: Share = 1.0
    max_post_steps: _FromZero = 16

    def choose(self, view: View) -> Choice:
        """Makes the choice of `TokenEditing`, ends blocks that are sure, and says how doubtful each token is."""
        base = TokenEditing(
            threshold=self.threshold, editing_threshold=self.editing_threshold, max_post_steps=self.max_post_steps
        ).choose(view)
        token = torch.where(base.write, base.token, view.current)
        # A token that stays although another is likelier has at most the remaining probability.
        prob = torch.where(base.write, view.token_prob, 1 - view.max_prob)
        prob = torch.where(token == view.argmax, view.max_prob, prob)
        doubtful = view.real & (base.undecided | (prob <= self.sure))
        pending = base.pending & _in_block(view, doubtful)
        share = torch.where(pending & ~base.undecided, self.weight * (1 - prob), 0.0)
        return Choice(write=base.write, token=base.token, undecided=base.undecided, pending=pending, mask_share=share)


@dataclass(frozen=True, kw_only=True, slots=True)
class InsertDelete(_RevisingRule):
    """`TokenEditing` with two tokens that move others: one deletes its place, one opens a place before it.

    A deleted position is removed, the rest of its block moves up, and a mask is added at the block's end. Where a
    position is inserted, the last undecided position of the block is removed. After `max_edits` deletions and
    insertions in a block neither token is offered any more, so every block ends.

    Attributes:
        delete_token: id of the token that deletes.
        split_token: id of the token that opens a place.
        threshold: as in `TokenEditing`.
        editing_threshold: as in `TokenEditing`.
        max_post_steps: as in `TokenEditing`.
        max_edits: most deletions and insertions in a block.

    Source: LLaDA 2.2 (Levenshtein edits; no paper yet), after Levenshtein Transformer, arXiv 1905.11006.

    >>> InsertDelete(delete_token=5, split_token=6).max_edits
    8
    """

    moves: ClassVar[bool] = True
    delete_token: _FromZero
    split_token: _FromZero
    threshold: Share = 0.95
    editing_threshold: Share = 0.9
    max_post_steps: Count = 16
    max_edits: _FromZero = 8

    def validate(self) -> None:
        """Refuses knobs out of range, and one token for both jobs."""
        super(InsertDelete, self).validate()
        if self.delete_token == self.split_token:
            raise ArgumentError(f"delete_token and split_token are both {self.delete_token}; give two different tokens")

    @property
    def bars(self) -> tuple[int, ...]:
        """Lists both tokens, which are not offered to texts that have used up their edits."""
        return (self.delete_token, self.split_token)

    def choose(self, view: View) -> Choice:
        """Makes the edits of `TokenEditing`, then the moves, row by row: a block is short."""
        base = TokenEditing(
            threshold=self.threshold, editing_threshold=self.editing_threshold, max_post_steps=self.max_post_steps
        ).choose(view)
        token = torch.where(base.write, base.token, view.current)
        movers = base.write & ((token == self.delete_token) | (token == self.split_token))
        used = view.noted("edits", 0)
        moves = _Moves(view, base, token)
        for row in movers.any(1).nonzero().flatten().tolist():
            moves.apply(row, movers[row], self.delete_token, self.max_edits - int(used[row].max()))
        view.note("edits", used.amax(1, keepdim=True) + moves.count[:, None])
        spent_all = used.amax(1) + moves.count >= self.max_edits
        view.memory["barred"] = torch.where(moves.count > 0, spent_all, view.memory.get("barred", spent_all))
        return moves.choice()


class _Moves:
    """Applies deletions and insertions within the blocks of a view, whose positions follow each other."""

    def __init__(self, view: View, base: Choice, token: Tensor) -> None:
        self.view, self.base = view, base
        self.token, self.undecided = token.clone(), base.undecided.clone()
        self.write = base.write.clone()
        self.inserted, self.deleted = torch.zeros_like(base.write), torch.zeros_like(base.write)
        self.count = torch.zeros(len(token), dtype=torch.int64, device=token.device)

    def apply(self, row: int, movers: Tensor, delete: int, left: int) -> None:
        """Applies the moves of a row's new tokens, block by block, within its budget."""
        for block in self.view.block[row][self.view.real[row]].unique().tolist():
            places = ((self.view.block[row] == block) & self.view.real[row]).nonzero().flatten().tolist()
            items: list[int | None] = []
            for place in places:
                token = None if self.undecided[row, place] else int(self.token[row, place])
                if not movers[place] or left <= 0:
                    # A position without budget is decided again, without these tokens.
                    items.append(None if movers[place] else token)
                    continue
                left, self.count[row] = left - 1, self.count[row] + 1
                if token == delete:
                    self.deleted[row, place] = True
                else:
                    self.inserted[row, place] = True
                    current = int(self.view.current[row, place])
                    items += [None, None if self.view.undecided[row, place] else current]
            self._lay(row, places, items)

    def _lay(self, row: int, places: list[int], items: list[int | None]) -> None:
        while len(items) > len(places) and None in items:
            items.pop(len(items) - 1 - items[::-1].index(None))
        items = (items + [None] * len(places))[: len(places)]
        for place, item in zip(places, items, strict=True):
            old = None if self.view.undecided[row, place] else int(self.view.current[row, place])
            self.undecided[row, place] = item is None
            self.write[row, place] = item is not None and item != old
            self.token[row, place] = -1 if item is None else item

    def choice(self) -> Choice:
        """Returns the final choice."""
        pending = self.base.pending | self.undecided
        moved = (self.count > 0)[:, None] & self.view.real
        return Choice(
            write=self.write,
            token=self.token,
            undecided=self.undecided,
            pending=pending | moved,
            inserted=self.inserted,
            deleted=self.deleted,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Renoise(_RevisingRule):
    """Keeps the draws an entropy bound allows and draws everything else anew at random, until the text is stable.

    For models of uniform noise. A block ends when the most likely tokens have not changed for `patience` steps and
    their mean entropy is small, or after `max_steps`; it then takes the most likely tokens.

    Attributes:
        gamma: nats, as in `EntropyBound`.
        max_steps: most steps of a block.
        patience: steps without change.
        entropy: mean nats below which a still text is done.
        hot: temperature of the first step; it falls evenly to almost `cold`.
        cold: see `hot`.

    Source: DiffusionGemma (2026); the entropy bound: arXiv 2505.24857.

    >>> Renoise().max_steps
    48
    """

    noise: ClassVar[tuple[str, ...]] = ("uniform",)
    gamma: Nats = 0.1
    max_steps: Count = 48
    patience: Count = 1
    entropy: Nats = 0.005
    hot: Annotated[float, Number(0.0, 100.0, above=True)] = 0.8
    cold: Annotated[float, Number(0.0, 100.0, above=True)] = 0.4

    def validate(self) -> None:
        """Refuses knobs out of range, and a first temperature below the last."""
        super(Renoise, self).validate()
        check_value("hot", self.hot, Annotated[float, Number(self.cold, 100.0)], "Renoise: ")

    def heat(self, block_step: int) -> float:
        """Falls from `hot` in the first step of a block to almost `cold` in the last."""
        return self.cold + (self.hot - self.cold) * (self.max_steps - block_step) / self.max_steps

    def choose(self, view: View) -> Choice:
        """Keeps some draws and puts noise elsewhere; at the end it takes the most likely tokens."""
        before = view.noted("argmax", -1)
        still = view.noted("steps unchanged", 0)
        same = ((before == view.argmax) | ~view.real).all(1, keepdim=True)
        still = torch.where(same, still + 1, 0)
        view.note("argmax", view.argmax)
        view.note("steps unchanged", still)
        real = view.real
        mean = torch.where(real, view.entropy, 0.0).sum(1) / real.sum(1)
        calm = torch.where(real, still, torch.iinfo(torch.int64).max).amin(1) >= self.patience
        done = (calm & (mean < self.entropy)) | (view.block_step + 1 >= self.max_steps)
        keep = within_entropy(view.entropy, real, self.gamma)
        token = torch.where(keep, view.token, view.random_token())
        token = torch.where(done[:, None], view.argmax, token)
        left = real & ~done[:, None]
        return Choice(write=real, token=token, undecided=left, pending=left)
