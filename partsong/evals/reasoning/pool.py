"""Keeps many samples of every problem on disk, so that they can be handed out again at no cost.

A strategy that only draws samples of the plain question runs on `PoolEngine` unchanged and needs no new token. One pool
therefore gives the accuracy of all such strategies on the same samples, so that they can be compared in pairs.

The pool is a file of JSON lines. The first line holds the common settings of all samples, then comes a line per problem
and per sample. A sample that a killed run left incomplete is dropped and drawn again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from partsong.errors import ArgumentError
from partsong.evals.reasoning.line_file import LineFile, read_lines
from partsong.evals.reasoning.problem import Problem
from partsong.knobs import Count, check_knobs, type_hints
from partsong.reasoning.calls.call import Completion, Message, Parameters
from partsong.reasoning.calls.engine import Engine
from partsong.reasoning.calls.run import Run
from partsong.seeds import derive

__all__ = ["Pool", "collect", "run_seed"]

_VERSION = 1
#: The branch whose samples a pool holds. Every strategy that draws samples of the plain question uses it.
BRANCH = ("sample",)


def run_seed(seed: int, problem: Problem) -> int:
    """Returns the seed of a problem's runs, with which sample i of a pool is sample i of a live run."""
    return derive(seed, "problem", problem.name)


@dataclass(kw_only=True)
class Pool:
    """Holds samples of problems.

    Attributes:
        engine: name of the engine that drew the samples.
        parameters: with which they were drawn.
        seed: of the evaluation.
        questions: for each problem by name, its question.
        samples: for each problem by name, its completions by number.
    """

    engine: str
    parameters: Parameters
    seed: int = 0
    questions: dict[str, str] = field(default_factory=dict)
    samples: dict[str, dict[int, Completion]] = field(default_factory=dict)

    def of(self, problem: Problem, num: int | None = None) -> list[Completion]:
        """Returns the first `num` samples of a problem, or all it has.

        Raises:
            ArgumentError: the pool does not hold the problem, holds another question of its name, or has fewer samples.
        """
        if self.questions.get(problem.name) != problem.question:
            content = "another question" if problem.name in self.questions else "nothing"
            raise ArgumentError(
                f"the pool holds {content} of the name {problem.name}; collect samples of this one first"
            )
        samples = self.samples.get(problem.name, {})
        num = len(samples) if num is None else num
        if missing := [number for number in range(num) if number not in samples]:
            raise ArgumentError(f"the pool has no sample {missing[0]} of {problem.name}; collect {num} of each")
        return [samples[number] for number in range(num)]

    @classmethod
    def read(cls, path: str | Path) -> Pool:
        """Reads the file of a pool.

        Raises:
            ArgumentError: the file is not there, is not a pool, or is one of another version.
        """
        file = Path(path)
        if not file.is_file():
            raise ArgumentError(f"{file} is not there; collect a pool first")
        (header, *lines), _ = read_lines(file, "pool") if file.stat().st_size else ([{}], 0)
        if header.get("pool") != _VERSION:
            raise ArgumentError(f"{file} is no pool of version {_VERSION}; collect one first")
        drawn = header["parameters"]
        parameters = Parameters(**{**drawn, "stop": tuple(drawn["stop"])})
        pool = cls(engine=header["engine"], parameters=parameters, seed=header["seed"])
        pool.add(lines)
        return pool

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Adds the questions and samples that lines of a pool's file hold."""
        for line in lines:
            if "question" in line:
                self.questions[line["problem"]] = line["question"]
            else:
                samples = self.samples.setdefault(line["problem"], {})
                samples[line["sample"]] = Completion.from_json(line["completion"])


async def collect(
    path: str | Path,
    problems: Sequence[Problem],
    engine: Engine,
    num: Count,
    *,
    parameters: Parameters | None = None,
    seed: int = 0,
    concurrency: Count = 64,
    together: Count = 1,
) -> Pool:
    """Draws the samples that a pool does not hold yet; it may be stopped at any moment and called again.

    Args:
        path: the file of the pool; it is made if it is not there.
        problems: whose samples to draw.
        engine: draws them.
        num: samples of each problem.
        parameters: of the draws; confidence needs ``logprobs``.
        seed: of the draws; sample i of a problem depends on it, but not on `num` or the other problems.
        concurrency: at most this many calls at the same time.
        together: at most this many problems at the same time.

    Returns:
        The pool, with all that its file holds.

    Raises:
        ArgumentError: the file is of another engine, other parameters or another seed, or holds another question.
        OutputError: the file cannot be written.
        EngineError: a sample could not be drawn; the samples before it are kept.
    """
    check_knobs(type_hints(collect), {"num": num, "concurrency": concurrency, "together": together})
    pool = Pool(engine=engine.name, parameters=parameters or Parameters(), seed=seed)
    header = {"pool": _VERSION, "engine": pool.engine, "parameters": asdict(pool.parameters), "seed": seed}
    gate, seats = asyncio.Semaphore(concurrency), asyncio.Semaphore(together)
    with LineFile(path, header, "pool") as file:
        pool.add(file.lines)
        for problem in problems:
            if pool.questions.get(problem.name, problem.question) != problem.question:
                raise ArgumentError(f"{path} holds another question of the name {problem.name}; use another file")
        await run_all(_draw(file, pool, problem, engine, num, gate, seats) for problem in problems)
    return pool


async def run_all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs coroutines at the same time; if one fails, the others are cancelled before its error is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _keep(file: LineFile, pool: Pool, line: dict[str, Any]) -> None:
    file.append(line)
    pool.add([line])


async def _draw(
    file: LineFile,
    pool: Pool,
    problem: Problem,
    engine: Engine,
    num: int,
    gate: asyncio.Semaphore,
    seats: asyncio.Semaphore,
) -> None:
    """Draws the missing samples of a problem and writes each when it is complete."""

    async def one(number: int) -> None:
        async with gate:
            completion = await run.call(chat, path=BRANCH, sample=number, parameters=pool.parameters)
        _keep(file, pool, {"problem": problem.name, "sample": number, "completion": completion.as_json()})

    async with seats:
        if problem.name not in pool.questions:
            _keep(file, pool, {"problem": problem.name, "question": problem.question})
        run = Run(engine, seed=run_seed(pool.seed, problem), name=problem.name)
        chat = [Message("user", (problem.question,))]
        samples = pool.samples.get(problem.name, {})
        await run_all(one(number) for number in range(num) if number not in samples)
