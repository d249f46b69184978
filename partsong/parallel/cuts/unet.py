"""Cuts a UNet's latent into rows, and puts its prediction together again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter, Split
from partsong.parallel.attention_call import TOKEN_AXES, Stage
from partsong.parallel.cuts.row_blocks import (
    UNET_ADVICE,
    UNET_BLOCKS,
    halves_evenly,
    is_off_the_path,
    joins_text,
    reads_text,
    reads_the_image,
    refuse_unknown,
)
from partsong.parallel.cuts.rows import RowSplit, halved
from partsong.parallel.cuts.tokens import head_counts
from partsong.parallel.hooks.model_hooks import HookSet, InputHook, OutputHook, signature_of
from partsong.parallel.ranks.collectives import gather_tokens
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.strategy import Borders, Cut

__all__ = ["RowParallel"]

#: Residuals of a T2I adapter, which may be more than the UNet has levels: it adds only those that fit one.
_OF_ADAPTERS = "down_intrablock_additional_residuals"


class RowParallel(Cut):
    """Cuts a UNet's rows over the token axes of a mesh.

    Args:
        module: the UNet.
        adapter: its row; `splits` names where the image enters and `gather` where it leaves.
        mesh: the ranks.
        stages: attention stages, outermost first.
        borders: how neighbours exchange border rows.
    """

    def __init__(
        self, module: nn.Module, adapter: Adapter, mesh: Mesh, stages: tuple[Stage, ...], borders: Borders
    ) -> None:
        self.module, self.adapter = module, adapter
        self.axis = mesh.axis(*TOKEN_AXES)
        self.stages, self.borders = stages, borders
        joins = lambda name: joins_text(module.get_submodule(name))  # noqa: E731
        self.split = RowSplit(
            module, self.axis, borders, stages, self._is_attention, joins_text=joins, copies=self._copies
        )
        children: Iterator[Any] = module.modules()
        self._paddings = [int(m.padding) for m in children if type(m).__name__ == "Downsample2D"]
        self._even, self._reads_text = halves_evenly(module), reads_text(module)
        self._row_bytes, self._widths = 0, (1,)

    def _is_attention(self, name: str) -> bool:
        """Says whether a module is a self-attention over the image."""
        if self.adapter.streams_of(name) is None:
            return False
        child = self.module.get_submodule(name)
        return type(child).__name__ == "Attention" and reads_the_image(child)

    def _copies(self, name: str) -> int:
        """Returns for how many query heads the model repeats each key/value head of an attention."""
        if not self.adapter.repeats_keys:
            return 1
        heads, kv_heads, _ = head_counts(self.module.get_submodule(name))
        return heads // kv_heads

    def attach(self, hooks: HookSet) -> None:
        """Puts the cutting, gathering and layer hooks on the module.

        Raises:
            UnsupportedError: the UNet holds a module that no rule here covers.
        """
        assert self.adapter.splits is not None and self.adapter.gather is not None
        refuse_unknown(self.module, UNET_BLOCKS, UNET_ADVICE)
        aside = [name for name, _ in self.module.named_children() if is_off_the_path(name)]
        # Nothing is cut before the first convolution.
        self.split.attach(hooks, skip=("conv_in", *aside))
        for path, cuts in self.adapter.splits.items():
            if path:
                self._attach_entry(hooks, self.module.get_submodule(path), cuts)
        for path in self.adapter.gather:
            hooks.add(self.module.get_submodule(path), OutputHook(self._gather), "gather")
        signature = signature_of(self.module)
        hooks.add(self.module, InputHook(self._cut_inputs, signature), "split")

    def _attach_entry(self, hooks: HookSet, module: nn.Module, cuts: Mapping[str | int, Split]) -> None:
        """Puts on the hook that cuts the output of a module, or the named arguments."""
        names = [str(name) for name, cut in cuts.items() if not cut.output]
        if not names:
            hooks.add(module, OutputHook(self._cut), "split-output")
            return

        def change(named: dict[str, Any]) -> None:
            named |= {name: self._cut(named[name]) for name in names}

        hooks.add(module, InputHook(change, signature_of(module)), "split")

    def begin_forward(self, sample: Tensor) -> None:
        """Distributes the rows of a call over the ranks.

        Raises:
            UnsupportedError: there are too few rows for the ranks, or blocks that take rows in pairs get an odd number.
        """
        height, factor = sample.shape[-2], 1 << len(self._paddings)
        if self._even and height % factor:
            raise UnsupportedError(
                f"{self.adapter.model}: {height} rows are no multiple of {factor}, and its blocks put rows together in "
                "pairs; use a height that halves evenly"
            )
        self._widths = halved(sample.shape[-1], self._paddings)
        self.split.begin(self.split.levels_of(halved(height, self._paddings)), 0, len(sample))

    def abandon(self) -> None:
        """Drops pending messages without waiting, after an error."""
        self.borders.abandon()
        for stage in self.stages:
            stage.abandon()

    def _cut_inputs(self, named: dict[str, Any]) -> None:
        if "ip_adapter_masks" in (named.get("cross_attention_kwargs") or {}):
            raise UnsupportedError(
                f"{self.adapter.model}: ip_adapter_masks were given, which cross-attention would stretch over this "
                "rank's rows; leave them out, or use CfgParallel or DataParallel"
            )
        # Where the text is made from a picture's embedding, there is none to pass.
        is_given = getattr(self.module, "config", {}).get("encoder_hid_dim_type") == "image_proj"
        if self._reads_text and not is_given and named.get("encoder_hidden_states") is None:
            raise UnsupportedError(
                f"{self.adapter.model}: encoder_hidden_states were not given, and what attends to a text would attend "
                "to this rank's rows instead; give them, or use CfgParallel or DataParallel"
            )
        cuts = self.adapter.splits or {}
        for name in cuts.get("", {}):
            if named.get(str(name)) is not None:
                named[str(name)] = self._cut_residuals(str(name), named[str(name)])

    def _cut_residuals(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return type(value)(self._cut_residuals(name, part) for part in value)
        heights = self.split.levels.heights
        if value.shape[2] in heights:
            return value[:, :, self.split.own_at(heights.index(value.shape[2]))]
        if name == _OF_ADAPTERS:
            return value
        raise UnsupportedError(
            f"{self.adapter.model}: a residual of {name} has {value.shape[2]} rows, and the image has {heights} at its "
            "levels; give residuals as a ControlNet of this model makes them, or use CfgParallel or DataParallel"
        )

    def _cut(self, image: Tensor) -> Tensor:
        return image[:, :, self.split.own_at(0)].contiguous()

    def spread(self, own: Tensor) -> Tensor:
        """Returns this rank's rows `[B, C, own H, W]` of any level in their place among zeros, `[B, C, H, W]`."""
        levels, index = self.split.levels, self.axis.index
        # Near the last row two levels may have equally many rows here; then the width decides.
        shapes = [(levels.sizes(level)[index], width) for level, width in enumerate(self._widths)]
        level = shapes.index((own.shape[2], own.shape[3]))
        if shapes.count(shapes[level]) > 1:
            raise UnsupportedError(
                f"{self.adapter.model}: an image {self._widths[0]} wide is too narrow to be cut; use fewer ranks"
            )
        rows = self.split.own_at(level)
        return F.pad(own, (0, 0, rows.start, levels.heights[level] - rows.stop))

    def _gather(self, rows: Tensor) -> Tensor:
        # Frames may be folded into the batch.
        self._row_bytes = rows[:, :, 0].nbytes // self.split.batch
        sizes = self.split.levels.sizes(0)
        return gather_tokens(self.axis, rows, sizes, 2, name="gather of the output rows").contiguous()

    @property
    def sizes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the rows of each rank."""
        return {"latent rows": self.split.levels.sizes(0)}

    def predict(self, batch: int, tokens: Mapping[str, int], itemsize: int, index: int, step: tuple[int, bool]) -> int:
        """Returns the bytes the rank at `index` sends in one forward of a step (its number, whether it is the last)."""
        gathered = batch * self.split.levels.sizes(0)[index] * self._row_bytes * (self.axis.size - 1)
        return gathered + self.split.predict(batch, index, step)
