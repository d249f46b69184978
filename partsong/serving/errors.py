"""Names what a request did wrong, or what failed on the way, as a status of HTTP and a body clients know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partsong.errors import ArgumentError, ArgumentTypeError, PartsongError, UnsupportedError

__all__ = ["ApiError", "as_api_error", "invalid"]

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(PartsongError):
    """Says that a request gets no answer.

    Attributes:
        status: status of HTTP.
        param: the field of the request that it is about, or None.
        code: a short name that programs can test, or None.
        retry_after: seconds after which the same request may succeed, or None.

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
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    @property
    def type(self) -> str:
        """Returns the kind of error, as the OpenAI API names them."""
        if self.status >= 500:
            return "server_error"
        return _TYPES.get(self.status, "invalid_request_error")

    def as_json(self) -> dict[str, Any]:
        """Returns the body of the reply."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}


def as_api_error(error: PartsongError) -> ApiError:
    """Returns any error of partsong as one of a request: what a caller can correct is 400, the rest 500."""
    if isinstance(error, ApiError):
        return error
    is_request = isinstance(error, ArgumentError | ArgumentTypeError | UnsupportedError)
    return ApiError(400 if is_request else 500, str(error))


def invalid(first: Mapping[str, Any]) -> ApiError:
    """Returns the error for the first thing that pydantic finds wrong with a request."""
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "extra_forbidden":
        message = f"{place} is not known here; leave it out"
    else:
        message = f"{place or 'the body'}: {first['msg']}"
    return ApiError(400, message, param=place or None, code="invalid_value")
