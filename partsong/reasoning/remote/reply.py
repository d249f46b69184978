"""Assembles an answer from a server's reply, piece by piece or at once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from partsong.reasoning.calls.call import Completion, Request, Usage
from partsong.reasoning.calls.thoughts import first_stop
from partsong.reasoning.remote.errors import (
    DroppedError,
    GarbledError,
    RequestRefusedError,
    ServerFailedError,
    WithheldError,
)
from partsong.reasoning.remote.logprobs import DrawnToken, drawn_tokens
from partsong.reasoning.remote.think_tags import without_thoughts
from partsong.whole_text import CleanedPieces

__all__ = ["ReplyPart", "Reply", "estimated_tokens"]

_LOG = logging.getLogger(__name__)

#: More tokens than one answer or prompt has: a server that reports more has miscounted.
_MOST_TOKENS = 10_000_000

#: The reasons that servers give for the end of an answer.
_STOPPED = {"stop", "eos", "eos_token", "end_turn", "stop_sequence", "completed"}
_CUT = {"length", "max_tokens", "max_output_tokens", "max_completion_tokens"}
_BROKEN = {"error", "abort", "cancelled"}
#: What some servers send in every piece in place of null.
_OPEN = {"", "null", "None"}


def estimated_tokens(text: str) -> int:
    """Estimates the uncounted tokens of a text: one for every four bytes.

    >>> estimated_tokens("twelve bytes"), estimated_tokens("")
    (3, 0)
    """
    return -(-len(text.encode("utf-8", "surrogatepass")) // 4)


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """Holds what one event brought.

    Attributes:
        text: new text of the answer.
        tokens: tokens of the answer so far; 0 where the event brought no new ones.
        confidence: confidence of the new tokens, as in `Completion`.
    """

    text: str = ""
    tokens: int = 0
    confidence: tuple[float, ...] = ()


class Reply:
    """Collects the reply so far; `tokens` is an estimate until the server reports its count."""

    def __init__(self, request: Request, think_tags: tuple[str, str] | None = None) -> None:
        self.request, self.think_tags = request, think_tags
        self._stops = tuple(filter(None, request.parameters.stop))
        #: Whether the server ended the answer before there was any, within hidden reasoning.
        self.ended_in_thoughts = False
        self.tokens = 0
        self._events = self._messages = self._bare = 0
        self._whole_text, self._whole_thought = CleanedPieces(), CleanedPieces()
        self._strange: Any = None
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._drawn: list[DrawnToken] = []
        self._reason: str | None = None
        self._usage: Mapping[str, Any] | None = None

    def add(self, event: Any) -> ReplyPart:
        """Takes one event of a stream, or a whole answer.

        Raises:
            GarbledError: the event makes no sense, or has more answers than one.
            ServerFailedError: the event says that the server failed.
        """
        if not isinstance(event, Mapping):
            raise GarbledError(f"the server sent {_short(event)} where an object was due")
        self._events += 1
        if event.get("error") or event.get("object") == "error":
            words = _short(event.get("error") or dict(event))
            raise ServerFailedError(f"the server failed in the middle of an answer: {words}")
        if isinstance(event.get("usage"), Mapping):
            self._usage = event["usage"]
        choices = [] if event.get("choices") is None else event["choices"]
        if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
            raise GarbledError(f"the server sent choices={_short(choices)} where a list of objects was due")
        if len(choices) > 1 or any(choice.get("index") not in (0, None) for choice in choices):
            others = f"one answer was asked for and the server sent others: {_short(choices)}"
            raise GarbledError(others, retry=False)
        if not choices and not isinstance(event.get("usage"), Mapping):
            self._strange = dict(event)
        return self._choice(choices[0]) if choices else ReplyPart()

    def _choice(self, choice: Mapping[str, Any]) -> ReplyPart:
        self._messages += any(choice.get(name) is not None for name in ("delta", "message", "text"))
        message = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        if not isinstance(message, Mapping):
            raise GarbledError(f"the server sent {_short(message)} where a message was due")
        if self._reason is not None:  # the answer has ended; some servers send an empty piece after it
            if message.get("content"):
                _LOG.warning("the server sent %s after the end of the answer, which is left out", _short(message))
            return ReplyPart()
        text, thought = _parts(message.get("content"))
        hidden = [message.get(name) for name in ("reasoning_content", "reasoning")]
        thought += next((part for part in hidden if isinstance(part, str)), "")  # some servers send the same in both
        text, thought = self._whole_text.push(text), self._whole_thought.push(thought)
        drawn = drawn_tokens(choice.get("logprobs"))
        if choice.get("finish_reason") is not None and choice["finish_reason"] not in _OPEN:
            self._reason = str(choice["finish_reason"])
            text, thought = text + self._whole_text.end(), thought + self._whole_thought.end()
        self._texts.append(text)
        self._thoughts.append(thought)
        self._drawn += drawn
        self._bare += bool(text and not drawn)
        new = len(drawn) or (1 if text or thought else 0)
        self.tokens += new
        return ReplyPart(text, self.tokens, self._confidence(drawn)) if new else ReplyPart()

    def completion(self) -> Completion:
        """Returns the answer, once all events have been added.

        Raises:
            DroppedError: the server never said that the answer had ended.
            WithheldError: the server's content filter withheld the answer.
            GarbledError: there was no message, or the answer ended for an unknown reason.
            RequestRefusedError: log-probabilities were asked for and did not come.
        """
        if not self._messages:
            what = "no message in its choice" if self._reason is not None else "no choice"
            what += "" if self._strange is None else f" but {_short(self._strange)}"
            raise GarbledError(f"the server sent {self._events} events and {what}; is base_url that of an API?")
        whole, hidden = without_thoughts("".join(self._texts), self.think_tags)
        thoughts = "".join(self._thoughts) or hidden
        usage, reasoned = self._token_counts()
        # Not every server looks for stop strings, or leaves them out.
        text = whole if self.request.parameters.stop_in_thoughts else whole[: first_stop(whole, self._stops)]
        finish = self._finish() if text == whole else "stop"
        self.ended_in_thoughts = finish == "stop" and bool(thoughts) and not whole.strip()
        if not whole.strip() and (thoughts or 0 < usage.completion <= reasoned):
            finish = "length"  # all tokens went into hidden reasoning, even where the server calls this a stop
        if usage.reported and usage.completion > self.request.parameters.max_tokens:
            _LOG.warning("the server wrote %d tokens of %d", usage.completion, self.request.parameters.max_tokens)
            finish = "length"
        logprobs, confidence = self._probabilities(usage, None if thoughts and not reasoned else reasoned)
        return Completion(
            text=text, finish=finish, usage=usage, reasoning=thoughts, logprobs=logprobs, confidence=confidence
        )

    @property
    def has_stopped(self) -> bool:
        """Returns whether a stop string has appeared in the answer, for servers that are not to look for it."""
        text, _ = without_thoughts("".join(self._texts), self.think_tags)
        return first_stop(text, self._stops) is not None

    def _finish(self) -> Literal["stop", "length"]:
        if self._reason is None:
            raise DroppedError(f"the answer broke off after {self.tokens} tokens, before the server said it had ended")
        if self._reason in _STOPPED:
            return "stop"
        if self._reason in _CUT:
            return "length"
        if self._reason in _BROKEN:
            raise ServerFailedError(f"the server ended the answer itself: finish_reason={self._reason!r}")
        if self._reason == "content_filter":
            raise WithheldError("the server's content filter withheld the answer; ask in other words")
        reason = f"the server ended with finish_reason={_short(self._reason)}, which does not end a text"
        raise GarbledError(reason, retry=False)

    def _token_counts(self) -> tuple[Usage, int]:
        """Returns the server's token counts and its tokens of hidden reasoning; estimates where it does not count."""
        reported = self._usage or {}
        prompt, completion = _count(reported.get("prompt_tokens")), _count(reported.get("completion_tokens"))
        if max(prompt or 0, completion or 0) > _MOST_TOKENS:
            _LOG.warning("the server reports %s, which nobody wrote; tokens are estimated", _short(dict(reported)))
            prompt = completion = None
        if prompt is None or completion is None or (self.tokens and not completion):
            chat = sum(estimated_tokens(message.text) + 4 for message in self.request.messages)
            whole = estimated_tokens("".join((*self._texts, *self._thoughts)))
            # The number of events equals that of tokens only where a server sends each token separately.
            return Usage(prompt=chat, completion=max(self.tokens, whole if not self._drawn else 0), reported=False), 0
        cached = _count(_inner(reported, "prompt_tokens_details").get("cached_tokens")) or 0
        reasoning = _count(_inner(reported, "completion_tokens_details").get("reasoning_tokens")) or 0
        return Usage(prompt=prompt, cached=min(cached, prompt), completion=completion), reasoning

    def _probabilities(
        self, usage: Usage, reasoned: int | None
    ) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        num, drawn = self.request.parameters.logprobs, len(self._drawn)
        if not num:
            return None, None
        if not drawn and usage.completion > 1:  # an empty answer has no log-probabilities to report
            raise RequestRefusedError(
                f"logprobs={num} were asked for and the server sent none; it cannot serve strategies that need them"
            )
        most = self._tokens_drawn(usage, reasoned)
        if drawn < most:
            raise RequestRefusedError(
                f"logprobs={num} were asked for and the server sent those of {drawn} tokens of at least {most}; it "
                f"cannot serve strategies that need one for each"
            )
        confidence = self._confidence(self._drawn)
        return tuple(own for own, _ in self._drawn), confidence if len(confidence) == drawn else None

    def _tokens_drawn(self, usage: Usage, reasoned: int | None) -> int:
        """Returns how many tokens of the answer must have log-probabilities, at least.

        Servers need not send those of hidden reasoning, of the token that ends a text, and of what a stop string cuts.
        """
        if not self._drawn:
            return 0
        if not usage.reported:
            return len(self._drawn) + self._bare - 1
        cut = max(map(len, self.request.parameters.stop), default=0)
        return 0 if reasoned is None else usage.completion - reasoned - 1 - cut

    def _confidence(self, drawn: list[DrawnToken]) -> tuple[float, ...]:
        """Returns the confidence by token; servers may send the drawn token on top of the alternatives asked for."""
        num = self.request.parameters.logprobs
        return tuple(-sum(top[:num]) / len(top[:num]) for _, top in drawn if top and num)


def _parts(content: Any) -> tuple[str, str]:
    """Returns text and thoughts of a message's content, which some servers send as a list of typed parts."""
    if content is None or isinstance(content, str):
        return content or "", ""
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise GarbledError(f"the server sent content={_short(content)} where text was due")
    text = "".join(part["text"] for part in content if isinstance(part.get("text"), str))
    nested = [_parts(part["thinking"])[0] for part in content if part.get("thinking") is not None]
    return text, "".join(nested)


def _inner(usage: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    details = usage.get(name)
    return details if isinstance(details, Mapping) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _short(value: Any) -> str:
    quoted = repr(value)
    return quoted if len(quoted) <= 200 else quoted[:197] + "..."
