"""Scores texts by asking a model whether they are right."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import re
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from partsong.errors import ArgumentError
from partsong.knobs import Count, check_knobs, type_hints
from partsong.reasoning.calls.call import Completion, Message, Parameters, Request
from partsong.reasoning.calls.engine import Engine, EngineError
from partsong.reasoning.calls.tasks import cancel_all
from partsong.reasoning.remote import OpenAIEngine
from partsong.reasoning.remote.address import Secret
from partsong.reasoning.scorers.reward_model import JUDGE, RewardModel, check_scorer_kind
from partsong.reasoning.strategies.parts import Scorer
from partsong.reasoning.strategies.registry import STRATEGIES
from partsong.reasoning.strategies.steps import StepScorer, Trace

__all__ = ["Verifier", "VerifierAddress", "takes_scorer"]

_ASKED = """Here is a problem, and a solution to it that may not be complete.

Problem:
{question}

Solution so far:
{text}

Is everything in this solution right so far? Answer with one word, Yes or No."""
_VERDICT = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
#: More tokens than a verdict has: the first one's probability is then of something else, such as thoughts.
_SHORT = 4


def takes_scorer(strategy: str) -> bool:
    """Says whether a thinking method takes a scorer."""
    return "scorer" in inspect.signature(STRATEGIES[strategy]).parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifierAddress:
    """Names a model behind a server with the OpenAI API that scores texts.

    Attributes:
        base_url: of the API; the key of that server is read from ``PARTSONG_SCORER_KEY``.
        model: what the server calls the model.
        kind: how the model is asked: ``judge`` in a chat, or as a `RewardModel` of this kind.
    """

    base_url: str
    model: str
    kind: str = JUDGE

    def open(self) -> Verifier:
        """Returns a verifier of its own.

        Raises:
            ArgumentError: the address cannot be used, or there is no such kind.
            UnsupportedError: the client is not installed.
        """
        # The key of the server that answers belongs to another host.
        key = Secret(os.environ.get("PARTSONG_SCORER_KEY", ""), "the environment's PARTSONG_SCORER_KEY")
        engine = OpenAIEngine(self.model, base_url=self.base_url, api_key=key)
        return Verifier(engine if check_scorer_kind(self.kind)[0] == JUDGE else RewardModel(engine, self.kind))


class Verifier:
    """Asks a model for each text whether it is right; the score is the probability that it is.

    A reward model answers with a number. Any other model is asked for a yes or a no: where the engine reports
    log-probabilities and the answer is one word, the score is the probability of that word, or what is left of it.
    Otherwise a yes is 1 and a no is 0. A model that thinks first may do so. The same text is judged once.

    Args:
        engine: asks the model: `OpenAIEngine` for one behind a server that answers with words, or a `RewardModel`.
        max_tokens: most tokens of a verdict, hidden reasoning included.

    Attributes:
        calls: verdicts that were asked for.
        tokens: of all prompts and verdicts.

    Raises:
        ArgumentError: `max_tokens` is not positive.

    Source: the generative verifier of arXiv 2408.15240.

    >>> from partsong.reasoning.calls.scripted import Line, ScriptedEngine
    >>> script = lambda request, draw: Line(text="Yes." if "= 5" in request.messages[0].text else "No.")
    >>> verifier = Verifier(ScriptedEngine(script))
    >>> asyncio.run(verifier.score("What is 2 + 3?", "2 + 3 = 5")), verifier.calls
    (1.0, 1)
    """

    def __init__(self, engine: Engine | RewardModel, *, max_tokens: Count = 1024) -> None:
        check_knobs(type_hints(Verifier.__init__), {"max_tokens": max_tokens})
        self.calls = self.tokens = 0
        self._engine, self._max_tokens, self._logprobs = engine, max_tokens, 1
        self._verdicts: dict[tuple[str, str], asyncio.Task[float]] = {}

    @property
    def spent(self) -> dict[str, int]:
        """Returns the verdicts and their tokens so far."""
        return {"calls": self.calls, "tokens": self.tokens}

    async def score(self, question: str, text: str) -> float:
        """Returns the probability, from 0 to 1, that a text is right.

        Raises:
            ArgumentError: the model says neither yes nor no, or its numbers are no probabilities.
            EngineError: it does not answer.
        """
        key = question, text
        if key not in self._verdicts:
            self._verdicts[key] = asyncio.ensure_future(self._ask(question, text))
        return await asyncio.shield(self._verdicts[key])

    def scorer(self, strategy: str, question: str) -> Scorer | StepScorer:
        """Returns the scorer of a thinking method for one question.

        Raises:
            ArgumentError: the method takes none.
        """
        if not takes_scorer(strategy):
            names = ", ".join(filter(takes_scorer, STRATEGIES))
            raise ArgumentError(f"strategy {strategy} takes no scorer; these do: {names}")

        def of_completion(completion: Completion) -> Any:
            return self.score(question, completion.text)

        def of_trace(asked: str, trace: Trace) -> Any:
            return self.score(asked, trace.text)

        of_steps = StepScorer in get_args(get_type_hints(STRATEGIES[strategy])["scorer"])
        return of_trace if of_steps else of_completion

    async def close(self) -> None:
        """Ends what is still asked, and frees the engine's resources."""
        await cancel_all(self._verdicts.values())
        await self._engine.close()

    async def _ask(self, question: str, text: str) -> float:
        if not isinstance(self._engine, RewardModel):
            return await self._judge(self._engine, question, text)
        self.calls += 1
        score, tokens = await self._engine.score(question, text)
        self.tokens += tokens
        return score

    async def _judge(self, engine: Engine, question: str, text: str) -> float:
        prompt = Message("user", (_ASKED.format(question=question, text=text),))
        parameters = Parameters(max_tokens=self._max_tokens, temperature=0.0, logprobs=self._logprobs)
        self.calls += 1
        try:
            verdict = await engine.generate(Request(messages=(prompt,), parameters=parameters, path=("verdict",)))
        except EngineError:
            if not self._logprobs:
                raise
            self._logprobs = 0  # a server that reports none refuses what asks for them
            self.calls -= 1
            return await self._judge(engine, question, text)
        self.tokens += verdict.usage.prompt + verdict.usage.completion
        words = _VERDICT.findall(verdict.text)
        if not words:
            raise ArgumentError(f"the verifier says neither yes nor no, but {verdict.text[:80]!r}; give another model")
        is_right = words[-1].lower() == "yes"
        if verdict.logprobs and len(verdict.logprobs) <= _SHORT and not verdict.reasoning:
            likely = math.exp(min(0.0, verdict.logprobs[0]))
            return likely if is_right else 1.0 - likely
        return float(is_right)
