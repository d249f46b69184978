"""Decides how many guesses a step verifies: the likeliest of all texts first, as many as are worth their cost."""

from __future__ import annotations

from collections.abc import Sequence

from partsong.kernels.speculation.draft import DraftTree

__all__ = ["within_budget"]


def within_budget(drafts: Sequence[DraftTree], costs: Sequence[float]) -> list[DraftTree]:
    """Keeps the guesses that bring tokens sooner.

    A text gets one token from a step for sure, and one more for every guess that is right. Guesses are taken in the
    order of their chances, as many as give the most tokens per time. The same rule serves one text and many: with many,
    a guess competes with guesses at other texts.

    Args:
        drafts: a draft for every text, with the chances of its guesses.
        costs: what a step over 1, 2, ... tokens costs. No step has more tokens, unless there are more texts.

    Returns:
        For every text the part of its draft that is worth verifying.

    >>> draft = DraftTree.chain([5, 6, 7], [0.9, 0.5, 0.01])
    >>> within_budget([draft], [1.0, 1.1, 1.2, 1.3])[0].tokens
    (5, 6)
    """
    # A node is at most as likely as its parent, and equals keep their order: the first ones always make a tree.
    ranked = sorted(
        (-chance, text, node) for text, draft in enumerate(drafts) for node, chance in enumerate(_reached(draft), 1)
    )
    texts = len(drafts)
    expected, best, most = float(texts), 0, texts / costs[min(texts, len(costs)) - 1]
    for number, (chance, _, _) in enumerate(ranked[: max(0, len(costs) - texts)], 1):
        expected -= chance
        if (rate := expected / costs[texts + number - 1]) > most:
            best, most = number, rate
    kept: list[list[int]] = [[] for _ in drafts]
    for _, text, node in ranked[:best]:
        kept[text].append(node)
    return [draft.part(sorted(nodes)) for draft, nodes in zip(drafts, kept, strict=True)]


def _reached(draft: DraftTree) -> list[float]:
    """Returns for each node the chance that it and all before it are right."""
    chances = [1.0]
    for parent, chance in zip(draft.parents, draft.known_chances, strict=True):
        chances.append(chances[parent] * chance)
    return chances[1:]
