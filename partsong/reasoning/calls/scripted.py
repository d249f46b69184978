"""Plays a script as an engine: deterministic answers with lengths and latencies, for tests and what-if studies."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from partsong.knobs import Count, Number, check_knobs, type_hints
from partsong.reasoning.calls.call import Completion, Request, Usage
from partsong.reasoning.calls.engine import Progress

__all__ = ["Line", "ScriptedEngine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Holds one answer of the script.

    Attributes:
        text: the answer.
        tokens: its number of tokens; None counts its words.
        reasoning: hidden reasoning.
        confidence: confidence by token, reported where it was asked for.
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
        script: returns the answer; its randomness is a function of the request's seed, so answers depend on nothing
            else.
        seconds_per_token: time to write a token.
        seconds_to_first: time to read a prompt.
        chunk: tokens between two reports of progress.
        name: name of the engine, for journals.

    Raises:
        ArgumentError: a latency is below 0, or a chunk below 1.

    >>> engine = ScriptedEngine(lambda request, draw: Line(text="4"))
    >>> asyncio.run(engine.generate(Request(messages=()))).text
    '4'
    """

    def __init__(
        self,
        script: Callable[[Request, random.Random], Line],
        *,
        seconds_per_token: Annotated[float, Number(0.0)] = 0.0,
        seconds_to_first: Annotated[float, Number(0.0)] = 0.0,
        chunk: Count = 16,
        name: str = "scripted",
    ) -> None:
        times = {"seconds_per_token": seconds_per_token, "seconds_to_first": seconds_to_first}
        check_knobs(type_hints(ScriptedEngine.__init__), {**times, "chunk": chunk})
        self.script, self.name, self.chunk = script, name, chunk
        self.seconds_per_token, self.seconds_to_first = seconds_per_token, seconds_to_first
        #: Requests begun, in order.
        self.asked: list[Request] = []

    async def generate(self, request: Request, progress: Progress | None = None) -> Completion:
        """Answers after the time that the answer's tokens take; see `Engine`."""
        self.asked.append(request)
        line = self.script(request, random.Random(request.seed))
        length = len(line.text.split()) if line.tokens is None else line.tokens
        tokens = min(length, request.parameters.max_tokens)
        await asyncio.sleep(self.seconds_to_first)
        for written in range(0, tokens, self.chunk):
            now = min(self.chunk, tokens - written)
            if self.seconds_per_token:
                await asyncio.sleep(now * self.seconds_per_token)
            if progress is not None:
                progress(*self._report(line, request, written, now))
        if line.error is not None:
            raise line.error
        cut = tokens < length
        return Completion(
            text=" ".join(line.text.split()[:tokens]) if cut else line.text,
            finish="length" if cut else "stop",
            usage=Usage(prompt=sum(len(m.text.split()) for m in request.messages), completion=tokens),
            reasoning=line.reasoning,
            confidence=line.confidence if request.parameters.logprobs else None,
        )

    def _report(self, line: Line, request: Request, written: int, now: int) -> tuple[str, int, tuple[float, ...]]:
        """Returns what is new after some more tokens: the words of the text, one for each token."""
        words = line.text.split()[written : written + now]
        text = " ".join(words) if written == 0 or not words else " " + " ".join(words)
        confidence = (line.confidence or ()) if request.parameters.logprobs else ()
        return text, written + now, confidence[written : written + now]

    async def close(self) -> None:
        """Does nothing: the engine holds nothing."""
