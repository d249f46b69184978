"""Tokens sharded over ranks: what is cut where, and the attention that puts it together again.

Each rank holds a contiguous run of every token stream (image, text). Projections, norms and feed-forward layers see
local tokens only; self-attention goes through a chain of stages, one per mesh axis, outermost call first: `Ulysses`
swaps tokens for heads, then `Ring` or `DisplacedPatch` brings the keys and values, then one kernel computes. Keys
may arrive in any token order: attention does not depend on it once positions are in the keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.kernels import attention
from partsong.parallel.adapters import Adapter, Split, places
from partsong.parallel.adapters.row import IMAGE
from partsong.parallel.collectives import gather_tokens
from partsong.parallel.hooks import AttentionHook, HookSet, InputHook, OutputHook
from partsong.parallel.linear_attention import TokenSums
from partsong.parallel.mesh import Axis, Mesh
from partsong.parallel.shards import offsets, split_sizes

__all__ = [
    "TOKEN_AXES",
    "AttentionCall",
    "AttentionShape",
    "Runs",
    "SequenceParallel",
    "Stage",
    "attend_locally",
    "attend_through",
    "merged_runs",
    "shard_runs",
]

#: Mesh axes over which tokens are cut, outermost first.
TOKEN_AXES = ("patch", "ring", "ulysses")

#: The tokens of one shard: runs of one stream each, (stream, tokens), in order.
Runs = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One self-attention of one rank.

    Attributes:
        layer: index of the attention module in its model.
        q: queries `[B, Hq, L, D]` of the tokens this rank holds.
        k: their keys `[B, Hkv, L, D]`.
        v: their values.
        sizes: token count of every shard still apart, in order.
        index: which of them this rank holds.
        masks: for each shard its key mask `[B, 1, 1, L]` (bool keeps True; float is added); None masks nothing.
        scale: logit scale; None is ``D ** -0.5``.
        wave: which part of the layer's heads this is, where a stage deals them out.
        runs: what the tokens of every shard are; empty where all are one run of image tokens.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    sizes: tuple[int, ...]
    index: int
    masks: tuple[Tensor, ...] | None = None
    scale: float | None = None
    wave: int = 0
    runs: tuple[Runs, ...] = ()


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What decides how many bytes one self-attention moves; names are those of `AttentionCall`."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    sizes: tuple[int, ...]
    index: int
    step: int = 0
    is_last: bool = False
    layer: int = 0
    runs: tuple[Runs, ...] = ()


def shard_runs(of: AttentionCall | AttentionShape) -> tuple[Runs, ...]:
    """What the tokens of every shard are.

    Example:
        >>> shard_runs(AttentionShape(1, 1, 1, 8, 4, sizes=(3, 2), index=0))
        ((('image', 3),), (('image', 2),))
    """
    return of.runs or tuple(((IMAGE, size),) for size in of.sizes)


def merged_runs(runs: tuple[Runs, ...], size: int) -> tuple[Runs, ...]:
    """The runs of shards put together `size` by `size`, in order."""
    return tuple(sum(runs[start : start + size], ()) for start in range(0, len(runs), size))


class Stage(Protocol):
    """One link of the attention chain."""

    axis: Axis

    def run(self, call: AttentionCall, inner: Any) -> Tensor:
        """Attention of the call's queries to all keys; `inner` does the rest of the work."""
        ...

    def predict(self, shape: AttentionShape) -> tuple[int, AttentionShape]:
        """Bytes this rank sends in one attention, and the shape that `inner` sees."""
        ...


def attend_through(stages: Sequence[Stage], call: AttentionCall) -> Tensor:
    """Attention through a chain of stages, outermost first, which ends at the keys at hand."""
    if not stages:
        return attend_locally(call)
    return stages[0].run(call, lambda inner: attend_through(stages[1:], inner))


def attend_locally(call: AttentionCall) -> Tensor:
    """The end of the chain: attention to the keys at hand."""
    mask = None if call.masks is None else torch.cat(call.masks, dim=-1)
    return masked_attention(call.q, call.k, call.v, mask, call.scale)[0]


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """`kernels.attention` with a mask that is boolean or additive."""
    if mask is None:
        return attention(q, k, v, scale=scale)
    if mask.dtype == torch.bool:
        return attention(q, k, v, mask=mask, scale=scale)
    return attention(q, k, v, bias=mask, scale=scale)


