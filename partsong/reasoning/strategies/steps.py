"""Grows texts step by step: asks for a step, and scores how likely a text is on the right track."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from partsong.errors import ArgumentError
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.call import Completion, Message, Parameters, Piece
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.confidence import self_certainty, with_alternatives
from partsong.reasoning.strategies.parts import answer_in, await_score

__all__ = ["Aggregate", "Finished", "StepScorer", "Stepper", "Trace", "looks_finished"]

#: Returns whether a text needs no further step.
Finished = Callable[[str], bool]
#: How the scores of its steps become the score of a text.
Aggregate = Literal["last", "min", "prod"]


def looks_finished(text: str) -> bool:
    r"""Returns whether a text has a ``\boxed{}`` or says "final answer".

    >>> looks_finished("First, 2 + 2 = 4."), looks_finished("The final answer is 4.")
    (False, True)
    """
    return "\\boxed{" in text or "final answer" in text.lower()


@dataclass(frozen=True, slots=True)
class Trace:
    """Holds a text and the calls that wrote it.

    Attributes:
        steps: the completions, in order.
        scores: the score of the text after each step.
        separator: string between steps.
        finished: whether the text has ended.
    """

    steps: tuple[Completion, ...] = ()
    scores: tuple[float, ...] = ()
    separator: str = "\n\n"
    finished: bool = False

    @property
    def text(self) -> str:
        """Returns the text so far."""
        return self.separator.join(step.text for step in self.steps if step.text.strip())

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the calls that wrote the text."""
        return tuple(step.source for step in self.steps)

    @property
    def spoilt(self) -> bool:
        """Returns whether a step ran out of tokens: then the text is no answer."""
        return any(step.finish != "stop" for step in self.steps)

    def score(self, aggregate: Aggregate = "last") -> float:
        """Returns the score of the text; 0 before the first step."""
        if not self.scores:
            return 0.0
        return {"last": self.scores[-1], "min": min(self.scores), "prod": math.prod(self.scores)}[aggregate]


#: Takes (question, trace) and returns the chance, from 0 to 1, that the text leads to a right answer; may be async.
StepScorer = Callable[[str, Trace], float | Awaitable[float]]


@dataclass(frozen=True, slots=True)
class Stepper:
    """Asks for steps and scores them; for its settings see `beam_search`.

    The model reads the question and, as the beginning of its own answer, the steps so far. A step is what it writes
    from there up to `separator`. So the engine must continue an assistant message that comes last. A text has ended
    when `finished` says so, when a step comes back empty, or when one ran out of tokens. Without a scorer, the
    confidence c of the newest step's tokens gives the score 1 - exp(-c), for which the engine must report
    log-probabilities of alternatives.
    """

    run: Run
    question: str
    scorer: StepScorer | None
    finished: Finished
    separator: str
    step_tokens: int
    parameters: Parameters | None

    def __post_init__(self) -> None:
        if not self.separator:
            raise ArgumentError("separator=''; use a string that ends a step, such as an empty line")

    async def extend(self, trace: Trace, *, path: Sequence[str], sample: int, waits: Sequence[str] = ()) -> Trace:
        """Returns a trace with one more step, scored; a finished one is returned unchanged.

        Raises:
            BudgetError: the budget is spent.
        """
        if trace.finished:
            return trace
        chat = [Message("user", (self.question,))]
        if trace.steps:
            before: list[str | Piece] = []
            for step in trace.steps:
                before += [step.piece, self.separator]
            chat.append(Message("assistant", tuple(before)))
        completion = await self.run.call(chat, path=path, sample=sample, parameters=self._limits, waits=waits)
        # Some engines leave the stop string at the end of the text.
        step = replace(completion, text=completion.text.removesuffix(self.separator))
        if trace.steps and not step.text.strip():
            # The model has no more to say. The call stays on the record: it had to end before that was known.
            return replace(trace, steps=(*trace.steps, step), scores=(*trace.scores, trace.score()), finished=True)
        return await self._score(replace(trace, steps=(*trace.steps, step)))

    async def _score(self, trace: Trace) -> Trace:
        step = trace.steps[-1]
        if self.scorer is None:
            score = -math.expm1(-self_certainty(step))
        else:
            score = await await_score(self.scorer(self.question, trace))
        if not 0 <= score <= 1:
            raise ArgumentError(f"the scorer gave call {step.source} a score of {score}; return a number from 0 to 1")
        ended = step.finish != "stop" or not step.text.strip() or self.finished(trace.text)
        return replace(trace, scores=(*trace.scores, float(score)), finished=ended)

    @property
    def _limits(self) -> Parameters:
        settings = self.parameters or Parameters()
        settings = replace(
            settings, max_tokens=self.step_tokens, stop=(*settings.stop, self.separator), stop_in_thoughts=True
        )
        return with_alternatives(settings, 20) if self.scorer is None else settings

    def answer(self, trace: Trace | None, extract: Extract, stopped: str, **details: object) -> Answer:
        """Returns the answer of a trace; None where there is no trace, or a step of it ran out of tokens."""
        if trace is None:
            return answer_in(self.run, "", (), extract, stopped, valid=False, **details)
        return answer_in(self.run, trace.text, trace.names, extract, stopped, valid=not trace.spoilt, **details)
