"""Texts that grow step by step: how a step is asked for, and how sure somebody is that a text is on the right way."""

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
from partsong.reasoning.strategies.parts import concluded, now

__all__ = ["Aggregate", "Finished", "StepScorer", "Stepper", "Trace", "looks_finished"]

#: Whether a text needs no further step.
Finished = Callable[[str], bool]
#: One score of a text from those of its steps.
Aggregate = Literal["last", "min", "prod"]


def looks_finished(text: str) -> bool:
    r"""Whether a text has a ``\boxed{}`` or says "final answer".

    >>> looks_finished("First, 2 + 2 = 4."), looks_finished("The final answer is 4.")
    (False, True)
    """
    return "\\boxed{" in text or "final answer" in text.lower()


@dataclass(frozen=True, slots=True)
class Trace:
    """A text and the calls that wrote it.

    Attributes:
        steps: completions, in order.
        scores: of the text after each step.
        separator: between steps.
        finished: there is nothing to add.
    """

    steps: tuple[Completion, ...] = ()
    scores: tuple[float, ...] = ()
    separator: str = "\n\n"
    finished: bool = False

    @property
    def text(self) -> str:
        """The text so far."""
        return self.separator.join(step.text for step in self.steps if step.text.strip())

    @property
    def names(self) -> tuple[str, ...]:
        """The calls that wrote it."""
        return tuple(step.source for step in self.steps)

    @property
    def spoilt(self) -> bool:
        """Whether a step of it ran out of tokens: then it is no answer."""
        return any(step.finish != "stop" for step in self.steps)

    def score(self, aggregate: Aggregate = "last") -> float:
        """Its score; 0 before the first step."""
        if not self.scores:
            return 0.0
        return {"last": self.scores[-1], "min": min(self.scores), "prod": math.prod(self.scores)}[aggregate]


#: Chance that a text so far leads to a right answer: of (question, trace) between 0 and 1; may be async.
StepScorer = Callable[[str, Trace], float | Awaitable[float]]


@dataclass(frozen=True, slots=True)
class Stepper:
    """Asks for steps and scores them.

    A step is what the model writes up to `separator` when it is given the question and, as the beginning of its own
    answer, the steps before: the engine must continue an assistant message that comes last. A text has ended when
    `finished` says so, when a step comes back empty, or when one ran out of tokens.

    Attributes:
        run: makes the calls.
        question: the prompt.
        scorer: of texts; None takes the confidence c of the newest step's tokens as 1 - exp(-c), for which the engine
            must report log-probabilities of alternatives.
        finished: whether a text has ended.
        separator: ends a step.
        step_tokens: most tokens of a step.
        parameters: of the draws.
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
            raise ArgumentError("separator=''; steps need something between them")

    async def extend(self, trace: Trace, *, path: Sequence[str], sample: int, waits: Sequence[str] = ()) -> Trace:
        """A trace with one more step, scored; one that has ended comes back as it is.

        Raises:
            BudgetError: there is nothing left for the step.
        """
        if trace.finished:
            return trace
        chat = [Message("user", (self.question,))]
        if trace.steps:
            before: list[str | Piece] = []
            for step in trace.steps:
                before += [step.piece, self.separator]
            chat.append(Message("assistant", tuple(before)))
        made = await self.run.call(chat, path=path, sample=sample, parameters=self._limits, waits=waits)
        # Some engines leave the stop string at the end of the text.
        step = replace(made, text=made.text.removesuffix(self.separator))
        if trace.steps and not step.text.strip():
            # The model has no more to say. The call stays on the record: it had to end before that was known.
            return replace(trace, steps=(*trace.steps, step), scores=(*trace.scores, trace.score()), finished=True)
        return await self._scored(replace(trace, steps=(*trace.steps, step)))

    async def _scored(self, trace: Trace) -> Trace:
        step = trace.steps[-1]
        if self.scorer is None:
            score = -math.expm1(-self_certainty(step))
        else:
            score = await now(self.scorer(self.question, trace))
        if not 0 <= score <= 1:
            raise ArgumentError(f"call {step.source} was scored {score}; a score of steps lies between 0 and 1")
        ended = step.finish != "stop" or not step.text.strip() or self.finished(trace.text)
        return replace(trace, scores=(*trace.scores, float(score)), finished=ended)

    @property
    def _limits(self) -> Parameters:
        asked = self.parameters or Parameters()
        asked = replace(asked, max_tokens=self.step_tokens, stop=(*asked.stop, self.separator))
        return with_alternatives(asked, 20) if self.scorer is None else asked

    def answer(self, trace: Trace | None, extract: Extract, stopped: str, **details: object) -> Answer:
        """The answer of a trace; None where there is no trace, or a step of it ran out of tokens."""
        if trace is None:
            return concluded(self.run, "", (), extract, stopped, valid=False, **details)
        return concluded(self.run, trace.text, trace.names, extract, stopped, valid=not trace.spoilt, **details)
