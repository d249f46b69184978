"""Tokens sharded over ranks: what is cut where, and the attention that puts it together again.

Each rank holds a contiguous run of every token stream (image, text). Projections, norms and feed-forward layers see
local tokens only; self-attention goes through a chain of stages, one per mesh axis, outermost call first: `Ulysses`
swaps tokens for heads, then `Ring` or `DisplacedPatch` brings the keys and values, then one kernel computes. Keys
may arrive in any token order: attention does not depend on it once positions are in the keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.kernels import attention
from partsong.parallel.adapters import Adapter, Split
from partsong.parallel.collectives import gather_tokens
from partsong.parallel.hooks import AttentionHook, HookSet, InputHook, OutputHook
from partsong.parallel.mesh import Axis, Mesh
from partsong.parallel.shards import offsets, split_sizes

__all__ = ["TOKEN_AXES", "AttentionCall", "AttentionShape", "SequenceParallel", "Stage", "attend_locally"]

#: Mesh axes over which tokens are cut, outermost first.
TOKEN_AXES = ("patch", "ring", "ulysses")


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


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What decides how many bytes one self-attention moves."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    sizes: tuple[int, ...]
    index: int
    step: int = 0
    is_last: bool = False


class Stage(Protocol):
    """One link of the attention chain."""

    axis: Axis

    def run(self, call: AttentionCall, inner: Any) -> Tensor:
        """Attention of the call's queries to all keys; `inner` does the rest of the work."""
        ...

    def predict(self, shape: AttentionShape) -> tuple[int, AttentionShape]:
        """Bytes this rank sends in one attention, and the shape that `inner` sees."""
        ...


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

    def __init__(self, module: nn.Module, adapter: Adapter, mesh: Mesh, stages: Sequence[Stage]) -> None:
        self.module, self.adapter, self.stages = module, adapter, tuple(stages)
        self.axis: Axis = mesh.axis(*TOKEN_AXES)
        self.sizes: dict[str, tuple[int, ...]] = {}
        self.layers: list[tuple[str, tuple[str, ...], nn.Module]] = []
        self.mask_itemsize = 0

    def attach(self, hooks: HookSet) -> None:
        """Puts the splitting, gathering and attention hooks on the module."""
        modules = dict(self.module.named_modules())
        assert self.adapter.splits is not None and self.adapter.gather is not None
        for path, entry in self.adapter.splits.items():
            target = _child(modules, path, self.adapter)
            inputs = {str(key): cut for key, cut in entry.items() if not cut.output}
            outputs = {key: cut for key, cut in entry.items() if cut.output}
            if inputs:
                signature = inspect.signature(target.forward)
                hooks.add(target, InputHook(lambda named, i=inputs: self._cut_inputs(named, i), signature), "split")
            if outputs:
                hooks.add(target, OutputHook(lambda out, o=outputs: self._cut_outputs(out, o)), "split-output")
        path, dim = self.adapter.gather
        hooks.add(_child(modules, path, self.adapter), OutputHook(lambda out: self._gather(out, dim)), "gather")
        for name, child in modules.items():
            streams = self.adapter.streams_of(name)
            if streams is None or getattr(child, "is_cross_attention", False):
                continue
            layer = len(self.layers)
            self.layers.append((name, streams, child))
            hooks.add(child, AttentionHook(self._attention_of(layer, name, streams), name), "attention")
        if not self.layers:
            raise UnsupportedError(f"no self-attention found in this {self.adapter.model}; its layout has changed")

    def _cut_inputs(self, named: dict[str, Any], cuts: dict[str, Split]) -> None:
        for name, cut in cuts.items():
            value = named.get(name)
            if value is None and cut.optional:
                continue
            if not isinstance(value, Tensor):
                raise UnsupportedError(f"{self.adapter.model}: {name} is {type(value).__name__}, a tensor is needed")
            named[name] = self._cut(value, cut, name)

    def _cut_outputs(self, output: Any, cuts: dict[str | int, Split]) -> Any:
        if isinstance(output, Tensor):
            return self._cut(output, cuts[0], "output")
        return tuple(self._cut(x, cuts[i], f"output {i}") if i in cuts else x for i, x in enumerate(output))

    def _cut(self, tensor: Tensor, cut: Split, name: str) -> Tensor:
        if cut.ndim is not None and tensor.ndim != cut.ndim:
            if cut.optional and tensor.ndim < cut.ndim:
                return tensor  # nothing per token in it, such as one timestep for the whole sample
            raise UnsupportedError(f"{self.adapter.model}: {name} has {tensor.ndim} dimensions, not {cut.ndim}")
        total, parts = tensor.shape[cut.dim], self.axis.size
        sizes = split_sizes(total, parts)
        if total < parts:
            raise UnsupportedError(
                f"{self.adapter.model}: {total} {cut.stream} tokens cannot be cut over {parts} ranks; "
                f"use at most {total} ranks, a larger picture or a longer text"
            )
        if self.sizes.setdefault(cut.stream, sizes) != sizes:
            raise UnsupportedError(
                f"{self.adapter.model}: {name} has {total} {cut.stream} tokens, another input has "
                f"{sum(self.sizes[cut.stream])}"
            )
        start = offsets(sizes)[self.axis.index]
        return tensor.narrow(cut.dim, start, sizes[self.axis.index])

    def begin_forward(self) -> None:
        """Forgets the token counts of the last call: the next one may have another shape."""
        self.sizes.clear()

    def _gather(self, output: Tensor, dim: int) -> Tensor:
        return gather_tokens(self.axis, output, self.sizes["image"], dim, name="gather of the output tokens")

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
            local = sizes[self.axis.index]
            if query.shape[2] != local or key.shape[2] != local:
                raise UnsupportedError(
                    f"{name}: attends {query.shape[2]} queries to {key.shape[2]} keys where this rank holds {local} "
                    f"tokens of {' and '.join(streams)}; this call form cannot be cut"
                )
            if is_causal or dropout_p:
                raise UnsupportedError(f"{name}: causal attention and dropout are not supported over ranks")
            masks = None if attn_mask is None else self._masks(attn_mask, sizes, name)
            call = AttentionCall(layer, query, key, value, sizes, self.axis.index, masks, scale)
            return self.attend(call)

        return attend

    def attend(self, call: AttentionCall) -> Tensor:
        """Runs the chain of stages on one attention call."""
        return self._chain(0)(call)

    def _chain(self, position: int) -> Any:
        if position == len(self.stages):
            return attend_locally
        return lambda call: self.stages[position].run(call, self._chain(position + 1))

    def shard_sizes(self, streams: tuple[str, ...]) -> tuple[int, ...]:
        """Tokens each rank contributes to an attention over `streams`."""
        return tuple(sum(self.sizes[stream][i] for stream in streams) for i in range(self.axis.size))

    def _masks(self, mask: Tensor, sizes: tuple[int, ...], name: str) -> tuple[Tensor, ...]:
        while mask.ndim < 4:
            mask = mask.unsqueeze(0 if mask.ndim < 2 else 1)
        local = sizes[self.axis.index]
        if mask.shape[-2] != 1 or mask.shape[-1] != local or not bool((mask == mask[:, :1]).all()):
            raise UnsupportedError(
                f"{name}: only key-padding masks (the same for all queries and heads) can be cut; "
                f"found shape {tuple(mask.shape)} for {local} local tokens"
            )
        rows = mask[:, 0, 0].contiguous()  # [B, L]
        self.mask_itemsize = rows.element_size()
        whole = gather_tokens(self.axis, rows.to(torch.uint8) if rows.dtype == torch.bool else rows, sizes, 1)
        whole = whole.to(mask.dtype)
        return tuple(part[:, None, None] for part in whole.split(list(sizes), dim=1))

    def predict(self, batch: int, tokens: dict[str, int], itemsize: int, index: int, step: tuple[int, bool]) -> int:
        """Bytes the rank at `index` of the token axes sends in one forward of a step (its number, whether the last)."""
        cut = {stream: split_sizes(total, self.axis.size) for stream, total in tokens.items()}
        moved = 0
        for _, streams, module in self.layers:
            sizes = tuple(sum(cut[stream][i] for stream in streams) for i in range(self.axis.size))
            shape = AttentionShape(batch, *head_counts(module), itemsize, sizes, index, *step)
            moved += batch * sizes[index] * self.mask_itemsize * (self.axis.size - 1)
            for stage in self.stages:
                sent, shape = stage.predict(shape)
                moved += sent
        assert self.adapter.gather is not None
        width = self.module.get_submodule(self.adapter.gather[0]).out_features
        assert isinstance(width, int)
        return moved + batch * cut["image"][index] * width * itemsize * (self.axis.size - 1)


def head_counts(module: Any) -> tuple[int, int, int]:
    """Query heads, key/value heads and head dimension of a diffusers attention module."""
    heads = module.heads
    if getattr(module, "fused_projections", False) or not hasattr(module, "to_q"):
        head_dim = getattr(module, "head_dim", None) or module.inner_dim // heads
        return heads, getattr(module, "inner_kv_dim", heads * head_dim) // head_dim, head_dim
    head_dim = module.to_q.out_features // heads
    return heads, module.to_k.out_features // head_dim, head_dim


def _child(modules: dict[str, nn.Module], path: str, adapter: Adapter) -> nn.Module:
    if path not in modules:
        raise UnsupportedError(f"{adapter.model} has no module {path!r} here; its layout has changed")
    return modules[path]
