"""Holds what requests for ``/v1/responses`` say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from partsong.serving.answers.chat_bodies import AnswerBody, StrictBody
from partsong.serving.answers.chat_fields import OtherFields

__all__ = ["OTHER_FIELDS", "InputMessage", "ResponseBody"]

_TOOLS = "answers are text alone here; ask a model of a --upstream server without a strategy, where tools go through"
#: Fields of the API that a `ResponseBody` does not hold.
OTHER_FIELDS = OtherFields(
    hints=frozenset(
        {
            "max_tool_calls",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "stream_options",
        }
    ),
    neutral={
        "context_management": (None, []),
        "conversation": (None,),
        # What a model has thought is in its reply as it is: there is nothing that could come encrypted.
        "include": (None, [], ["reasoning.encrypted_content"]),
        "moderation": (None,),
        "parallel_tool_calls": (None, True, False),
        "prompt": (None,),
        "tool_choice": (None, "none", "auto"),
        "tools": (None, []),
        "top_logprobs": (None, 0),
        "truncation": (None, "disabled"),
    },
    why={
        "conversation": "conversations are kept by previous_response_id alone",
        "tools": _TOOLS,
        "truncation": "no message is left out here",
    },
)


class _Part(StrictBody):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(StrictBody):
    """Holds a message of the input, or one of an earlier reply as clients send it back."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    @property
    def pair(self) -> tuple[str, str]:
        """Returns role and text, as `TextRequest` has them."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return "system" if self.role == "developer" else self.role, "".join(parts)


class _Thoughts(BaseModel):
    """Holds what a model thought in an earlier turn, which clients send back and no later turn reads."""

    model_config = ConfigDict(frozen=True)

    type: Literal["reasoning"]


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return str(kind)[:60]


_Item = Annotated[
    Annotated[InputMessage, Tag("message")] | Annotated[_Thoughts, Tag("reasoning")], Discriminator(_kind)
]


class _Format(StrictBody):
    type: Literal["text"] = "text"


class _TextSettings(StrictBody):
    format: _Format | None = None
    verbosity: Literal["medium"] | None = None


class _ReasoningSettings(StrictBody):
    """Says what is shown of the thinking; how long it takes is part of the model's name, so effort is refused."""

    effort: Literal["medium"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseBody(AnswerBody):
    """Holds a request of ``/v1/responses``."""

    texts_field: ClassVar[str] = "input"
    length_field: ClassVar[str] = "max_output_tokens"

    input: str | Annotated[list[_Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    text: _TextSettings | None = None
    reasoning: _ReasoningSettings | None = None
    previous_response_id: str | None = None
    store: bool = True
    background: bool = False

    @property
    def length(self) -> int | None:
        """Returns the most tokens that an answer may have; None leaves it to the model."""
        return self.max_output_tokens

    @property
    def summary(self) -> str | None:
        """Returns how the thinking is to be shown; None does not show it."""
        return None if self.reasoning is None else self.reasoning.summary or self.reasoning.generate_summary

    @property
    def shows_threads(self) -> bool:
        """Says whether the reply shows what each call writes."""
        return self.summary is not None

    @property
    def turns(self) -> tuple[tuple[str, str], ...]:
        """Returns role and text of each message of the input."""
        if isinstance(self.input, str):
            return (("user", self.input),)
        return tuple(item.pair for item in self.input if isinstance(item, InputMessage))

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Returns role and text of each message, the instructions first."""
        return self.turns if self.instructions is None else (("system", self.instructions), *self.turns)

    def after(self, earlier: Sequence[tuple[str, str]]) -> ResponseBody:
        """Returns the request with the messages of earlier turns before its own."""
        turns: list[Any] = [InputMessage(role=role, content=text) for role, text in (*earlier, *self.turns)]  # type: ignore[arg-type]
        return self.model_copy(update={"input": turns})
