"""Writes requests in a server's dialect of the API, and learns once what the server refuses."""

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

#: Where a request goes: "chat" takes messages, "completions" one text to continue.
Endpoint = Literal["chat", "completions"]

#: Names of the limit of tokens; the first is tried first.
_LIMITS = ("max_tokens", "max_completion_tokens")
#: Without these fields the answer is still right, but less is known of it, or it cannot be repeated.
_OPTIONAL = ("stream_options", "seed")
#: Without these fields the answer is the same, provided that they have these values.
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0}
#: With these fields the model continues the last message instead of answering it, which would be another question.
_CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}
#: How servers say that they do not know a parameter. A value that is too large is another complaint.
_UNKNOWN = re.compile(
    r"un(?:supported|known|recogni[sz]ed|expected)|not (?:supported|permitted|allowed|recogni[sz]ed)|"
    r"(?:does|do) not (?:support|allow|accept)|extra (?:inputs|fields|parameter)|additional propert|"
    r"invalid (?:parameter|argument|field)|deprecated",
    re.IGNORECASE,
)
#: Seeds of 31 bits work everywhere. The largest one is left out, because llama.cpp takes it for "at random".
_SEEDS = 2**31 - 1


def joined(messages: Sequence[Message]) -> str:
    r"""Joins messages into one text of paragraphs, without roles, for models that know no chat.

    >>> joined([Message("system", ("Add.",)), Message("user", ("2+2=",))])
    'Add.\n\n2+2='
    """
    return "\n\n".join(message.text for message in messages)


@dataclass(slots=True)
class Dialect:
    """Writes requests, and learns from refusals; all else is described in `OpenAIEngine`.

    Attributes:
        limit: name of the limit of tokens that the server takes.
        refused: optional fields that the server does not take.

    Raises:
        ArgumentError: `extra` has a field that is written from each request.
    """

    endpoint: Endpoint
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    template: Callable[[Sequence[Message]], str] = joined
    stream: bool = True
    limit: str = _LIMITS[0]
    refused: set[str] = field(default_factory=set)
    thinks: bool = False

    def __post_init__(self) -> None:
        fields = {"model", "messages", "prompt", "stop", "stream", "n", "logprobs", "top_logprobs"}
        taken = sorted({*fields, *_LIMITS, *_DEFAULTS, *_OPTIONAL} & set(self.extra))
        if taken:
            raise ArgumentError(f"extra={taken} is written from each request; leave it out, and use Parameters")

    @property
    def path(self) -> str:
        """Returns the path after the base address."""
        return "/chat/completions" if self.endpoint == "chat" else "/completions"

    def body(self, request: Request) -> dict[str, Any]:
        """Writes a request as the server understands it.

        Raises:
            UnsupportedError: the model should continue a chat, and answers are not streamed.
        """
        parameters = request.parameters
        body: dict[str, Any] = {
            "model": self.model,
            **self._prompt(request.messages),
            self.limit: parameters.max_tokens,
            "temperature": parameters.temperature,
            "top_p": parameters.top_p,
            "seed": request.seed % _SEEDS,
            "stream": self.stream,
        }
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if parameters.stop and (parameters.stop_in_thoughts or not self.thinks):
            body["stop"] = list(parameters.stop)
        if parameters.logprobs and self.endpoint == "chat":
            body |= {"logprobs": True, "top_logprobs": parameters.logprobs}
        elif parameters.logprobs:
            body["logprobs"] = parameters.logprobs
        left_out = {name for name in self.refused if name not in _DEFAULTS or body[name] == _DEFAULTS[name]}
        return {name: value for name, value in body.items() if name not in left_out} | dict(self.extra)

    def _prompt(self, messages: Sequence[Message]) -> dict[str, Any]:
        if self.endpoint == "completions":
            return {"prompt": self.template(messages)}
        chat = {"messages": [{"role": message.role, "content": message.text} for message in messages]}
        if not messages or messages[-1].role != "assistant":
            return chat
        if not self.stream:  # llama.cpp is such a server
            raise UnsupportedError(
                "the chat's last message is the assistant's, to continue, and with stream=False some servers repeat "
                "it in the answer: use stream=True, or endpoint='completions'"
            )
        return chat | _CONTINUE

    def learn(self, body: Mapping[str, Any], words: str) -> bool:
        """Learns from the text of a refusal; returns whether to send the request again in another form.

        Raises:
            UnsupportedError: the server cannot continue the last message of a chat.
        """
        if not _UNKNOWN.search(words):
            return False
        if any(name in body and _names(words, name) for name in _CONTINUE):
            raise UnsupportedError(
                f"the chat's last message is the assistant's, to continue, and the server cannot ({words}): use "
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
        # Another call may have learned it meanwhile, so the limit is chosen by how this one was sent.
        self.limit = next(name for name in _LIMITS if name != used)
        _LOG.info("the server does not take %s; it is %s from now on", used, self.limit)
        return True


def _names(words: str, name: str) -> bool:
    return re.search(rf"(?<![\w]){name}(?![\w])", words) is not None
