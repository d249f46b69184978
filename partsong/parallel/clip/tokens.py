"""Cuts transformers over the tokens of all frames into clips: each rank has whole frames of tokens, and the text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter, Split
from partsong.parallel.adapters.row import IMAGE, TEXT
from partsong.parallel.attention_call import AttentionCall
from partsong.parallel.clip.attention import FrameAttention, Shared
from partsong.parallel.cuts.linear_attention import TokenSums
from partsong.parallel.cuts.tokens import SequenceParallel, key_mask
from partsong.parallel.hooks.model_hooks import HookSet, InputHook, signature_of
from partsong.parallel.ranks.mesh import Mesh

__all__ = ["ClipTokens", "token_frames"]


class ClipTokens(SequenceParallel):
    """Cuts a transformer's tokens between frames.

    Self-attention sees the frames that the key set names. Text in the same attention is whole on every rank. Every
    frame sees it, and it attends to all frames individually.

    Args:
        module: the transformer.
        adapter: its row, resolved.
        mesh: the ranks.
        attention: attends from the frames to those they see.
    """

    def __init__(self, module: nn.Module, adapter: Adapter, mesh: Mesh, attention: FrameAttention) -> None:
        super().__init__(module, adapter, mesh, ())
        self.axis = mesh.axis("clip")
        self.sums = TokenSums(self.axis, adapter)
        self.attention = attention

    def describe(self, tokens: Mapping[str, int]) -> str:
        """Says what is cut."""
        return f"{self.attention.layout.keys.frames} frames of {self._unit} tokens"

    def attach(self, hooks: HookSet) -> None:
        """Puts the splitting, gathering and attention hooks on the module."""
        super().attach(hooks)
        hooks.add(self.module, InputHook(self._begin_call, signature_of(self.module)), "clip")

    def _begin_call(self, named: dict[str, Any]) -> None:
        """Lays the frames of a call out over the ranks, before anything is cut."""
        assert self.adapter.frames is not None
        sample = named[self.adapter.sample]
        self.attention.begin(token_frames(self.adapter, self.module, named), len(sample))
        self.attention.note_time(named[self.adapter.timestep])

    def _cut(self, tensor: Tensor, cut: Split, name: str) -> Tensor:
        is_cut = cut.allows(tensor.ndim)
        if cut.stream == TEXT:
            if is_cut:
                self._note_text(tensor, cut, name)
            return tensor
        if is_cut:
            frames, tokens = self.attention.layout.keys.frames, tensor.shape[cut.dim]
            if tokens % frames:
                raise UnsupportedError(
                    f"{self.adapter.model}: {name} has {tokens} tokens, which do not divide by {frames} frames; its "
                    "layout has changed"
                )
            self._unit = tokens // frames
        return super()._cut(tensor, cut, name)

    def _gather(self, local: Tensor, name: str, cut: Split) -> Tensor:
        """Puts the frames' tokens together; the text is whole already."""
        return local if cut.stream == TEXT else super()._gather(local, name, cut)

    def _note_text(self, tensor: Tensor, cut: Split, name: str) -> None:
        """Notes the number of text tokens, all of which every rank holds."""
        length = tensor.shape[cut.dim]
        if self.sizes.setdefault(TEXT, (length,) * self.axis.size)[0] != length:
            raise UnsupportedError(
                f"{self.adapter.model}: {name} has {length} text tokens, another input has {self.sizes[TEXT][0]}"
            )
        if cut.present and not self.present.counts:
            self.present.note(tensor, TEXT, (length,))

    def _next_call(self, layer: int, streams: tuple[str, ...]) -> tuple[int, int, Mapping[str, tuple[int, ...]]]:
        number, samples, sizes = super()._next_call(layer, streams)
        everywhere = {TEXT: sizes[TEXT][:1] * self.axis.size} if TEXT in sizes else {}
        return number, samples, {**sizes, **everywhere}

    def _mask_of_all_queries(
        self, mask: Tensor, sizes: Mapping[str, tuple[int, ...]], streams: tuple[str, ...]
    ) -> Tensor | None:
        """Leaves every mask to `_masks`, which knows clips."""
        return None

    def _masks(self, mask: Tensor, sizes: tuple[int, ...], layer: int) -> tuple[Tensor, ...]:
        """Returns the text's part of a key mask `[B, 1, 1, L]`, which must not mask the video."""
        name, streams, _ = self.layers[layer]
        if mask.shape[-2] > 1:  # padding neither sees nor is seen; its own result is never read
            mask = key_mask(mask)[0]
        everywhere, here = (
            [frames if stream == IMAGE else self.sizes[TEXT][0] for stream in streams]
            for frames in (sum(self.sizes[IMAGE]), self.sizes[IMAGE][self.axis.index])
        )
        # A model may make the mask in its layers, where it sees only this rank's frames.
        lengths = here if mask.shape[-1] == sum(here) else everywhere
        if mask.ndim != 4 or mask.shape[1:] != (1, 1, sum(lengths)) or TEXT not in streams:
            raise UnsupportedError(
                f"{name}: only masks of the text's padding, over all frames and the text, can be cut into clips; this "
                f"one has shape {tuple(mask.shape)}; use Ulysses, CfgParallel or DataParallel"
            )
        parts = dict(zip(streams, mask.split(lengths, dim=-1), strict=True))
        video = parts[IMAGE] if mask.dtype == torch.bool else parts[IMAGE] == 0
        if not mask.is_meta and not bool(video.all()):
            raise UnsupportedError(f"{name}: a mask leaves out tokens of frames, which is not supported in clips")
        return (parts[TEXT],)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attends from this rank's frames, and from the text, to what each of them sees."""
        streams, lengths = zip(*call.runs[self.axis.index], strict=True)
        if streams == (IMAGE,):
            return self.attention.attend(call.q, call.k, call.v, self._unit, call.scale)
        parts = zip(*(tensor.split(lengths, dim=2) for tensor in (call.q, call.k, call.v)), strict=True)
        by_stream = dict(zip(streams, parts, strict=True))
        (q, k, v), (text_q, text_k, text_v) = by_stream[IMAGE], by_stream[TEXT]
        text = Shared(text_k, text_v, None if call.masks is None else call.masks[0])
        outputs = {
            IMAGE: self.attention.attend(q, k, v, self._unit, call.scale, text),
            TEXT: self.attention.attend_to_all(text_q, (k, v), text, call.scale),
        }
        return torch.cat([outputs[stream] for stream in streams], dim=2)

    def predict(self, batch: int, tokens: dict[str, int], itemsize: int, index: int, step: tuple[int, bool]) -> int:
        """Returns the bytes the rank at `index` sends in one forward of `batch` videos."""
        cut = {IMAGE: self.cut_sizes(self.attention.layout.keys.frames * self._unit)}
        return self.predict_gather(batch, cut, index) + self.attention.predict(batch, index)


def token_frames(adapter: Adapter, module: Any, named: dict[str, Any]) -> int:
    """Counts the frames of tokens in a call of a model.

    Args:
        adapter: its row.
        module: the model, whose configuration may say how many frames make one frame of tokens.
        named: its arguments.

    Raises:
        UnsupportedError: the argument that gives the number of frames is missing, or not all tokens are of frames.
    """
    frames = adapter.frames
    assert frames is not None
    tokens = named[adapter.sample].shape[frames.dim]
    count = tokens if frames.argument is None else named.get(frames.argument)
    if count is None:
        raise UnsupportedError(
            f"{adapter.model}: {frames.argument} was not given, so it is not known which tokens are of which frame; "
            "give it, or use Ulysses"
        )
    sides: list[Any] = [named.get(side) for side in frames.sides]
    if sides and None not in sides and tokens != count * math.prod(sides):
        raise UnsupportedError(
            f"{adapter.model}: {tokens} tokens are not {count} frames of {' x '.join(map(str, sides))}: there are "
            "others among them, such as pictures to go by, which belong to no frame; use Ulysses"
        )
    patch = None if frames.patch is None else module.config[frames.patch]
    return int(count) // int((patch[0] if isinstance(patch, list | tuple) else patch) or 1)
