"""Reads the fields of requests for chats and texts, and refuses what would be ignored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from partsong.serving.answers.chat_bodies import AnswerBody
from partsong.serving.errors import ApiError, as_written, json_kind
from partsong.whole_text import whole_json

__all__ = ["OtherFields", "read_body", "read_fields"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherFields:
    """Lists fields of the API that a body does not hold.

    Attributes:
        hints: those that say something of the request and ask for nothing.
        neutral: those that have no effect here, with their neutral values; other values are refused.
        why: reasons for that, where there is more to say than that they are not supported.
    """

    hints: frozenset[str]
    neutral: Mapping[str, tuple[Any, ...]]
    why: Mapping[str, str]


_TOOLS = (
    "models of this server and its thinking methods read and write text alone; ask a model of a --upstream server "
    "without a strategy, with single, or with self-consistency, whose votes are calls then"
)
_HINTS = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "service_tier"})
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False, 0),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
}
_OF_CHATS = OtherFields(hints=_HINTS, neutral=_NEUTRAL, why={"tools": _TOOLS, "functions": _TOOLS})

AnyBody = TypeVar("AnyBody", bound=AnswerBody)


def read_fields(body: bytes) -> dict[str, Any]:
    """Reads the body of a request as a JSON object, whose texts are cleaned of half characters.

    Raises:
        ApiError: it is not a JSON object.
    """
    try:
        fields = whole_json(json.loads(body))
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body is {json_kind(fields)}; send a JSON object")
    return fields


def read_body(kind: type[AnyBody], fields: dict[str, Any], others: OtherFields = _OF_CHATS) -> AnyBody:
    """Checks the fields of a request.

    Args:
        kind: what holds the fields that are honoured.
        fields: all of them.
        others: what the API has besides.

    Raises:
        ApiError: a field is unknown, of another type, out of bounds, or asks for what is not done here.
    """
    for name, neutral in others.neutral.items():
        value = fields.get(name)
        if value not in neutral:
            why = others.why.get(name, "this server does not support it")
            raise ApiError(400, f"{name}={as_written(value)}: {why}; leave {name} out", param=name)
    try:
        return kind.model_validate(
            {
                name: value
                for name, value in fields.items()
                if name not in others.neutral and name not in others.hints and value is not None
            }
        )
    except ValidationError as error:
        raise _refused(kind, error, others) from None


def _refused(kind: type[AnswerBody], error: ValidationError, others: OtherFields) -> ApiError:
    """Returns the first thing that is wrong with a body, in words."""
    errors = error.errors(include_url=False, include_context=False)
    # Where a field may be a text or a list, pydantic's first error compares a list with the text and says nothing
    # useful.
    first = next((each for each in errors if each["type"] != "string_type"), errors[0])
    place = [part for part in first["loc"] if isinstance(part, int) or (part.isidentifier() and part != "str")]
    param = ".".join(map(str, place))
    if first["type"] == "extra_forbidden":
        known = ", ".join(sorted({*kind.model_fields, *others.neutral, *others.hints}))
        message = f"unknown field {param!r}" + (f"; the fields are {known}" if len(place) == 1 else "")
    elif first["type"] == "missing":
        message = f"{param} is missing"
    else:
        message = f"{param}={as_written(first['input'])}: {first['msg'][:1].lower()}{first['msg'][1:]}"
    return ApiError(400, message, param=param)
