"""A way to think as a model for other harnesses: a chat goes in, the text that the strategy accepted comes out."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from partsong.errors import ArgumentError
from partsong.evals.harness.strategy_engine import EngineArguments, extractor, open_engine
from partsong.evals.reasoning.suite import read_strategies
from partsong.reasoning.calls.answer import Answer
from partsong.reasoning.calls.budget import Budget
from partsong.reasoning.calls.call import Message, Parameters
from partsong.reasoning.calls.engine import Engine
from partsong.reasoning.calls.engine_wrappers import BoundedEngine, ChatEngine
from partsong.reasoning.calls.journal import Journal
from partsong.reasoning.calls.run import Run
from partsong.reasoning.strategies.registry import parse_thinking
from partsong.seeds import check_seed, derive
from partsong.zoo.thinking import knobs_for, task_of

__all__ = ["StrategyModel"]

#: What the costs of all questions are sums of.
_SUMS = (
    *("calls", "tokens_total", "tokens_critical", "tokens_accepted", "tokens_cancelled", "tokens_wasted"),
    *("prefill", "prefill_cached", "truncated", "estimated"),
)
#: Strategies that make one draw, to which a temperature of 0 does no harm.
_ONE_DRAW = ("greedy", "single")


class StrategyModel:
    """Answers chats with a strategy, many at a time.

    A system message and earlier turns stand before every call the strategy makes; the last message, a user's, is its
    question. What comes out depends on the chat, the parameters, the seed and `answer`'s labels alone.

    Args:
        strategy: "greedy", or ``NAME:key=value,...`` as `parse_thinking` reads it; ``;`` may stand between knobs, for
            command lines of harnesses cut at commas.
        engine: answers; or `EngineArguments`, which are opened after all else is checked.
        extract: how answers are found in texts, a name of `EXTRACTORS`; None is the zoo model's own, or "number".
        seed: of all draws.
        journal: file that keeps completed calls, so that an evaluation that was stopped goes on; None keeps none.
        budget_tokens: most tokens of all calls of a question; None is no limit.
        concurrency: most calls under way, of all questions together.

    Attributes:
        engine: answers.
        strategy: as it was read.
        replayed: calls that came out of the journal.

    Raises:
        ArgumentError: an unknown strategy, knob or way to find answers, one that needs what no text can give, or a
            bound that is none.

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
        """Whether the strategy makes one draw, so that a temperature of 0 leaves it what it is."""
        return self.strategy in _ONE_DRAW

    async def answer(self, chat: Sequence[Message], parameters: Parameters, *labels: str | int) -> Answer:
        """Answers a chat.

        Args:
            chat: at least one message, the last one a user's.
            parameters: of every call the strategy makes.
            *labels: tell equal chats apart whose draws are to differ, such as the first and the second time a harness
                asks.

        Raises:
            ArgumentError: a chat that a strategy cannot answer, or a prompt the model has no room for.
            EngineError: the engine gave no answer.
        """
        if not chat or chat[-1].role != "user":
            found = chat[-1].role if chat else "none"
            raise ArgumentError(f"a strategy answers a user's message; the last one here is {found}")
        said = [(message.role, message.text) for message in chat]
        before, question = chat[:-1], chat[-1].text
        run = Run(
            ChatEngine(self._gate, before) if before else self._gate,
            seed=derive(self.seed, "chat", _digest(said), *labels),
            name=f"{self.strategy}/{_digest([said, labels, asdict(parameters), self._how])}",
            journal=self._journal,
            budget=self._budget,
            concurrency=self.concurrency,
        )
        made = await self._think(run, question, extract=self._extract, parameters=parameters, **self._knobs)
        self._count(made, run.replayed)
        return made

    def costs(self) -> dict[str, Any]:
        """How was thought, and what all questions so far cost.

        Returns:
            ``strategy engine extract seed requests unanswered`` (no answer was found) ``replayed`` (calls out of the
            journal) ``stopped`` (how often for which reason, see `Answer`); sums over all questions: ``calls
            tokens_total tokens_critical tokens_accepted tokens_cancelled tokens_wasted prefill prefill_cached
            truncated estimated``, as in `CallGraph.summary`; ``tokens_critical_longest``, of one question.
        """
        return {
            **{"strategy": self.strategy, "engine": self.engine.name, "extract": self.extract, "seed": self.seed},
            **{"requests": self._requests, "unanswered": self._unanswered, "replayed": self.replayed},
            **{name: self._sums[name] for name in _SUMS},
            **{"tokens_critical_longest": self._longest, "stopped": dict(self._stopped)},
        }

    def _count(self, made: Answer, replayed: int) -> None:
        self._requests += 1
        self._unanswered += made.answer is None
        self.replayed += replayed
        self._stopped[made.stopped] += 1
        self._longest = max(self._longest, made.summary["tokens_critical"])
        self._sums.update({name: made.summary[name] for name in _SUMS})

    async def rest(self) -> None:
        """Gives back connections before the event loop ends; the next question opens new ones."""
        from partsong.reasoning.remote import OpenAIEngine

        if isinstance(self.engine, OpenAIEngine):
            await self.engine.close()

    async def close(self) -> None:
        """Closes the engine and the journal."""
        await self.engine.close()
        if self._journal is not None:
            self._journal.close()


def _own_knobs(model: Any, text: str) -> Mapping[str, Any]:
    """What a zoo model wants its strategy to be given, such as prompts of its language; what the text sets stays."""
    if text == "greedy":
        return {}
    thinking = parse_thinking(text)
    return knobs_for(model, thinking.name, thinking.knobs)


def _digest(said: Any) -> str:
    text = json.dumps(said, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
