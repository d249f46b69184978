"""Records how a strategy answered a problem, and sums up many such outcomes in rows of a table."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from partsong.evals.reasoning.intervals import Resampler, wilson
from partsong.evals.reasoning.problem import Problem
from partsong.reasoning.calls.answer import Answer

__all__ = ["COUNTS", "Outcome", "compare_strategies", "key_of", "outcome_of", "table_rows"]

#: Counts of a run; rows of a table hold their means per problem.
COUNTS = (
    *("tokens_total", "tokens_critical", "tokens_accepted", "tokens_cancelled"),
    *("prefill", "prefill_cached", "calls", "truncated", "estimated", "seconds"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Records the answer of a strategy to a problem.

    Attributes:
        task: of the problem.
        number: of the problem.
        asked: digest of the question, since problems drawn with other knobs can have the same name.
        strategy: as its text names it.
        answer: None if the strategy found none.
        right: whether the problem's check accepts the answer.
        stopped: as in `Answer`.
        hint: why voting can hardly help here, or "".
        counts: of the run, by the names of `COUNTS`.
    """

    task: str
    number: int
    asked: str
    strategy: str
    answer: str | None
    right: bool
    stopped: str
    hint: str
    counts: dict[str, float]

    @property
    def key(self) -> tuple[str, str, int, str]:
        """Returns a key that is unique among all outcomes of an evaluation."""
        return self.strategy, self.task, self.number, self.asked

    def as_json(self) -> dict[str, Any]:
        """Returns the fields for a file of JSON lines; ``Outcome(**line)`` reads them back."""
        return asdict(self)


def outcome_of(problem: Problem, strategy: str, answer: Answer, right: bool) -> Outcome:
    """Makes an outcome from a method's answer."""
    return Outcome(
        task=problem.task,
        number=problem.number,
        asked=_digest(problem.question),
        strategy=strategy,
        answer=answer.answer,
        right=right,
        stopped=answer.stopped,
        hint=str(answer.details.get("hint") or ""),
        counts={name: answer.summary[name] for name in COUNTS},
    )


def key_of(strategy: str, problem: Problem) -> tuple[str, str, int, str]:
    """Returns the `Outcome.key` that a problem will have under a strategy."""
    return strategy, problem.task, problem.number, _digest(problem.question)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def table_rows(
    outcomes: Iterable[Outcome], *, level: float = 0.95, interval: Callable[..., tuple[float, float]] = wilson
) -> list[dict[str, Any]]:
    """Sums up outcomes in a flat row per task and strategy, in the order in which they first appear.

    Args:
        outcomes: of any tasks and strategies.
        level: of the accuracy's interval.
        interval: `intervals.wilson` or `intervals.clopper_pearson`.

    Returns:
        Rows: ``task strategy problems right accuracy low high``, the `COUNTS` as means per problem, ``unanswered``
        (problems without an answer), ``hints`` (problems for which voting can hardly help) and ``hint``, the first.
    """
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.task, outcome.strategy), []).append(outcome)
    rows = []
    for (task, strategy), group in groups.items():
        total, right = len(group), sum(outcome.right for outcome in group)
        low, high = interval(right, total, level)
        hints = [outcome.hint for outcome in group if outcome.hint]
        rows.append(
            {"task": task, "strategy": strategy, "problems": total, "right": right, "accuracy": right / total}
            | {"low": low, "high": high}
            | {name: sum(outcome.counts[name] for outcome in group) / total for name in COUNTS}
            | {"unanswered": sum(outcome.answer is None for outcome in group)}
            | {"hints": len(hints), "hint": hints[0] if hints else ""}
        )
    return rows


def compare_strategies(
    outcomes: Sequence[Outcome], *, to: str | None = None, resamples: int = 10_000, seed: int = 0, level: float = 0.95
) -> list[dict[str, Any]]:
    """Measures how much better each strategy is than one of them, in pairs on the same problems.

    Args:
        outcomes: of one or several tasks.
        to: the strategy that the others are compared with; None is the first.
        resamples: of the bootstrap.
        seed: of the bootstrap.
        level: of the interval.

    Returns:
        Flat rows ``task strategy than problems difference low high p``. Only the problems that all strategies have
        answered count, ``problems`` of them.
    """
    rows = []
    for task in dict.fromkeys(outcome.task for outcome in outcomes):
        right: dict[str, dict[int, bool]] = {}
        for outcome in outcomes:
            if outcome.task == task:
                right.setdefault(outcome.strategy, {})[outcome.number] = outcome.right
        common = sorted(set.intersection(*map(set, right.values())))
        base = next(iter(right)) if to is None else to
        if not common or base not in right:
            continue
        scores = {name: [float(answers[number]) for number in common] for name, answers in right.items()}
        resampler = Resampler(scores, resamples=resamples, seed=seed)
        rows += [{"task": task} | row for row in resampler.rows(base, level)]
    return rows
