"""Defines the errors of calls to a server, with whether a retry may help and what was lost."""

from __future__ import annotations

from partsong.reasoning.calls.engine import EngineError

__all__ = [
    "DroppedError",
    "GarbledError",
    "KeyRefusedError",
    "ModelNotServedError",
    "RateLimitError",
    "RemoteError",
    "RequestRefusedError",
    "ServerFailedError",
    "StalledError",
    "UnreachableError",
    "WithheldError",
]


class RemoteError(EngineError):
    """Says that a call to a server failed.

    Attributes:
        retry: whether the same request may succeed later.
        status: HTTP status; None where there was no response.
        wait: seconds the server asked us to wait; None where it did not ask.
        words: the server's own words, without the key.
        attempts: how often the request was sent.
        wasted: tokens that failed attempts had streamed; they are in no completion.

    >>> RateLimitError("too many", status=429, wait=2.0).retry
    True
    """

    retry: bool = False

    def __init__(
        self, message: str, *, status: int | None = None, wait: float | None = None, words: str = "", retry: bool = True
    ) -> None:
        super().__init__(message)
        self.status, self.wait, self.words, self.attempts, self.wasted = status, wait, words, 1, 0
        self.retry = self.retry and retry

    def after(self, attempts: int, wasted: int, hint: str = "") -> RemoteError:
        """Returns the same error, which also says how often it was tried and what that cost."""
        message = str(self)
        if attempts > 1:
            message += f" (the last of {attempts} attempts)"
        if wasted:
            message += f"; {wasted} tokens of failed attempts are lost"
        error = type(self)(message + hint, status=self.status, wait=self.wait, words=self.words, retry=self.retry)
        error.attempts, error.wasted = attempts, wasted
        return error


class _PassingError(RemoteError):
    """Says that a call failed in a way that may pass."""

    retry = True


class UnreachableError(_PassingError):
    """Says that there is no connection: no server listens, the name is unknown, or the certificate is not trusted."""


class DroppedError(_PassingError):
    """Says that the connection ended before the answer did."""


class StalledError(_PassingError):
    """Says that nothing came for longer than a call may wait."""


class GarbledError(_PassingError):
    """Says that a reply makes no sense: no JSON, no event, no choice, or more choices than requested."""


class ServerFailedError(_PassingError):
    """Says that the server failed inside (HTTP 5xx, or an error in the middle of a stream)."""


class RateLimitError(_PassingError):
    """Says that the server takes no more calls for now (HTTP 429)."""


class KeyRefusedError(RemoteError):
    """Says that the server does not accept the key, or not for this request (HTTP 401, 403)."""


class ModelNotServedError(RemoteError):
    """Says that the server does not know the model, or that there is no API at the address (HTTP 404)."""


class RequestRefusedError(RemoteError):
    """Says that the server finds the request wrong, or does not know one of its parameters (other HTTP 4xx)."""


class WithheldError(RemoteError):
    """Says that the server's content filter withheld the answer."""
