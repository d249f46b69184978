"""The loop of ``partsong eval reasoning``: problems by strategies on an engine, a row for each task and strategy.

It may be stopped at any moment. Finished problems are lines of a file, finished calls of an unfinished problem are in
the journal; called again with both, it repeats neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from partsong.errors import ArgumentError
from partsong.evals.reasoning.line_file import LineFile
from partsong.evals.reasoning.outcome import Outcome, compared, key_of, outcome_of, table_rows
from partsong.evals.reasoning.pool import all_of, run_seed
from partsong.evals.reasoning.problem import Problem
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.budget import Budget
from partsong.reasoning.calls.call import Parameters
from partsong.reasoning.calls.engine import Engine
from partsong.reasoning.calls.journal import Journal
from partsong.reasoning.calls.run import Run
from partsong.reasoning.calls.virtual_time import VirtualLoop
from partsong.reasoning.strategies.registry import parse_thinking
from partsong.reasoning.strategies.single import single
from partsong.zoo.thinking import knobs_for

__all__ = ["Strategy", "evaluate", "greedy", "read_strategies", "reasoning_suite"]

#: ``strategy(run, question, *, extract, parameters)``.
Strategy = Callable[..., Coroutine[Any, Any, Answer]]
#: An engine for all problems, or one for each.
Engines = Engine | Callable[[Problem], Engine]


async def greedy(run: Run, question: str, *, extract: Extract, parameters: Parameters | None = None) -> Answer:
    """One call at temperature 0: `single`, whatever temperature the others are given."""
    cold = replace(parameters or Parameters(), temperature=0.0)
    return await single(run, question, extract=extract, parameters=cold)


def read_strategies(texts: Sequence[str], model: Any = None) -> dict[str, Strategy]:
    """Strategies as command lines name them, all of them legal before the first is run.

    Args:
        texts: ``greedy``, or ``NAME:key=value,...`` as `parse_thinking` reads it.
        model: what the model is called; for a zoo model that was trained to think, strategies have knobs of its own.

    Raises:
        ArgumentError: an unknown strategy or knob, or a strategy that needs what no text can give.

    >>> list(read_strategies(["greedy", "pdr:schedule=4-1"]))
    ['greedy', 'pdr:schedule=4-1']
    """
    found: dict[str, Strategy] = {}
    for text in dict.fromkeys(texts):
        if text == "greedy":
            found[text] = greedy
            continue
        thinking = parse_thinking(text)
        if thinking.needs:
            raise ArgumentError(f"strategy {thinking.name} needs {', '.join(thinking.needs)}, which no text can give")
        own = knobs_for(model, thinking.name, thinking.knobs)
        found[text] = partial(thinking, **own) if own else thinking
    return found


async def evaluate(
    problems: Sequence[Problem],
    strategies: Mapping[str, Strategy],
    engine: Engines,
    *,
    seed: int = 0,
    parameters: Parameters | None = None,
    journal: Journal | None = None,
    outcomes: str | Path | None = None,
    budget: Budget | None = None,
    concurrency: int = 64,
    together: int = 1,
    told: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Answers every problem with every strategy.

    All strategies are given the same seed for a problem, so that those which draw samples of the plain question draw
    the same ones.

    Args:
        problems: of one or several tasks, each name once.
        strategies: by the name that rows give them.
        engine: answers; or a function of the problem, such as one that makes a `PoolEngine`.
        seed: of all draws.
        parameters: handed to every strategy; None leaves each its own.
        journal: keeps the calls of problems that are not finished.
        outcomes: file that keeps finished problems; those it holds are not answered again.
        budget: of one problem under one strategy; what is exceeded ends it with what it has.
        concurrency: most calls of a problem under way.
        together: problems under way. Their times overlap, so more than one makes ``seconds`` mean less.
        told: called with every new outcome, for progress bars.

    Returns:
        The outcomes, strategy by strategy, in the order of the problems.

    Raises:
        ArgumentError: no problems or strategies, two problems of one name, or a file of another evaluation.
        EngineError: an answer could not be had; all that is finished is kept.
    """
    _check(problems, strategies, together)
    work = _Work(strategies, engine, seed, parameters, journal, budget, concurrency, asyncio.Semaphore(together))
    header = {"outcomes": 1, "engine": getattr(engine, "name", "by problem"), "seed": seed}
    drawn = asdict(parameters) if parameters is not None else None
    pairs = [(name, problem) for name in strategies for problem in problems]
    with (
        nullcontext() if outcomes is None else LineFile(outcomes, {**header, "parameters": drawn}, "evaluation") as file
    ):
        kept = [] if file is None else [Outcome(**line) for line in file.lines]
        found = {one.key: one for one in kept}

        async def one(name: str, problem: Problem) -> None:
            outcome = found[key_of(name, problem)] = await work.outcome(name, problem)
            if file is not None:
                file.append(outcome.as_json())
            if told is not None:
                told(outcome)

        await all_of(one(*pair) for pair in pairs if key_of(*pair) not in found)
    return [found[key_of(*pair)] for pair in pairs]


@dataclass(frozen=True, slots=True)
class _Work:
    """What all problems share."""

    strategies: Mapping[str, Strategy]
    engine: Engines
    seed: int
    parameters: Parameters | None
    journal: Journal | None
    budget: Budget | None
    concurrency: int
    seats: asyncio.Semaphore

    async def outcome(self, name: str, problem: Problem) -> Outcome:
        """Answers a problem with a strategy, when there is a seat."""
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
            made = await self.strategies[name](run, problem.question, extract=problem.extract, **given)
            return outcome_of(problem, name, made, await _judged(problem, made.answer))


async def _judged(problem: Problem, answer: str | None) -> bool:
    """Checks beside the loop: comparing formulas may take seconds, and other problems' calls go on meanwhile."""
    if isinstance(asyncio.get_running_loop(), VirtualLoop):
        return problem.check(answer)
    return await asyncio.to_thread(problem.check, answer)


def _check(problems: Sequence[Problem], strategies: Mapping[str, Strategy], together: int) -> None:
    if not problems or not strategies:
        raise ArgumentError(f"{len(problems)} problems and {len(strategies)} strategies; give at least one of each")
    names = [problem.name for problem in problems]
    if twice := [name for name in set(names) if names.count(name) > 1]:
        raise ArgumentError(f"two problems are called {twice[0]}; give each a number of its own")
    if isinstance(together, bool) or not isinstance(together, int) or together < 1:
        raise ArgumentError(f"together={together!r}; use a positive integer")


async def reasoning_suite(
    problems: Sequence[Problem], strategies: Mapping[str, Strategy], engine: Engines, **options: Any
) -> dict[str, list[dict[str, Any]]]:
    """Runs `evaluate` and sums up.

    Args:
        problems: as there.
        strategies: as there; the first is what the others are compared with.
        engine: as there.
        **options: as there.

    Returns:
        ``rows`` of `table_rows`, ``differences`` of `compared`.

    >>> from partsong.evals.reasoning.tasks import TASKS
    >>> from partsong.reasoning import Line, ScriptedEngine
    >>> always = ScriptedEngine(lambda request, draw: Line(text="It is 42."))
    >>> made = asyncio.run(reasoning_suite(TASKS["multiplication"](2), {"greedy": greedy}, always))
    >>> made["rows"][0]["accuracy"], made["rows"][0]["tokens_total"]
    (0.0, 3.0)
    """
    found = await evaluate(problems, strategies, engine, **options)
    return {"rows": table_rows(found), "differences": compared(found, seed=options.get("seed", 0))}
