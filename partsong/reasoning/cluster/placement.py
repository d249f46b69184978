"""Chooses which of several identical engines takes a call."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping

from partsong.reasoning.calls.call import Request

__all__ = ["MAX_LEAD", "Placement", "gpu_share"]

#: Calls by which an engine may exceed the least busy one and still get another call of a prompt it has seen.
MAX_LEAD = 4
#: Number of prompts whose engine is remembered.
_REMEMBERED = 4096


class Placement:
    """Gives a call to the least busy engine, and calls of equal prompts to the same one as long as load allows.

    An engine keeps the keys of a prompt it has read, and further samples of the prompt read these. That is worth
    waiting for a few calls, not for many: engines are kept within `MAX_LEAD` calls of each other.

    >>> placement = Placement()
    >>> request = Request(messages=())
    >>> [placement.choose({0: load, 1: 0}, request) for load in (0, 1, 4, 5)]
    [0, 0, 0, 1]
    """

    def __init__(self) -> None:
        self._homes: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, loads: Mapping[int, int], request: Request) -> int:
        """Returns the number of the engine that takes a call; `loads` counts the running calls of those available."""
        key, least = _prompt_key(request), min(loads.values())
        home = self._homes.get(key)
        if home is None or home not in loads:
            home = min(loads, key=lambda number: (loads[number], number))
            self._homes[key] = home
        self._homes.move_to_end(key)
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return home if loads[home] <= least + MAX_LEAD else min(loads, key=lambda number: (loads[number], number))


def _prompt_key(request: Request) -> bytes:
    """Names the chat without an answer that is continued, so that the threads of an answer go where its keys are."""
    chat = request.messages
    if len(chat) > 1 and chat[-1].role == "assistant":
        chat = chat[:-1]
    text = json.dumps([(message.role, message.text) for message in chat])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def gpu_share(num_engines: int, num_gpus: float) -> float:
    """Returns the GPUs of each engine: one, or the largest fraction that leaves room for all of them.

    >>> gpu_share(2, 8), gpu_share(3, 2), gpu_share(4, 0)
    (1.0, 0.5, 0.0)
    """
    whole = int(num_gpus)
    return 0.0 if whole == 0 else 1.0 / -(-num_engines // whole)
