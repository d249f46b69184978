"""Models that are no classes of diffusers: that of docs/support.md, and others that attend in other forms."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partsong.parallel import Adapter, Split
from tests.documents import ROOT


def page_names() -> dict[str, Any]:
    """What the first example of the page defines."""
    text = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "own_model_page"}
    exec(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0], names)
    return names


class Attends(nn.Module):
    """Attends with grouped keys, to itself or to a text, with a mask of keys, with heads of its own or in the batch."""

    def __init__(self, dim: int, heads: int, groups: int, *, folded: bool = False) -> None:
        super().__init__()
        self.shape, self.folded = (heads, groups, dim // heads), folded
        self.q, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * groups * (dim // heads))

    def forward(self, x: Tensor, seen: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        heads, groups, width = self.shape
        q = self.q(x).unflatten(-1, (heads, width)).transpose(1, 2)
        k, v = self.kv(x if seen is None else seen).unflatten(-1, (2, groups, width)).permute(2, 0, 3, 1, 4)
        if self.folded:
            found = F.scaled_dot_product_attention(*(part.flatten(0, 1) for part in (q, k, v))).unflatten(
                0, q.shape[:2]
            )
        else:
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=heads != groups)
        return self.out(found.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attends to the picture, then to the text."""

    def __init__(self, dim: int, heads: int, groups: int, **more: Any) -> None:
        super().__init__()
        self.mixer, self.reader = Attends(dim, heads, groups, **more), Attends(dim, heads, heads)

    def forward(self, y: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        y = y + self.mixer(y, mask=mask)
        return y + self.reader(y, context)


class OwnVideo(nn.Module):
    """Makes tokens of a video, with a text beside it and perhaps a mask of tokens."""

    def __init__(self, heads: int = 4, groups: int = 4, **more: Any) -> None:
        super().__init__()
        dim = 8 * heads
        self.enter = nn.Conv3d(4, dim, (1, 2, 2), (1, 2, 2))
        self.time, self.words = nn.Linear(1, dim), nn.Linear(6, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, groups, **more) for _ in range(3))
        self.leave = nn.Linear(dim, 16)

    def forward(self, video: Tensor, words: Tensor, sigma: Tensor, keep: Tensor | None = None) -> tuple[Tensor]:
        tokens = self.enter(video)
        b, _, f, h, w = tokens.shape
        y = tokens.flatten(2).transpose(1, 2) + self.time(sigma[:, None])[:, None]
        mask = None if keep is None else keep[:, None, None]
        for layer in self.layers:
            y = layer(y, self.words(words), mask)
        out = self.leave(y).view(b, f, h, w, 2, 2, 4)
        return (out.permute(0, 6, 1, 2, 4, 3, 5).reshape(b, 4, f, 2 * h, 2 * w),)


class Averaging(OwnVideo):
    """Looks at the mean of all tokens, which its row does not say."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_forward_hook(lambda layer, given, y: y - y.mean(dim=1, keepdim=True))


VIDEO = Adapter(
    family="own",
    model="OwnVideo",
    sample="video",
    timestep="sigma",
    batched=("video", "words", "sigma", "keep"),
    attention={"layers.*.mixer": ("image",)},
    splits={"layers.0": {"y": Split(dim=1)}},
    gather={"leave": Split(dim=1)},
    blocks={"layers": ("y",)},
)


@dataclass(frozen=True)
class Own:
    """How to make a model, its row, and a call of it for a number of samples."""

    build: Callable[[], nn.Module]
    row: Callable[[], Adapter]
    call: Callable[[int], dict[str, Any]]


def _picture(batch: int) -> dict[str, Any]:
    return {"x": torch.randn(batch, 4, 6, 10).double(), "t": torch.full((batch,), 0.3).double()}


def _video(batch: int) -> dict[str, Any]:
    named = {
        "video": torch.randn(batch, 4, 3, 6, 6),
        "words": torch.randn(batch, 5, 6),
        "sigma": torch.full((batch,), 0.6),
    }
    return {name: value.double() for name, value in named.items()}


def _masked(batch: int) -> dict[str, Any]:
    keep = torch.ones(batch, 27, dtype=torch.bool)
    keep[:, 20:] = False
    return {**_video(batch), "keep": keep}


MODELS = {
    "the page's": Own(lambda: page_names()["OwnDiT"](), lambda: page_names()["ROW"], _picture),
    "three heads": Own(lambda: page_names()["OwnDiT"](dim=24, heads=3), lambda: page_names()["ROW"], _picture),
    "video": Own(OwnVideo, lambda: VIDEO, _video),
    "grouped keys": Own(lambda: OwnVideo(groups=2), lambda: VIDEO, _video),
    "a mask": Own(OwnVideo, lambda: VIDEO, _masked),
    "heads in the batch": Own(lambda: OwnVideo(folded=True), lambda: VIDEO, _video),
}
#: A row that misses something; names that the model does not have, by the field that is told.
WRONG = Own(Averaging, lambda: replace(VIDEO, model="Averaging"), _video)
TYPOS = {
    "attention": replace(VIDEO, attention={"layers.*.attn": ("image",)}),
    "gather": replace(VIDEO, gather={"last": Split(dim=1)}),
    "splits['layers.0']": replace(VIDEO, splits={"layers.0": {"hidden_states": Split(dim=1)}}),
    "blocks['layers']": replace(VIDEO, blocks={"layers": ("hidden_states",)}),
    "batched": replace(VIDEO, batched=("video", "text")),
    "sample": replace(VIDEO, sample="latents"),
    "timestep": replace(VIDEO, timestep="t"),
}
