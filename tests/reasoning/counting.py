"""A scripted engine that counts the calls that run at the same time."""

from __future__ import annotations

from typing import Any

from partsong.reasoning import Completion, Request, ScriptedEngine

__all__ = ["Counting"]


class Counting(ScriptedEngine):
    """Answers by a script, each call a moment later, so that all that may be under way together are.

    Attributes:
        under_way: calls now.
        most: calls at any moment so far.
        closed: how often it was closed.
    """

    def __init__(self, script: Any, **more: Any) -> None:
        super().__init__(script, **{"seconds_to_first": 0.001, **more})
        self.under_way = self.most = self.closed = 0

    async def generate(self, request: Request, progress: Any = None) -> Completion:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            return await super().generate(request, progress)
        finally:
            self.under_way -= 1

    async def close(self) -> None:
        self.closed += 1
