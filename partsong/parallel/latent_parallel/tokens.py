"""Runs a transformer on a part of its latent: the tokens of that part, with the positions they have in the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter, Split
from partsong.parallel.adapters.row import IMAGE
from partsong.parallel.cuts.token_cuts import TokenCuts
from partsong.parallel.cuts.token_grid import Lengths, patch_of, token_grid
from partsong.parallel.hooks.known_values import KnownValues
from partsong.parallel.hooks.model_hooks import HookSet, InputHook, signature_of
from partsong.parallel.hooks.samples import map_sample, sample_of
from partsong.parallel.latent_parallel.layout import LatentCut
from partsong.parallel.latent_parallel.parts import PartView
from partsong.parallel.ranks.mesh import Axis

__all__ = ["PartTokens"]


class PartTokens(TokenCuts, PartView):
    """Keeps the tokens of one part where tokens enter the model, and puts them among zeros where they leave it.

    The model is given the whole latent, so the positions it computes are those in the whole. Between the two places
    are its blocks, which look at nothing but these tokens and the text. A few tokens of the rest may be among them, as
    context: what is predicted for those is dropped.

    Args:
        module: the transformer.
        adapter: its row, resolved, with a grid.
        axis: the ranks.
        context: one of every so many rows and columns of the rest is context; None is none.
    """

    def __init__(self, module: nn.Module, adapter: Adapter, axis: Axis, context: int | None) -> None:
        super().__init__(module, adapter, axis)
        self.context = context
        self._config: Any = module.config
        self._lengths: Lengths = (1, 1, 1)
        self._places: tuple[Tensor, Tensor] | None = None  # of the part's tokens: on the device, and on the host
        self._known: dict[Any, tuple[Tensor, Tensor]] = {}
        self._counts = KnownValues()

    def attach(self, hooks: HookSet) -> None:
        """Puts on the hooks that pick a part's tokens, and the part of masks over all tokens."""
        modules = dict(self.module.named_modules())
        self.attach_cuts(hooks, modules)
        self.attach_gather(hooks, modules)
        if self.adapter.attends_per_sample:
            return  # its masks are of the text only
        for name, child in modules.items():
            streams, signature = self.adapter.streams_of(name), signature_of(child)
            if streams is not None and IMAGE in streams and "attention_mask" in signature.parameters:
                hooks.add(child, InputHook(partial(self._cut_mask, streams=streams), signature), "mask")

    def lengths(self, named: Mapping[str, Any]) -> Lengths:
        """Returns how many frames, rows and columns of patches a call's latent has."""
        grid, sample = self.adapter.grid, named[self.adapter.sample]
        assert grid is not None
        self._lengths, _ = token_grid(self.adapter, self._config, named, self._counts)
        if not grid.dims and math.prod(self._lengths) != sample.shape[1]:
            raise UnsupportedError(
                f"{self.adapter.model}: {sample.shape[1]} tokens are not those of one picture of "
                f"{' x '.join(map(str, self._lengths))}: there are others among them, such as pictures to go by, "
                "which no part would see whole; use Ulysses"
            )
        return self._lengths

    def run(self, forward: Callable[..., Any], named: dict[str, Any], cut: LatentCut, number: int) -> Any:
        """Runs the model on the tokens of one part."""
        self.begin_forward(named[self.adapter.sample])
        self.sizes[IMAGE] = (math.prod(self._lengths),)
        self._places = self._places_of(cut, number, named[self.adapter.sample].device)
        try:
            return forward(**named)
        finally:
            self._places = None

    def _places_of(self, cut: LatentCut, number: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the places of a part's tokens and of its context among all tokens, in order."""
        key = self._lengths, cut, number, device
        if key not in self._known:
            is_here = torch.zeros(self._lengths, dtype=torch.bool)
            is_here.narrow(cut.dim, cut.starts[number], cut.part).fill_(True)
            if self.context is not None:
                some = slice(self.context // 2, None, self.context)
                is_here[:, some, some] = True
            here = is_here.flatten().nonzero().flatten()
            self._known[key] = here.to(device), here
        return self._known[key]

    def part(self, output: Any, cut: LatentCut, number: int) -> Tensor:
        """Returns the prediction for a part, a piece of what the model returned."""
        dim, unit = self.line(cut)
        whole = self._unfolded(sample_of(output))
        return whole.narrow(dim, cut.starts[number] * unit, cut.part * unit).contiguous()

    def line(self, cut: LatentCut) -> tuple[int, int]:
        """Returns the dimension of a prediction that is cut, and the length of a patch along it."""
        grid = self.adapter.grid
        assert grid is not None
        if grid.dims:
            return grid.dims[cut.dim - 3], patch_of(self.adapter, self._config)[cut.dim]
        return cut.dim + 1, 1

    def returned(self, output: Any, whole: Tensor) -> Any:
        """Returns what the model would return with the prediction for the whole latent."""
        return map_sample(output, lambda sample: whole.view(sample.shape))

    def _unfolded(self, sample: Tensor) -> Tensor:
        """Returns a prediction with a dimension for each of frames, rows and columns."""
        grid = self.adapter.grid
        assert grid is not None
        return sample if grid.dims else sample.unflatten(1, self._lengths)

    def _cut(self, tensor: Tensor, cut: Split, name: str) -> Tensor:
        """Cuts tensors of the picture; the text stays whole, and so does everything while there are no parts."""
        return tensor if self._places is None or cut.stream != IMAGE else super()._cut(tensor, cut, name)

    def _own(self, tensor: Tensor, cut: Split, name: str) -> Tensor:
        """Returns the part's tokens of a tensor that has all of them."""
        assert self._places is not None
        total = sum(self.sizes[IMAGE])
        if tensor.shape[cut.dim] != total:
            raise UnsupportedError(
                f"{self.adapter.model}: {name} has {tensor.shape[cut.dim]} tokens where its latent has "
                f"{' x '.join(map(str, self._lengths))} patches: there are others among them, such as pictures to go "
                "by, which no part would see whole; use Ulysses"
            )
        return tensor.index_select(cut.dim, self._places[0])

    def _cut_number(self, value: int, cut: Split) -> int:
        """Returns how many of the stream's first tokens are the part's."""
        if self._places is None or cut.stream != IMAGE:
            return value
        assert cut.leading, "rows without such numbers are the only ones that are taken"
        return int((self._places[1] < value).sum())

    def _gather(self, local: Tensor, name: str, cut: Split) -> Tensor:
        """Puts the part's tokens in their places among zeros; nothing is computed from those."""
        if self._places is None or cut.stream != IMAGE:
            return local
        shape = list(local.shape)
        shape[cut.dim] = sum(self.sizes[IMAGE])
        return local.new_zeros(shape).index_copy(cut.dim, self._places[0], local)

    def predict(self, batch: int, tokens: dict[str, int], itemsize: int, index: int, step: tuple[int, bool]) -> int:
        """Returns the bytes a rank sends inside the model: none."""
        return 0

    def _cut_mask(self, named: dict[str, Any], streams: tuple[str, ...]) -> None:
        """Cuts a mask over the tokens of the whole picture, and of the text beside it, for those of the part."""
        mask = named.get("attention_mask")
        if self._places is None or not isinstance(mask, Tensor):
            return
        (here, _), picture, beside = self._places, sum(self.sizes[IMAGE]), named.get("encoder_hidden_states")
        text = named["hidden_states"].shape[1] - len(here) if beside is None else beside.shape[1]
        words = torch.arange(text, device=mask.device)
        kept = torch.cat([here, words + picture] if streams[0] == IMAGE else [words, here + text])
        for dim in range(max(1, mask.ndim - 2), mask.ndim):
            if mask.shape[dim] == picture + text:
                mask = mask.index_select(dim, kept)
        named["attention_mask"] = mask
