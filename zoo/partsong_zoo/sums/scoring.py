"""Measures a `sums` model by single samples, votes, refinement and Parallel-Distill-Refine on unseen problems.

This is a plain twin of the strategies in `partsong.reasoning`: rounds of batches without graph and journal, with all
numbers from the same drafts. Importing this module loads torch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import LlamaForCausalLM

from partsong.evals.reasoning.intervals import wilson
from partsong.seeds import derive
from partsong_zoo.sums.problems import FAMILIES, Family, answer_of, check
from partsong_zoo.sums.prompts import again, again_from, distil
from partsong_zoo.sums.sampling import Draft, sample
from partsong_zoo.sums.solutions import examples

__all__ = ["SumsOutcome", "report", "vote"]

#: The drafts of one problem.
Drafts = list[Draft]


@dataclass(slots=True)
class SumsOutcome:
    """Counts what a way to answer does over all problems.

    Attributes:
        right: problems with a right answer.
        total: all problems.
        tokens: tokens written in all.
        critical: tokens written on the longest path of calls that wait for each other.
        read: tokens of prompts in all.
    """

    right: int
    total: int
    tokens: int
    critical: int
    read: int

    def row(self) -> dict[str, Any]:
        """Makes a row of a table: per cent right, its 95 % interval, and mean tokens per problem."""
        low, high = wilson(self.right, self.total)
        return {
            "right": round(100 * self.right / self.total, 1),
            "interval": [round(100 * low, 1), round(100 * high, 1)],
            "tokens": round(self.tokens / self.total, 1),
            "critical": round(self.critical / self.total, 1),
            "read": round(self.read / self.total, 1),
        }


def answer(draft: Draft) -> str | None:
    """Returns a draft's answer; None if it did not end or has no answer."""
    return answer_of(draft.text) if draft.finished else None


def vote(drafts: Sequence[Draft]) -> str | None:
    """Returns the answer of most drafts; of several, the one that was named first."""
    return voted(map(answer, drafts))


def voted(answers: Iterable[str | None]) -> str | None:
    """Returns the most frequent answer, the first of equals; None if there is none."""
    counts = Counter(each for each in answers if each is not None)
    return counts.most_common(1)[0][0] if counts else None


def _outcome(
    questions: Sequence[str], answers: Sequence[str | None], rounds: Sequence[Sequence[Drafts]]
) -> SumsOutcome:
    """Counts answers, and the tokens of rounds of drafts per problem, each round after the last."""
    right = sum(each is not None and check(q, each) for q, each in zip(questions, answers, strict=True))
    written = [[[draft.written for draft in drafts] for drafts in one] for one in rounds]
    return SumsOutcome(
        right=right,
        total=len(questions),
        tokens=sum(sum(counts) for one in written for counts in one),
        critical=sum(max(counts) for one in written for counts in one),
        read=sum(draft.read for one in rounds for drafts in one for draft in drafts),
    )


#: Makes the prompt of one of a round's drafts from the question, the last round's drafts and a random generator.
Prompt = Callable[[str, Drafts, random.Random], str]


def random_k(keep: int) -> Prompt:
    """Shows drafts drawn at random, anew for each reader."""

    def prompt(question: str, before: Drafts, rng: random.Random) -> str:
        return again(question, [draft.text for draft in rng.sample(before, min(keep, len(before)))])

    return prompt


def top_k(keep: int) -> Prompt:
    """Shows the drafts whose answers most others share, the same for all readers."""

    def prompt(question: str, before: Drafts, rng: random.Random) -> str:
        votes = [answer(draft) for draft in before]
        support = [0 if each is None else votes.count(each) for each in votes]
        order = sorted(range(len(before)), key=lambda index: (-support[index], index))
        return again(question, [before[index].text for index in order[:keep]])

    return prompt


def from_list(question: str, before: Drafts, rng: random.Random) -> str:
    """Shows the one list of what the drafts found."""
    return again_from(question, before[0].text)


def next_round(
    model: LlamaForCausalLM, questions: Sequence[str], before: Sequence[Drafts], width: int, prompt: Prompt, seed: int
) -> list[Drafts]:
    """Samples drafts that read some of the last round's."""
    prompts: list[str] = []
    for index, (question, drafts) in enumerate(zip(questions, before, strict=True)):
        for reader in range(width):
            prompts.append(prompt(question, drafts, random.Random(derive(seed, "choose", index, reader))))
    return _group(sample(model, prompts, seed=seed), width)


