"""What the client of an API raises, as errors with a name, a reason and something to do about it."""

from __future__ import annotations

import email.utils
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

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

__all__ = ["asked_pause", "named_faults", "stalled"]

#: Longest part of a server's own words in a message.
_WORDS = 300


@contextmanager
def named_faults(where: str, clean: Callable[[str], str], began: Callable[[], bool]) -> Iterator[None]:
    """Gives the client's errors their names inside the block.

    Args:
        where: the address, for messages.
        clean: takes secrets out of a text.
        began: whether anything of an answer had come.

    Raises:
        RemoteError: instead of the client's errors. These are not chained to it: they hold the request, and with it
            the key.
    """
    import openai

    try:
        yield
    except openai.APITimeoutError as error:
        raise UnreachableError(f"{where} does not take connections: {clean(_root(error))}; is it up?") from None
    except openai.APIConnectionError as error:
        raise _unconnected(where, clean(_root(error)), began()) from None
    except openai.APIStatusError as error:
        raise _refused(where, error.status_code, clean(_words(error)), error.response.headers) from None
    except openai.APIError as error:
        raise ServerFailedError(f"{where} failed in the middle of an answer: {clean(_words(error))}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GarbledError(f"{where} sent what is no JSON: {clean(str(error))[:_WORDS]}") from None


def _unconnected(where: str, words: str, began: bool) -> RemoteError:
    if began or "disconnected" in words or "ReadError" in words:
        return DroppedError(f"{where} dropped the connection: {words}")
    return UnreachableError(f"{where} cannot be reached: {words}; is the server up, and base_url right?")


def _refused(where: str, status: int, words: str, headers: Mapping[str, str]) -> RemoteError:
    said = f"{where} answered {status}: {words}"
    if status == 429:
        error: RemoteError = RateLimitError(said, status=status, wait=asked_pause(headers), words=words)
        error.retry = "insufficient_quota" not in words
        return error
    if status in (408, 409, 425) or (status >= 500 and status not in (501, 505)):
        return ServerFailedError(said, status=status, wait=asked_pause(headers), words=words)
    if status in (401, 403):
        hint = "; set api_key= or the environment's OPENAI_API_KEY"
        return KeyRefusedError(said + hint, status=status, words=words)
    if status == 404:
        return ModelNotServedError(said, status=status, words=words)
    return RequestRefusedError(said, status=status, words=words)


def _words(error: Exception) -> str:
    """The server's own, in one line."""
    body = getattr(error, "body", None)
    said = body if isinstance(body, str) else json.dumps(body, ensure_ascii=False) if body else str(error)
    line = " ".join(said.split())
    return line if len(line) <= _WORDS else line[: _WORDS - 3] + "..."


def _root(error: BaseException) -> str:
    """The deepest cause that has something to say, with its name."""
    said = type(error).__name__
    while error is not None:
        if str(error):
            said = f"{type(error).__name__}: {error}"
        following = error.__cause__ or error.__context__
        if following is None:
            return said
        error = following
    return said


def asked_pause(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds a server asks for: ``retry-after-ms``, or ``Retry-After`` in seconds or as a date.

    Args:
        headers: of the response, by lower-case names.
        now: seconds since the epoch, for dates; None is now.

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


def stalled(where: str, seconds: float, began: bool) -> StalledError:
    """Nothing came for so long."""
    if began:
        return StalledError(f"{where} sent nothing for patience stall={seconds:g} s in the middle of an answer")
    return StalledError(f"{where} did not begin to answer within patience first={seconds:g} s")
