"""Turns exceptions of an API's client into errors with a name, a reason and advice."""

from __future__ import annotations

import email.utils
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from partsong.reasoning.remote.address import Secret
from partsong.reasoning.remote.errors import (
    DroppedError,
    GarbledError,
    KeyRefusedError,
    ModelNotServedError,
    RateLimitError,
    RemoteError,
    RequestRefusedError,
    ServerFailedError,
    StalledError,
    UnreachableError,
)
from partsong.whole_text import whole_text

if TYPE_CHECKING:
    import openai

__all__ = ["asked_pause", "named_faults", "stalled"]

#: Most characters of a server's own words in a message.
_WORDS = 300


@contextmanager
def named_faults(where: str, key: Secret, began: Callable[[], bool]) -> Iterator[None]:
    """Gives the client's errors their names inside the block.

    Args:
        where: the address, for messages.
        key: is taken out of texts, and says where another one can be set.
        began: returns whether part of an answer had arrived.

    Raises:
        RemoteError: replaces the client's errors. These are not chained to it, because they hold the request, and with
            it the key.
    """
    import httpx2
    import openai

    clean = key.clean
    try:
        yield
    except openai.APITimeoutError as error:
        raise UnreachableError(f"{where} does not take connections: {clean(_root(error))}; is it up?") from None
    except openai.APIConnectionError as error:
        raise _connection_error(where, clean(_root(error)), began()) from None
    except httpx2.TransportError as error:  # the client does not wrap these where a body is read late
        raise _connection_error(where, clean(_root(error)), began()) from None
    except openai.APIStatusError as error:
        raise _status_error(where, error.status_code, clean(_words(error)), error.response.headers, key) from None
    except openai.APIError as error:
        raise ServerFailedError(f"{where} failed in the middle of an answer: {clean(_words(error))}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GarbledError(f"{where} did not send JSON: {clean(str(error))[:_WORDS]}") from None


def _connection_error(where: str, words: str, began: bool) -> RemoteError:
    if began or any(sign in words for sign in ("disconnected", "ReadError", "without sending complete")):
        return DroppedError(f"{where} dropped the connection: {words}")
    return UnreachableError(f"{where} cannot be reached: {words}; is the server up, and base_url right?")


def _status_error(where: str, status: int, words: str, headers: Mapping[str, str], key: Secret) -> RemoteError:
    message = f"{where} answered {status}: {words}"
    if status == 429:
        retry = "insufficient_quota" not in words
        return RateLimitError(message, status=status, wait=asked_pause(headers), words=words, retry=retry)
    if status in (408, 409, 425) or (status >= 500 and status not in (501, 505)):
        return ServerFailedError(message, status=status, wait=asked_pause(headers), words=words)
    if status in (401, 403):
        return KeyRefusedError(f"{message}; set {key.source}", status=status, words=words)
    if status == 404:
        return ModelNotServedError(message, status=status, words=words)
    return RequestRefusedError(message, status=status, words=words)


def _words(error: openai.APIError) -> str:
    """Returns the server's own words in one line."""
    body = error.body
    words = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False) if body else str(error)
    line = " ".join(whole_text(words).split())
    return line if len(line) <= _WORDS else line[: _WORDS - 3] + "..."


def _root(error: BaseException) -> str:
    """Returns the message of the deepest cause that has one, with its name."""
    message, cause = type(error).__name__, error
    while cause is not None:
        if str(cause):
            message = f"{type(cause).__name__}: {cause}"
        cause = cause.__cause__ or cause.__context__
    return message


def asked_pause(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Returns the seconds a server asks for: ``retry-after-ms``, or ``Retry-After`` in seconds or as a date.

    Names of headers are in lower case. `now`, in seconds since the epoch, is for dates; None takes the clock.

    >>> asked_pause({"retry-after": "2"}), asked_pause({"retry-after-ms": "50"}), asked_pause({})
    (2.0, 0.05, None)
    """
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) / scale
        except ValueError:
            continue
        if math.isfinite(seconds):
            return max(seconds, 0.0)
    date = email.utils.parsedate_tz(headers.get("retry-after", ""))
    if date is None:
        return None
    return max(email.utils.mktime_tz(date) - (time.time() if now is None else now), 0.0)


def stalled(where: str, seconds: float, limit: Literal["first", "stall", "connect"]) -> StalledError:
    """Returns the error of a server that sent nothing for longer than a limit of `Patience` allows."""
    fault = "sent nothing in the middle of an answer" if limit == "stall" else "did not begin to answer"
    return StalledError(f"{where} {fault} for {seconds:g} s; raise Patience({limit}=...) to wait longer")
