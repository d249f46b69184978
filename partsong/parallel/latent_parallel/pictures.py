"""Runs a UNet on a part of its latent: rows or columns of the picture, which is a smaller picture to the UNet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter
from partsong.parallel.cuts.token_grid import Lengths
from partsong.parallel.hooks.model_hooks import HookSet
from partsong.parallel.hooks.samples import map_sample, sample_of
from partsong.parallel.latent_parallel.layout import LatentCut
from partsong.parallel.latent_parallel.parts import PartView

__all__ = ["PartPictures"]

#: Dictionaries of arguments, and what may be in them that lies over the picture like its latent.
_OVER_THE_PICTURE = {"added_cond_kwargs": "hint", "cross_attention_kwargs": "ip_adapter_masks"}


class PartPictures(PartView):
    """Gives a UNet a part of its picture's rows or columns. It has no positions, so a part needs none.

    A patch is a row of the coarsest level. What a ControlNet adds is cut at the same places.

    Args:
        module: the UNet.
        adapter: its row.
    """

    def __init__(self, module: nn.Module, adapter: Adapter) -> None:
        config: Any = module.config
        self.adapter, self.unit = adapter, 1 << (len(config["down_block_types"]) - 1)

    def attach(self, hooks: HookSet) -> None:
        """Does nothing: a part is a picture to the UNet."""

    def lengths(self, named: Mapping[str, Any]) -> Lengths:
        """Returns how many patches the picture has down and across; 1 where they do not divide its side."""
        for name, key in _OVER_THE_PICTURE.items():
            if key in (named.get(name) or {}):
                raise UnsupportedError(
                    f"{self.adapter.model}: {key} was given, which lies over the whole picture and would not fit its "
                    "parts; leave it out, or use CfgParallel or DataParallel"
                )
        rows, columns = named[self.adapter.sample].shape[-2:]
        if rows % self.unit and columns % self.unit:
            raise UnsupportedError(
                f"{self.adapter.model}: neither side of a latent of {rows} x {columns} is a multiple of {self.unit}, "
                "where its coarsest level can be cut; use SyncPatch"
            )
        down, across = (1 if side % self.unit else side // self.unit for side in (rows, columns))
        return 1, down, across

    def run(self, forward: Callable[..., Any], named: dict[str, Any], cut: LatentCut, number: int) -> Any:
        """Runs the UNet on one part."""

        def cut_at(picture: Any) -> Any:
            if not isinstance(picture, Tensor):
                return picture
            dim, length = cut.dim - 3, picture.shape[cut.dim - 3]  # finer levels have more of it
            start, size = (count * length // cut.length for count in (cut.starts[number], cut.part))
            return picture.narrow(dim, start, size).contiguous()

        over = (self.adapter.sample, *self.adapter.residuals)
        changed = {name: tree_map(cut_at, named[name]) for name in over if named.get(name) is not None}
        return forward(**{**named, **changed})

    def part(self, output: Any, cut: LatentCut, number: int) -> Tensor:
        """Returns the prediction for a part: all that the UNet returned."""
        return sample_of(output)

    def line(self, cut: LatentCut) -> tuple[int, int]:
        """Returns the dimension of a prediction that is cut, and the length of a patch along it."""
        return cut.dim - 3, self.unit

    def returned(self, output: Any, whole: Tensor) -> Any:
        """Returns what the UNet would return with the prediction for the whole picture."""
        return map_sample(output, lambda _: whole)
