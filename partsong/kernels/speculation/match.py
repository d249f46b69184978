"""Verifies drafts without loss: the model's own keyed token is drawn at every node, and guesses only save time.

The token at a place is a function of the logits there, the row's seed and the place (see `sampling`). So the text is
token for token that of plain decoding, at any temperature and nucleus and for any drafter, even one that uses the same
noise. EAGLE-2 (arXiv 2406.16858) and its successors verify trees this way without a key, equal in distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partsong.kernels.keyed_draw import TokenDraw, draw
from partsong.kernels.speculation.draft import DraftTree

__all__ = ["Match", "Process", "follow", "match", "node_draws"]

#: Changes the logits `[vocabulary]` after a text, as penalties do; it is given the tokens since the last one kept.
Process = Callable[[Sequence[int], Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Match:
    """Holds the result of a verified draft.

    Attributes:
        tokens: the next tokens of the text, at least one. All but the last were guessed. Where there was no token to
            draw, the last is a negative number (see `no_token`), and the text cannot go on.
        path: the nodes whose tokens were kept, node 0 first; their keys stay.
        drawn: the model's own token at every node, which drafters may learn from.
    """

    tokens: tuple[int, ...]
    path: tuple[int, ...]
    drawn: tuple[int, ...]


def match(
    draft: DraftTree, logits: Tensor, own: TokenDraw, *, ends: Collection[int] = (), process: Process | None = None
) -> Match:
    """Walks down a draft as long as the model's own draws were guessed.

    Args:
        draft: the guesses.
        logits: those after every node, `[1 + len(draft), vocabulary]`.
        own: how the row draws the token after node 0.
        ends: tokens that end a text; nothing is taken after one.
        process: changes the logits of every node before its token is drawn.

    Returns:
        The tokens that plain decoding would draw, as far as the draft shows them.

    >>> logits = torch.tensor([[0.0, 9.0, 0.0], [0.0, 0.0, 9.0], [9.0, 0.0, 0.0]])
    >>> match(DraftTree.chain([1, 1]), logits, TokenDraw(0.0, 1.0, seed=3, place=0)).tokens
    (1, 2)
    """
    if process is not None:
        prefixes = ([draft.tokens[n - 1] for n in draft.ancestors(node)[1:]] for node in range(len(logits)))
        rows = [process(prefix, row) for prefix, row in zip(prefixes, logits, strict=True)]
        logits = torch.stack(rows)
    return follow(draft, draw(logits, node_draws(draft, own)), ends)


def node_draws(draft: DraftTree, own: TokenDraw) -> list[TokenDraw]:
    """Returns the settings of the draw after every node, given those after node 0."""
    return [own if depth == 0 else replace(own, place=own.place + depth) for depth in draft.depths]


def follow(draft: DraftTree, drawn: Sequence[int], ends: Collection[int] = ()) -> Match:
    """Walks down a draft with the model's own token at every node, as `match` does once it has drawn them."""
    node: int | None = 0
    tokens, path = list[int](), list[int]()
    while node is not None:
        path.append(node)
        tokens.append(drawn[node])
        node = None if drawn[node] in ends else draft.child(node, drawn[node])
    return Match(tuple(tokens), tuple(path), tuple(drawn))