def lists(model: LlamaForCausalLM, questions: Sequence[str], before: Sequence[Drafts]) -> list[Drafts]:
    """Lets the model list what the drafts found."""
    prompts = [distil(q, [draft.text for draft in drafts]) for q, drafts in zip(questions, before, strict=True)]
    return _group(sample(model, prompts, seed=None), 1)


def _group(drafts: Drafts, width: int) -> list[Drafts]:
    return [drafts[start : start + width] for start in range(0, len(drafts), width)]


def pdr(
    model: LlamaForCausalLM,
    questions: Sequence[str],
    first: Sequence[Drafts],
    widths: Sequence[int],
    prompt: Prompt,
    seed: int,
) -> SumsOutcome:
    """Runs Parallel-Distill-Refine (arXiv 2510.01123) from a first round of drafts, with lists if they are read.

    Args:
        model: a `sums` model.
        questions: the questions.
        first: the first drafts of each.
        widths: how many drafts each later round has; the last has 1.
        prompt: `random_k(...)`, `top_k(...)` or `from_list`.
        seed: draws tokens and choices.
    """
    rounds = [list(first)]
    for number, width in enumerate(widths):
        if prompt is from_list:
            rounds.append(lists(model, questions, rounds[-1]))
        rounds.append(next_round(model, questions, rounds[-1], width, prompt, derive(seed, "round", number)))
    return _outcome(questions, [answer(drafts[0]) for drafts in rounds[-1]], rounds)


def score(model: LlamaForCausalLM, questions: Sequence[str], seed: int, draws: int = 16) -> dict[str, SumsOutcome]:
    """Tries every way to answer, on the same first drafts.

    Args:
        model: a `sums` model.
        questions: the questions.
        seed: draws all tokens.
        draws: how many first drafts each problem has, at least 8.
    """
    pool = _group(sample(model, [q for q in questions for _ in range(draws)], seed=seed), draws)
    some = {num: [drafts[:num] for drafts in pool] for num in (1, 4, 8, draws)}
    greedy = _group(sample(model, questions, seed=None), 1)
    outcomes = {
        "greedy": _outcome(questions, [answer(drafts[0]) for drafts in greedy], [greedy]),
        "single": _outcome(questions, [answer(drafts[0]) for drafts in pool], [some[1]]),
    }
    for num in (4, 8, draws):
        outcomes[f"vote of {num}"] = _outcome(questions, [vote(drafts) for drafts in some[num]], [some[num]])
    outcomes["refine 1-1-1-1"] = pdr(model, questions, some[1], (1, 1, 1), random_k(1), seed)
    outcomes["pdr 4-1 random-4"] = pdr(model, questions, some[4], (1,), random_k(4), seed)
    outcomes["pdr 8-4-1 random-4"] = pdr(model, questions, some[8], (4, 1), random_k(4), seed)
    outcomes["pdr 8-4-1 shared-top-4"] = pdr(model, questions, some[8], (4, 1), top_k(4), seed)
    outcomes["pdr 8-4-1 summary"] = pdr(model, questions, some[8], (4, 1), from_list, seed)
    any_right = [_any_right(q, drafts) for q, drafts in zip(questions, some[8], strict=True)]
    outcomes["any of 8"] = _outcome(questions, any_right, [some[8]])
    return outcomes


def _any_right(question: str, drafts: Drafts) -> str | None:
    answers = (answer(draft) for draft in drafts)
    return next((each for each in answers if each is not None and check(question, each)), None)


def report(model: LlamaForCausalLM, num: int = 500, *, seed: int = 1) -> dict[str, Any]:
    """Measures a model on problems that training never shows.

    Args:
        model: a `sums` model.
        num: how many problems each family has.
        seed: draws problems and drafts.

    Returns:
        For each family and way to answer: per cent right, the 95 % interval, and the mean tokens written in all,
        written on the critical path, and read.
    """
    numbers: dict[str, Any] = {"problems": num}
    families: tuple[Family, ...] = FAMILIES
    for family in families:
        questions = [example.question for example in examples(num, seed, [family])]
        numbers[family] = {name: outcome.row() for name, outcome in score(model, questions, seed).items()}
    return numbers
