"""An engine that plays a script: deterministic answers with lengths and latencies, for tests and what-if studies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from partsong.errors import ArgumentError
from partsong.reasoning.calls.call import Completion, Request, Usage
from partsong.reasoning.calls.engine import Progress

__all__ = ["Line", "ScriptedEngine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """What the engine answers.

    Attributes:
        text: the answer.
        tokens: of it; None counts its words.
        reasoning: hidden reasoning.
        confidence: by token, where it was asked for.
        error: raised instead of answering, after the latency of `tokens`.
    """

    text: str
    tokens: int | None = None
    reasoning: str = ""
    confidence: tuple[float, ...] | None = None
    error: Exception | None = None


class ScriptedEngine:
    """Answers by a function of the request and a random stream of the request's own.

    Args:
        script: gives the answer; its randomness is a function of the request's seed, so that answers depend on
            nothing else.
        seconds_per_token: of writing.
        seconds_to_first: of a prompt.
        chunk: tokens between two reports of progress.
        name: of the engine, for journals.

    Raises:
        ArgumentError: a latency below 0 or a chunk below 1.

    >>> engine = ScriptedEngine(lambda request, draw: Line(text="4"))
    >>> asyncio.run(engine.generate(Request(messages=()))).text
    '4'
    """

    def __init__(
        self,
        script: Callable[[Request, random.Random], Line],
        *,
        seconds_per_token: float = 0.0,
        seconds_to_first: float = 0.0,
        chunk: int = 16,
        name: str = "scripted",
    ) -> None:
        if seconds_per_token < 0 or seconds_to_first < 0 or chunk < 1:
            raise ArgumentError("latencies are 0 or more, and a chunk is 1 token or more")
        self.script, self.name, self.chunk = script, name, chunk
        self.seconds_per_token, self.seconds_to_first = seconds_per_token, seconds_to_first
        #: Requests begun, in order.
        self.asked: list[Request] = []

    async def generate(self, request: Request, progress: Progress | None = None) -> Completion:
        """Answers after as long as the answer's tokens take; see `Engine`."""
        self.asked.append(request)
        line = self.script(request, random.Random(request.seed))
        wanted = len(line.text.split()) if line.tokens is None else line.tokens
        tokens = min(wanted, request.parameters.max_tokens)
        await asyncio.sleep(self.seconds_to_first)
        for written in range(0, tokens, self.chunk):
            now = min(self.chunk, tokens - written)
            if self.seconds_per_token:
                await asyncio.sleep(now * self.seconds_per_token)
            if progress is not None:
                progress(*self._report(line, request, written, now))
        if line.error is not None:
            raise line.error
        cut = tokens < wanted
        return Completion(
            text=" ".join(line.text.split()[:tokens]) if cut else line.text,
            finish="length" if cut else "stop",
            usage=Usage(prompt=sum(len(m.text.split()) for m in request.messages), completion=tokens),
            reasoning=line.reasoning,
            confidence=line.confidence if request.parameters.logprobs else None,
        )

    def _report(self, line: Line, request: Request, written: int, now: int) -> tuple[str, int, tuple[float, ...]]:
        """What is new after some more tokens: the words of the text, one by token."""
        words = line.text.split()[written : written + now]
        text = " ".join(words) if written == 0 or not words else " " + " ".join(words)
        confidence = (line.confidence or ()) if request.parameters.logprobs else ()
        return text, written + now, confidence[written : written + now]

    async def close(self) -> None:
        """Nothing to give back."""
