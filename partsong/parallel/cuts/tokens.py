"""Shards tokens over ranks: what is cut where, and the attention over all of them.

Each rank holds a contiguous run of every token stream (image, text). Projections, norms and feed-forward layers see
local tokens only; self-attention goes through the chain of stages in `attention_call`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter, Split, places
from partsong.parallel.adapters.row import IMAGE
from partsong.parallel.attention_call import (
    TOKEN_AXES,
    AttentionCall,
    AttentionShape,
    Runs,
    Stage,
    attend_through,
    mask_rows,
    predict_through,
)
from partsong.parallel.block_rule import BlockRule
from partsong.parallel.cuts.linear_attention import TokenSums
from partsong.parallel.cuts.token_cuts import TokenCuts, totals
from partsong.parallel.cuts.whole_views import attend_at, mask_by_shard, with_silent_queries
from partsong.parallel.hooks.model_hooks import (
    AroundHook,
    Attend,
    AttentionHook,
    HookSet,
    InputHook,
    signature_of,
)
from partsong.parallel.ranks.collectives import gather_tokens
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.ranks.shards import offsets

__all__ = ["SequenceParallel", "head_counts", "key_mask"]


class SequenceParallel(TokenCuts):
    """Cuts one module's tokens over the token axes of a mesh and chains the attention stages.

    Args:
        module: the transformer.
        adapter: its row, resolved.
        mesh: the ranks.
        stages: attention stages, outermost first.
    """

    def __init__(self, module: nn.Module, adapter: Adapter, mesh: Mesh, stages: Sequence[Stage]) -> None:
        super().__init__(module, adapter, mesh.axis(*TOKEN_AXES))
        self.stages = tuple(stages)
        self.sums = TokenSums(self.axis, adapter)
        self.layers: list[tuple[str, tuple[str, ...], nn.Module]] = []
        self._folds: dict[int, Fraction] = {}
        self._heads: dict[int, tuple[int, int, int, int]] = {}
        self._attended: Counter[int] = Counter()
        self._rules: dict[int, BlockRule] = {}
        self._is_known = False
        self._mask_bytes: dict[int, int] = {}
        self._seen_masks = WeakTensorKeyDictionary()
        self._gathered: dict[str, tuple[str, int]] = {}

    def attach(self, hooks: HookSet) -> None:
        """Puts the splitting, gathering and attention hooks on the module."""
        modules = dict(self.module.named_modules())
        self.attach_cuts(hooks, modules)
        self.attach_gather(hooks, modules)
        for path, arguments in self.adapter.gathered.items():
            for name in places(path, modules):
                signature = signature_of(modules[name])
                run = partial(self._run_on_all, name=name, arguments=arguments)
                if set(arguments) <= set(signature.parameters):
                    hooks.add(modules[name], AroundHook(run, signature), "gathered")
        for name, child in modules.items():
            streams = self.adapter.streams_of(name)
            if streams is None or (getattr(child, "is_cross_attention", False) and not self.adapter.seems_cross):
                continue
            if self.adapter.scaled_by_length is not None:
                scaled = InputHook(partial(self._scale_by_all, streams=streams), signature_of(child))
                hooks.add(child, scaled, "length")
            layer = len(self.layers)
            self.layers.append((name, streams, child))
            if self.adapter.block_choice is not None:
                hooks.add(child, InputHook(partial(self._take_rule, layer=layer), signature_of(child)), "blocks")
            attend = self._attention_of(layer, name, streams)
            once = not self.adapter.attends_per_sample and self.adapter.attentions == 1
            # A cache of diffusers leaves out attentions too, the same ones on all ranks.
            skips = self.adapter.skips_attention or getattr(self.module, "is_cache_enabled", False)
            hook = AttentionHook(attend, name, once=once, may_skip=skips, leaves=self._is_of_whole_text)
            hooks.add(child, hook, "attention")
        if not self.sums.attach(hooks, modules) and not self.layers:
            raise UnsupportedError(f"no self-attention found in this {self.adapter.model}; its layout has changed")

    def _is_of_whole_text(self, query: Tensor, key: Tensor, *_: Any, is_causal: bool = False, **__: Any) -> bool:
        """Says whether an attention is one of tokens that every rank holds, to each other."""
        return (self.adapter.causal_text and is_causal) or key.shape[2] <= self.before

    def _scale_by_all(self, named: dict[str, Any], streams: tuple[str, ...]) -> None:
        """Changes the base of the logarithm of the local number of tokens to get the logarithm for all tokens."""
        name = self.adapter.scaled_by_length
        if name is None or named.get(name) is None:
            return
        sizes = self.shard_sizes(streams)
        if sizes[self.axis.index] == 1:
            raise UnsupportedError(f"{self.adapter.model}: one token alone cannot be scaled by {name}; use fewer ranks")
        exponent = math.log(sizes[self.axis.index]) / math.log(sum(sizes))
        named[name] = named[name] ** exponent

    def _take_rule(self, named: dict[str, Any], layer: int) -> None:
        """Takes what a layer chooses blocks of keys by, so that the attention over ranks does it for all tokens."""
        given = named.pop(str(self.adapter.block_choice), None)
        if given is not None:
            self._rules[layer] = BlockRule.of_call(given)

    def _run_on_all(
        self, forward: Callable[..., Tensor], named: dict[str, Any], name: str, arguments: tuple[str, ...]
    ) -> Tensor:
        """Runs a layer that looks across all tokens on all of them, and keeps this rank's part of its output."""
        whole = {argument: self._gather(named[argument], f"{name}.{argument}", Split(dim=1)) for argument in arguments}
        sizes = self.shard_sizes((IMAGE,))
        return forward(**named | whole).narrow(1, offsets(sizes)[self.axis.index], sizes[self.axis.index])

    def takes(self, argument: str) -> bool:
        """Says whether it has a form for an argument: for the choice of blocks where all its stages have one."""
        # Kinds of it attend in ways of their own, which know nothing of blocks.
        chains = type(self) is SequenceParallel and bool(self.stages)
        return chains and argument == self.adapter.block_choice and all(stage.takes_blocks for stage in self.stages)

    def begin_forward(self, sample: Any) -> None:
        """Forgets the token counts of the last call, and its masks."""
        super().begin_forward(sample)
        self.sums.begin_forward(self.batch)
        for last in (self._mask_bytes, self._gathered, self._attended, self._seen_masks, self._rules):
            last.clear()

    def call_notes(self) -> Any:
        """Returns how often and over which tokens each layer attended in this call, and what was gathered."""
        noted = (self._folds, self._heads, self._attended, self._mask_bytes, self._gathered, self._rules)
        return self.sums.call_notes(), *(part.copy() for part in noted)

    def recall(self, notes: Any) -> None:
        """Prepares `predict` for a call by what `call_notes` returned after it."""
        self._is_known = notes is not None
        if notes is not None:
            sums, *others = notes
            self.sums.recall(sums)
            # Copies, since the next call of the model clears its own.
            copies = (part.copy() for part in others)
            self._folds, self._heads, self._attended, self._mask_bytes, self._gathered, self._rules = copies
            self._unit = next((rule.size for rule in self._rules.values()), self._unit)

    def abandon(self) -> None:
        """Drops pending messages without waiting, after an error."""
        for stage in self.stages:
            stage.abandon()

    def _gather(self, local: Tensor, name: str, cut: Split) -> Tensor:
        # Tokens may come before the batch, and frames may be folded into it.
        if cut.after is not None and self.before:
            front, rest = local.tensor_split([self.before], dim=cut.dim)
            return torch.cat([front, self._gather(rest, name, replace(cut, after=None))], dim=cut.dim)
        per_token = local.nbytes // (self.batch * local.shape[cut.dim])
        self._gathered[name] = (cut.stream, per_token)
        local = self._only_own(local, cut)
        return gather_tokens(self.axis, local, self.sizes[cut.stream], cut.dim, name=f"gather at {name}")

    def _attention_of(self, layer: int, name: str, streams: tuple[str, ...]) -> Attend:
        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
            whole = self._keys_only(query, key, streams)
            if whole is not None:
                return self._attend_without_queries(whole, streams, attend, (query, key, value, mask, scale))
            places = self.own_places(streams, query.shape[2])
            if places is not None:
                return attend_at(places, attend, query, key, value, mask, scale)
            if mask is not None and self.axis.dry:
                mask = mask.to("meta")  # in a prediction it may have been made from tensors with values
            number, samples, by_stream = self._next_call(layer, streams)
            sizes = totals(by_stream, streams)
            # Folded frames enlarge the batch, skipped branches shrink it.
            self._folds[layer] = Fraction(len(query), samples)
            key, value = self._once_per_group(query, key, value, layer)
            local = sizes[self.axis.index]
            if query.shape[2] != local or key.shape[2] != local:
                raise UnsupportedError(
                    f"{name}: attends {query.shape[2]} queries to {key.shape[2]} keys where this rank holds {local} "
                    f"tokens of {' and '.join(streams)}; this call form cannot be cut"
                )
            self._heads[layer] = (query.shape[1], key.shape[1], query.shape[3], key.element_size())
            runs = _runs(by_stream, streams)
            mask, attending, every = self._looked_at(mask, by_stream, streams)
            if every is not None:
                masks: tuple[Tensor, ...] | None = mask_rows(every, sizes, self.axis.index)
            else:
                masks = None if mask is None else self._masks(mask, sizes, layer)
            rule, index = self._rules.get(layer), self.axis.index
            if rule is not None and mask is not None:
                raise UnsupportedError(f"{name}: a mask beside a choice of blocks cannot be cut; leave one of them out")
            call = AttentionCall(
                number, query, key, value, sizes, index, masks, scale, runs=runs, whole_mask=every, rule=rule
            )
            out = self.attend(call)
            return out if attending is None else out * attending

        return attend

    def _keys_only(self, query: Tensor, key: Tensor, streams: tuple[str, ...]) -> str | None:
        """Returns the stream whose keys are whole here and whose queries are missing; None if there is none."""
        silent = [stream for stream in streams if stream in self.adapter.keys_only]
        return silent[0] if silent and query.shape[2] < key.shape[2] else None

    def _attend_without_queries(self, stream: str, streams: tuple[str, ...], attend: Attend, call: Any) -> Tensor:
        query, key, value, mask, scale = call
        total, first = key.shape[2] - query.shape[2], streams[0] == stream
        sizes = self.sizes.setdefault(stream, self.cut_sizes(total))
        index, local = self.axis.index, query.shape[2]
        query, key, value, mask = with_silent_queries(query, key, value, mask, sizes=sizes, index=index, first=first)
        output = attend(query, key, value, mask, scale)
        return output.narrow(2, sizes[index] if first else 0, local)

    def _looked_at(
        self, mask: Tensor | None, sizes: Mapping[str, tuple[int, ...]], streams: tuple[str, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns a mask's keys, its queries that attend, and the mask of all queries where it has one.

        Layers share a mask, and looking at it makes a GPU's host wait, so that happens once per mask and forward.
        """
        if mask is None:
            return None, None, None
        known: dict[tuple[str, ...], Any] = self._seen_masks.setdefault(mask, {})  # type: ignore[assignment]
        if streams not in known:
            # A mask of all tokens of all ranks is cut by queries and keys; one of a rank's own tokens may be a product.
            is_whole = mask.shape[-2:] == (sum(totals(sizes, streams)),) * 2
            keys, attending = (mask, None) if is_whole else key_mask(mask)
            every = self._mask_of_all_queries(keys, sizes, streams)
            # Not the mask itself: facts known about it are kept with it.
            known[streams] = None if keys is mask else keys, attending, every
        keys, attending, every = known[streams]
        return mask if keys is None else keys, attending, every

    def _mask_of_all_queries(
        self, mask: Tensor, sizes: Mapping[str, tuple[int, ...]], streams: tuple[str, ...]
    ) -> Tensor | None:
        """Returns a mask with a row for every query, by shards; None where all queries see the same."""
        total = sum(totals(sizes, streams))
        if mask.ndim < 3 or tuple(mask.shape[-2:]) != (total, total) or total == 1:
            return None
        mask = mask.unsqueeze(1) if mask.ndim == 3 else mask
        return mask_by_shard(mask[:, :1], sizes, streams) if _is_alike(mask, 1) else None

    def _next_call(self, layer: int, streams: tuple[str, ...]) -> tuple[int, int, Mapping[str, tuple[int, ...]]]:
        """Returns a number for the next attention of a layer, its samples, and each rank's tokens by stream."""
        self.shard_sizes(streams)
        turn, self._attended[layer] = self._attended[layer], self._attended[layer] + 1
        if not self.present.counts:
            return layer + turn * len(self.layers), self.batch, self.sizes
        sample = self.present.next_sample(layer)
        return layer + sample * len(self.layers), 1, self.present.of_sample(self.sizes, sample)

    def attend(self, call: AttentionCall) -> Tensor:
        """Runs the chain of stages on one attention call."""
        return attend_through(self.stages, call)

    def _once_per_group(self, query: Tensor, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values as they were before the model repeated them for every query head of a group."""
        if not self.adapter.repeats_keys or key.shape[1] != query.shape[1]:
            return key, value
        _, kv_heads, _ = head_counts(self.layers[layer][2])
        step = query.shape[1] // kv_heads
        return key[:, ::step], value[:, ::step]

    def _masks(self, mask: Tensor, sizes: tuple[int, ...], layer: int) -> tuple[Tensor, ...]:
        while mask.ndim < 4:
            mask = mask.unsqueeze(0 if mask.ndim < 2 else 1)
        local, total = sizes[self.axis.index], sum(sizes)
        is_alike = _is_alike(mask, 1) and _is_alike(mask, 2)
        if mask.shape[-1] not in (local, total) or not is_alike:
            raise UnsupportedError(
                f"{self.layers[layer][0]}: only key-padding masks (the same for all queries and heads) can be cut; "
                f"this one has shape {tuple(mask.shape)} for {total} tokens; use CfgParallel or DataParallel"
            )
        rows = mask[:, 0, 0].contiguous()  # [B, L]
        if rows.shape[1] == total:
            return self._known_masks(self._shares(rows, self.layers[layer][1]))
        self._mask_bytes[layer] = rows.element_size()
        return self._whole_masks(rows, sizes)

    def _whole_masks(self, rows: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Gathers the key masks of all parts from this one's."""
        whole = gather_tokens(self.axis, rows.to(torch.uint8) if rows.dtype == torch.bool else rows, sizes, 1)
        whole = whole.to(rows.dtype)
        return tuple(part[:, None, None] for part in whole.split(list(sizes), dim=1))

    def _shares(self, rows: Tensor, streams: tuple[str, ...]) -> tuple[Tensor, ...]:
        """Cuts a mask of all tokens, stream after stream, into the masks of the ranks' tokens."""
        whole = rows.split([sum(self.sizes[stream]) for stream in streams], dim=1)
        cut = [part.split(list(self.sizes[stream]), dim=1) for part, stream in zip(whole, streams, strict=True)]
        return tuple(torch.cat(parts, dim=1)[:, None, None] for parts in zip(*cut, strict=True))

    def _known_masks(self, shares: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns the key masks of all parts, known without an exchange."""
        return shares

    def _calls(
        self, layer: int, batch: int, cut: Mapping[str, tuple[int, ...]]
    ) -> list[tuple[int, int, Mapping[str, tuple[int, ...]]]]:
        """Lists the attentions of a layer in one forward, in the form of `_next_call`."""
        if not self.present.counts:
            # A known call may have attended nowhere if its blocks were left out.
            is_counted = self._is_known or bool(self._attended)
            turns = range(self._attended[layer] if is_counted else self.adapter.attentions)
            samples = int(batch * self._folds.get(layer, 1))
            return [(layer + turn * len(self.layers), samples, cut) for turn in turns]
        numbers = ((layer + sample * len(self.layers), sample) for sample in range(batch))
        return [(number, 1, self.present.of_sample(cut, sample)) for number, sample in numbers]

    def predict(self, batch: int, tokens: dict[str, int], itemsize: int, index: int, step: tuple[int, bool]) -> int:
        """Returns the bytes the rank at `index` sends in one forward of a step (its number, whether the last)."""
        cut = {stream: self.cut_sizes(total) for stream, total in tokens.items()}
        moved = self.sums.predict(batch, index)
        for layer, (_, streams, module) in enumerate(self.layers):
            for number, samples, by_stream in self._calls(layer, batch, cut):
                runs, sizes = _runs(by_stream, streams), totals(by_stream, streams)
                heads = self._heads.get(layer) or (*head_counts(module), itemsize)
                block = self._rules[layer].size if layer in self._rules else 0
                shape = AttentionShape(samples, *heads, sizes, index, *step, number, runs, block)
                moved += samples * sizes[index] * self._mask_bytes.get(layer, 0) * (self.axis.size - 1)
                moved += predict_through(self.stages, shape)
        return moved + self.predict_gather(batch, cut, index)

    def predict_gather(self, batch: int, cut: Mapping[str, tuple[int, ...]], index: int) -> int:
        """Returns the bytes the rank at `index` sends where tokens are put together again."""
        per_token = (cut[stream][index] * token_bytes for stream, token_bytes in self._gathered.values())
        return batch * sum(per_token) * (self.axis.size - 1)


def _is_alike(mask: Tensor, dim: int) -> bool:
    """Says whether a mask is constant along a dimension; one without values is assumed to be."""
    if mask.shape[dim] == 1 or mask.stride(dim) == 0 or mask.is_meta:
        return True
    return bool((mask == mask.narrow(dim, 0, 1)).all())


def key_mask(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Reads a padding mask in which queries that are padding attend to nothing.

    Args:
        mask: `[..., L, L]`, boolean, the product of a mask of queries and one of keys; any other is left as it is.

    Returns:
        The mask of keys `[..., 1, L]`, and 1 for the queries that attend and 0 for the others, `[..., L, 1]`.
    """
    if mask.dtype != torch.bool or mask.ndim < 4 or mask.shape[-2] == 1:
        return mask, None
    keys, queries = mask.any(dim=-2, keepdim=True), mask.any(dim=-1, keepdim=True)
    # With shapes only, it is assumed to mask padding, as models do for the tokens that they get.
    return (keys, queries) if mask.is_meta or bool((mask == (keys & queries)).all()) else (mask, None)


def _runs(sizes: Mapping[str, tuple[int, ...]], streams: tuple[str, ...]) -> tuple[Runs, ...]:
    """Returns the tokens that each rank contributes to an attention over `streams`."""
    return tuple(
        tuple(zip(streams, lengths, strict=True)) for lengths in zip(*(sizes[s] for s in streams), strict=True)
    )


def head_counts(module: Any) -> tuple[int, int, int]:
    """Returns query heads, key/value heads and head dimension of an attention module that has not been called yet."""
    heads = _first(module, "heads", "num_heads", "num_attention_heads")
    queries = _first(module, "to_q", "to_query")
    if getattr(module, "fused_projections", False) or queries is None:
        head_dim = _first(module, "head_dim", "dim_heads") or module.inner_dim // heads
        return heads, getattr(module, "inner_kv_dim", heads * head_dim) // head_dim, head_dim
    head_dim = queries.out_features // heads
    return heads, _first(module, "to_k", "to_key").out_features // head_dim, head_dim


def _first(module: Any, *names: str) -> Any:
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)
