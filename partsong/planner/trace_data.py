"""Writes traces as data that JSON can hold, and reads them back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from partsong.planner.operators import OperatorWork
from partsong.planner.trace import CallPart, CallTrace, Event, Post, Wait

__all__ = ["TraceTable", "data_of"]


def data_of(traces: Mapping[str, CallTrace]) -> dict[str, Any]:
    """Returns traces as JSON has them: calls name their events by places in one list, because most recur."""
    places: dict[str, int] = {}

    def place(event: Event) -> int:
        fields = [*(list(way.items()) for way in event[:2]), event.lane] if isinstance(event, Post) else list(event)
        return places.setdefault(json.dumps([type(event).__name__, *fields]), len(places))

    def call(parts: Sequence[CallPart]) -> list[Any]:
        return [[[place(event) for event in part.events], part.times] for part in parts]

    rows = {
        key: {
            "first": call(trace.first),
            "steady": None if trace.steady == trace.first else call(trace.steady),
            "numbers": {name: getattr(trace, name) for name in _NUMBERS},
        }
        for key, trace in traces.items()
    }
    return {"events": [json.loads(text) for text in places], "traces": rows}


class TraceTable:
    """Reads traces from what `data_of` has made of them.

    Args:
        data: what `data_of` returned, or JSON read back.

    Raises:
        LookupError: something is missing; a ``TypeError`` or ``ValueError`` where something is of the wrong kind.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._events = [_KINDS[kind](fields) for kind, *fields in data["events"]]
        self._rows: Mapping[str, Any] = data["traces"]

    def trace(self, key: str) -> CallTrace | None:
        """Returns a trace; None where there is none of this name."""
        if (row := self._rows.get(key)) is None:
            return None
        first = self._call(row["first"])
        numbers = {name: row["numbers"][name] for name in _NUMBERS}
        numbers["checks"] = tuple(numbers["checks"])
        return CallTrace(first=first, steady=first if row["steady"] is None else self._call(row["steady"]), **numbers)

    def _call(self, parts: Sequence[Any]) -> tuple[CallPart, ...]:
        return tuple(CallPart(tuple(self._events[place] for place in places), times) for places, times in parts)


_NUMBERS = ("warmup", "working", "weights", "kept", "checks", "returned", "handed", "keys", "blocks")
#: How an event is made of its fields, by its name.
_KINDS: Mapping[str, Callable[[Sequence[Any]], Any]] = {
    "Post": lambda fields: Post(dict(map(tuple, fields[0])), dict(map(tuple, fields[1])), fields[2]),
    "Wait": lambda fields: Wait(*fields),
    "OperatorWork": lambda fields: OperatorWork(*fields),
}