class SequenceParallel:
    """Cuts one module's tokens over the token axes of a mesh and chains the attention stages.

    Args:
        module: the transformer.
        adapter: its row, resolved.
        mesh: the ranks.
        stages: attention stages, outermost first.
    """

    #: What holds a part of the tokens, in messages.
    parts_name = "ranks"

    def __init__(self, module: nn.Module, adapter: Adapter, mesh: Mesh, stages: Sequence[Stage]) -> None:
        self.module, self.adapter, self.stages = module, adapter, tuple(stages)
        self.axis: Axis = mesh.axis(*TOKEN_AXES)
        self.sums = TokenSums(self.axis, adapter)
        self.sizes: dict[str, tuple[int, ...]] = {}
        self.layers: list[tuple[str, tuple[str, ...], nn.Module]] = []
        self._unit = 1
        self._mask_bytes: dict[int, int] = {}
        self._gathered: dict[str, tuple[str, int]] = {}

    def attach(self, hooks: HookSet) -> None:
        """Puts the splitting, gathering and attention hooks on the module."""
        modules = dict(self.module.named_modules())
        assert self.adapter.splits is not None and self.adapter.gather is not None
        for name, entry in self._by_module(self.adapter.splits, modules).items():
            inputs = {str(key): cut for key, cut in entry.items() if not cut.output}
            outputs = {key: cut for key, cut in entry.items() if cut.output}
            if inputs:
                signature = inspect.signature(modules[name].forward)
                hooks.add(
                    modules[name], InputHook(lambda named, i=inputs: self._cut_inputs(named, i), signature), "split"
                )
            if outputs:
                hooks.add(modules[name], OutputHook(lambda out, o=outputs: self._cut_outputs(out, o)), "split-output")
        for path, cut in self.adapter.gather.items():
            for name in places(path, modules):
                hooks.add(modules[name], OutputHook(lambda out, n=name, c=cut: self._gather(out, n, c)), "gather")
        for name, child in modules.items():
            streams = self.adapter.streams_of(name)
            if streams is None or getattr(child, "is_cross_attention", False):
                continue
            layer = len(self.layers)
            self.layers.append((name, streams, child))
            hooks.add(child, AttentionHook(self._attention_of(layer, name, streams), name), "attention")
        if not self.sums.attach(hooks, modules) and not self.layers:
            raise UnsupportedError(f"no self-attention found in this {self.adapter.model}; its layout has changed")

    def _by_module(
        self, splits: Mapping[str, Mapping[str | int, Split]], modules: dict[str, nn.Module]
    ) -> dict[str, dict[str | int, Split]]:
        """The cuts of every module that some paths name: one hook each, however many paths."""
        found: dict[str, dict[str | int, Split]] = {}
        for path, entry in splits.items():
            for name in places(path, modules):
                found.setdefault(name, {}).update(entry)
        return found

    def _cut_inputs(self, named: dict[str, Any], cuts: dict[str, Split]) -> None:
        for name, cut in cuts.items():
            value = named.get(name)
            if value is not None or not cut.optional:
                named[name] = self._cut_any(value, cut, name)

    def _cut_outputs(self, output: Any, cuts: dict[str | int, Split]) -> Any:
        if isinstance(output, Tensor):
            return self._cut(output, cuts[0], "output")
        return tuple(self._cut(x, cuts[i], f"output {i}") if i in cuts else x for i, x in enumerate(output))

    def _cut_any(self, value: Any, cut: Split, name: str) -> Any:
        if isinstance(value, Tensor):
            return self._cut(value, cut, name)
        if isinstance(value, (list, tuple)):
            return type(value)(self._cut_any(item, cut, name) for item in value)
        if isinstance(value, dict):
            return {key: self._cut_any(item, cut, name) for key, item in value.items()}
        if isinstance(value, int):
            return split_sizes(value, self.axis.size)[self.axis.index]
        raise UnsupportedError(f"{self.adapter.model}: {name} is {type(value).__name__}, a tensor is needed")

    def _cut(self, tensor: Tensor, cut: Split, name: str) -> Tensor:
        if cut.ndim is not None and tensor.ndim != cut.ndim:
            if cut.optional and tensor.ndim < cut.ndim:
                return tensor  # nothing per token in it, such as one timestep for the whole sample
            raise UnsupportedError(f"{self.adapter.model}: {name} has {tensor.ndim} dimensions, not {cut.ndim}")
        total, parts = tensor.shape[cut.dim], self.axis.size
        if total // self._unit < parts:
            what = f"{total} {cut.stream} tokens" if self._unit == 1 else f"{total // self._unit} rows of tokens"
            raise UnsupportedError(
                f"{self.adapter.model}: {what} cannot be cut over {parts} {self.parts_name}; "
                f"use at most {total // self._unit} {self.parts_name}, a larger picture or a longer text"
            )
        sizes = self.cut_sizes(total)
        if self.sizes.setdefault(cut.stream, sizes) != sizes:
            raise UnsupportedError(
                f"{self.adapter.model}: {name} has {total} {cut.stream} tokens, another input has "
                f"{sum(self.sizes[cut.stream])}"
            )
        start = offsets(sizes)[self.axis.index]
        return tensor.narrow(cut.dim, start, sizes[self.axis.index])

    def cut_sizes(self, total: int) -> tuple[int, ...]:
        """Tokens of each rank: as even as can be, in whole rows of the grid where the row asks for it."""
        return tuple(self._unit * size for size in split_sizes(total // self._unit, self.axis.size))

    def begin_forward(self, sample: Any) -> None:
        """Forgets the token counts of the last call: the next one may have another shape.

        Args:
            sample: the noisy latents of this call.
        """
        self.sizes.clear()
        self._mask_bytes.clear()
        if self.adapter.whole_rows:
            patch: Any = self.module.config["patch_size"]  # type: ignore[index]
            self._unit = sample.shape[-1] // patch

    def _gather(self, output: Tensor, name: str, cut: Split) -> Tensor:
        self._gathered[name] = (cut.stream, output.shape[-1] * output.element_size())
        return gather_tokens(self.axis, output, self.sizes[cut.stream], cut.dim, name="gather of the output tokens")

    def _attention_of(self, layer: int, name: str, streams: tuple[str, ...]) -> Any:
        def attend(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            sizes = self.shard_sizes(streams)
            key, value = self._once_per_group(query, key, value, layer)
            local = sizes[self.axis.index]
            if query.shape[2] != local or key.shape[2] != local:
                raise UnsupportedError(
                    f"{name}: attends {query.shape[2]} queries to {key.shape[2]} keys where this rank holds {local} "
                    f"tokens of {' and '.join(streams)}; this call form cannot be cut"
                )
            if is_causal or dropout_p:
                raise UnsupportedError(f"{name}: causal attention and dropout are not supported over ranks")
            masks = None if attn_mask is None else self._masks(attn_mask, sizes, layer)
            runs = _runs(self.sizes, streams)
            call = AttentionCall(layer, query, key, value, sizes, self.axis.index, masks, scale, runs=runs)
            return self.attend(call)

        return attend

    def attend(self, call: AttentionCall) -> Tensor:
        """Runs the chain of stages on one attention call."""
        return attend_through(self.stages, call)

    def _once_per_group(self, query: Tensor, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values as they were before the model repeated them for every query head of a group."""
        _, kv_heads, _ = head_counts(self.layers[layer][2])
        if not self.adapter.repeats_keys or key.shape[1] != query.shape[1]:
            return key, value
        step = query.shape[1] // kv_heads
        return key[:, ::step], value[:, ::step]

    def shard_sizes(self, streams: tuple[str, ...]) -> tuple[int, ...]:
        """Tokens each rank contributes to an attention over `streams`."""
        for stream in streams:
            if stream not in self.sizes:
                raise UnsupportedError(f"{self.adapter.model}: no {stream} tokens were cut; its layout has changed")
        return tuple(sum(self.sizes[stream][i] for stream in streams) for i in range(self.axis.size))

    def _masks(self, mask: Tensor, sizes: tuple[int, ...], layer: int) -> tuple[Tensor, ...]:
        while mask.ndim < 4:
            mask = mask.unsqueeze(0 if mask.ndim < 2 else 1)
        local = sizes[self.axis.index]
        if mask.shape[-2] != 1 or mask.shape[-1] != local or not bool((mask == mask[:, :1]).all()):
            raise UnsupportedError(
                f"{self.layers[layer][0]}: only key-padding masks (the same for all queries and heads) can be cut; "
                f"found shape {tuple(mask.shape)} for {local} local tokens"
            )
        rows = mask[:, 0, 0].contiguous()  # [B, L]
        self._mask_bytes[layer] = rows.element_size()
        return self._whole_masks(rows, sizes)

    def _whole_masks(self, rows: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """The key masks of all parts out of this one's."""
        whole = gather_tokens(self.axis, rows.to(torch.uint8) if rows.dtype == torch.bool else rows, sizes, 1)
        whole = whole.to(rows.dtype)
        return tuple(part[:, None, None] for part in whole.split(list(sizes), dim=1))

    def predict(self, batch: int, tokens: dict[str, int], itemsize: int, index: int, step: tuple[int, bool]) -> int:
        """Bytes the rank at `index` of the token axes sends in one forward of a step (its number, whether the last)."""
        cut = {stream: self.cut_sizes(total) for stream, total in tokens.items()}
        moved = self.sums.predict(batch, index)
        for layer, (_, streams, module) in enumerate(self.layers):
            runs = _runs(cut, streams)
            sizes = tuple(sum(length for _, length in shard) for shard in runs)
            shape = AttentionShape(batch, *head_counts(module), itemsize, sizes, index, *step, layer, runs)
            moved += batch * sizes[index] * self._mask_bytes.get(layer, 0) * (self.axis.size - 1)
            for stage in self.stages:
                sent, shape = stage.predict(shape)
                moved += sent
        for stream, token_bytes in self._gathered.values():
            moved += batch * cut[stream][index] * token_bytes * (self.axis.size - 1)
        return moved


def _runs(sizes: Mapping[str, tuple[int, ...]], streams: tuple[str, ...]) -> tuple[Runs, ...]:
    """What each rank contributes to an attention over `streams`."""
    return tuple(
        tuple(zip(streams, lengths, strict=True)) for lengths in zip(*(sizes[s] for s in streams), strict=True)
    )


def head_counts(module: Any) -> tuple[int, int, int]:
    """Query heads, key/value heads and head dimension of a diffusers attention module."""
    heads = module.heads
    if getattr(module, "fused_projections", False) or not hasattr(module, "to_q"):
        head_dim = getattr(module, "head_dim", None) or module.inner_dim // heads
        return heads, getattr(module, "inner_kv_dim", heads * head_dim) // head_dim, head_dim
    head_dim = module.to_q.out_features // heads
    return heads, module.to_k.out_features // head_dim, head_dim
