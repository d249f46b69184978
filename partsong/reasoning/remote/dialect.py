"""What a server understands of the API: a request is written for it, and what it refuses is found out once."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from partsong.errors import ArgumentError, UnsupportedError
from partsong.reasoning.calls.call import Message, Request

__all__ = ["Dialect", "Endpoint", "joined"]

_LOG = logging.getLogger(__name__)

#: Where a request goes: messages, or one text to go on with.
Endpoint = Literal["chat", "completions"]

#: Names of the limit of tokens; the first is tried first.
_LIMITS = ("max_tokens", "max_completion_tokens")
#: Without these the answer is the same, only less is known of it or it cannot be had again.
_OPTIONAL = ("stream_options", "seed")
#: Without these the answer is the same if they have these values.
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0}
#: With these a chat goes on with its last message instead of answering it; without them it would be another question.
_GOING_ON = {"continue_final_message": True, "add_generation_prompt": False}
#: A server that does not know a parameter says so in one of these ways; "too large" is none of them.
_UNKNOWN = re.compile(
    r"un(?:supported|known|recogni[sz]ed|expected)|not (?:supported|permitted|allowed|recogni[sz]ed)|"
    r"(?:does|do) not (?:support|allow|accept)|extra (?:inputs|fields|parameter)|additional propert|"
    r"invalid (?:parameter|argument|field)|deprecated",
    re.IGNORECASE,
)
#: Seeds fit into 31 bits everywhere; one less, as llama.cpp keeps the largest number for "at random".
_SEEDS = 2**31 - 1


def joined(messages: Sequence[Message]) -> str:
    r"""Messages as one text, for models that know no chat: paragraphs, without roles.

    >>> joined([Message("system", ("Add.",)), Message("user", ("2+2=",))])
    'Add.\n\n2+2='
    """
    return "\n\n".join(message.text for message in messages)


@dataclass(slots=True)
class Dialect:
    """Writes requests, and learns from refusals.

    Attributes:
        endpoint: "chat" or "completions".
        model: as the server calls it.
        extra: further fields of every request.
        template: makes one text of messages, for completions.
        stream: whether answers come piece by piece.
        limit: the name of the limit of tokens the server takes.
        refused: optional fields it does not take.

    Raises:
        ArgumentError: an endpoint that is none, or a field in `extra` that is written from the request.
    """

    endpoint: Endpoint
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    template: Callable[[Sequence[Message]], str] = joined
    stream: bool = True
    limit: str = _LIMITS[0]
    refused: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.endpoint not in ("chat", "completions"):
            raise ArgumentError(f"endpoint={self.endpoint!r}; use chat or completions")
        ours = {"model", "messages", "prompt", "stop", "stream", "n", "logprobs", "top_logprobs", *_LIMITS, *_DEFAULTS}
        wrong = sorted((ours | set(_OPTIONAL)) & set(self.extra))
        if wrong:
            raise ArgumentError(f"extra={wrong} is written from each request; leave it out, and use Parameters")

    @property
    def path(self) -> str:
        """Behind the base address."""
        return "/chat/completions" if self.endpoint == "chat" else "/completions"

    def body(self, request: Request) -> dict[str, Any]:
        """A request as the server understands it.

        Raises:
            UnsupportedError: a chat to go on with, asked for in one piece.
        """
        drawn = request.parameters
        body: dict[str, Any] = {
            "model": self.model,
            **self._prompt(request.messages),
            self.limit: drawn.max_tokens,
            "temperature": drawn.temperature,
            "top_p": drawn.top_p,
            "seed": request.seed % _SEEDS,
            "stream": self.stream,
        }
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if drawn.stop:
            body["stop"] = list(drawn.stop)
        if drawn.logprobs and self.endpoint == "chat":
            body |= {"logprobs": True, "top_logprobs": drawn.logprobs}
        elif drawn.logprobs:
            body["logprobs"] = drawn.logprobs
        left_out = {name for name in self.refused if name not in _DEFAULTS or body[name] == _DEFAULTS[name]}
        return {name: value for name, value in body.items() if name not in left_out} | dict(self.extra)

    def _prompt(self, messages: Sequence[Message]) -> dict[str, Any]:
        if self.endpoint == "completions":
            return {"prompt": self.template(messages)}
        chat = {"messages": [{"role": message.role, "content": message.text} for message in messages]}
        if not messages or messages[-1].role != "assistant":
            return chat
        if not self.stream:  # llama.cpp does so
            raise UnsupportedError(
                "the chat's last message is the assistant's, to go on with, and with stream=False some servers repeat "
                "it in the answer: use stream=True, or endpoint='completions'"
            )
        return chat | _GOING_ON

    def learn(self, body: Mapping[str, Any], words: str) -> bool:
        """Whether a refused request is worth sending again in other words.

        Args:
            body: as it was sent.
            words: what the server said.

        Raises:
            UnsupportedError: it cannot go on with the last message of a chat.
        """
        if not _UNKNOWN.search(words):
            return False
        if any(name in body and _names(words, name) for name in _GOING_ON):
            raise UnsupportedError(
                f"the chat's last message is the assistant's, to go on with, and the server cannot ({words}): use "
                f"endpoint='completions', with a template= that writes the chat as the model knows it"
            )
        for name in (*_OPTIONAL, *_DEFAULTS):
            if name in body and _names(words, name) and body[name] == _DEFAULTS.get(name, body[name]):
                if name not in self.refused:
                    _LOG.info("the server does not take %s; it is left out from now on", name)
                self.refused.add(name)
                return True
        used = next(name for name in _LIMITS if name in body)
        if not _names(words, used):
            return False
        # Another call may have learned it meanwhile; what counts is how this one was sent.
        self.limit = next(name for name in _LIMITS if name != used)
        _LOG.info("the server does not take %s; it is %s from now on", used, self.limit)
        return True


def _names(words: str, name: str) -> bool:
    return re.search(rf"(?<![\w]){name}(?![\w])", words) is not None
