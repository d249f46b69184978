"""Finds models on the hub, without a long wait where there is no network."""

from __future__ import annotations

from partsong.errors import ArgumentError

__all__ = ["first_line", "is_hub_id", "why_offline"]


def is_hub_id(name: str) -> bool:
    """Whether a name has the form ``owner/name``.

    Example:
        >>> is_hub_id("org/model"), is_hub_id("./model"), is_hub_id("shapes")
        (True, False, False)
    """
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and all(name.split("/"))


def why_offline(name: str) -> str:
    """Asks the hub for a model once and returns why it does not answer, or "" if it does.

    A download without a network would try for half a minute.

    Raises:
        ArgumentError: the hub answers that it has no such model, or that it may not be read.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(name, timeout=10)
    except HfHubHTTPError as error:
        raise ArgumentError(f"the hub has no readable model {name} ({first_line(error)})") from error
    except Exception as error:  # noqa: BLE001 - the HTTP library raises many kinds of errors without a network
        return first_line(error)
    return ""


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
