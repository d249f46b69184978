"""Finds the parts of a model whose width can be shared out: attention heads and feed-forward columns.

A part begins with layers of which a rank computes some output columns, and ends with a layer that reads these columns
and whose outputs are added up over ranks. In between, heads and columns are independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from partsong.parallel.tensor_parallel.quantised_weights import is_linear

__all__ = ["UNKNOWN", "Columns", "Part", "HeadTurns", "WidthCount", "find_parts"]


@dataclass(frozen=True, slots=True)
class Columns:
    """Describes the order of one layer's columns: pieces of units that stay whole.

    Attributes:
        layer: the layer.
        pieces: for each piece the numbers of its units and of columns in a unit; a head is a unit of an attention.
        is_text: whether it belongs to the text's side of a block, which has tokens of its own.
    """

    layer: nn.Module
    pieces: tuple[tuple[int, int], ...]
    is_text: bool = False

    @property
    def width(self) -> int:
        """Returns the number of columns."""
        return sum(units * size for units, size in self.pieces)


@dataclass(frozen=True, slots=True)
class WidthCount:
    """Names an attribute that counts heads or columns: `each` for every unit."""

    module: nn.Module
    name: str
    units: int
    each: int


@dataclass(frozen=True, slots=True)
class HeadTurns:
    """Names the rotary arguments of an attention whose heads rotate differently.

    Attributes:
        attention: the attention.
        names: the arguments: tensors or tuples of them, with a dim for the heads or for all columns.
        heads: groups of heads that read the same keys, and heads in a group.
        width: columns of a head.
    """

    attention: nn.Module
    names: tuple[str, ...]
    heads: tuple[int, int]
    width: int


@dataclass(frozen=True, slots=True)
class Part:
    """Describes one part of a model that is shared out.

    Attributes:
        name: where it stands in the model, for messages.
        first: layers whose output columns are cut.
        last: layers whose input columns are cut.
        norms: norms over the whole width between them.
        scales: modules with weights of their own that hold a number for every head.
        turns: rotary positions with numbers for every column or head; None without any.
        counts: attributes with its width.
    """

    name: str
    first: tuple[Columns, ...]
    last: tuple[Columns, ...]
    norms: tuple[Columns, ...] = ()
    scales: tuple[Columns, ...] = ()
    counts: tuple[WidthCount, ...] = ()
    turns: HeadTurns | None = None

    @property
    def most(self) -> int:
        """Returns the largest number of ranks it can be shared out over."""
        return min(units for columns in (*self.first, *self.last) for units, _ in columns.pieces)


# What the layers of diffusers' attention modules are called: each is followed by what it computes, queries, keys or
# values, or one number for a head of queries. Fused layers compute several.
_PROJECTIONS = {
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_kv": "kv",
    "to_qkv": "qkv",
    "to_gate": "q",
    "to_gate_logits": "h",
    "add_q_proj": "q",
    "add_k_proj": "k",
    "add_v_proj": "v",
    "to_added_kv": "kv",
    "to_added_qkv": "qkv",
}
_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
_OUTPUTS = ("to_out", "to_add_out")
#: Norms of an attention's input, which every rank has whole.
_BEFORE = ("norm_cross", "group_norm", "spatial_norm")
#: Attributes that count the heads of queries.
_HEADS = ("heads", "num_heads")
#: Attributes that count the heads of keys, and those that hold the width of all queries or keys.
_KEY_COUNTS = ("kv_heads", "num_kv_heads")
_WIDTHS = {"inner_dim": "q", "out_dim": "q", "inner_kv_dim": "k"}
#: Classes of attention whose positions hold numbers for every head or column -> the arguments with them.
_TURNS = {
    "LTXAttention": ("image_rotary_emb",),
    "LTX2Attention": ("query_rotary_emb", "key_rotary_emb"),
    "MochiAttention": ("image_rotary_emb",),
}
#: Processors and models whose attention stays whole: the first reads its width from the image's channels. A prior makes
#: a mask for every head of its configuration, AnyFlow's causal pipeline keeps keys of all heads, and Lumina puts two
#: attentions through one output layer.
_WHOLE_PROCESSORS = ("AttnAddedKVProcessor", "AttnAddedKVProcessor2_0")
_WHOLE_MODELS = ("AnyFlowFARTransformer3DModel", "LuminaNextDiT2DModel", "PriorTransformer")
#: Models without a known layer.
UNKNOWN = ("LongCatAudioDiTTransformer", "PRXTransformer2DModel", "RFD4ProteinaTransformer", "StableAudio3DiTModel")
#: Processors that return the text's attention unchanged where there is no output layer for it.
_BARE_TEXT = ("EasyAnimateAttnProcessor2_0",)

#: Feed-forward layers by the names of their children: the first ones, and the last one. The name of the class is stated
#: because other modules have children of such names.
_FEED_FORWARD = (
    ("FeedForward", ("net.0.proj",), "net.2"),
    ("FeedForward", ("w1", "w3"), "w2"),
    ("LuminaFeedForward", ("linear_1", "linear_3"), "linear_2"),
    ("AuraFlowFeedForward", ("linear_1", "linear_2"), "out_projection"),
    ("AceStepMLP", ("gate_proj", "up_proj"), "down_proj"),
    ("Cosmos3VLTextMLP", ("gate_proj", "up_proj"), "down_proj"),
    ("ErnieImageFeedForward", ("gate_proj", "up_proj"), "linear_fc2"),
    ("Flux2FeedForward", ("linear_in",), "linear_out"),
    ("Flux3FeedForward", ("linear_in",), "linear_out"),
    ("HiDreamImageFeedForwardSwiGLU", ("w1", "w3"), "w2"),
    ("Ideogram4MLP", ("w1", "w3"), "w2"),
    ("Kandinsky5FeedForward", ("in_layer",), "out_layer"),
    ("Krea2SwiGLU", ("gate", "up"), "down"),
    ("OmniGenFeedForward", ("gate_up_proj",), "down_proj"),
    ("SanaWMMlp", ("fc1",), "fc2"),
)


def find_parts(model: nn.Module) -> Iterator[Part]:
    """Yields the parts of a model. Unknown layers stay whole on every rank, which is just as correct."""
    has_heads = type(model).__name__ not in _WHOLE_MODELS
    for name, module in model.named_modules():
        part = (
            (_attention(name, module) if has_heads else None)
            or _single_block(name, module)
            or _fused_block(name, module)
        )
        part = part or _feed_forward(name, module)
        if part is not None:
            yield part


def _attention(name: str, module: nn.Module) -> Part | None:
    """Returns the heads of an attention that has an output layer of its own."""
    heads = _heads(name, module)
    outputs = {key: _single(child) for key in _OUTPUTS if (child := _child(module, key)) is not None}
    if heads is None or not outputs:
        return None
    part, head = heads
    if not all(is_linear(layer) and layer.in_features == math.prod(head) for layer in outputs.values()):
        return None
    if type(getattr(module, "processor", None)).__name__ in _BARE_TEXT and len(outputs) == 1:
        return None
    return replace(part, last=tuple(Columns(layer, (head,), key == "to_add_out") for key, layer in outputs.items()))


def _heads(name: str, module: nn.Module) -> tuple[Part, tuple[int, int]] | None:
    """Returns the heads of an attention module of diffusers, without its last layers, and a piece of its queries.

    Returns:
        None where it is not one, or has unknown layers.
    """
    counted = next((name for name in _HEADS if type(vars(module).get(name)) is int), None)
    heads, query = getattr(module, counted or "", 0), _child(module, "to_q")
    if counted is None or not _is_column_layer(query) or query.out_features % heads:
        return None
    processor = getattr(module, "processor", None)
    if isinstance(processor, nn.Module) or type(processor).__name__ in _WHOLE_PROCESSORS:
        return None  # a processor that is a module may have projections of its own, such as for an image prompt
    width = query.out_features // heads
    key = _child(module, "to_k")
    keys = key.out_features // width if _is_column_layer(key) else heads
    sizes = {"q": (keys, heads // keys * width), "k": (keys, width), "v": (keys, width), "h": (keys, heads // keys)}
    own = list(module.parameters(recurse=False))
    scales = tuple(Columns(module, (sizes["h"],)) for each in own if each.shape == (heads,))
    layers = _layers(module, sizes, heads)
    if layers is None or any(each.numel() > 1 and each.shape != (heads,) for each in own):
        return None
    names = _TURNS.get(type(module).__name__)
    turns = None if names is None else HeadTurns(module, names, sizes["h"], width)
    return Part(name, layers[0], (), layers[1], scales, _counts(module, counted, sizes), turns), sizes["q"]


def _layers(
    module: nn.Module, sizes: Mapping[str, tuple[int, int]], heads: int
) -> tuple[tuple[Columns, ...], tuple[Columns, ...]] | None:
    """Returns the projections of an attention and its norms over the whole width; None where it has other layers."""
    first, norms = [], []
    for name, child in module.named_children():
        if not any(True for _ in child.parameters()) or name in (*_OUTPUTS, *_BEFORE):
            continue
        if name in _PROJECTIONS and is_linear(child):
            pieces = tuple(sizes[letter] for letter in _PROJECTIONS[name])
            first.append(Columns(child, pieces, name.startswith("add") or "added" in name))
            if first[-1].width != child.out_features:
                return None
        elif name in _NORMS:
            piece = sizes["q" if name.endswith("q") else "k"]
            span = next(child.parameters()).numel()
            if span == math.prod(piece) and not (span == sizes["k"][1] and heads > 1):
                norms.append(Columns(child, (piece,), "added" in name))
            elif span != sizes["k"][1]:
                return None
        else:
            return None
    return tuple(first), tuple(norms)


def _counts(module: nn.Module, counted: str, sizes: Mapping[str, tuple[int, int]]) -> tuple[WidthCount, ...]:
    """Lists the attributes of an attention that hold a number of heads or a width."""
    counts = [WidthCount(module, counted, *sizes["h"])]
    keys = sizes["k"][0]
    counts += [WidthCount(module, name, keys, 1) for name in _KEY_COUNTS if getattr(module, name, None) == keys]
    for name, whose in _WIDTHS.items():
        if getattr(module, name, None) == math.prod(sizes[whose]):
            counts.append(WidthCount(module, name, *sizes[whose]))
    return tuple(counts)


def _single_block(name: str, module: nn.Module) -> Part | None:
    """Returns the attention and feed-forward columns of a block that computes both at once, like Flux' single blocks.

    Its last layer reads the outputs of the heads and then the columns.
    """
    attention, up, down = (_child(module, key) for key in ("attn", "proj_mlp", "proj_out"))
    if attention is None or not is_linear(up) or not is_linear(down):
        return None
    heads = _heads(name, attention)
    if heads is None or any(_child(attention, key) is not None for key in _OUTPUTS):
        return None
    if any(_child(child, "to_q") is not None for child in module.children() if child is not attention):
        return None  # another attention may read this one's output, as in Motif
    part, head = heads
    reads = down.in_features - math.prod(head)
    if reads <= 0 or up.out_features % reads or up.out_features // reads > 2:
        return None
    more = Columns(up, ((reads, 1),) * (up.out_features // reads))
    counts = (*part.counts, *(WidthCount(module, "mlp_hidden_dim", reads, 1),) * hasattr(module, "mlp_hidden_dim"))
    last = Columns(down, (head, (reads, 1)))
    return replace(part, first=(*part.first, more), last=(last,), counts=counts)


def _fused_block(name: str, module: nn.Module) -> Part | None:
    """Returns the heads and the columns of an attention whose first layer computes both, as in Flux 2."""
    heads, up, down = getattr(module, "heads", None), _child(module, "to_qkv_mlp_proj"), _child(module, "to_out")
    if type(heads) is not int or not is_linear(up) or not is_linear(down):
        return None
    inner, reads = getattr(module, "inner_dim", 0), getattr(module, "mlp_hidden_dim", 0)
    if down.in_features != inner + reads or not reads or (up.out_features - 3 * inner) % reads:
        return None
    head, pieces = (heads, inner // heads), (up.out_features - 3 * inner) // reads
    first = Columns(up, (head,) * 3 + ((reads, 1),) * pieces)
    counts = (
        WidthCount(module, "heads", heads, 1),
        WidthCount(module, "inner_dim", heads, inner // heads),
        WidthCount(module, "mlp_hidden_dim", reads, 1),
    )
    return Part(name, (first,), (Columns(down, (head, (reads, 1))),), counts=counts)


def _feed_forward(name: str, module: nn.Module) -> Part | None:
    """Returns the columns of a feed-forward layer; gates may be a second half."""
    for kind, ups, down_name in _FEED_FORWARD:
        if type(module).__name__ != kind:
            continue
        down = _child(module, down_name)
        first = [_child(module, up) for up in ups]
        if down is None or None in first:
            continue
        if not all(map(is_linear, (*first, down))):
            return None
        width: Any = down.in_features
        if any(layer.out_features not in (width, 2 * width) for layer in first):
            return None
        columns = tuple(Columns(layer, ((width, 1),) * (layer.out_features // width)) for layer in first)
        return Part(name, columns, (Columns(down, ((width, 1),), _is_text(name)),))
    return None


def _is_text(name: str) -> bool:
    """Says whether a feed-forward layer is that of the text's tokens, by the names diffusers gives those."""
    return any(word in name.rsplit(".", 1)[-1] for word in ("context", "txt", "text", "added"))


def _child(module: nn.Module, path: str) -> Any:
    for name in path.split("."):
        # Every layer of a model is asked for dozens of names, so missing ones are found without building a list.
        if not isinstance(getattr(module, name, None), nn.Module):
            return None
        children: dict[str, Any] = dict(module.named_children())
        if name not in children:
            return None
        module = children[name]
    return module


def _is_column_layer(layer: Any) -> bool:
    return isinstance(layer, nn.Linear) or is_linear(layer)


def _single(layer: Any) -> Any:
    """Returns the linear layer of an output, which may be in a list with a dropout."""
    return layer[0] if isinstance(layer, (nn.ModuleList, nn.Sequential)) else layer
