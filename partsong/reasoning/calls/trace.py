"""Writes a record of a run: a line of JSON per call, a trace for Perfetto, or a page that shows the threads."""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import Any

from partsong.errors import ArgumentError
from partsong.outputs import write_text
from partsong.reasoning.calls.graph import CallGraph, CallNode

__all__ = ["FORMATS", "as_lines", "as_page", "as_perfetto", "lanes", "write_trace"]

#: File endings and their formats.
FORMATS = {".jsonl": "a line per call", ".json": "a trace for Perfetto", ".html": "a page that shows the threads"}


def write_trace(graph: CallGraph, path: str | Path, *, title: str = "") -> Path:
    """Writes the calls of a run in the format its name ends in.

    Args:
        graph: the calls.
        path: ends in ``.jsonl``, ``.json`` (open it in Perfetto or in a browser's tracing page) or ``.html``.
        title: title of the page.

    Raises:
        ArgumentError: the ending is unknown, or the file cannot be written.
    """
    target = Path(path)
    check_format(target)
    text = {".jsonl": as_lines, ".json": lambda g: json.dumps(as_perfetto(g)), ".html": lambda g: as_page(g, title)}
    return write_text(target, text[target.suffix](graph))


def check_format(path: Path) -> None:
    """Refuses file names with an ending that names no format; the error names the endings there are."""
    if path.suffix not in FORMATS:
        known = "; ".join(f"{ending}, {what}" for ending, what in FORMATS.items())
        raise ArgumentError(f"a trace named {path.name} has no known format; end it in {known}")


def as_lines(graph: CallGraph) -> str:
    """Writes a line with a JSON object for each call, in the order in which they began.

    Each has ``name path sample reads waits start end finish tokens prompt_tokens cached reported replayed chat text
    reasoning``. Times are seconds since the run began.
    """
    return "".join(json.dumps(_record(node), ensure_ascii=False) + "\n" for node in graph.nodes.values())


def _record(node: CallNode) -> dict[str, Any]:
    completion = node.completion
    return {
        "name": node.name,
        "path": list(node.request.path),
        "sample": node.request.sample,
        "reads": list(node.reads),
        "waits": list(node.waits),
        "start": node.start,
        "end": node.end,
        "finish": None if completion is None else completion.finish,
        "tokens": node.tokens,
        "prompt_tokens": None if completion is None else completion.usage.prompt,
        "cached": None if completion is None else completion.usage.cached,
        "reported": None if completion is None else completion.usage.reported,
        "replayed": node.replayed,
        "chat": [[message.role, message.text] for message in node.request.messages],
        "text": None if completion is None else completion.text,
        "reasoning": None if completion is None else completion.reasoning,
    }


def lanes(graph: CallGraph) -> dict[str, int]:
    """Gives every call a lane, as few as possible, so that no two calls of a lane overlap.

    >>> lanes(CallGraph())
    {}
    """
    lane_of: dict[str, int] = {}
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    for node in sorted(graph.nodes.values(), key=lambda node: node.start):
        while busy and busy[0][0] <= node.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        lane_of[node.name] = lane
        heapq.heappush(busy, (_end(node), lane))
    return lane_of


def _end(node: CallNode) -> float:
    return node.start if node.end is None else max(node.end, node.start)


def as_perfetto(graph: CallGraph) -> dict[str, Any]:
    """Writes the trace event format: a slice per call, an arrow for every answer another call reads; microseconds."""
    rows, events = lanes(graph), []
    for lane in range(max(rows.values(), default=-1) + 1):
        label = {"name": f"thread {lane + 1}"}
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": lane, "args": label})
    for node in graph.nodes.values():
        place = {"pid": 1, "tid": rows[node.name]}
        start, end = 1e6 * node.start, 1e6 * _end(node)
        kept = {name: value for name, value in _record(node).items() if name not in ("name", "start", "end", "chat")}
        events.append(
            {"name": node.name, "cat": "call", "ph": "X", "ts": start, "dur": end - start, "args": kept, **place}
        )
        for other in node.reads:
            arrow = {"name": "reads", "cat": "reads", "id": f"{other} > {node.name}", "pid": 1}
            events.append({**arrow, "ph": "s", "ts": 1e6 * _end(graph.nodes[other]), "tid": rows[other]})
            events.append({**arrow, "ph": "f", "bp": "e", "ts": start, "tid": rows[node.name]})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def as_page(graph: CallGraph, title: str = "") -> str:
    """Writes one page that loads nothing from outside: a bar per call in the lanes of `lanes`, and all texts below."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    rows = lanes(graph)
    last = max((_end(node) for node in graph.nodes.values()), default=0.0) or 1.0
    calls = [
        {
            **_record(node),
            "left": 100 * node.start / last,
            "width": max(100 * (_end(node) - node.start) / last, 0.2),
            "lane": rows[node.name],
        }
        for node in graph.nodes.values()
    ]
    jinja = Environment(loader=PackageLoader("partsong.reasoning.calls"), autoescape=True, undefined=StrictUndefined)
    page = jinja.get_template("timeline.html.j2")
    return page.render(title=title, calls=calls, lanes=max(rows.values(), default=-1) + 1, seconds=last)
