"""Shows the calls of a run in the terminal while they are written, a line per thread."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, TextIO

from partsong.cli.screen import BOLD, DIM, PALETTE, Piece, Screen, columns, is_live, printable

if TYPE_CHECKING:
    from partsong.reasoning.calls.graph import CallNode

__all__ = ["Threads"]

#: Seconds between two drawings.
FRAME_SECONDS = 0.1


class Threads:
    """Draws every call: the end of its text while it runs, and then how it ended.

    On a terminal the drawing is renewed in place. Elsewhere a line is written when a call begins and when it ends.

    Args:
        stream: where to draw; None is standard error, so that standard output holds only the answer.
        live: whether to renew in place; None asks the stream.
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.live = is_live(self.stream) if live is None else live
        self.screen = Screen(self.stream, colour=self.live and not os.environ.get("NO_COLOR"))
        self.nodes: dict[str, CallNode] = {}
        self.texts: dict[str, str] = {}

    def __call__(self, node: CallNode, text: str) -> None:
        """Takes a report of a run; see `partsong.reasoning.calls.run.Observer`."""
        is_new = node.name not in self.nodes
        self.nodes[node.name] = node
        # The screen shows only the end of a text.
        self.texts[node.name] = (self.texts.get(node.name, "") + text)[-400:]
        if self.live:
            if time.monotonic() - self.screen.drawn_at >= FRAME_SECONDS:
                self.draw()
        elif is_new or node.end is not None:
            self.stream.write("".join(text for text, _ in self._line(node, 100)).rstrip() + "\n")

    def draw(self) -> None:
        """Draws as many lines as fit, running calls before those that have ended."""
        if not self.live:
            return
        width, room = self.screen.size
        nodes = list(self.nodes.values())
        running = [node for node in nodes if node.end is None]
        shown = {node.name for node in (running + [n for n in reversed(nodes) if n.end is not None])[:room]}
        title = f"{len(running)} under way, {len(nodes) - len(running)} ended, {sum(map(_tokens, nodes))} tokens"
        lines = [self._line(node, width) for node in nodes if node.name in shown]
        self.screen.draw([[(title, DIM)], *lines])

    def _line(self, node: CallNode, width: int) -> list[Piece]:
        name, state = f"{node.name:24.24} ", _state(node)
        completion = node.completion
        text = self.texts[node.name] if completion is None or not completion.text else completion.text
        text = printable(" ".join(text.split()), self.stream)
        colour = f"38;5;{PALETTE[sum(map(ord, '/'.join(node.request.path))) % len(PALETTE)]}"
        complete = completion is not None and completion.finish == "stop"
        style = colour if node.end is None else "" if complete else DIM
        head = f"{_tokens(node):5} {state:10} "
        return [(name, f"{colour};{BOLD}"), (head, DIM), (_tail(text, width - len(name) - len(head)), style)]


def _tokens(node: CallNode) -> int:
    return node.written if node.completion is None else node.tokens


def _state(node: CallNode) -> str:
    if node.end is None:
        return "..."
    if node.completion is None:
        return "failed"
    done = "kept" if node.replayed else "done"
    return {"stop": done, "length": "cut off"}.get(node.completion.finish, node.completion.finish)


def _tail(text: str, width: int) -> str:
    """Returns as much of the end of a text as fits."""
    left, first = width, len(text)
    while first > 0 and (left := left - columns(text[first - 1])) >= 0:
        first -= 1
    return text[first:]
