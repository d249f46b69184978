"""Decides how many guesses a step verifies: the likeliest of all texts first, as many as pay off."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from partsong.kernels.speculation.draft import DraftTree

__all__ = ["with_masks", "within_budget"]


def within_budget(drafts: Sequence[DraftTree], costs: Sequence[float], ends: Collection[int] = ()) -> list[DraftTree]:
    """Keeps the guesses that bring tokens sooner.

    A text gets one token from a step for sure, and one more for every guess that is right. Guesses are taken in the
    order of their chances, as many as give the most tokens per time. The same rule serves one text and many: with many,
    a guess competes with guesses at other texts.

    Args:
        drafts: a draft for every text, with the chances of its guesses.
        costs: costs of steps over 1, 2, ... tokens. No step has more tokens, unless there are more texts.
        ends: tokens that end a text; guesses after one are not verified.

    Returns:
        For every text the part of its draft that pays off.

    >>> draft = DraftTree.chain([5, 6, 7], [0.9, 0.5, 0.01])
    >>> within_budget([draft], [1.0, 1.1, 1.2, 1.3])[0].tokens
    (5, 6)
    """
    # A node is at most as likely as its parent, and equals keep their order: the first ones always make a tree.
    ranked = sorted(
        (-chance, text, node)
        for text, draft in enumerate(drafts)
        for node, chance in enumerate(_reached(draft, ends), 1)
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


def with_masks(
    drafts: Sequence[DraftTree],
    costs: Sequence[float],
    rooms: Sequence[int],
    masks: int,
    gain: float,
    ends: Collection[int] = (),
) -> list[DraftTree]:
    """Adds masks after the nodes where texts are likeliest to continue, as far as they save time.

    The masks after the last right node give the next step its guesses. So masks after a node are worth the tokens
    gained by guesses, times the chance that the node is the last right one. Arguments and costs are those of
    `within_budget`.

    Args:
        drafts: the drafts that are verified.
        costs: costs of steps over 1, 2, ... tokens and masks.
        rooms: how many guesses each text has room for.
        masks: how many masks follow a node; fewer where the text has no room for the tokens they predict.
        gain: how many more tokens a step is expected to give if it has guesses.
        ends: tokens that end a text; there are no masks after them.

    Returns:
        The drafts with masks.

    >>> draft = DraftTree.chain([5, 6], [0.9, 0.1])
    >>> with_masks([draft], [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6], [9], 2, 2.0)[0].masks
    (0, 2, 0)
    """
    ranked = list[tuple[float, int, int, int]]()
    for text, (draft, room) in enumerate(zip(drafts, rooms, strict=True)):
        reached = [1.0, *_reached(draft, ends)]
        last = list(reached)
        for node, parent in enumerate(draft.parents, 1):
            last[parent] -= reached[node]
        for node, (chance, depth) in enumerate(zip(last, draft.depths, strict=True)):
            is_end = node > 0 and draft.tokens[node - 1] in ends
            if (num := min(masks, room - depth - 1)) > 0 and chance > 0 and not is_end:
                ranked.append((-chance * gain / num, text, node, num))
    rows = sum(draft.num_rows for draft in drafts)
    counts = [[0] * (1 + len(draft)) for draft in drafts]
    expected = sum(1.0 + sum(_reached(draft, ends)) for draft in drafts)
    for value, text, node, num in sorted(ranked):
        more = rows + num
        if (
            more > len(costs)
            or (expected - value * num) / costs[more - 1] <= expected / costs[min(rows, len(costs)) - 1]
        ):
            continue
        counts[text][node], rows, expected = num, more, expected - value * num
    return [replace(draft, masks=tuple(own)) if any(own) else draft for draft, own in zip(drafts, counts, strict=True)]


def _reached(draft: DraftTree, ends: Collection[int]) -> list[float]:
    """Returns for each node the chance that it and all before it are right, and none of those before ends the text."""
    chances, goes_on = [1.0], [True]
    for token, parent, chance in zip(draft.tokens, draft.parents, draft.known_chances, strict=True):
        chances.append(chances[parent] * chance if goes_on[parent] else 0.0)
        goes_on.append(token not in ends)
    return chances[1:]
