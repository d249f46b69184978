"""Takes a request through the engine, and its answer back to the loop that waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from partsong.kernels.keyed_draw import TokenDraw
from partsong.kernels.speculation.drafter import DraftText
from partsong.reasoning.calls.call import Completion, Parameters, Usage
from partsong.reasoning.calls.waiter import Waiter
from partsong.reasoning.local.lockstep import OpenCall
from partsong.reasoning.local.prompt import Prompt
from partsong.reasoning.local.stops import AnswerText
from partsong.reasoning.threads.layout import TokenRun, lay_out

__all__ = ["Ticket", "WaitingCaller"]


@dataclass(kw_only=True, slots=True, eq=False)
class WaitingCaller(Waiter):
    """Waits in a loop for the answer to a request.

    Attributes:
        call: what it asks.
    """

    call: OpenCall

    def report(self, text: str, tokens: int, confidence: tuple[float, ...]) -> None:
        """Reports progress; runs in the loop."""
        if self.progress is not None and not self.future.done():
            self.progress(text, tokens, confidence)


@dataclass(slots=True, eq=False)
class Ticket:
    """Describes one running request.

    Attributes:
        prompt: what it reads.
        parameters: how its tokens are drawn.
        seed: the seed of its random stream.
        max_tokens: how many tokens the answer may have, considering the model's context.
        ends: tokens that end an answer.
        text: the answer's text so far.
        caller: who waits for it; None on ranks that only compute.
        cancelled: whether the caller no longer waits.
        cached: how many tokens of the prompt had their keys.
        answer: the tokens drawn.
        logprobs: their log-probabilities.
        confidence: their confidence.
        drafted: how many tokens were guessed and verified.
        rejected: how many of them did not become part of the answer.
    """

    prompt: Prompt
    parameters: Parameters
    seed: int
    max_tokens: int
    ends: frozenset[int]
    text: AnswerText
    caller: WaitingCaller | None = None
    cancelled: bool = False
    cached: int = 0
    answer: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    drafted: int = 0
    rejected: int = 0

    @property
    def draw(self) -> TokenDraw:
        """Says how the next token is drawn."""
        return TokenDraw(self.parameters.temperature, self.parameters.top_p, self.seed, len(self.answer))

    def draft_text(self) -> DraftText:
        """Returns what drafters read of it."""
        parts = self.prompt.parts
        is_plain = not self.prompt.mark and all(isinstance(part, TokenRun) for part in parts)
        return DraftText([*lay_out(parts).tokens, *self.answer], self.draw, is_plain)

    def take(self, token: int) -> tuple[str, Completion | None]:
        """Takes a drawn token; returns the new text, and the completion if this was the last token."""
        self.answer.append(token)
        if token in self.ends:
            return "", self.completion("stop")
        new = self.text.push(token)
        if self.text.stopped:
            return new, self.completion("stop")
        return new, self.completion("length") if len(self.answer) >= self.max_tokens else None

    def note(self, logprob: float, confidence: float) -> None:
        """Notes the log-probability and the confidence of the next token that is taken."""
        self.logprobs.append(logprob)
        self.confidence.append(confidence)

    def completion(self, finish: str) -> Completion:
        """Returns what has been written, as a completion."""
        assert finish in ("stop", "length")
        has_logprobs = self.parameters.logprobs > 0
        text, tokens = self.text.final(), self.text.tokens
        return Completion(
            text=text,
            finish="stop" if finish == "stop" else "length",
            usage=Usage(
                prompt=self.prompt.num_tokens,
                cached=self.cached,
                completion=len(self.answer),
                drafted=self.drafted,
                rejected=self.rejected,
            ),
            logprobs=tuple(self.logprobs) if has_logprobs else None,
            confidence=tuple(self.confidence) if has_logprobs else None,
            tokens=tokens,
        )
