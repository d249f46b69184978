"""Cuts a UNet's latent into rows, and puts its prediction together again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter
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
from partsong.parallel.cuts.rows import RowLevels, RowSplit, halved
from partsong.parallel.hooks.model_hooks import HookSet, InputHook, OutputHook, signature_of
from partsong.parallel.ranks.collectives import gather_tokens
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.strategy import Borders, Cut

__all__ = ["RowParallel"]


class RowParallel(Cut):
    """Cuts a UNet's rows over the token axes of a mesh.

    Args:
        module: the UNet.
        adapter: its row; `splits` names where the image enters and `gather` where it leaves.
        mesh: the ranks.
        stages: attention stages, outermost first.
        borders: how neighbours come to know of each other's rows.
    """

    def __init__(
        self, module: nn.Module, adapter: Adapter, mesh: Mesh, stages: tuple[Stage, ...], borders: Borders
    ) -> None:
        self.module, self.adapter = module, adapter
        self.axis = mesh.axis(*TOKEN_AXES)
        self.stages, self.borders = stages, borders
        joins = lambda name: joins_text(module.get_submodule(name))  # noqa: E731
        self.split = RowSplit(module, self.axis, borders, stages, self._is_attention, joins_text=joins)
        children: Iterator[Any] = module.modules()
        self._paddings = [int(m.padding) for m in children if type(m).__name__ == "Downsample2D"]
        self._even, self._reads_text = halves_evenly(module), reads_text(module)
        self._row_bytes = 0

    def _is_attention(self, name: str) -> bool:
        """Says whether a module is a self-attention over the image."""
        if self.adapter.streams_of(name) is None:
            return False
        child = self.module.get_submodule(name)
        return type(child).__name__ == "Attention" and reads_the_image(child)

    def attach(self, hooks: HookSet) -> None:
        """Puts the cutting, gathering and layer hooks on the module.

        Raises:
            UnsupportedError: the UNet holds a module that no rule here covers.
        """
        assert self.adapter.splits is not None and self.adapter.gather is not None
        refuse_unknown(self.module, UNET_BLOCKS, UNET_ADVICE)
        entry = next(path for path in self.adapter.splits if path)
        aside = [name for name, _ in self.module.named_children() if is_off_the_path(name)]
        self.split.attach(hooks, skip=(entry, *aside))
        hooks.add(self.module.get_submodule(entry), OutputHook(self._cut), "split-output")
        hooks.add(self.module.get_submodule(next(iter(self.adapter.gather))), OutputHook(self._gather), "gather")
        signature = signature_of(self.module)
        hooks.add(self.module, InputHook(self._cut_inputs, signature), "split")

    def begin_forward(self, sample: Tensor) -> None:
        """Lays the rows of a call out over the ranks.

        Raises:
            UnsupportedError: there are too few rows for the ranks, or blocks that take rows in pairs get an odd number.
        """
        height, factor = sample.shape[-2], 1 << len(self._paddings)
        if self._even and height % factor:
            raise UnsupportedError(
                f"{self.adapter.model}: {height} rows are no multiple of {factor}, and its blocks put rows together in "
                "pairs; use a height that halves evenly"
            )
        self.split.begin(RowLevels(halved(height, self._paddings), self.axis.size), 0, len(sample))

    def abandon(self) -> None:
        """Drops messages under way without waiting, after an error."""
        self.borders.abandon()
        for stage in self.stages:
            stage.abandon()

    def _cut_inputs(self, named: dict[str, Any]) -> None:
        if "ip_adapter_masks" in (named.get("cross_attention_kwargs") or {}):
            raise UnsupportedError(
                f"{self.adapter.model}: ip_adapter_masks were given, which cross-attention would stretch over this "
                "rank's rows; leave them out, or use CfgParallel or DataParallel"
            )
        # Where the text is made of a picture's embedding, there is none to give.
        is_given = getattr(self.module, "config", {}).get("encoder_hid_dim_type") == "image_proj"
        if self._reads_text and not is_given and named.get("encoder_hidden_states") is None:
            raise UnsupportedError(
                f"{self.adapter.model}: encoder_hidden_states were not given, and what attends to a text would attend "
                "to this rank's rows instead; give them, or use CfgParallel or DataParallel"
            )
        cuts = self.adapter.splits or {}
        for name in cuts.get("", {}):
            if named.get(str(name)) is not None:
                named[str(name)] = self._cut_residuals(named[str(name)])

    def _cut_residuals(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            heights = self.split.levels.heights
            if value.shape[2] not in heights:
                raise UnsupportedError(
                    f"{self.adapter.model}: a residual has {value.shape[2]} rows, the image has {heights} at its levels"
                )
            return value[:, :, self.split.own_at(heights.index(value.shape[2]))]
        return type(value)(self._cut_residuals(part) for part in value)

    def _cut(self, image: Tensor) -> Tensor:
        return image[:, :, self.split.own].contiguous()

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
