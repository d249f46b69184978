"""Searches a tree of texts that grow step by step, and chooses among the texts that trees found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partsong.reasoning.answers.votes import Ballot
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.strategies.parts import together
from partsong.reasoning.strategies.steps import Aggregate, Stepper, Trace

__all__ = ["SearchTree", "best_of_trees"]


@dataclass(frozen=True, slots=True)
class SearchTree:
    """Makes one search, as `beam_search` says; `label` begins the path of its calls."""

    stepper: Stepper
    label: Sequence[str]
    beams: int
    width: int
    max_steps: int
    aggregate: Aggregate
    distinct: bool = False

    async def grow(self) -> tuple[list[Trace], bool]:
        """Returns the texts kept at the end, best first, and whether the budget ended the search."""
        kept = [Trace(separator=self.stepper.separator)] * self.beams
        waits: tuple[str, ...] = ()
        for step in range(self.max_steps):
            ended = [trace for trace in kept if trace.finished]
            parents = [trace for trace in kept if not trace.finished for _ in range(self.width)]
            path = (*self.label, f"step {step}")
            results = await together(
                self.stepper.extend(trace, path=path, sample=i, waits=waits) for i, trace in enumerate(parents)
            )
            grown = [trace for trace in results if trace is not None]
            candidates = [*ended, *grown]
            if len(grown) < len(results):
                return self._best(candidates or (kept if step else [])), True
            waits = tuple(trace.names[-1] for trace in grown) or waits
            kept = self._best(candidates)
            if all(trace.finished for trace in kept):
                break
        return kept, False

    def _best(self, traces: list[Trace]) -> list[Trace]:
        """Returns the best few texts.

        Of identical finished texts one is kept, because each empty continuation would end its parent again.
        """
        kept: list[Trace] = []
        for trace in sorted(traces, key=lambda trace: -trace.score(self.aggregate)):
            alike = any(trace.text == other.text and trace.finished == other.finished for other in kept)
            if not (alike and (self.distinct or trace.finished)):
                kept.append(trace)
        return kept[: self.beams]


def best_of_trees(
    stepper: Stepper,
    extract: Extract,
    results: Sequence[tuple[list[Trace], bool]],
    aggregate: Aggregate,
    selection: str,
) -> Answer:
    """Returns the answer of the texts that searches kept: that of the best one, or a vote weighted by score."""
    kept = [trace for traces, _ in results for trace in traces]
    ranked = sorted(kept, key=lambda t: (t.spoilt, not t.finished, -t.score(aggregate)))
    if selection == "weighted":
        ballot, named = Ballot(len(ranked)), [None if t.spoilt else extract(t.text) for t in ranked]
        for place, (trace, vote) in enumerate(zip(ranked, named, strict=True)):
            ballot.add(place, vote, trace.score(aggregate))
        # Where no text names an answer, the best text remains.
        ranked = [t for t, vote in zip(ranked, named, strict=True) if vote == ballot.leader]
    stopped = "budget" if any(spent for _, spent in results) else "done"
    scores = [trace.score(aggregate) for trace in kept]
    return stepper.answer(ranked[0] if ranked else None, extract, stopped, scores=scores)
