"""Lets workers of one model write at the same time and see each other's tokens as they appear: Hogwild! Inference."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import torch

from partsong.errors import ArgumentError, PartsongError, UnsupportedError
from partsong.knobs import Count, Whole
from partsong.reasoning.answers.extract import last_boxed
from partsong.reasoning.calls.answer import Answer, Extract, vote_of
from partsong.reasoning.calls.call import Completion, Parameters, Request
from partsong.reasoning.calls.engine import EngineError, Progress
from partsong.reasoning.calls.run import Run
from partsong.reasoning.hogwild.layouts import LAYOUTS
from partsong.reasoning.hogwild.prompts import HogwildPrompts, fill, worker_names
from partsong.reasoning.hogwild.workers import WorkerReport, WorkerText, Writing
from partsong.reasoning.local.engine import LocalEngine, check_parameters
from partsong.reasoning.local.prompt import prompt_ids
from partsong.reasoning.strategies.knobs import checked
from partsong.reasoning.strategies.parts import answer_of, together
from partsong.reasoning.strategies.prompts import ask
from partsong.seeds import derive

__all__ = ["HogwildPrompts", "hogwild"]

_PROMPTS = HogwildPrompts()


@checked
async def hogwild(
    run: Run,
    question: str,
    *,
    extract: Extract,
    num_workers: Count = 2,
    layout: Literal["combined", "contiguous", "interleaved"] = "combined",
    probe_every: Annotated[int, Whole(0)] = 256,
    answer_tokens: Annotated[int, Whole(0)] = 32,
    names: Sequence[str] | None = None,
    prompts: HogwildPrompts = _PROMPTS,
    parameters: Parameters | None = None,
) -> Answer:
    r"""Lets workers write at the same time and see each other's text; the first to box a result answers for all.

    Each worker is a call of the run. They end together: when one closes a ``\boxed{}`` or ends its text with an answer
    in it, when all have used up their tokens, or when the model's context is full. All workers take one step at a time,
    so draws depend only on the seed.

    Args:
        run: a run with a `LocalEngine`, since a server shares no keys between its calls.
        question: the problem.
        extract: finds the answer in a text.
        num_workers: how many workers there are. One is a plain call, without headings, labels and questions.
        layout: what a worker sees before its own text. "combined" shows the finished steps (paragraphs) in the order in
            which they ended, then what the others are writing. "contiguous" shows all that each of the others has
            written. "interleaved" shows only the finished steps.
        probe_every: tokens after which a worker is asked, at the end of a paragraph, whether somebody else is already
            doing the same. After twice as many it is asked in the middle of a paragraph. 0 never asks.
        answer_tokens: if no worker names a result, the first one must do so, greedily, in at most this many tokens. 0
            leaves the run without an answer.
        names: the workers' names, at least as many as workers. Default: "Alice", "Bob" and so on.
        prompts: the texts the workers read.
        parameters: how each worker's tokens are drawn; `max_tokens` is each worker's own.

    Returns:
        The answer. Its details have ``texts``, by worker, without the labels; ``steps``, the number of forwards in
        which workers wrote, as many as the longest worker has tokens; and ``probes``, a (worker, reply) for each
        question about redundancy.

    Raises:
        UnsupportedError: the engine is not a `LocalEngine`, its model's positions are not rotary, or `parameters` ask
            for stop strings or log-probabilities.
        ArgumentError: a knob is out of bounds, or the prompt leaves no room in the model's context.
        EngineError: the engine failed.

    Source: Hogwild! Inference (Rodionov et al., arXiv 2504.06261).

    >>> from partsong.reasoning import final_number
    >>> async def main():
    ...     engine = LocalEngine("smollm2-135m")
    ...     answer = await hogwild(Run(engine), "How many primes lie below 30?", extract=final_number, num_workers=3)
    ...     await engine.close()
    ...     return answer
    >>> answer = asyncio.run(main())  # doctest: +SKIP
    """
    drawing, people = parameters or Parameters(), _names(names, num_workers)
    engine = _local_engine(run, drawing)

    def begin(request: Request) -> Writing:
        work = WorkerText(
            prompt=prompt_ids(engine.tokenizer, request.messages),
            names=people,
            layout=LAYOUTS[layout],
            texts=prompts,
            parameters=drawing,
            seed=derive(run.seed, *request.path),
            probe_every=probe_every,
            answer_tokens=answer_tokens,
            ends=engine._ends,
            concludes=lambda text, ended: (ended or last_boxed(text) is not None) and extract(text) is not None,
        )
        return Writing(engine.model, engine.tokenizer, work)

    chat = ask(prompts.problem, names=", ".join(people), question=question)
    if num_workers == 1:
        chat = ask(prompts.alone, question=question)
    inner = run.branch("hogwild")
    inner.engine = _Workers(engine.name, begin)
    path = (layout, f"{num_workers} workers", f"probe {probe_every}")
    completions = await together(inner.call(chat, path=path, sample=n, parameters=drawing) for n in range(num_workers))
    return _answer(run, completions, extract, fill(prompts.probe))


def _local_engine(run: Run, parameters: Parameters) -> LocalEngine:
    """Returns the engine of a run if it can do what the parameters ask."""
    engine = run.engine
    if not isinstance(engine, LocalEngine):
        raise UnsupportedError(
            f"hogwild lets calls read each other's keys while they are written, which needs a model in this process; "
            f"found {type(engine).__name__}: use LocalEngine, or a strategy of separate calls such as decompose"
        )
    if parameters.stop or parameters.logprobs:
        raise UnsupportedError(
            f"hogwild takes neither stop={parameters.stop!r} nor logprobs={parameters.logprobs}: leave them out"
        )
    check_parameters(parameters, engine.model.vocab_size)
    return engine


def _answer(run: Run, completions: Sequence[Completion | None], extract: Extract, probe: str) -> Answer:
    written = [each for each in completions if each is not None]
    winner = next((each for each in written if vote_of(each, extract) is not None), None)
    # A worker replies to a question before it begins its next line.
    probes = [
        (number, reply.strip().partition("\n")[0])
        for number, each in enumerate(completions)
        for reply in ([] if each is None else each.text.split(probe)[1:])
    ]
    return answer_of(
        run,
        winner,
        extract,
        "done" if len(written) == len(completions) else "budget",
        texts=[None if each is None else each.text for each in completions],
        steps=max((each.usage.completion for each in written), default=0),
        probes=probes,
    )


def _names(names: Sequence[str] | None, num: int) -> tuple[str, ...]:
    if names is None:
        return worker_names(num)
    if isinstance(names, str) or len(names) < num or not all(isinstance(name, str) and name for name in names):
        raise ArgumentError(f"names={names!r}; use a sequence of at least num_workers={num} texts that are not empty")
    return tuple(names[:num])


class _Workers:
    """Acts as an engine whose calls are the workers that write together.

    The first call begins the writing for all workers, so it does not matter which calls are running, and when. It
    ends when all workers have ended, or when no call waits any more.

    Args:
        name: the name of the engine beneath.
        begin: makes the writing of a worker's request; the others' requests differ only in their number.
    """

    def __init__(self, name: str, begin: Callable[[Request], Writing]) -> None:
        self.name, self._begin = name, begin
        self._writing: Writing | None = None
        self._driver: asyncio.Task[None] | None = None
        # Reports for the calls that wait, and for cancelled calls an event that is set when their worker has stopped.
        self._open: dict[int, Progress | None] = {}
        self._gone: dict[int, asyncio.Event] = {}

    async def generate(self, request: Request, progress: Progress | None = None) -> Completion:
        """Waits for what worker number `request.sample` writes."""
        number = request.sample
        if self._driver is None or self._writing is None:
            self._writing = self._begin(request)
            self._driver = asyncio.ensure_future(self._drive(self._writing))
        # The driver starts when this waits for it, so there is a call then.
        self._open[number] = progress
        try:
            await asyncio.shield(self._driver)
        except asyncio.CancelledError:
            del self._open[number]
            if not self._driver.done():
                self._gone[number] = asyncio.Event()
                # The worker stops before the next step; a second cancellation does not wait for that.
                with contextlib.suppress(asyncio.CancelledError):
                    await self._gone[number].wait()
            raise
        completion = self._writing.completion(number)
        if completion is None:
            raise EngineError("the workers were stopped because nobody waited for them any more")
        return completion

    async def close(self) -> None:
        """Does nothing, since the engine beneath belongs to its owner."""

    async def _drive(self, writing: Writing) -> None:
        loop = asyncio.get_running_loop()
        # torch's number of threads is per thread; the caller's setting should hold there, too.
        threads = torch.get_num_threads()
        try:
            with ThreadPoolExecutor(1, "hogwild", torch.set_num_threads, (threads,)) as pool:
                while not writing.over:
                    tokens = await loop.run_in_executor(pool, writing.compute)
                    news = writing.take(tokens)
                    for number in list(self._gone):
                        writing.stop(number)
                        self._gone.pop(number).set()
                    self._report(news)
                    if not self._open:
                        return
        except PartsongError:
            raise
        except Exception as error:
            raise EngineError(f"the model could not go on, so all workers ended: {error!r}") from error
        finally:
            for event in self._gone.values():
                event.set()

    def _report(self, news: Sequence[WorkerReport]) -> None:
        for each in news:
            progress: Any = self._open.get(each.worker)
            if progress is not None:
                progress(each.text, each.tokens)
