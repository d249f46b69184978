"""Cuts images into rows: every rank computes a run of rows of a convolutional model, with its neighbours' help.

Cuts are made so that each halving of the image stays within a rank: the coarsest level is shared out, evenly or by the
ranks' shares, and finer ones follow. What convolutions, group norms and self-attention need from other ranks comes
through `Borders` and, for attention, through the same chain of stages that token models use.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from partsong.errors import UnsupportedError
from partsong.kernels import group_norm_apply, group_norm_stats
from partsong.parallel.attention_call import AttentionShape, Stage, attend_through, predict_through
from partsong.parallel.cuts.linear_attention import TokenSumHook, sum_over_ranks
from partsong.parallel.cuts.row_attention import call_over_rows
from partsong.parallel.cuts.row_blocks import (
    border_rows,
    check_convolution,
    doubled_columns,
    farthest_reach,
    framed_norms,
    is_causal,
    is_low_rank,
    level_changes,
)
from partsong.parallel.hooks.arguments import AsCalled
from partsong.parallel.hooks.model_hooks import (
    AroundHook,
    Attend,
    AttentionHook,
    HookSet,
    InputHook,
    OutputHook,
    signature_of,
)
from partsong.parallel.ranks.mesh import Axis
from partsong.parallel.ranks.shards import offsets, split_sizes
from partsong.parallel.strategy import Borders

__all__ = ["RowLevels", "RowSplit", "halved"]


@dataclass(frozen=True, slots=True)
class RowLevels:
    """Says which rows each rank holds at every resolution of a model.

    Attributes:
        heights: rows of the whole image, finest level first; each level has about half the rows of the one before.
        parts: number of ranks.
        shares: relative speed of each rank; None where they are equal.
        least: fewest rows of a rank at the coarsest level.
    """

    heights: tuple[int, ...]
    parts: int
    shares: tuple[float, ...] | None = None
    least: int = 1

    def starts(self, level: int) -> tuple[int, ...]:
        """Returns the first row of each rank at a level, and the height."""
        return _starts(self, level)

    def sizes(self, level: int) -> tuple[int, ...]:
        """Returns the rows of each rank at a level.

        Example:
            >>> RowLevels((11, 6, 3), 2).sizes(0)
            (8, 3)
        """
        return tuple(end - start for start, end in itertools.pairwise(self.starts(level)))


@functools.lru_cache(maxsize=256)  # called by every layer in every step
def _starts(levels: RowLevels, level: int) -> tuple[int, ...]:
    heights, coarsest = levels.heights, len(levels.heights) - 1
    sizes = split_sizes(heights[coarsest], levels.parts, levels.shares, levels.least)
    return (*(start << (coarsest - level) for start in offsets(sizes)), heights[level])


def halved(height: int, paddings: Sequence[int]) -> tuple[int, ...]:
    """Returns the heights after convolutions of stride 2 (padding 0: the row below is padded outside)."""
    heights = [height]
    for padding in paddings:
        heights.append((heights[-1] + (2 * padding if padding else 1) - 3) // 2 + 1)
    return tuple(heights)


@dataclass(frozen=True, slots=True)
class _Move:
    """Counts what one layer sends: bytes per sample to the rank before, to the rank after, and to all others.

    Attributes:
        itemsize: bytes of a number of the rows.
    """

    before: int = 0
    after: int = 0
    everyone: int = 0
    itemsize: int = 1


class RowSplit:
    """Hooks the layers of one convolutional module that is called with a rank's rows.

    Args:
        module: the module whose layers are hooked.
        axis: the ranks, from the image's top to its bottom.
        borders: how they exchange border rows.
        stages: the attention stages, outermost first.
        is_attention: says whether the module of a name is a self-attention over the image.
        joins_text: says whether it also has keys of a text, in front of the image's.
        copies: returns for how many query heads each of its key/value heads is repeated; one copy is moved.
        input_name: what messages call the module's input.
    """

    def __init__(
        self,
        module: nn.Module,
        axis: Axis,
        borders: Borders,
        stages: Sequence[Stage],
        is_attention: Callable[[str], bool],
        input_name: str = "latent",
        joins_text: Callable[[str], bool] = lambda name: False,
        copies: Callable[[str], int] = lambda name: 1,
    ) -> None:
        self.input_name, self.joins_text, self.copies = input_name, joins_text, copies
        self.module, self.axis, self.borders, self.stages = module, axis, borders, tuple(stages)
        self.is_attention = is_attention
        self.levels, self.level, self.batch = RowLevels((axis.size,), axis.size), 0, 1
        self.moves: list[_Move] = []
        self.shapes: list[AttentionShape] = []
        self._layers = 0
        #: Convolutions that get the rows around a rank's own from a group norm, and those norms.
        self._framed_by: dict[nn.Module, nn.Module] = {}
        self._reach = farthest_reach(module)

    def levels_of(self, heights: tuple[int, ...]) -> RowLevels:
        """Distributes the rows of an image, whose levels have these heights, over the ranks by their shares."""
        return RowLevels(heights, self.axis.size, self.axis.shares, max(self._reach, 1))

    def begin(self, levels: RowLevels, level: int, batch: int) -> None:
        """Starts a forward of a number of samples at a level.

        Raises:
            UnsupportedError: the coarsest level has too few rows for the number of ranks.
        """
        coarsest, needed = levels.heights[-1], max(self._reach, 1) * self.axis.size
        if coarsest < needed:
            factor = 1 << (len(levels.heights) - 1 - level)
            reach = f", whose convolutions reach {self._reach} rows" if self._reach > 1 else ""
            raise UnsupportedError(
                f"{type(self.module).__name__}: at its coarsest level the image has {coarsest} rows, too few to cut "
                f"over {self.axis.size} ranks{reach}; use at most {coarsest * self.axis.size // needed} ranks or a "
                f"{self.input_name} of at least {factor * needed} rows"
            )
        self.levels, self.level, self.batch = levels, level, batch
        self.moves.clear()
        self.shapes.clear()

    @property
    def own(self) -> slice:
        """Returns this rank's rows at the current level."""
        return self.own_at(self.level)

    def own_at(self, level: int) -> slice:
        """Returns this rank's rows at a level."""
        starts = self.levels.starts(level)
        return slice(starts[self.axis.index], starts[self.axis.index + 1])

    def attach(self, hooks: HookSet, skip: Sequence[str] = ()) -> None:
        """Puts the hooks on all layers but those in the modules whose names are in `skip`."""
        modules = dict(self.module.named_modules())
        doubled, changes = doubled_columns(modules), level_changes(modules)
        pairs = framed_norms(modules) if self.borders.joins else {}
        self._framed_by = {modules[conv]: modules[norm] for norm, conv in pairs.items() if _is_cut(skip, norm, conv)}
        for name, child in modules.items():
            if not _is_cut(skip, name):
                continue
            self._hook(hooks, name, child, name in doubled)
            halves = border_rows(child) > 0 and int(child.stride[-2]) > 1 and not is_low_rank(name)  # type: ignore[index]
            change = changes.get(name, int(halves))
            if change:
                hooks.add(child, OutputHook(self._changed(change)), "rows-level")

    def _hook(self, hooks: HookSet, name: str, child: nn.Module, doubled: bool) -> None:
        """Puts the hooks on one layer that looks across rows; others need none."""
        if child in self._framed_by:
            check_convolution(name, child)
            hooks.add(child, self._around(_convolve_framed, child), "rows")
        elif border_rows(child):
            check_convolution(name, child)
            convolve = self._convolve_frames if is_causal(child) else self._convolve
            hooks.add(child, self._around(convolve, child, self._number(), doubled), "rows")
        elif isinstance(child, nn.GroupNorm) and not name.endswith(".norm_cross"):  # that one sees only the text
            conv = next((conv for conv, norm in self._framed_by.items() if norm is child), None)
            normalise = self._normalise if conv is None else functools.partial(self._normalise_framed, conv)
            hooks.add(child, self._around(normalise, child, self._number()), "rows")
        elif hasattr(child, "apply_linear_attention"):
            hooks.add(child, InputHook(self._check_sums(name, child), signature_of(child)), "rows-input")
            hooks.add(child, TokenSumHook(self._summed, name), "rows")
        elif self.is_attention(name):
            attend = self._attention(self._number(), name, self.joins_text(name))
            hooks.add(child, AttentionHook(attend, name), "rows")

    def _number(self) -> int:
        self._layers += 1
        return self._layers - 1

    def _around(self, compute: Callable[..., Tensor], layer: Any, *settings: Any) -> AroundHook:
        def run(forward: AsCalled, named: dict[str, Any]) -> Tensor:
            with_weights = lambda weight, bias: compute(layer, *settings, weight, bias, *named.values())  # noqa: E731
            if getattr(forward.function, "__func__", None) is type(layer).forward:
                return with_weights(layer.weight, layer.bias)
            # The layer is wrapped by hooks that fetch its weights or change their type in this call.
            with _InPlaceOfLayer(with_weights):
                return forward(**named)

        return AroundHook(run, signature_of(layer))

    def _changed(self, by: int) -> Callable[[Any], Any]:
        def change(output: Any) -> Any:
            self.level += by
            return output

        return change

    def _convolve(
        self, conv: nn.Conv2d, layer: int, doubled: bool, weight: Tensor, bias: Tensor | None, x: Tensor
    ) -> Tensor:
        """Computes the convolution of this rank's rows, with the rows around them."""
        padding, stride = int(conv.padding[0]), conv.stride[0]
        if stride > 1 and padding == 0:  # the caller's row of zeros stands for the next rank's first row
            x, reach, edge = x[..., :-1, :], 1, 1
        else:
            reach, edge = border_rows(conv) - padding - (stride - 1), padding
        whole = self._framed(x, layer, doubled, padding, reach, edge)
        pad = (0, int(conv.padding[1]))
        return F.conv2d(whole, weight, bias, conv.stride, pad, conv.dilation, conv.groups)

    def _convolve_frames(
        self,
        conv: Any,
        layer: int,
        doubled: bool,
        weight: Tensor,
        bias: Tensor | None,
        x: Tensor,
        past: Tensor | None = None,
    ) -> Tensor:
        """Computes a convolution over frames too, `[B, C, T, H, W]`, which sees past frames but no later ones."""
        columns, _, rows, _, frames, _ = conv._padding
        if past is not None and frames:
            x, frames = torch.cat([past, x], dim=2), frames - past.shape[2]
        whole = F.pad(self._framed(x, layer, doubled, rows, rows, rows), (columns, columns, 0, 0, frames, 0))
        return F.conv3d(whole, weight, bias, conv.stride, 0, conv.dilation, conv.groups)

    def _framed(self, x: Tensor, layer: int, doubled: bool, padding: int, reach: int, edge: int) -> Tensor:
        """Puts this rank's rows between `padding` from above and `reach` from below, with `edge` zeros at the end."""
        rows = x.shape[-2]
        assert rows >= max(padding, reach), "a rank holds fewer rows than a convolution reaches"
        first = x[..., :reach, :] if reach else None
        last = x[..., rows - padding :, :] if padding else None
        above, below = self._ghosts(layer, first, last, 2 if doubled else 1)
        if above is None and padding:
            above = x.new_zeros((*x.shape[:-2], padding, x.shape[-1]))
        if self.axis.index == self.axis.size - 1:
            below = x.new_zeros((*x.shape[:-2], edge, x.shape[-1]))
        return torch.cat([part for part in (above, x, below) if part is not None], dim=-2)

    def _ghosts(self, layer: int, first: Tensor | None, last: Tensor | None, every: int) -> list[Tensor | None]:
        """Returns the rows around this rank's; where all columns stand `every` times, one copy is sent."""
        some = next(rows for rows in (first, last) if rows is not None)
        width, itemsize = some.shape[-1], some.element_size()
        thin = [None if rows is None else rows[..., ::every] for rows in (first, last)]
        before, after = (0 if rows is None else self._per_sample(rows) for rows in thin)
        self.moves.append(_Move(before, after, itemsize=itemsize))
        ghosts = self.borders.ghosts(layer, *thin)
        return [None if rows is None else _repeated(rows, every, width) for rows in ghosts]

    def _normalise(
        self, norm: nn.GroupNorm, layer: int, weight: Tensor | None, bias: Tensor | None, x: Tensor
    ) -> Tensor:
        """Computes the group norm with the statistics of the whole image."""
        own = group_norm_stats(x, norm.num_groups)
        self.moves.append(_Move(everyone=2 * self._per_sample(own[0])))
        mean, var = self.borders.statistics(layer, own, self.levels.sizes(self.level))
        return group_norm_apply(x, mean, var, weight, bias, norm.eps)

    def _normalise_framed(
        self, conv: Any, norm: nn.GroupNorm, layer: int, weight: Tensor | None, bias: Tensor | None, x: Tensor
    ) -> Tensor:
        """Computes the group norm of this rank's rows and of those around them, for the next convolution."""
        padding, rows = int(conv.padding[0]), x.shape[-2]
        assert rows >= padding, "a rank holds fewer rows than a convolution reaches"
        own = group_norm_stats(x, norm.num_groups)
        first, last = x[..., :padding, :], x[..., rows - padding :, :]
        self.moves.append(_Move(self._per_sample(first), self._per_sample(last), 2 * self._per_sample(own[0])))
        (mean, var), (above, below) = self.borders.joined(layer, own, self.levels.sizes(self.level), first, last)
        beyond = torch.zeros_like(first) if above is None or below is None else first
        whole = torch.cat([beyond if above is None else above, x, beyond if below is None else below], dim=-2)
        out = group_norm_apply(whole, mean, var, weight, bias, norm.eps)
        if above is None:
            out[..., :padding, :] = 0
        if below is None:
            out[..., rows + padding :, :] = 0
        return out

    def _check_sums(self, name: str, attention: Any) -> Callable[[dict[str, Any]], None]:
        """Refuses linear attention over few positions, which is computed differently; on all ranks alike."""

        def check(named: dict[str, Any]) -> None:
            fewest, least = min(self.levels.sizes(self.level)), attention.attention_head_dim + 1
            width = next(iter(named.values())).shape[-1]
            if fewest * width < least:
                raise UnsupportedError(
                    f"{name}: a rank would hold {fewest} rows of {width} positions, and linear attention over fewer "
                    f"than {least} positions is computed another way, which cannot be cut; use fewer ranks"
                )

        return check

    def _summed(self, part: Tensor) -> Tensor:
        self.moves.append(_Move(everyone=self._per_sample(part)))
        return sum_over_ranks(self.axis, part)

    def _per_sample(self, tensor: Tensor) -> int:
        # Frames may be folded into the first dimension, so its length is not the number of samples.
        return tensor.nbytes // self.batch

    def _attention(self, layer: int, name: str, joined: bool) -> Attend:
        copies = self.copies(name)

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
            if key.shape[1] == query.shape[1]:
                key, value = key[:, ::copies], value[:, ::copies]
            given, rows, index = (query, key, value, mask, scale), self.levels.sizes(self.level), self.axis.index
            call = call_over_rows(name, layer, given, rows=rows, axis=self.axis, joined=joined)
            shape = (query.shape[1], key.shape[1], query.shape[3], query.element_size(), call.sizes)
            # Not per sample: perturbed attention leaves some samples out.
            self.shapes.append(AttentionShape(len(query), *shape, index, layer=layer, runs=call.runs))
            out = attend_through(self.stages, call)
            return out[:, :, call.q.shape[2] - query.shape[2] :] if joined else out

        return attend

    def predict(self, batch: int, index: int, step: tuple[int, bool]) -> int:
        """Returns the bytes the rank at `index` sends in one forward of a step (its number, whether it is the last)."""
        size, moved = self.axis.size, 0
        if self.borders.sends(*step):
            for move in self.moves:
                rows = move.before * (index > 0), move.after * (index < size - 1)
                numbers = (batch * each // move.itemsize for each in rows)
                moved += sum(self.borders.row_bytes(each, move.itemsize, step[0]) for each in numbers)
        if self.borders.sends_statistics(*step):
            moved += sum(move.everyone for move in self.moves) * (size - 1) * batch
        shapes = (
            replace(shape, batch=batch * shape.batch // self.batch, index=index, step=step[0], is_last=step[1])
            for shape in self.shapes
        )
        return moved + sum(predict_through(self.stages, shape) for shape in shapes)


def _is_cut(skip: Sequence[str], *names: str) -> bool:
    return not any(name == place or name.startswith(f"{place}.") for place in skip for name in names)


def _convolve_framed(conv: nn.Conv2d, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """Computes a convolution of rows to which a norm has already added those around them."""
    return F.conv2d(x, weight, bias, conv.stride, (0, int(conv.padding[1])), conv.dilation, conv.groups)


def _repeated(rows: Tensor, every: int, width: int) -> Tensor:
    return rows if every == 1 else rows.repeat_interleave(every, dim=-1)[..., :width]


class _InPlaceOfLayer(TorchFunctionMode):
    """Computes a layer's convolution or group norm differently, with the weights that the layer would have used."""

    def __init__(self, compute: Callable[[Tensor | None, Tensor | None], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = {F.conv2d: 1, F.conv3d: 1, F.group_norm: 2}.get(func)
        if first is None:
            return func(*args, **(kwargs or {}))
        named = dict(zip(("weight", "bias"), args[first : first + 2], strict=False)) | (kwargs or {})
        return self.compute(named["weight"], named["bias"])
