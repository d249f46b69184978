"""A pool: many samples of every problem on disk, and an engine that hands them out again at no cost.

A strategy that only draws samples of the plain question runs on `PoolEngine` unchanged, and needs no new token: one
pool gives the accuracy of all of them, on the same samples, so that they can be compared in pairs.

A pool is a file of JSON lines: what holds for all of them first, then a line per problem and per sample. Every line is
on the disk before the next call's result is; what a killed run left half written is dropped and drawn again.
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
from partsong.reasoning.calls.call import Completion, Message, Parameters, Request
from partsong.reasoning.calls.engine import Engine, EngineError, Progress
from partsong.reasoning.calls.run import Run
from partsong.seeds import derive

__all__ = ["Pool", "PoolEngine", "collect", "run_seed"]

_VERSION = 1
#: The branch whose samples a pool holds: that of every strategy that draws samples of the plain question.
BRANCH = ("sample",)


def run_seed(seed: int, problem: Problem) -> int:
    """The seed of a problem's runs: with it, sample i of a pool is sample i of a live run."""
    return derive(seed, "problem", problem.name)


@dataclass(kw_only=True)
class Pool:
    """Samples of problems.

    Attributes:
        engine: name of the engine that drew them.
        parameters: they were drawn with.
        seed: of the evaluation.
        questions: by name of the problem.
        samples: completions by name of the problem and number.
    """

    engine: str
    parameters: Parameters
    seed: int = 0
    questions: dict[str, str] = field(default_factory=dict)
    samples: dict[str, dict[int, Completion]] = field(default_factory=dict)

    def of(self, problem: Problem, num: int | None = None) -> list[Completion]:
        """The first `num` samples of a problem; None is all it has.

        Raises:
            ArgumentError: the pool does not hold the problem, asked something else, or has fewer samples.
        """
        if self.questions.get(problem.name) != problem.question:
            found = "another question" if problem.name in self.questions else "nothing"
            raise ArgumentError(f"the pool holds {found} of the name {problem.name}; collect samples of this one first")
        held = self.samples.get(problem.name, {})
        wanted = len(held) if num is None else num
        if missing := [number for number in range(wanted) if number not in held]:
            raise ArgumentError(f"the pool has no sample {missing[0]} of {problem.name}; collect {wanted} of each")
        return [held[number] for number in range(wanted)]

    @classmethod
    def read(cls, path: str | Path) -> Pool:
        """Reads a pool's file.

        Raises:
            ArgumentError: it is not there, no pool, or of another version.
        """
        file = Path(path)
        if not file.is_file():
            raise ArgumentError(f"{file} is not there; collect a pool first")
        (header, *lines), _ = read_lines(file, "pool") if file.stat().st_size else ([{}], 0)
        if header.get("pool") != _VERSION:
            raise ArgumentError(f"{file} is no pool of version {_VERSION}; collect one first")
        drawn = header["parameters"]
        parameters = Parameters(**{**drawn, "stop": tuple(drawn["stop"])})
        return cls(engine=header["engine"], parameters=parameters, seed=header["seed"])._with(lines)

    def _with(self, lines: Iterable[Mapping[str, Any]]) -> Pool:
        """Adds what lines of a file say."""
        for said in lines:
            if "question" in said:
                self.questions[said["problem"]] = said["question"]
            else:
                held = self.samples.setdefault(said["problem"], {})
                held[said["sample"]] = Completion.from_json(said["completion"])
        return self


async def collect(
    path: str | Path,
    problems: Sequence[Problem],
    engine: Engine,
    num: int,
    *,
    parameters: Parameters | None = None,
    seed: int = 0,
    concurrency: int = 64,
    together: int = 1,
) -> Pool:
    """Draws the samples a pool does not hold yet; may be stopped at any moment and called again.

    Args:
        path: its file; made where it is not there.
        problems: whose samples.
        engine: draws them.
        num: samples of each.
        parameters: of the draws; confidence needs ``logprobs``.
        seed: of the draws; sample i of a problem is a function of it, whatever `num` and the other problems are.
        concurrency: most calls under way.
        together: problems under way.

    Returns:
        The pool, with all it holds.

    Raises:
        ArgumentError: the file is of another engine, other parameters or another seed, or holds another question.
        OutputError: it cannot be written.
        EngineError: a sample could not be drawn; what came before is kept.
    """
    for name, value in (("num", num), ("concurrency", concurrency), ("together", together)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"{name}={value!r}; use a positive integer")
    pool = Pool(engine=engine.name, parameters=parameters or Parameters(), seed=seed)
    header = {"pool": _VERSION, "engine": pool.engine, "parameters": asdict(pool.parameters), "seed": seed}
    gate, seats = asyncio.Semaphore(concurrency), asyncio.Semaphore(together)
    with LineFile(path, header, "pool") as file:
        pool._with(file.lines)
        for problem in problems:
            if pool.questions.get(problem.name, problem.question) != problem.question:
                raise ArgumentError(f"{path} holds another question of the name {problem.name}; use another file")
        await all_of(_draw(file, pool, problem, engine, num, gate, seats) for problem in problems)
    return pool


