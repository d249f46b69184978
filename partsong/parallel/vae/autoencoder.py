"""Cuts an autoencoder's encoder and decoder over all ranks, into rows or overlapping tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.parallel.cuts.row_blocks import (
    AUTOENCODER_ADVICE,
    AUTOENCODER_BLOCKS,
    SELF_ATTENTION,
    halves_evenly,
    level_change,
    refuse_unknown,
)
from partsong.parallel.cuts.rows import RowSplit, halved
from partsong.parallel.exchange.borders import SyncBorders
from partsong.parallel.exchange.gather import GatherStage
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.hooks.gradients import check_gradients
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, signature_of
from partsong.parallel.protocols import Coder
from partsong.parallel.ranks.agreement import NUMBERS_PER_VALUE, check_alike
from partsong.parallel.ranks.collectives import gather_tokens
from partsong.parallel.ranks.mesh import Axis

__all__ = ["AutoencoderParallel", "Half", "RowHalf", "two_halves"]


class Half(Protocol):
    """Describes how the encoder or the decoder of an autoencoder is shared out over ranks."""

    def attach(self, hooks: HookSet) -> None:
        """Puts hooks on the layers inside."""
        ...

    def run(self, forward: Callable[..., Any], named: dict[str, Any], first: str) -> Tensor:
        """Computes one call; `first` names the argument that is the image."""
        ...

    def sent(self) -> list[int]:
        """Returns the bytes each rank sent in the last call."""
        ...


class AutoencoderParallel(Coder):
    """Shares the calls of an autoencoder's encoder and decoder out over ranks.

    Args:
        axis: all ranks.
        halves: the modules by name, and how each is shared out.
    """

    def __init__(self, axis: Axis, halves: dict[str, tuple[nn.Module, Half]]) -> None:
        self.axis, self.halves = axis, halves
        self.rows: dict[str, int] = {}
        # The bytes each rank sent, by half and by the step of the generation in which it was called.
        self._sent: dict[tuple[str, int], list[int]] = {}

    def attach(self, hooks: HookSet, clock: StepClock) -> None:
        """Puts the hooks on."""
        for name, (module, half) in self.halves.items():
            half.attach(hooks)
            signature = signature_of(module)
            first = next(iter(signature.parameters))
            hooks.add(module, AroundHook(self._runner(name, module, half, first, clock), signature), "autoencoder")
        clock.on_begin(lambda: self._begin(clock.steps_before))

    def _runner(self, name: str, module: nn.Module, half: Half, first: str, clock: StepClock) -> Callable[..., Tensor]:
        def run(forward: Callable[..., Any], named: dict[str, Any]) -> Tensor:
            if self.axis.size > 1:
                check_gradients(f"the {name}", [module], named, "ParallelVae")
            if not self.axis.dry:
                check_alike(self.axis, {f"input of the {name}": named[first]})
            output = half.run(forward, named, first)
            compared = 8 * NUMBERS_PER_VALUE * (self.axis.size - 1)
            before = self._sent.get((name, clock.step), [0] * self.axis.size)
            moved = zip(before, half.sent(), strict=True)
            self._sent[name, clock.step] = [old + compared + new for old, new in moved]
            self.rows[name] = named[first].shape[-2]
            return output

        return run

    def _begin(self, done: int) -> None:
        """Starts a generation; pictures encoded after the last one's `done` steps belong to the new one."""
        fresh = self._sent.get(("encoder", done))
        self._sent = {} if fresh is None else {("encoder", 0): fresh}

    @property
    def known(self) -> bool:
        """Says whether a call has been seen."""
        return bool(self.rows)

    def predict(self, rank: int) -> int:
        """Returns the bytes a rank sends in the calls of this generation."""
        return sum(sent[rank] for sent in self._sent.values())

    def describe(self) -> list[str]:
        """Says what is split, in one line for each half that was called."""
        over = f"over {self.axis.size} ranks{self.axis.told_shares}"
        return [f"{rows} input rows of the {name} {over}" for name, rows in self.rows.items()]


class RowHalf:
    """Cuts the rows of an encoder or decoder; exact.

    Args:
        module: the encoder or decoder.
        axis: the ranks, from the image's top to its bottom.
        input_name: what messages call its input.

    Raises:
        UnsupportedError: the module holds a layer that no rule here covers.
    """

    def __init__(self, module: nn.Module, axis: Axis, input_name: str) -> None:
        refuse_unknown(module, AUTOENCODER_BLOCKS, AUTOENCODER_ADVICE)
        self.module, self.axis = module, axis
        kinds = {name: type(child).__name__ for name, child in module.named_modules()}
        attends = lambda name: kinds[name] in SELF_ATTENTION  # noqa: E731
        self.split = RowSplit(module, axis, SyncBorders(axis), [GatherStage(axis)], attends, input_name)
        changes = [change for child in module.modules() if (change := _change(child)) is not None]
        self._doublings, self._paddings = changes.count(-1), [padding for padding in changes if padding >= 0]
        self._even = halves_evenly(module)
        self._last = (0, 0)

    def attach(self, hooks: HookSet) -> None:
        """Puts the hooks on the layers."""
        self.split.attach(hooks)

    def run(self, forward: Callable[..., Any], named: dict[str, Any], first: str) -> Tensor:
        """Computes this rank's rows and puts all rows together."""
        image: Tensor = named[first]
        height = image.shape[-2]
        factor = 1 << len(self._paddings)
        if self._even and height % factor:
            raise UnsupportedError(f"{type(self.module).__name__}: {height} rows are no multiple of {factor}")
        doubled = tuple(height << power for power in range(self._doublings, -1, -1))
        heights = halved(height, self._paddings) if self._paddings else doubled
        self.split.begin(self.split.levels_of(heights), self._doublings, len(image))
        rows = forward(**{**named, first: image[..., self.split.own, :].contiguous()})
        sizes = self.split.levels.sizes(self.split.level)
        assert rows.shape[-2] == sizes[self.axis.index], "a rank must return its own rows"
        self._last = (len(image), rows[..., 0, :].numel() * rows.element_size())
        return gather_tokens(self.axis, rows, sizes, rows.ndim - 2, name="gather of the rows").contiguous()

    def sent(self) -> list[int]:
        """Returns the bytes each rank sent in the last call."""
        batch, row = self._last
        sizes = self.split.levels.sizes(self.split.level)
        gathered = [size * row * (self.axis.size - 1) for size in sizes]
        return [gathered[rank] + self.split.predict(batch, rank, (0, False)) for rank in range(self.axis.size)]


def two_halves(vae: Any) -> dict[str, nn.Module]:
    """Returns the encoder and the decoder of an autoencoder, if it has them."""
    halves = {name: getattr(vae, name, None) for name in ("encoder", "decoder")}
    return {name: module for name, module in halves.items() if isinstance(module, nn.Module)}


def _change(child: nn.Module) -> int | None:
    """Returns -1 where a layer doubles rows, its padding where it halves them, and None elsewhere."""
    change = level_change(child)
    if change:
        return -1 if change < 0 else 0
    return int(child.padding[0]) if isinstance(child, nn.Conv2d) and child.stride[0] == 2 else None
