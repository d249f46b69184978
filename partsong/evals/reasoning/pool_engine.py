"""Hands out the samples of a pool again, as an engine that strategies run on unchanged."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from partsong.evals.reasoning.pool import BRANCH, Pool
from partsong.evals.reasoning.problem import Problem
from partsong.reasoning.calls.call import Completion, Request
from partsong.reasoning.calls.engine import EngineError, Progress

__all__ = ["PoolEngine"]


class PoolEngine:
    """Answers with the samples that a pool has of one problem; strategies run on it unchanged.

    It answers only the plain question, drawn in the way the pool was drawn. It refuses other calls, such as those of
    the second round of PDR, because the pool has no samples of them.

    Args:
        pool: the samples.
        problem: the one to answer.
        seconds_per_token: simulated time, for strategies that act on the order in which samples end; run it under
            `run_virtual`.
        chunk: tokens between two reports of progress, which is also how finely a cancelled call's tokens are counted.
    """

    def __init__(self, pool: Pool, problem: Problem, *, seconds_per_token: float = 0.01, chunk: int = 16) -> None:
        self.name, self.parameters, self.problem = pool.engine, pool.parameters, problem
        self.samples = pool.of(problem)
        self.seconds_per_token, self.chunk = seconds_per_token, chunk

    async def generate(self, request: Request, progress: Progress | None = None) -> Completion:
        """Returns the sample with the number of the request; see `Engine`.

        Raises:
            EngineError: the pool has no such sample.
        """
        sample = self._sample_for(request)
        seen, tokens = sample.confidence or (), sample.usage.completion
        for written in range(0, tokens, self.chunk):
            now = min(self.chunk, tokens - written)
            await asyncio.sleep(now * self.seconds_per_token)
            if progress is not None:
                confidence = seen[written : written + now] if request.parameters.logprobs else ()
                progress(sample.text if written + now == tokens else "", written + now, confidence)
        return sample

    def _sample_for(self, request: Request) -> Completion:
        asked = [(message.role, message.text) for message in request.messages]
        if asked != [("user", self.problem.question)] or request.path != BRANCH:
            raise EngineError(
                f"the pool answers only the plain question of {self.problem.name}, and call "
                f"{'/'.join(request.path)} asks more: run this strategy on a live engine"
            )
        drawn, needed = asdict(self.parameters), asdict(request.parameters)
        for name in ("temperature", "top_p", "stop", "max_tokens"):
            if drawn[name] != needed[name]:
                raise EngineError(
                    f"the pool was drawn with {name}={drawn[name]!r}, the strategy asks for {needed[name]!r}; give it "
                    "the pool's parameters"
                )
        if request.sample >= len(self.samples):
            raise EngineError(
                f"the pool has {len(self.samples)} samples of {self.problem.name}, and the strategy asks for one more"
            )
        return self.samples[request.sample]

    async def close(self) -> None:
        """Does nothing, since there is nothing to close."""