async def all_of(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Waits for all; where one fails, the others are ended first."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _keep(file: LineFile, pool: Pool, said: dict[str, Any]) -> None:
    file.append(said)
    pool._with([said])


async def _draw(
    file: LineFile,
    pool: Pool,
    problem: Problem,
    engine: Engine,
    num: int,
    gate: asyncio.Semaphore,
    seats: asyncio.Semaphore,
) -> None:
    """The missing samples of a problem, each written as it ends."""

    async def one(number: int) -> None:
        async with gate:
            made = await run.call(chat, path=BRANCH, sample=number, parameters=pool.parameters)
        _keep(file, pool, {"problem": problem.name, "sample": number, "completion": made.as_json()})

    async with seats:
        if problem.name not in pool.questions:
            _keep(file, pool, {"problem": problem.name, "question": problem.question})
        run = Run(engine, seed=run_seed(pool.seed, problem), name=problem.name)
        chat = [Message("user", (problem.question,))]
        held = pool.samples.get(problem.name, {})
        await all_of(one(number) for number in range(num) if number not in held)


class PoolEngine:
    """An engine that has the samples of one problem already; strategies run on it unchanged.

    It answers nothing but what the pool's samples answered: the plain question, drawn in the same way. A strategy that
    asks something else, such as PDR's second round, is refused: its accuracy is not in the pool.

    Args:
        pool: the samples.
        problem: whose.
        seconds_per_token: pretended, for strategies that act on what ends first; run it under `run_virtual`.
        chunk: tokens between two reports of progress, and the grain at which a cancelled call's tokens are counted.
    """

    def __init__(self, pool: Pool, problem: Problem, *, seconds_per_token: float = 0.01, chunk: int = 16) -> None:
        self.name, self.parameters, self.problem = pool.engine, pool.parameters, problem
        self.samples = pool.of(problem)
        self.seconds_per_token, self.chunk = seconds_per_token, chunk

    async def generate(self, request: Request, progress: Progress | None = None) -> Completion:
        """Hands out the sample of the request's number; see `Engine`.

        Raises:
            EngineError: the pool has no such sample.
        """
        found = self._found(request)
        seen, tokens = found.confidence or (), found.usage.completion
        for written in range(0, tokens, self.chunk):
            now = min(self.chunk, tokens - written)
            await asyncio.sleep(now * self.seconds_per_token)
            if progress is not None:
                confidence = seen[written : written + now] if request.parameters.logprobs else ()
                progress(found.text if written + now == tokens else "", written + now, confidence)
        return found

    def _found(self, request: Request) -> Completion:
        asked = [(message.role, message.text) for message in request.messages]
        if asked != [("user", self.problem.question)] or request.path != BRANCH:
            raise EngineError(
                f"the pool answers only the plain question of {self.problem.name}, and call "
                f"{'/'.join(request.path)} asks more: run this strategy on a live engine"
            )
        drawn, wanted = self.parameters, request.parameters
        for name in ("temperature", "top_p", "stop", "max_tokens"):
            if getattr(drawn, name) != getattr(wanted, name):
                raise EngineError(
                    f"the pool was drawn with {name}={getattr(drawn, name)!r}, the strategy wants "
                    f"{getattr(wanted, name)!r}; hand it the pool's parameters"
                )
        if request.sample >= len(self.samples):
            raise EngineError(
                f"the pool has {len(self.samples)} samples of {self.problem.name}, and the strategy wants one more"
            )
        return self.samples[request.sample]

    async def close(self) -> None:
        """Nothing to give back."""
