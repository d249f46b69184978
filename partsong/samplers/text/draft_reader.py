"""Runs a causal model on guesses at the next tokens of texts, all in one forward.

The guesses at a text form a tree, and a token sees the text and its ancestors. Texts gain as many tokens in a step as
were guessed right, so their lengths diverge; each is written at its own position, and the keys of accepted guesses are
moved together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from partsong.kernels.speculation.draft import DraftTree
from partsong.samplers.text.causal_reader import CausalReader
from partsong.samplers.text.runner import StockTextModel

__all__ = ["DraftReader"]


class DraftReader(CausalReader):
    """Computes the hidden states after the last tokens of texts and after guesses at the next ones.

    Arguments are those of `CausalReader`; there, `room` is for the longest text, here there is room for guesses too.
    """

    def __init__(
        self, model: StockTextModel, texts: Sequence[Sequence[int]], room: int, *, layers: tuple[int, ...] = ()
    ) -> None:
        super().__init__(model, texts, room, layers=layers)
        self.ends = [self.end] * len(texts)

    def states_of(self, row: int, count: int | None = None) -> Tensor | None:
        """Returns the states of a text's last tokens `[tokens, layers, C]`; None where no layer was named.

        Args:
            row: which text.
            count: how many nodes its draft had, node 0 included. Default: the text was read for the first time.
        """
        if self.states is None:
            return None
        return self.states[row, self.pads[row] :] if count is None else self.states[row, :count]

    def verify(self, tokens: Sequence[int], drafts: Sequence[DraftTree]) -> Tensor:
        """Feeds a token of every text, and the guesses at what follows it; `keep_paths` then says which were accepted.

        Returns:
            Hidden states `[nodes, C]`: of the first text those after its token and after each guess, then the next's.
        """
        sizes = [1 + len(draft) for draft in drafts]
        most = max(sizes)
        until = max(self.ends) + most
        self.keys.reserve(until)
        if most == 1 and len(set(self.ends)) == 1:
            self.end = self.ends[0]
            return self.go_on(tokens)
        device = self.model.device
        firsts = torch.tensor(self.ends, device=device)[:, None]
        # Padding of shorter drafts sees itself and the text, and nothing sees it; the next tokens overwrite its keys.
        fed = [
            [token, *draft.tokens, *[token] * (most - 1 - len(draft))]
            for token, draft in zip(tokens, drafts, strict=True)
        ]
        depths = [[*draft.depths] + [0] * (most - 1 - len(draft)) for draft in drafts]
        slots = firsts + torch.arange(most, device=device)
        self.keys.at(max(self.ends), until, slots)
        positions = firsts - self._pads[:, None] + torch.tensor(depths, device=device)
        hidden = self._forward(fed, positions, self._visible(firsts, slots, drafts, until))
        if min(sizes) == most:
            return hidden.flatten(0, 1)
        return torch.cat([own[:size] for own, size in zip(hidden, sizes, strict=True)])

    def keep_paths(self, paths: Sequence[Sequence[int]]) -> None:
        """Keeps of every text's last tokens those on a path, and forgets the others.

        Args:
            paths: for each text the nodes that stay, node 0 first.
        """
        for row, path in enumerate(paths):
            if path[-1] != len(path) - 1:
                self.keys.gather(row, self.ends[row], path)
            self.ends[row] += len(path)

    def take_back(self) -> None:
        """Forgets the last tokens and guesses of all texts, their keys included."""
        for row, end in enumerate(self.ends):
            self.keys.clear(row, end)

    def keep(self, rows: Sequence[int]) -> None:
        """Forgets all rows but these."""
        super().keep(rows)
        self.ends = [self.ends[row] for row in rows]

    def _visible(self, firsts: Tensor, slots: Tensor, drafts: Sequence[DraftTree], until: int) -> Tensor:
        """Returns which slots the nodes see, bool `[B, Q, until]`: text, ancestors and themselves."""
        places, most = torch.arange(until, device=slots.device), slots.shape[1]
        before = (places >= self._pads[:, None]) & (places < firsts)
        visible = before[:, None].repeat(1, most, 1)
        rows, nodes = torch.arange(len(drafts))[:, None, None], torch.arange(most)[:, None]
        visible[rows, nodes, slots[:, None]] = torch.stack([_ancestors(draft, most) for draft in drafts]).to(
            slots.device
        )
        return visible


def _ancestors(draft: DraftTree, size: int) -> Tensor:
    """Returns the ancestors of each node, itself included, bool `[size, size]`."""
    if draft.is_chain:
        return torch.ones(size, size, dtype=torch.bool).tril()
    seen = [1 << node for node in range(size)]
    for node, parent in enumerate(draft.parents, 1):
        seen[node] |= seen[parent]
    return torch.tensor([[bits >> node & 1 for node in range(size)] for bits in seen], dtype=torch.bool)
