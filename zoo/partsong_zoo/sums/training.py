"""Makes texts and batches for the `sums` model and computes its loss. Importing this module loads torch.

Every token of a right solution is learned. Of steps that lead nowhere only what is true is learned: the values after
the equals signs and the verdict, not the choice of steps. So the model computes honestly even if it does not reach the
target, and says so.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from partsong_zoo.sums.model import EOS, MODEL, PAD, USER, encode
from partsong_zoo.sums.problems import FAMILIES, Family, check, parse
from partsong_zoo.sums.prompts import MOST_ATTEMPTS, MOST_LISTED, again, again_from, distil, tally
from partsong_zoo.sums.solutions import LARGE, attempt, draw, near_miss, solve

__all__ = [
    "LESSONS",
    "Attempts",
    "SumsBatch",
    "SumsRow",
    "draw_batch",
    "ending",
    "first_row",
    "later_row",
    "loss_of",
    "invent",
    "pack",
]

_FAILED = ": no. answer: "
#: Matches a value, or the verdict at the end.
_TRUE = re.compile(r"(?<==)\d+|: no\. answer: none$")
_END = re.compile(r"(?:: yes)?\. answer: .*$")


@dataclass(frozen=True, slots=True)
class SumsRow:
    """Holds a chat of one question and one answer.

    Attributes:
        prompt: what the user writes.
        answer: what the model should write.
        honest: whether only values and the verdict are learned, not the choice of steps.
    """

    prompt: str
    answer: str
    honest: bool = False


@dataclass(frozen=True, slots=True)
class Attempts:
    """Holds a problem with a right solution, and a model's attempts at it.

    Attributes:
        question: the problem.
        solution: the right solution.
        drafts: the model's samples.
    """

    question: str
    solution: str
    drafts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SumsBatch:
    """Holds rows side by side, with padding at the end.

    Attributes:
        ids: token ids, `[batch, length]`.
        learned: which tokens are predicted, bool `[batch, length]`.
    """

    ids: Tensor
    learned: Tensor

    def to(self, device: torch.device) -> SumsBatch:
        """Copies the batch to a device."""
        return SumsBatch(self.ids.to(device), self.learned.to(device))


def first_row(rng: random.Random, family: Family, failed: float, *, large: bool = False) -> SumsRow:
    """Draws a problem that training may show, with a solution, or (odds `failed`) with steps that lead nowhere."""
    example = draw(family, rng, fresh=False, sizes=LARGE[family] if large else ())
    if family == "sum" or rng.random() >= failed:
        return SumsRow(example.question, example.solution)
    if rng.random() < 0.5:
        return SumsRow(*near_miss(example, rng), honest=True)
    text = attempt(parse(example.question), rng)
    return SumsRow(example.question, text, honest=_FAILED in text)


def invent(rng: random.Random) -> Attempts:
    """Draws a new problem with invented attempts: right solutions in other orders, or steps that lead nowhere."""
    family: Family = rng.choice(FAMILIES)
    example = draw(family, rng, fresh=False)
    problem = parse(example.question)
    if family == "sum":
        others = tuple(solve(problem, rng) for _ in range(MOST_ATTEMPTS - 1))
    else:
        others = tuple(attempt(problem, rng) for _ in range(MOST_LISTED - 1))
    return Attempts(example.question, example.solution, (example.solution, *others))


def later_row(rng: random.Random, pool: Sequence[Attempts], kind: str, most: int) -> SumsRow:
    """Draws a problem with earlier attempts, which is to be solved, or whose results are to be listed or read.

    Args:
        rng: where the draws come from.
        pool: problems and a model's attempts; half of the rows have an invented problem and invented attempts.
        kind: "again" solves, "distil" lists the results, "listed" solves from such a list.
        most: how many attempts there may be.

    Returns:
        The row. The model should repeat the end of the first right attempt shown, or else solve the problem anew.
    """
    one = rng.choice(pool) if rng.random() < 0.5 else invent(rng)
    shown = _shown(rng, one, most)
    if kind == "distil":
        return SumsRow(distil(one.question, shown), tally(one.question, shown))
    right = [draft for draft in shown if check(one.question, draft)]
    listed = kind == "listed"
    prompt = again_from(one.question, tally(one.question, shown)) if listed else again(one.question, shown)
    return SumsRow(prompt, ending(right[0]) if right else one.solution)


def ending(text: str) -> str:
    """Cuts a draft before its verdict: only that is left in a draft that repeats it.

    >>> ending("4+5=9: yes. answer: 4+5"), ending("3+4=7. answer: 7")
    (': yes. answer: 4+5', '. answer: 7')
    """
    end = _END.search(text)
    return text if end is None else end.group()


def _shown(rng: random.Random, one: Attempts, most: int) -> list[str]:
    """Draws some attempts in any order, a few only by their ends.

    A right one is among them more often than by chance, since it teaches most.
    """
    shown = rng.sample(one.drafts, rng.randint(1, min(most, len(one.drafts))))
    right = [draft for draft in one.drafts if check(one.question, draft)]
    if right and not set(right) & set(shown) and rng.random() < 0.5:
        shown[rng.randrange(len(shown))] = rng.choice(right)
    odds = rng.choice((0.0, 0.0, 0.3, 1.0))
    return [ending(draft) if rng.random() < odds and "none" not in draft else draft for draft in shown]


def row_ids(row: SumsRow) -> tuple[list[int], list[bool]]:
    """Encodes a chat, and says which tokens are learned."""
    prompt = [USER, *encode(row.prompt), MODEL]
    if not row.honest:
        answer = [*encode(row.answer), EOS]
        return [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)
    ids, learned, place = list(prompt), [False] * len(prompt), 0
    for match in _TRUE.finditer(row.answer):
        skipped, true = encode(row.answer[place : match.start()]), encode(match.group())
        # The token after a value shows that it has ended, so it is learned, too.
        ids += skipped + true
        learned += [bool(place)] * min(1, len(skipped)) + [False] * (len(skipped) - 1) + [True] * len(true)
        place = match.end()
    return [*ids, EOS], [*learned, True]


def pack(rows: Sequence[SumsRow]) -> SumsBatch:
    """Packs rows into a batch."""
    pairs = [row_ids(row) for row in rows]
    length = max(len(ids) for ids, _ in pairs)
    ids = torch.tensor([ids + [PAD] * (length - len(ids)) for ids, _ in pairs])
    return SumsBatch(ids, torch.tensor([learned + [False] * (length - len(learned)) for _, learned in pairs]))


#: The kinds of batches: first solutions, solutions after attempts, solutions after a list of results, such lists.
KINDS = ("first", "again", "listed", "distil")
#: The odds of the kinds in each lesson: without attempts, with one attempt each, with several, and in the last stage.
LESSONS: dict[str, tuple[float, float, float, float]] = {
    "first": (1.0, 0.0, 0.0, 0.0),
    "single": (0.3, 0.7, 0.0, 0.0),
    "several": (0.35, 0.45, 0.1, 0.1),
    "last": (0.45, 0.4, 0.05, 0.1),
}


def draw_batch(
    rng: np.random.Generator,
    num: int,
    lesson: str = "first",
    pool: Sequence[Attempts] = (),
    *,
    large: bool = False,
    countdown: float = 0.6,
) -> SumsBatch:
    """Draws a batch as training sees it.

    Args:
        rng: where the draws come from.
        num: how many rows a batch of first solutions has; rows with attempts are longer and fewer.
        lesson: one of `LESSONS`.
        pool: attempts, for all lessons but "first".
        large: whether problems of few steps are left out.
        countdown: the share of that family among first solutions.

    Returns:
        The batch.
    """
    # One kind of row per batch: rows of similar length waste no padding.
    source = random.Random(int(rng.integers(2**62)))
    kind = "first" if lesson == "first" else source.choices(KINDS, LESSONS[lesson])[0]
    if kind == "first":
        family: Family = "countdown" if source.random() < countdown else "sum"
        return pack([first_row(source, family, failed=0.25, large=large) for _ in range(num)])
    if lesson == "single":
        return pack([later_row(source, pool, kind, 1) for _ in range(num)])
    most = source.choice((1, 2, MOST_ATTEMPTS, MOST_ATTEMPTS)) if kind == "again" else MOST_LISTED
    share = {"again": {1: 0.6, 2: 0.45}.get(most, 0.3), "listed": 0.6, "distil": 0.2}[kind]
    return pack([later_row(source, pool, kind, most) for _ in range(max(1, int(share * num)))])


def loss_of(model: LlamaForCausalLM, batch: SumsBatch) -> Tensor:
    """Computes the mean negative log-likelihood of the learned tokens, in nats."""
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    learned = batch.learned[:, 1:]
    logits = model.lm_head(hidden[:, :-1][learned]).float()
    return F.cross_entropy(logits, batch.ids[:, 1:][learned])
