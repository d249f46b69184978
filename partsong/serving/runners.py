"""Says how the ranks of a replica are run, on this machine or elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from partsong.serving.ranks.settings import ReplicaSettings

__all__ = ["LOCAL", "RankRunner", "launch_ranks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRunner:
    """Says how ranks are run.

    Attributes:
        run: runs a number of ranks with some settings until they end, and raises what ended them. The event is set when
            the server closes: anything that still waits, for room or for ranks that do not end, then gives up.
        starts_again: whether ranks that are asked to end can be run again; another program starts those of torchrun.
        host: address of this machine at which ranks reach it; None where they are on it, and share its files.
    """

    run: Callable[[ReplicaSettings, int, threading.Event], None]
    host: str | None = None
    starts_again: bool = True


def launch_ranks(settings: ReplicaSettings, nproc: int, closing: threading.Event) -> None:
    """Starts ranks as processes of this machine and waits until they end.

    Args:
        settings: what they serve.
        nproc: their number.
        closing: ignored: the server ends its child processes itself.

    Raises:
        PartsongError: the ranks ended unasked.
    """
    from partsong.parallel.ranks.launch import launch
    from partsong.serving.ranks.loop import serve_ranks

    launch(serve_ranks, nproc, settings)


#: Ranks are processes of this machine.
LOCAL = RankRunner(run=launch_ranks)
