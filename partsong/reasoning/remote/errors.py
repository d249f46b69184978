"""What can go wrong between here and a server, by name: whether trying again may help, and what had been streamed."""

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
    """A call of a server failed.

    Attributes:
        retry: whether the same request may succeed later.
        status: of HTTP; None where there was no response.
        wait: seconds the server asked to be left alone; None where it did not say.
        words: what the server said, without the key.
        attempts: how often the request was sent.
        wasted: tokens that failed attempts had streamed; they are in no completion.

    >>> RateLimitError("too many", status=429, wait=2.0).retry
    True
    """

    retry: bool = False

    def __init__(
        self, message: str, *, status: int | None = None, wait: float | None = None, words: str = "", attempts: int = 1
    ) -> None:
        super().__init__(message)
        self.status, self.wait, self.words, self.attempts = status, wait, words, attempts
        self.wasted = 0

    def after(self, attempts: int, wasted: int, hint: str = "") -> RemoteError:
        """The same error, which also says how often it was tried and what that cost."""
        said = str(self)
        if attempts > 1:
            said += f" (the last of {attempts} attempts)"
        if wasted:
            said += f"; {wasted} tokens of failed attempts are lost"
        again = type(self)(said + hint, status=self.status, wait=self.wait, words=self.words, attempts=attempts)
        again.wasted = wasted
        return again


class UnreachableError(RemoteError):
    """No connection: nobody listens there, the name is unknown, or the certificate is not trusted."""

    retry = True


class DroppedError(RemoteError):
    """The connection ended before the answer did."""

    retry = True


class StalledError(RemoteError):
    """Nothing came for longer than a call may wait."""

    retry = True


class GarbledError(RemoteError):
    """What came back makes no sense: no JSON, no event, no choice, or more choices than were asked for."""

    retry = True


class ServerFailedError(RemoteError):
    """The server failed inside (HTTP 5xx, or an error in the middle of a stream)."""

    retry = True


class RateLimitError(RemoteError):
    """The server takes no more calls for now (HTTP 429)."""

    retry = True


class KeyRefusedError(RemoteError):
    """The server does not accept the key, or not for this (HTTP 401, 403)."""


class ModelNotServedError(RemoteError):
    """The server does not know the model, or the address is not that of an API (HTTP 404)."""


class RequestRefusedError(RemoteError):
    """The server takes the request for wrong, or does not know one of its parameters (other HTTP 4xx)."""


class WithheldError(RemoteError):
    """The answer was withheld by the server's content filter."""
