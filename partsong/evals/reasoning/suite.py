"""Answers problems with strategies on an engine, and sums up each task and strategy in a row.

An evaluation may be stopped at any moment. Finished problems are kept as lines of a file, and finished calls of an
unfinished problem in the journal. Called again with both, it repeats neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from partsong.errors import ArgumentError
from partsong.evals.reasoning.line_file import LineFile
from partsong.evals.reasoning.outcome import Outcome, compare_strategies, key_of, outcome_of, table_rows
from partsong.evals.reasoning.pool import run_all, run_seed
from partsong.evals.reasoning.problem import Problem
from partsong.knobs import Count, check_knobs, type_hints
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.budget import Budget
from partsong.reasoning.calls.call import Parameters
from partsong.reasoning.calls.engine import Engine
from partsong.reasoning.calls.journal import Journal
from partsong.reasoning.calls.run import Run
from partsong.reasoning.calls.virtual_time import VirtualLoop
from partsong.reasoning.strategies.registry import ThinkingMethod, parse_thinking
from partsong.reasoning.strategies.single import single
from partsong.zoo import knobs_for

__all__ = ["evaluate", "greedy", "read_strategies", "reasoning_suite"]

#: One engine for all problems, or a function that makes one for each.
Engines = Engine | Callable[[Problem], Engine]


async def greedy(run: Run, question: str, *, extract: Extract, parameters: Parameters | None = None) -> Answer:
    """Makes one call at temperature 0: `single`, but never with the temperature of the other strategies."""
    cold = replace(parameters or Parameters(), temperature=0.0)
    return await single(run, question, extract=extract, parameters=cold)


def read_strategies(texts: Sequence[str], model: Any = None) -> dict[str, ThinkingMethod]:
    """Reads strategies as command lines name them, and checks all of them before the first is run.

    Args:
        texts: ``greedy``, or ``NAME:key=value,...`` as `parse_thinking` reads it.
        model: name of the model; a zoo model that was trained to think sets some knobs of strategies.

    Raises:
        ArgumentError: a strategy or a knob is unknown, or the strategy needs an argument that no text can give.

    >>> list(read_strategies(["greedy", "pdr:schedule=4-1"]))
    ['greedy', 'pdr:schedule=4-1']
    """
    strategies: dict[str, ThinkingMethod] = {}
    for text in dict.fromkeys(texts):
        if text == "greedy":
            strategies[text] = greedy
            continue
        thinking = parse_thinking(text)
        if thinking.needs:
            raise ArgumentError(f"strategy {thinking.name} needs {', '.join(thinking.needs)}, which no text can give")
        own = knobs_for(model, thinking.name, thinking.knobs)
        strategies[text] = partial(thinking, **own) if own else thinking
    return strategies


async def evaluate(
    problems: Sequence[Problem],
    strategies: Mapping[str, ThinkingMethod],
    engine: Engines,
    *,
    seed: int = 0,
    parameters: Parameters | None = None,
    journal: Journal | None = None,
    outcomes: str | Path | None = None,
    budget: Budget | None = None,
    concurrency: int = 64,
    together: Count = 1,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Answers every problem with every strategy.

    All methods get the same seed for a problem, so those that draw samples of the plain question draw the same
    ones.

    Args:
        problems: of one or several tasks; no two may have the same name.
        strategies: by the names they get in rows.
        engine: answers the calls, or a function that makes an engine for a problem, such as a `PoolEngine`.
        seed: of all draws.
        parameters: given to every strategy; None leaves each its own.
        journal: keeps the calls of unfinished problems.
        outcomes: file that keeps finished problems; those it holds are not answered again.
        budget: of one problem with one strategy; when it is exceeded, the method ends with its results so far.
        concurrency: at most this many calls of a problem at the same time.
        together: at most this many problems at the same time. Their times overlap, so ``seconds`` then means less.
        on_outcome: called with every new outcome, for progress bars.

    Returns:
        The outcomes, strategy by strategy, in the order of the problems.

    Raises:
        ArgumentError: there are no problems or strategies, two problems have the same name, or the file belongs to
            another evaluation.
        EngineError: the engine gave no answer; everything finished is kept.
    """
    _check(problems, strategies, together)
    work = _Work(strategies, engine, seed, parameters, journal, budget, concurrency, asyncio.Semaphore(together))
    header = {"outcomes": 1, "engine": "by problem" if callable(engine) else engine.name, "seed": seed}
    drawn = asdict(parameters) if parameters is not None else None
    pairs = [(name, problem) for name in strategies for problem in problems]
    with (
        nullcontext() if outcomes is None else LineFile(outcomes, {**header, "parameters": drawn}, "evaluation") as file
    ):
        kept = [] if file is None else [Outcome(**line) for line in file.lines]
        finished = {outcome.key: outcome for outcome in kept}

        async def one(name: str, problem: Problem) -> None:
            outcome = finished[key_of(name, problem)] = await work.outcome(name, problem)
            if file is not None:
                file.append(outcome.as_json())
            if on_outcome is not None:
                on_outcome(outcome)

        await run_all(one(*pair) for pair in pairs if key_of(*pair) not in finished)
    return [finished[key_of(*pair)] for pair in pairs]


