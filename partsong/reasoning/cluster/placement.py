"""Which of several like engines takes a call."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping

from partsong.reasoning.calls.call import Request

__all__ = ["LEAN", "Placement", "gpu_share"]

#: Calls by which an engine may be ahead of the least busy one and still get another of a prompt it has seen.
LEAN = 4
#: Prompts whose engine is remembered.
_REMEMBERED = 4096


class Placement:
    """Gives a call to the least busy engine, and calls of equal prompts to the same one as long as load allows.

    An engine keeps the keys of a prompt it has read, so that its further samples are forks that read them. That is
    worth waiting for a few calls, not for many: engines are kept within `LEAN` calls of each other.

    >>> placement = Placement()
    >>> asked = Request(messages=())
    >>> [placement.choose({0: load, 1: 0}, asked) for load in (0, 1, 4, 5)]
    [0, 0, 0, 1]
    """

    def __init__(self) -> None:
        self._homes: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, loads: Mapping[int, int], request: Request) -> int:
        """Number of the engine that takes a call.

        Args:
            loads: calls under way by number of the engine; those that may be chosen, at least one.
            request: the call.
        """
        key, least = _prompt(request), min(loads.values())
        home = self._homes.get(key)
        if home is None or home not in loads:
            home = min(loads, key=lambda number: (loads[number], number))
            self._homes[key] = home
        self._homes.move_to_end(key)
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return home if loads[home] <= least + LEAN else min(loads, key=lambda number: (loads[number], number))


def _prompt(request: Request) -> bytes:
    """Names the chat; calls that go on with one answer, such as its threads, go where its keys are."""
    chat = request.messages
    if len(chat) > 1 and chat[-1].role == "assistant":
        chat = chat[:-1]
    said = json.dumps([(message.role, message.text) for message in chat])
    return hashlib.blake2b(said.encode(), digest_size=16).digest()


def gpu_share(num_engines: int, num_gpus: float) -> float:
    """GPUs of each of some engines: one, or the largest fraction with which all of them find room.

    Args:
        num_engines: how many.
        num_gpus: of the cluster; 0 where there are none.

    >>> gpu_share(2, 8), gpu_share(3, 2), gpu_share(4, 0)
    (1.0, 0.5, 0.0)
    """
    whole = int(num_gpus)
    return 0.0 if whole == 0 else 1.0 / -(-num_engines // whole)
