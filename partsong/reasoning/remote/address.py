"""Checks the address of a server, and keeps the key to it without ever showing it."""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import urlsplit

from partsong.errors import ArgumentError

__all__ = ["Secret", "check_address", "is_loopback"]

#: Sent where a server needs no key, because the client insists on one.
_NO_KEY = "none"


class Secret:
    """Holds a key that does not show itself when printed, logged or pickled.

    Args:
        value: the key; None or an empty text for none.
        source: where another one can be set, for messages.

    >>> Secret("sk-1234567890"), Secret("sk-1234567890").clean("not valid: sk-1234567890")
    (Secret(...), 'not valid: [key]')
    """

    __slots__ = ("_value", "source")

    def __init__(self, value: str | None, source: str = "api_key= or the environment's OPENAI_API_KEY") -> None:
        self._value, self.source = value, source

    def __repr__(self) -> str:
        return "Secret(...)" if self._value else "Secret(None)"

    def __bool__(self) -> bool:
        return bool(self._value)

    def __reduce__(self) -> str:
        raise TypeError("a key is not pickled; make the engine where it is used")

    def reveal(self) -> str:
        """Returns the key, for the one place that sends it."""
        return self._value or _NO_KEY

    def clean(self, text: str) -> str:
        """Returns a text with the key replaced by ``[key]``."""
        return text.replace(self._value, "[key]") if self._value else text

    @classmethod
    def find(cls, given: str | Secret | None) -> Secret:
        """Returns the key that was given, or else the environment's ``OPENAI_API_KEY``."""
        if isinstance(given, Secret):
            return given
        return cls(given if given is not None else os.environ.get("OPENAI_API_KEY"))


def is_loopback(host: str) -> bool:
    """Returns whether a host is this machine.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("10.0.0.1")
    (True, True, True, False)
    """
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(base_url: str, *, has_key: bool, plain_http: bool) -> str:
    """Returns an address, such as ``http://127.0.0.1:8000/v1``, without a slash at its end.

    It refuses addresses to which a key would go unencrypted over a network, unless `plain_http` allows that.

    Raises:
        ArgumentError: the address is not http, has a name and password in it, or would show the key to a network.
    """
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ArgumentError(f"base_url={base_url!r}; use an address such as http://127.0.0.1:8000/v1")
    if parts.username is not None or parts.password is not None:
        raise ArgumentError(f"the base_url of {parts.hostname} has a password in it; give it as api_key= instead")
    if parts.query or parts.fragment:
        raise ArgumentError(f"the base_url of {parts.hostname} has a query or fragment; leave out ? and # and the rest")
    if parts.scheme == "http" and has_key and not plain_http and not is_loopback(parts.hostname):
        raise ArgumentError(
            f"base_url={base_url!r} would carry the key unencrypted; use https, or api_key='' if the server wants none,"
            " or plain_http=True in a network you trust"
        )
    return base_url.rstrip("/")