@dataclass(frozen=True, slots=True)
class _Work:
    """Holds what all problems share."""

    strategies: Mapping[str, ThinkingMethod]
    engine: Engines
    seed: int
    parameters: Parameters | None
    journal: Journal | None
    budget: Budget | None
    concurrency: int
    seats: asyncio.Semaphore

    async def outcome(self, name: str, problem: Problem) -> Outcome:
        """Answers a problem with a strategy as soon as a seat is free."""
        async with self.seats:
            run = Run(
                self.engine(problem) if callable(self.engine) else self.engine,
                seed=run_seed(self.seed, problem),
                name=f"{name}/{problem.name}",
                journal=self.journal,
                budget=self.budget,
                concurrency=self.concurrency,
            )
            given = {} if self.parameters is None else {"parameters": self.parameters}
            answer = await self.strategies[name](run, problem.question, extract=problem.extract, **given)
            return outcome_of(problem, name, answer, await _judge(problem, answer.answer))


async def _judge(problem: Problem, answer: str | None) -> bool:
    """Checks an answer in a thread, because comparing formulas may take seconds while other calls go on."""
    if isinstance(asyncio.get_running_loop(), VirtualLoop):
        return problem.check(answer)
    return await asyncio.to_thread(problem.check, answer)


def _check(problems: Sequence[Problem], strategies: Mapping[str, ThinkingMethod], together: int) -> None:
    if not problems or not strategies:
        raise ArgumentError(f"{len(problems)} problems and {len(strategies)} strategies; give at least one of each")
    names = [problem.name for problem in problems]
    if repeated := [name for name in set(names) if names.count(name) > 1]:
        raise ArgumentError(f"two problems are called {repeated[0]}; give each a number of its own")
    check_knobs(type_hints(evaluate), {"together": together})


async def reasoning_suite(
    problems: Sequence[Problem], strategies: Mapping[str, ThinkingMethod], engine: Engines, **options: Any
) -> dict[str, list[dict[str, Any]]]:
    """Runs `evaluate` and sums up the outcomes.

    Args:
        problems: as in `evaluate`.
        strategies: as in `evaluate`; the others are compared with the first.
        engine: as in `evaluate`.
        **options: as in `evaluate`.

    Returns:
        ``rows`` as of `table_rows`, and ``differences`` as of `compare_strategies`.

    >>> from partsong.evals.reasoning.tasks import TASKS
    >>> from partsong.reasoning import Line, ScriptedEngine
    >>> always = ScriptedEngine(lambda request, draw: Line(text="It is 42."))
    >>> tables = asyncio.run(reasoning_suite(TASKS["multiplication"](2), {"greedy": greedy}, always))
    >>> tables["rows"][0]["accuracy"], tables["rows"][0]["tokens_total"]
    (0.0, 3.0)
    """
    outcomes = await evaluate(problems, strategies, engine, **options)
    return {"rows": table_rows(outcomes), "differences": compare_strategies(outcomes, seed=options.get("seed", 0))}
