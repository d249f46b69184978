"""Names what a request did wrong, or what failed on the way, as a status of HTTP and a body clients know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from partsong.errors import ArgumentError, ArgumentTypeError, OutputError, PartsongError, UnsupportedError

__all__ = [
    "ApiError", "CannotMakeError", "as_api_error", "as_written", "invalid", "json_kind", "leaving", "no_answer",
    "shortened",
]  # fmt: skip

#: Endpoints of the OpenAI API and its relatives, and what they would need; those below one are named with it.
_ABSENT = {
    "/v1/assistants": "assistants",
    "/v1/audio": "models of speech",
    "/v1/batches": "batches",
    "/v1/conversations": "conversations; /v1/responses has previous_response_id",
    "/v1/embeddings": "models of embeddings",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/images/variations": "variations; /v1/images/edits takes a picture",
    "/v1/moderations": "models of moderation",
    "/v1/realtime": "realtime sessions",
    "/v1/rerank": "models that rank",
    "/v1/threads": "threads; /v1/responses has previous_response_id",
    "/v1/vector_stores": "vector stores",
}
#: Most characters of a message.
_MOST = 2000
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(PartsongError):
    """Says that a request gets no answer.

    Attributes:
        status: status of HTTP.
        param: the field of the request that it is about, or None.
        code: a short name that programs can test, or None.
        retry_after: seconds after which the same request may succeed, or None.
        is_final: whether the same request would end the same way, so that clients should not repeat it.

    >>> ApiError(404, "no model 'x'", param="model", code="model_not_found").as_json()["error"]["type"]
    'not_found_error'
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        is_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.retry_after, self.is_final = retry_after, is_final

    @property
    def headers(self) -> dict[str, str]:
        """Returns what the reply says of another try; the official clients heed both."""
        headers = {} if self.retry_after is None else {"Retry-After": str(max(1, round(self.retry_after)))}
        return headers | ({"x-should-retry": "false"} if self.is_final else {})

    @property
    def type(self) -> str:
        """Returns the kind of error, as the OpenAI API names them."""
        if self.status >= 500:
            return "server_error"
        return _TYPES.get(self.status, "invalid_request_error")

    def as_json(self) -> dict[str, Any]:
        """Returns the body of the reply."""
        param = None if self.param is None else _cut(self.param, 100)
        return {"error": {"message": _cut(str(self), _MOST), "type": self.type, "param": param, "code": self.code}}


def _cut(text: str, most: int) -> str:
    """Returns a text without its middle where it is long: an error may repeat all that a client sent."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


class CannotMakeError(ArgumentError):
    """Says that a model cannot make what a request asks for.

    Attributes:
        param: the field of the request that asks for it.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def as_api_error(error: PartsongError) -> ApiError:
    """Returns any error of partsong as one of a request.

    What a caller can correct is 400, a disk that cannot be written 507, and the rest 500.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OutputError):
        return ApiError(507, str(error), code="no_room", retry_after=60.0)
    if isinstance(error, CannotMakeError):
        return ApiError(400, str(error), param=error.param, code="invalid_value")
    is_request = isinstance(error, ArgumentError | ArgumentTypeError | UnsupportedError)
    return ApiError(400 if is_request else 500, str(error))


#: Names that FastAPI gives the parts of a request, which clients do not write.
_PARTS = ("body", "query", "path", "header")


def invalid(first: Mapping[str, Any]) -> ApiError:
    """Returns the error for the first thing that pydantic finds wrong with a request.

    >>> str(invalid({"type": "json_invalid", "loc": ("body", 1), "msg": "", "ctx": {"error": "Expecting value"}}))
    'the body is not JSON: expecting value at character 1'
    """
    kind, reason = first["type"], _lowered(first["msg"])
    place = ".".join(str(part) for part in first["loc"] if part not in _PARTS)
    if kind == "json_invalid":
        why = f"{_lowered(first['ctx']['error'])} at character {first['loc'][-1]}"
        return ApiError(400, f"the body is not JSON: {why}", code="invalid_json")
    if kind == "extra_forbidden":
        message = f"{place} is not known here; leave it out"
    elif kind == "missing":
        message = f"{place or 'the body'} is missing"
    elif not place:
        message = f"the body is {json_kind(first['input'])}; send a JSON object"
    else:
        message = f"{place}={as_written(first['input'])}: {reason}"
    return ApiError(400, message, param=place or None, code="invalid_value")


def as_written(value: object, most: int = 60) -> str:
    """Returns a value of a request as its client wrote it, cut where it is long."""
    text = json.dumps(value, default=str)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def json_kind(value: object) -> str:
    """Returns what JSON calls a value.

    >>> json_kind([1]), json_kind(None)
    ('an array', 'null')
    """
    kinds = {list: "an array", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else kinds.get(type(value), "no JSON object")


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


def shortened(value: object, most: int = 60) -> str:
    """Returns what a client sent, cut where it is long, so that an error repeats no megabytes.

    >>> shortened("x" * 100, 5)
    "'xxxxx'..."
    """
    text = value if isinstance(value, str) else repr(value)
    return f"{text[:most]!r}..." if len(text) > most else f"{text!r}"


def leaving() -> ApiError:
    """Returns the error of a request that a server which ends does not answer any more."""
    return ApiError(503, "the server ends; ask again in a moment", code="server_ends", retry_after=5.0)


def no_answer(status: int, method: str, path: str, detail: str) -> ApiError:
    """Returns the error for a request that no endpoint takes.

    Args:
        status: of HTTP.
        method: of the request.
        path: below the root of the server.
        detail: what the web framework says of it.
    """
    for begin, what in _ABSENT.items():
        if path == begin or path.startswith(f"{begin}/"):
            message = f"{method} {shortened(path)}: this server has no {what}"
            return ApiError(404, message, code="unsupported_endpoint", is_final=True)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(status)
    return ApiError(status, f"{method} {shortened(path)}: {detail}", code=code)
