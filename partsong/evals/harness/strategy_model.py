"""Answers chats of other harnesses with a thinking method, and counts the cost."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from partsong.errors import ArgumentError
from partsong.evals.reasoning.suite import read_strategies
from partsong.jobs.engines import EngineArguments, extractor, open_engine
from partsong.reasoning.calls.answer import Answer
from partsong.reasoning.calls.budget import Budget
from partsong.reasoning.calls.call import Message, Parameters
from partsong.reasoning.calls.engine import Engine
from partsong.reasoning.calls.engine_wrappers import BoundedEngine, ChatEngine
from partsong.reasoning.calls.journal import Journal
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.registry import parse_thinking
from partsong.seeds import check_seed, derive
from partsong.zoo import knobs_for, task_of

__all__ = ["StrategyModel"]

#: Costs that are summed over all questions.
_SUMS = (
    *("calls", "tokens_total", "tokens_critical", "tokens_accepted", "tokens_cancelled", "tokens_wasted"),
    *("prefill", "prefill_cached", "truncated", "estimated"),
)
#: Strategies that make one draw, so that a temperature of 0 does no harm.
_ONE_DRAW = ("greedy", "single")


class StrategyModel:
    """Answers chats with a strategy, many at a time.

    The last message, from the user, is the question of the strategy. A system message and earlier turns come before
    every call it makes. The answer depends only on the chat, the parameters, the seed and the labels given to `answer`.

    Args:
        strategy: "greedy", or ``NAME:key=value,...`` as `parse_thinking` reads it; knobs may be separated by ``;``,
            because command lines of harnesses split at commas.
        engine: answers the calls; `EngineArguments` are opened after everything else is checked.
        extract: how answers are found in texts, a name of `EXTRACTORS`; None is the zoo model's own, or "number".
        seed: of all draws.
        journal: file that keeps completed calls, so that a stopped evaluation can be continued, or None.
        budget_tokens: at most this many tokens in all calls of a question; None sets no limit.
        concurrency: at most this many calls at the same time, of all questions together.

    Attributes:
        engine: answers the calls.
        strategy: as it was read.
        replayed: how many calls were read from the journal.

    Raises:
        ArgumentError: the strategy, a knob or `extract` is unknown, the strategy needs an argument that no text can
            give, or a bound is out of range.

    >>> import asyncio
    >>> from partsong.reasoning import Line, ScriptedEngine
    >>> seven = ScriptedEngine(lambda request, draw: Line(text="so 7"))
    >>> model = StrategyModel("self-consistency:num=4", seven)
    >>> asyncio.run(model.answer([Message("user", ("3 + 4?",))], Parameters())).answer, model.costs()["calls"]
    ('7', 4)
    """

    def __init__(
        self,
        strategy: str,
        engine: Engine | EngineArguments,
        *,
        extract: str | None = None,
        seed: int = 0,
        journal: str | Path | None = None,
        budget_tokens: int | None = None,
        concurrency: int = 64,
    ) -> None:
        text = str(strategy).replace(";", ",")
        ((self.strategy, self._think),) = read_strategies([text]).items()
        model = engine.pretrained if isinstance(engine, EngineArguments) else None
        self.extract, self._extract = extractor(extract, task_of(model))
        self._knobs = _own_knobs(model, text)
        self.seed, self.concurrency = check_seed(seed), concurrency
        self._budget = Budget(tokens=budget_tokens)
        self._budget.validate()
        self._how = (self.seed, self.extract, budget_tokens)
        self._journal = None if journal is None else Journal(journal)
        self.engine = open_engine(engine) if isinstance(engine, EngineArguments) else engine
        self._gate = BoundedEngine(self.engine, concurrency)
        self._sums, self._stopped = Counter[str](), Counter[str]()
        self._longest = self._requests = self._unanswered = self.replayed = 0

    @property
    def draws_once(self) -> bool:
        """Says whether the strategy makes only one draw, so that a temperature of 0 does no harm."""
        return self.strategy in _ONE_DRAW

    async def answer(self, chat: Sequence[Message], parameters: Parameters, *labels: str | int) -> Answer:
        """Answers a chat.

        Args:
            chat: at least one message; the last one is from the user.
            parameters: of every call the strategy makes.
            *labels: give equal chats different draws, such as the number of earlier calls.

        Raises:
            ArgumentError: the chat does not end with a user's message, or the model has no room for it.
            EngineError: the engine gave no answer.
        """
        if not chat or chat[-1].role != "user":
            last = chat[-1].role if chat else "missing"
            raise ArgumentError(f"a strategy answers a user's message; the last one here is {last}")
        messages = [(message.role, message.text) for message in chat]
        before, question = chat[:-1], chat[-1].text
        run = Run(
            ChatEngine(self._gate, before) if before else self._gate,
            seed=derive(self.seed, "chat", _digest(messages), *labels),
            name=f"{self.strategy}/{_digest([messages, labels, asdict(parameters), self._how])}",
            journal=self._journal,
            budget=self._budget,
            concurrency=self.concurrency,
        )
        answer = await self._think(run, question, extract=self._extract, parameters=parameters, **self._knobs)
        self._count(answer, run.replayed)
        return answer

    def costs(self) -> dict[str, Any]:
        """Returns the settings, and the cost of all questions so far.

        Returns:
            ``strategy engine extract seed``; ``requests`` and how many were ``unanswered``; ``replayed`` calls of the
            journal; ``stopped``, how often for each reason of `Answer`; ``tokens_critical_longest`` of one question;
            and as sums over all questions ``calls tokens_total tokens_critical tokens_accepted tokens_cancelled
            tokens_wasted prefill prefill_cached truncated estimated``, as in `CallGraph.summary`.
        """
        return {
            **{"strategy": self.strategy, "engine": self.engine.name, "extract": self.extract, "seed": self.seed},
            **{"requests": self._requests, "unanswered": self._unanswered, "replayed": self.replayed},
            **{name: self._sums[name] for name in _SUMS},
            **{"tokens_critical_longest": self._longest, "stopped": dict(self._stopped)},
        }

    def _count(self, answer: Answer, replayed: int) -> None:
        self._requests += 1
        self._unanswered += answer.answer is None
        self.replayed += replayed
        self._stopped[answer.stopped] += 1
        self._longest = max(self._longest, answer.summary["tokens_critical"])
        self._sums.update({name: answer.summary[name] for name in _SUMS})

    async def rest(self) -> None:
        """Closes connections before the event loop ends; the next question opens new ones."""
        from partsong.reasoning.remote import OpenAIEngine

        if isinstance(self.engine, OpenAIEngine):
            await self.engine.close()

    async def close(self) -> None:
        """Closes the engine and the journal."""
        await self.engine.close()
        if self._journal is not None:
            self._journal.close()


def _own_knobs(model: Any, text: str) -> Mapping[str, Any]:
    """Returns the knobs that a zoo model has for a strategy, such as prompts, except those that the text sets."""
    if text == "greedy":
        return {}
    thinking = parse_thinking(text)
    return knobs_for(model, thinking.name, thinking.knobs)


def _digest(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
