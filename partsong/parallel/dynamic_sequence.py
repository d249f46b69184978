"""Cuts frames or tokens, depending on which the next block does not mix (arXiv 2403.10266)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.knobs import Count
from partsong.parallel.adapters import Adapter, places
from partsong.parallel.adapters.row import IMAGE
from partsong.parallel.attention_call import TOKEN_AXES
from partsong.parallel.cuts.tokens import SequenceParallel
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.hooks.model_hooks import AroundHook, HookSet, signature_of
from partsong.parallel.ranks.collectives import all_to_all
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.ranks.shards import offsets
from partsong.parallel.strategy import Strategy

__all__ = ["DynamicSequence", "FRAMES", "SwitchedBlocks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicSequence(Strategy):
    """Cuts a video's frames for spatial blocks and their tokens for temporal ones. Exact.

    Some models attend within frames in some blocks and along time in others. In a spatial block a rank then holds some
    frames with all of their tokens, and in a temporal block some tokens of all frames, so no attention spans two ranks.
    Between the two one all-to-all exchanges hidden states; text, norms and feed-forward layers are local. Takes any
    number of heads and frames, but each frame needs at least as many tokens as there are ranks.

    Use it when a video model attends within frames in some blocks and along time in others, such as Latte.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.

    Source: DSP, arXiv 2403.10266.
    """

    axes: ClassVar[tuple[str, ...]] = ("ulysses",)
    uneven_axes: ClassVar[tuple[str, ...]] = ("ulysses",)

    degree: Count | None = None

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses models without separate spatial and temporal blocks."""
        reason = super(DynamicSequence, self).refuses(adapter)
        if reason is None and adapter.factored is None:
            return f"it has no blocks for space and others for time to switch between; {adapter.instead}"
        return reason

    def cut(self, module: nn.Module, adapter: Adapter, mesh: Mesh, clock: StepClock) -> SwitchedBlocks | None:
        """Returns this rank's cut of the blocks; None where one rank has all frames.

        Raises:
            UnsupportedError: another strategy cuts the tokens as well.
        """
        if mesh.axis("ulysses").size == 1:
            return None
        others = [axis for axis in TOKEN_AXES if axis != "ulysses" and mesh.degrees[axis] > 1]
        if others:
            raise UnsupportedError(
                f"DynamicSequence leaves no attention over several ranks for the mesh axis {' and '.join(others)}; "
                "give its ranks to DynamicSequence, CfgParallel or DataParallel"
            )
        return SwitchedBlocks(module, adapter, mesh)


#: Names the stream of frames, next to that of the tokens in a frame.
FRAMES = "frames"


