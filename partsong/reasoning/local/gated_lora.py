"""Lets a frozen model look ahead: masks after a text stand for its next tokens, and only they see trained weights.

A mask is a row of a forward that has an embedding instead of a token. It sees the text before it and the masks between.
Low-rank changes of the linear layers act on the rows of masks and on no others. So each token's state stays that of the
model itself, whatever masks hold (gated LoRA, arXiv 2507.11851, section 3.2). They cannot be merged into the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from partsong.errors import ArgumentError, UnsupportedError

__all__ = ["GatedLinear", "GatedLora", "linear_layers"]


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Lists the linear layers of a model's decoder by name, including packed ones but not its head.

    Raises:
        UnsupportedError: there are none.
    """
    decoder: Any = model.get_decoder()
    # Packed layers are not an `nn.Linear`, but have its sizes.
    layers = {name: each for name, each in decoder.named_modules() if hasattr(each, "in_features")}
    if not layers:
        raise UnsupportedError(f"{type(model).__name__} has no linear layers that masks could change")
    return layers


class GatedLora(nn.Module):
    """Holds embeddings of masks, and low-rank changes of a model's linear layers that act on masks only.

    For a mask's row x a layer gives W x + alpha / rank * B (A x). B begins at zero, so at first masks see the model as
    it is.

    Args:
        sizes: the linear layers by name, each with the sizes of its input and output.
        width: the size of an embedding.
        num_masks: how many masks may follow a token.
        rank: the rank of the changes; 0 for none.
        alpha: how much they count, times the rank.

    Source: arXiv 2507.11851.

    >>> lora = GatedLora({"layers.0.mlp": (4, 6)}, width=4, num_masks=3, rank=2)
    >>> tuple(lora.masks.shape), sum(each.numel() for each in lora.parameters())
    ((3, 4), 32)
    """

    def __init__(
        self, sizes: Mapping[str, tuple[int, int]], *, width: int, num_masks: int, rank: int, alpha: float = 1.0
    ) -> None:
        super().__init__()
        self.sizes, self.rank, self.alpha = dict(sizes), rank, alpha
        self.masks = nn.Parameter(torch.randn(num_masks, width) * 0.02)
        # Names of parameters have no dots.
        shapes = {name.replace(".", "/"): size for name, size in sizes.items()} if rank else {}
        self.down = nn.ParameterDict({n: nn.Parameter(torch.randn(rank, a) * a**-0.5) for n, (a, _) in shapes.items()})
        self.up = nn.ParameterDict({n: nn.Parameter(torch.zeros(b, rank)) for n, (_, b) in shapes.items()})
        #: Which tokens of the current forward are masks.
        self.rows: slice | Tensor | None = None
        self._numbers: Tensor | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, *, num_masks: int, rank: int, alpha: float = 1.0) -> GatedLora:
        """Makes changes of all linear layers of a model's decoder, with its dtype and on its device.

        Raises:
            UnsupportedError: it has none.
        """
        layers: dict[str, Any] = dict(linear_layers(model))
        sizes = {name: (each.in_features, each.out_features) for name, each in layers.items()}
        weight = model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        lora = cls(sizes, width=weight.shape[1], num_masks=num_masks, rank=rank, alpha=alpha)
        lora.masks.data = weight.detach().float().mean(0) + weight.detach().float().std() * torch.randn(
            num_masks, weight.shape[1]
        )
        return lora.to(weight.device, weight.dtype)

    @contextmanager
    def at(self, masks: Mapping[int, int] | Tensor) -> Iterator[None]:
        """Puts masks into the next forward.

        Args:
            masks: which of its tokens are masks, each with its number from 0 on; the tokens' ids do not matter. Or, if
                all of them are masks, the number of each, int64 `[tokens]`.
        """
        device = self.masks.device
        if isinstance(masks, Tensor):
            self.rows, self._numbers = slice(None), masks
        else:
            rows = list(masks)
            lie_together = rows[-1] - rows[0] == len(rows) - 1
            self.rows = slice(rows[0], rows[-1] + 1) if lie_together else torch.tensor(rows, device=device)
            self._numbers = torch.tensor(list(masks.values()), device=device)
        try:
            yield
        finally:
            self.rows = self._numbers = None

    def attach(self, model: PreTrainedModel) -> list[RemovableHandle]:
        """Hooks embeddings and changes into a model, for training; each handle's ``remove()`` takes one out.

        Raises:
            UnsupportedError: it has no linear layers.
            ArgumentError: its linear layers are not those that are changed.
        """
        layers = self._check(model)
        handles = [model.get_input_embeddings().register_forward_hook(self._embed)]
        if self.rank:
            handles += [each.register_forward_hook(self._adder(name)) for name, each in layers.items()]
        return handles

    def build_into(self, model: PreTrainedModel) -> None:
        """Replaces a model's linear layers by layers with the changes, for inference.

        They are faster than hooks, whose cost shows in a small model's steps. The model must not be shared.

        Raises:
            UnsupportedError: as in `attach`.
            ArgumentError: as in `attach`.
        """
        layers, decoder = self._check(model), model.get_decoder()
        model.get_input_embeddings().register_forward_hook(self._embed)
        for name, each in layers.items() if self.rank else ():
            parent, _, last = name.rpartition(".")
            setattr(decoder.get_submodule(parent), last, GatedLinear(each, self, _named(name, each)))

    def _check(self, model: PreTrainedModel) -> dict[str, nn.Module]:
        layers: dict[str, Any] = dict(linear_layers(model))
        sizes = {
            part: (each.in_features, outputs)
            for name, each in layers.items()
            for part, outputs in _named(name, each).items()
        }
        if self.rank and sizes != self.sizes:
            name = min(n for n in {**sizes, **self.sizes} if sizes.get(n) != self.sizes.get(n))
            raise ArgumentError(
                f"the masks were trained for another model: its layer {name} has sizes {self.sizes.get(name)}, that of "
                f"{type(model).__name__} {sizes.get(name)}"
            )
        return layers

    def _embed(self, _module: nn.Module, _inputs: Any, out: Tensor) -> Tensor | None:
        if self.rows is None:
            return None
        out = out.clone()
        out[:, self.rows] = self.masks[self._numbers].to(out.dtype)
        return out

    def _adder(self, name: str) -> Any:
        key, scale = name.replace(".", "/"), self.alpha / self.rank
        down, up = self.down[key], self.up[key]

        def add(_module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            rows = self.rows
            if rows is None:
                return
            change = F.linear(F.linear(inputs[0][:, rows], down), up)
            if isinstance(rows, slice):
                out[:, rows].add_(change, alpha=scale)
            else:
                out.index_add_(1, rows, change, alpha=scale)

        return add


def _named(name: str, layer: Any) -> dict[str, int]:
    """Names the layers that a layer computes, with their outputs: itself, or those that were joined in it."""
    parts: dict[str, int] = getattr(layer, "parts", None) or {name.rpartition(".")[2]: layer.out_features}
    return {f"{name.rpartition('.')[0]}.{part}": outputs for part, outputs in parts.items()}


class GatedLinear(nn.Module):
    """Computes a linear layer and the change that masks see.

    Args:
        inner: the layer.
        lora: the changes, which know what rows are masks.
        names: the layer's name among them, or several where it computes several, in the order of its outputs.
    """

    def __init__(self, inner: Any, lora: GatedLora, names: Iterable[str]) -> None:
        super().__init__()
        keys = [name.replace(".", "/") for name in names]
        self.inner = inner
        # Called directly: it has no hooks, and even looking for them shows in the times of a small model.
        self._multiply = inner.forward
        self.in_features, self.out_features = inner.in_features, inner.out_features
        # Each part has columns of its own between the two products.
        down = torch.cat([lora.down[key].detach().T for key in keys], dim=1)
        up = torch.block_diag(*(lora.up[key].detach().T * (lora.alpha / lora.rank) for key in keys))
        # Plain attributes, not modules or parameters: the model must not own the head's parts.
        self._of = (lora, down, up)

    def forward(self, x: Tensor) -> Tensor:
        """`[1, tokens, in_features]` to `[1, tokens, out_features]`."""
        out: Tensor = self._multiply(x)
        lora, down, up = self._of
        rows = lora.rows
        if isinstance(rows, slice):
            out[0, rows].addmm_(x[0, rows].mm(down), up)
        elif rows is not None:
            out[0].index_add_(0, rows, x[0, rows].mm(down).mm(up))
        return out
