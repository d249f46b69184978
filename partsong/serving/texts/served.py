"""Defines what a server asks of a text model, and finds the one that a request names."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from partsong.serving.errors import ApiError
from partsong.serving.texts.events import TextEvent, TextRequest
from partsong.serving.texts.limits import TextLimits

__all__ = ["ServedText", "find_text"]


class ServedText(Protocol):
    """Answers requests for text with one model, in a process of its own or at another server.

    Attributes:
        name: what clients call it.
        limits: what requests may ask for.
    """

    name: str
    limits: TextLimits

    @property
    def ready(self) -> bool:
        """Returns whether the model can answer now."""
        ...

    @property
    def in_flight(self) -> int:
        """Counts the running requests."""
        ...

    async def start(self) -> None:
        """Makes the model ready."""
        ...

    async def close(self) -> None:
        """Ends running requests and frees what the model holds."""
        ...

    def run(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """Yields what happens while a request is answered: `TextAccepted` first, `TextDone` last.

        Closing the generator cancels this request only.

        Raises:
            ApiError: the request is refused or gets no answer.
        """
        ...

    def as_json(self) -> dict[str, Any]:
        """Returns the model by the keys of ``GET /v1/models``: id, kind, strategies and defaults."""
        ...


def find_text(texts: Mapping[str, ServedText], model: Any) -> tuple[ServedText, str]:
    """Finds the model of a request, and what stands after its name.

    A name may itself hold colons, as those of some servers do; the longest that fits is taken.

    Args:
        texts: the models by name.
        model: what the request says.

    Raises:
        ApiError: there is no such model; names those there are.
    """
    if not isinstance(model, str) or not model:
        raise ApiError(
            400, f"model={model!r}; give one of {', '.join(texts) or 'no models: none is served'}", param="model"
        )
    fits = [name for name in texts if model == name or model.startswith(f"{name}:")]
    if not fits:
        known = ", ".join(texts) or "none"
        raise ApiError(
            404, f"no text model {model!r} is served here; there are: {known}", param="model", code="model_not_found"
        )
    name = max(fits, key=len)
    return texts[name], model[len(name) + 1 :]
