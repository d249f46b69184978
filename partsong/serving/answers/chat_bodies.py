"""Holds what requests for chats and texts say."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from partsong.serving.errors import ApiError
from partsong.serving.texts.events import TextRequest
from partsong.serving.texts.limits import TextLimits

__all__ = ["AnswerBody", "ChatBody", "ChatMessageBody", "CompletionBody", "StreamOptionsBody", "StrictBody", "TextBody"]


#: Fields that a request takes over as they are.
_AS_GIVEN = {"temperature", "extract", "budget_tokens", "budget_calls", "budget_seconds", "cache", "block_size"}


class StrictBody(BaseModel):
    """Refuses fields that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _PartBody(StrictBody):
    type: Literal["text"]
    text: str


class ChatMessageBody(StrictBody):
    """Holds a message of a chat. Fields that only replies need may be present if they are empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_PartBody]
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def pair(self) -> tuple[str, str]:
        """Returns role and text, as `TextRequest` has them."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return "system" if self.role == "developer" else self.role, "".join(parts)


class StreamOptionsBody(StrictBody):
    """Says what a stream contains besides the text."""

    include_usage: bool = False
    include_obfuscation: bool = False
    include_threads: bool = False


class AnswerBody(StrictBody):
    """Holds what all requests for an answer of a text model share.

    `extract`, `budget_tokens`, `budget_calls`, `budget_seconds`, `cache` and `block_size` are extensions; see
    `TextRequest`.
    """

    #: Names of the fields with the texts and with their length, for errors.
    texts_field: ClassVar[str] = "messages"
    length_field: ClassVar[str] = "max_tokens"

    model: str
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    user: str | None = None
    extract: str | None = None
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    budget_calls: Annotated[int, Field(ge=1)] | None = None
    budget_seconds: Annotated[float, Field(gt=0)] | None = None
    cache: str | None = None
    block_size: Annotated[int, Field(ge=1)] | None = None

    @property
    @abstractmethod
    def length(self) -> int | None:
        """Returns the most tokens that an answer may have; None leaves it to the model."""

    @property
    @abstractmethod
    def shows_threads(self) -> bool:
        """Says whether the reply shows what each call writes."""

    @abstractmethod
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Returns role and text of each message."""

    def as_request(self, strategy: str, limits: TextLimits) -> TextRequest:
        """Returns the request, with a random seed where the body names none.

        Raises:
            ApiError: it asks for more than the limits allow.
        """
        pairs, length = self.pairs(), self.length
        _check_size(pairs, limits, self.texts_field)
        if length is not None and length > limits.max_tokens:
            message = f"{length} tokens were asked for; this server writes {limits.max_tokens} at most"
            raise ApiError(400, message, param=self.length_field)
        return TextRequest(
            messages=pairs,
            plain=isinstance(self, TextBody),
            strategy=strategy,
            seed=secrets.randbits(32) if self.seed is None else self.seed,
            max_tokens=length,
            top_p=1.0 if self.top_p is None else self.top_p,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            **self.model_dump(include=_AS_GIVEN),
            threads=self.shows_threads,
        )


class CompletionBody(AnswerBody):
    """Holds what requests for chats and for texts to continue share."""

    stream_options: StreamOptionsBody | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None

    @property
    def options(self) -> StreamOptionsBody:
        """Returns what a stream contains besides the text."""
        return self.stream_options or StreamOptionsBody()

    @property
    def length(self) -> int | None:
        """Returns the most tokens that an answer may have; None leaves it to the model."""
        return self.max_tokens

    @property
    def shows_threads(self) -> bool:
        """Says whether the reply shows what each call writes."""
        return self.options.include_threads

    def as_request(self, strategy: str, limits: TextLimits) -> TextRequest:
        """Returns the request; see `AnswerBody.as_request`.

        Raises:
            ApiError: it asks for several answers, or for more than the limits allow.
        """
        if self.n not in (None, 1):
            how = f"ask {self.n} times with other seeds, or use a strategy such as self-consistency:num={self.n}"
            raise ApiError(400, f"n={self.n}: one request gives one answer here; {how}", param="n")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for stream=true; leave it out", param="stream_options")
        return super().as_request(strategy, limits)


class TextBody(CompletionBody):
    """Holds a request to continue a text."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Returns the text as a message of the user."""
        return (("user", self.prompt if isinstance(self.prompt, str) else self.prompt[0]),)


class ChatBody(CompletionBody):
    """Holds a request to answer in a chat."""

    messages: Annotated[list[ChatMessageBody], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def length(self) -> int | None:
        """Returns the most tokens that an answer may have; None leaves it to the model."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Returns role and text of each message."""
        return tuple(message.pair for message in self.messages)


def _check_size(pairs: Sequence[tuple[str, str]], limits: TextLimits, field: str) -> None:
    if not pairs:
        raise ApiError(400, f"{field} has no message; say what to answer", param=field)
    if len(pairs) > limits.max_messages:
        message = f"the chat has {len(pairs)} messages; this server reads {limits.max_messages} at most"
        raise ApiError(400, message, param=field)
    size = sum(len(text) for _, text in pairs)
    if size > limits.max_characters:
        message = f"the messages have {size} characters; this server reads {limits.max_characters} at most"
        raise ApiError(400, message, param=field)
    try:
        "".join(text for _, text in pairs).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "a message has half of a surrogate pair, which is no character", param=field) from None
    role, text = pairs[-1]
    if role != "user":
        raise ApiError(400, f"the last message is of the role {role}; end with one of the user", param=field)
    if not text.strip():
        raise ApiError(400, "the last message is empty; say what to answer", param=field)
