"""Answers with a language model that several ranks of this machine share."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from partsong.errors import ArgumentError
from partsong.knobs import Count, Whole, check_knobs, type_hints
from partsong.reasoning.calls.call import Completion, Request
from partsong.reasoning.calls.engine import EngineError, Progress
from partsong.reasoning.hosted.host import place_of
from partsong.reasoning.hosted.placed_call import PlacedCall, ask_until_answered
from partsong.reasoning.hosted.ranks_life import RanksLife

if TYPE_CHECKING:
    from partsong.parallel import Strategy

__all__ = ["RanksEngine"]

_SIZES = {"nproc": Count, "threads": Count, "restarts": Annotated[int, Whole(0)]}
#: Options of `LocalEngine` that are made on the ranks, or are not for them.
_NOT_HERE = ("self", "model", "strategies", "mesh", "name", "tokenizer", "thoughts")


class RanksEngine:
    """Starts ranks on this machine that share one model, and answers with them.

    Each rank holds its part of the weights and computes its part of every step, in lockstep with the others. In
    float64 the answers are those of a `LocalEngine`, to the last token. If a rank dies, the ranks are started anew and
    the calls under way are asked again with the same seeds; their lost tokens are in `Usage.wasted`.

    Args:
        model: a transformers folder, "smollm2-135m", a zoo name, or a hub id.
        nproc: number of ranks.
        strategies: how they share the model: `TensorParallel` (the default), `ShardedWeights` or `LayerPipeline`.
        threads: of each rank. Default: what the machine's cores leave to each.
        restarts: how often the ranks may be started anew.
        name: what journals call the engine. Default: that of a `LocalEngine`, so that a run goes on with either.
        **options: options of `LocalEngine`, but for tokenizer and thoughts.

    Attributes:
        name: what journals call it.
        tokenizer: that of the model.
        context: tokens that a prompt and its answer may have.
        vocab_size: tokens that the model knows.

    Raises:
        ArgumentError: a number out of range, an unknown option, or no such model.
        UnsupportedError: the model cannot be shared out so.
        DistributedError: a rank died while it loaded the model.

    >>> from partsong.reasoning import Message
    >>> async def ask():
    ...     engine = RanksEngine("sums", nproc=2)
    ...     completion = await engine.generate(Request(messages=(Message("user", ("37+48-19*3=?",)),)))
    ...     await engine.close()
    ...     return completion.text
    """

    def __init__(
        self,
        model: str | Path,
        *,
        nproc: int = 2,
        strategies: Sequence[Strategy] = (),
        threads: int | None = None,
        restarts: int = 1,
        name: str | None = None,
        **options: Any,
    ) -> None:
        check_knobs(_SIZES, {"nproc": nproc, "threads": 1 if threads is None else threads, "restarts": restarts})
        self._start = (nproc, place_of(model), _shared(strategies), {**_checked(options), "threads": threads})
        self.tokenizer = _tokenizer(model)
        self._restarts, self._closed = restarts, False
        self._numbers, self._changed = itertools.count(), threading.Condition()
        atexit.register(self._end)
        self._life = RanksLife(*self._start, self._changed)
        try:
            facts = self._living().facts
        except BaseException:
            self._end()
            raise
        self.name, self.context, self.vocab_size = name or facts.name, facts.context, facts.vocab_size

    async def generate(self, request: Request, progress: Progress | None = None, *, plain: bool = False) -> Completion:
        """Answers one request; see `LocalEngine.generate`. Cancelling returns when the ranks have dropped the call.

        Raises:
            ArgumentError: what `LocalEngine` refuses.
            EngineError: the ranks died too often, or the engine is closed.
        """

        async def place(call: PlacedCall) -> RanksLife:
            life = self._life if self._life.state == "up" else await asyncio.to_thread(self._living)
            life.begin(call, plain=plain)
            return life

        return await ask_until_answered(request, progress, self._numbers, place, "groups of ranks")

    async def close(self) -> None:
        """Ends the ranks; running calls get an `EngineError`. Closing twice does nothing."""
        await asyncio.to_thread(self._end)

    def _living(self) -> RanksLife:
        """Waits for ranks that can be asked, and starts them anew where they have died."""
        with self._changed:
            while self._life.state != "up":
                if self._closed:
                    raise EngineError("the engine is closed: make a new one")
                if (error := self._life.error) is not None:
                    if not self._life.has_answered:
                        raise error
                    if not self._restarts:
                        raise EngineError(f"the ranks have ended: {error}") from error
                    self._restarts -= 1
                    self._life = RanksLife(*self._start, self._changed)
                self._changed.wait()
            return self._life

    def _end(self) -> None:
        with self._changed:
            self._closed = True
            life = self._life if hasattr(self, "_life") else None
            self._changed.notify_all()
        atexit.unregister(self._end)
        if life is not None:
            life.end()


def _tokenizer(model: str | Path) -> Any:
    from partsong.reasoning.local.loading import load_tokenizer

    return load_tokenizer(model)


def _shared(strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    from partsong.parallel.tensor_parallel.strategy import TensorParallel

    return tuple(strategies) or (TensorParallel(),)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Checks the names of options; their values are checked on the ranks."""
    from partsong.reasoning.local import LocalEngine

    known = [name for name in type_hints(LocalEngine.__init__) if name not in (*_NOT_HERE, "return")]
    if unknown := [name for name in options if name not in known]:
        raise ArgumentError(f"{unknown[0]}= is no option of ranks that share a model; there are {', '.join(known)}")
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ArgumentError(
            "this process is a rank already, and a RanksEngine starts ranks of its own; make a LocalEngine with "
            "strategies= and mesh= on every rank instead"
        )
    return options
