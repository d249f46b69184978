"""Runs on each rank of a `RanksEngine`: the first one answers calls, and the others follow it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client
from typing import Any, Literal

import torch

from partsong.foreign_messages import quiet_libraries
from partsong.parallel import Mesh, Strategy, mesh_for
from partsong.reasoning.calls.call import Request
from partsong.reasoning.hosted.host import Host
from partsong.reasoning.local import LocalEngine

__all__ = ["ToRanks", "serve_rank"]

#: Seconds that a rank waits for another one in an exchange.
_TIMEOUT = 600.0


@dataclass(frozen=True, slots=True)
class ToRanks:
    """Asks the first rank to begin a call, to cancel one, or to end.

    Attributes:
        do: what to do.
        number: of the call.
        request: of the call that begins.
        plain: whether that is read without the chat template.
    """

    do: Literal["begin", "cancel", "end"]
    number: int = 0
    request: Request | None = None
    plain: bool = False


def serve_rank(
    address: Any, key: bytes, model: str, strategies: Sequence[Strategy], options: Mapping[str, Any]
) -> None:
    """Makes this rank's engine, and works until the process that started the ranks asks for the end, or is gone.

    Args:
        address: where that process listens.
        key: what it expects of the first rank.
        model: what the engine loads.
        strategies: how the ranks share the model.
        options: further options of `LocalEngine`, and ``threads``.

    Raises:
        PartsongError: the model cannot be loaded or shared out.
        DistributedError: a rank is gone, or the ranks no longer agree.
    """
    quiet_libraries("transformers")
    how = dict(options)
    if (threads := how.pop("threads")) is not None:
        torch.set_num_threads(threads)
    degrees = mesh_for(strategies, int(os.environ["WORLD_SIZE"]))
    with Mesh(**degrees, device=how.pop("device", None), timeout=_TIMEOUT) as mesh:
        engine = LocalEngine(model, strategies=strategies, mesh=mesh, **how)
        if mesh.is_main:
            asyncio.run(_answer(engine, address, key))
        else:
            engine.follow()


async def _answer(engine: LocalEngine, address: Any, key: bytes) -> None:
    host = Host(lambda: engine)
    orders: asyncio.Queue[ToRanks] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    with Client(address, authkey=key) as line:
        line.send(((await host.start())[0], engine.context, engine.vocab_size))

        def read() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                try:
                    while True:
                        loop.call_soon_threadsafe(orders.put_nowait, line.recv())
                except (EOFError, OSError):
                    loop.call_soon_threadsafe(orders.put_nowait, ToRanks("end"))

        async def report() -> None:
            while True:
                line.send(await host.news())

        threading.Thread(target=read, name="what is asked of the ranks", daemon=True).start()
        reporting = asyncio.ensure_future(report())
        ended = asyncio.ensure_future(asyncio.to_thread(engine.join))
        try:
            while not ended.done() and (order := await _next(orders, ended)) is not None and order.do != "end":
                if order.do == "cancel":
                    await host.cancel(order.number)
                elif order.request is not None:
                    await host.submit(order.number, order.request, plain=order.plain)
        finally:
            reporting.cancel()
            await host.close()
            await ended


async def _next(orders: asyncio.Queue[ToRanks], ended: asyncio.Future[None]) -> ToRanks | None:
    """Returns the next order; None where the engine ended before there was one."""
    order = asyncio.ensure_future(orders.get())
    await asyncio.wait({order, ended}, return_when=asyncio.FIRST_COMPLETED)
    if not order.done():
        order.cancel()
        return None
    return order.result()