class SwitchedBlocks(SequenceParallel):
    """Cuts frames around every spatial block of a model and tokens everywhere else.

    Hidden states are exchanged when a spatial block is entered and when it returns, so between its blocks the model
    always holds cut tokens. Before the first block everything is whole, so the first cut costs nothing.

    Args:
        module: the transformer.
        adapter: its row, resolved, with `factored` blocks.
        mesh: the ranks.
    """

    def __init__(self, module: nn.Module, adapter: Adapter, mesh: Mesh) -> None:
        super().__init__(module, adapter, mesh, ())
        assert adapter.factored is not None
        self.factored = adapter.factored
        self._moves: list[tuple[str, int]] = []

    def attach(self, hooks: HookSet) -> None:
        """Puts hooks on the blocks, and the one that puts the output together."""
        modules = dict(self.module.named_modules())
        for path, run in ((self.factored.spatial, self._run_spatial), (self.factored.temporal, self._run_temporal)):
            for name in places(path, modules):
                hooks.add(modules[name], AroundHook(run, signature_of(modules[name])), "block")
        self.attach_gather(hooks, modules)

    def begin_forward(self, sample: Any) -> None:
        """Forgets what the last call of the model cut and exchanged."""
        super().begin_forward(sample)
        self._moves.clear()

    def _run_spatial(self, forward: Callable[..., Tensor], named: dict[str, Any]) -> Tensor:
        whole = named["hidden_states"]
        if self.sizes:
            own = self._to_frames(whole)
        else:
            self._lay_out(*whole.shape[:2])
            own = self._rows(whole, FRAMES)
        named["hidden_states"] = own
        self._cut_named(named, self.factored.per_frame, FRAMES)
        # A rank without a frame has nothing to compute; what it holds has the right shape already.
        return self._to_tokens(forward(**named) if len(own) else own)

    def _run_temporal(self, forward: Callable[..., Tensor], named: dict[str, Any]) -> Tensor:
        self.shard_sizes((FRAMES, IMAGE))
        self._cut_named(named, self.factored.per_token, IMAGE)
        return forward(**named)

    def _cut_named(self, named: dict[str, Any], names: tuple[str, ...], stream: str) -> None:
        named |= {name: self._rows(named[name], stream) for name in names if isinstance(named.get(name), Tensor)}

    def _lay_out(self, rows: int, tokens: int) -> None:
        parts, name = self.axis.size, self.adapter.model
        if rows % self.batch:
            raise UnsupportedError(f"{name}: {rows} frames of {self.batch} samples; its layout has changed")
        if tokens < parts:
            raise UnsupportedError(
                f"{name}: {tokens} tokens of a frame cannot be cut over {parts} ranks; use at most {tokens} ranks or a "
                "larger picture"
            )
        self.sizes = {FRAMES: self.axis.split(rows // self.batch), IMAGE: self.axis.split(tokens)}

    def _rows(self, tensor: Tensor, stream: str) -> Tensor:
        """Returns this rank's part of a first dimension that holds samples and, within each, a stream."""
        sizes = self.sizes[stream]
        if len(tensor) != self.batch * sum(sizes):
            raise UnsupportedError(
                f"{self.adapter.model}: {len(tensor)} rows of {self.batch} samples with {sum(sizes)} {stream} each; "
                "its layout has changed"
            )
        start, size = offsets(sizes)[self.axis.index], sizes[self.axis.index]
        return tensor.unflatten(0, (self.batch, sum(sizes))).narrow(1, start, size).flatten(0, 1)

    def _to_tokens(self, hidden: Tensor) -> Tensor:
        """Turns all tokens of own frames, `[B * own F, L, C]`, to own tokens of all frames, `[B * F, own L, C]`."""
        frames = self.sizes[FRAMES][self.axis.index]
        cube = hidden.unflatten(0, (self.batch, frames)).transpose(0, 1)
        return self._switch(cube, 2, IMAGE, FRAMES).transpose(0, 1).flatten(0, 1)

    def _to_frames(self, hidden: Tensor) -> Tensor:
        """Turns own tokens of all frames back to all tokens of own frames."""
        frames = sum(self.sizes[FRAMES])
        cube = hidden.unflatten(0, (self.batch, frames)).permute(2, 0, 1, 3)
        return self._switch(cube, 2, FRAMES, IMAGE).permute(1, 2, 0, 3).flatten(0, 1)

    def _switch(self, cube: Tensor, dim: int, cut: str, joined: str) -> Tensor:
        """Cuts one stream along `dim`, and puts another together along the first dimension.

        Each peer's part lies in one piece in the result, so it arrives in place.
        """
        me, sizes = self.axis.index, self.sizes[joined]
        parts = cube.split(list(self.sizes[cut]), dim=dim)
        whole = cube.new_empty((sum(sizes), *parts[me].shape[1:]))
        arriving = whole.split(list(sizes))
        sends = [part if peer == me else part.contiguous() for peer, part in enumerate(parts)]
        pending = all_to_all(self.axis, sends, arriving, name=f"dynamic sequence: {joined} together, {cut} apart")
        arriving[me].copy_(parts[me])  # own part while the others' parts are in transit
        self._moves.append((cut, cube.shape[-1] * cube.element_size()))
        pending.wait()
        return whole

    def predict(self, batch: int, tokens: dict[str, int], itemsize: int, index: int, step: tuple[int, bool]) -> int:
        """Returns the bytes the rank at `index` sends in one forward: at every switch, what it does not keep."""
        sizes = {stream: self.axis.split(total) for stream, total in tokens.items()}
        frames, own_frames = tokens[FRAMES], sizes[FRAMES][index]
        length, own_length = tokens[IMAGE], sizes[IMAGE][index]
        leaving = {IMAGE: own_frames * (length - own_length), FRAMES: own_length * (frames - own_frames)}
        moved = sum(batch * leaving[cut] * unit for cut, unit in self._moves)
        return moved + self.predict_gather(batch, {IMAGE: sizes[IMAGE]}, index)
