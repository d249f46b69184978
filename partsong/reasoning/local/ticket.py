"""A request on its way through the engine, and the way back to the loop that waits for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from partsong.reasoning.calls.call import Completion, Parameters, Usage
from partsong.reasoning.calls.engine import Progress
from partsong.reasoning.local.prompt import Prompt
from partsong.reasoning.local.sampling import TokenDraw
from partsong.reasoning.local.stops import AnswerText

__all__ = ["Ticket"]


@dataclass(slots=True, eq=False)
class Ticket:
    """One request.

    Attributes:
        prompt: what it reads.
        parameters: of the draw.
        seed: of its random stream.
        most: tokens the answer may have, the model's context considered.
        ends: tokens that end an answer.
        text: the answer's text so far.
        loop: where somebody waits.
        future: for the completion.
        left: set once the engine does no more for it.
        progress: told of new text.
        cancelled: nobody waits any more.
        cached: tokens of the prompt whose keys were there.
        answer: tokens drawn.
        logprobs: of these.
        confidence: by token.
    """

    prompt: Prompt
    parameters: Parameters
    seed: int
    most: int
    ends: frozenset[int]
    text: AnswerText
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]
    left: asyncio.Event
    progress: Progress | None = None
    cancelled: bool = False
    cached: int = 0
    answer: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    @property
    def draw(self) -> TokenDraw:
        """How the next token is drawn."""
        asked = self.parameters
        return TokenDraw(asked.temperature, asked.top_p, self.seed, len(self.answer))

    def take(self, token: int) -> tuple[str, Completion | None]:
        """Takes a drawn token; returns the text that is new, and the completion if this was the last token."""
        self.answer.append(token)
        if token in self.ends:
            return "", self.completion("stop")
        new = self.text.push(token)
        if self.text.stopped:
            return new, self.completion("stop")
        return new, self.completion("length") if len(self.answer) >= self.most else None

    def completion(self, finish: str) -> Completion:
        """What has been written, as an answer."""
        assert finish in ("stop", "length")
        asked = self.parameters.logprobs > 0
        text, tokens = self.text.final(), self.text.tokens
        return Completion(
            text=text,
            finish="stop" if finish == "stop" else "length",
            usage=Usage(prompt=self.prompt.num_tokens, cached=self.cached, completion=len(self.answer)),
            logprobs=tuple(self.logprobs) if asked else None,
            confidence=tuple(self.confidence) if asked else None,
            tokens=tokens,
        )

    def tell(self, text: str, tokens: int, confidence: tuple[float, ...]) -> None:
        """In the loop: reports progress."""
        if self.progress is not None and not self.future.done():
            self.progress(text, tokens, confidence)

    def deliver(self, found: Completion | Exception) -> None:
        """In the loop: ends the call."""
        self.left.set()
        if self.future.done():
            return
        if isinstance(found, Completion):
            self.future.set_result(found)
        else:
            self.future.set_exception(found)
