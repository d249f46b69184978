"""Gives each rank a clip of a video's frames, on which it runs the whole model (arXiv 2406.16260)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import nn

from partsong.errors import UnsupportedError
from partsong.knobs import Count, Number, Whole
from partsong.parallel.adapters import Adapter
from partsong.parallel.adapters.row import JOINT, TEXT
from partsong.parallel.attention_call import TOKEN_AXES
from partsong.parallel.clip.attention import Emphasis, FrameAttention
from partsong.parallel.clip.frames import ClipFrames
from partsong.parallel.clip.tokens import ClipTokens
from partsong.parallel.hooks.clock import StepClock
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.strategy import Kind, Strategy

__all__ = ["ClipParallel"]

_Emphasis = Annotated[float, Number(0.0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipParallel(Strategy):
    """Gives each rank a clip of the video's frames; attention sees the near frames and a sample of the rest.

    Every rank runs the whole model on its clip. Where the model looks across frames, the ranks exchange what is needed.
    Convolutions over time get border frames, and norms over time the statistics of the whole video. Attention gets the
    frames within `window` of each of its own, and one out of every `stride` others, which counts for all frames it
    stands for. A frame's keys depend only on its place in the video, so the video is the same on any number of ranks.
    Approximate; with ``window=None``, or a window that reaches from end to end, it is exact.

    Use it when a video has so many frames that attention over all of them costs too much.

    Args:
        degree: number of ranks, at most the number of frames; None takes all ranks that other strategies leave.
        window: frames to each side that a frame attends to individually; 0 is only the frame itself, None all of them.
            Frames are those the model sees: latent frames, not frames of the video.
        stride: length of the blocks of other frames, of which only the middle one is attended to; 1 is every frame, and
            None leaves out all frames outside the window, for models that do not know positions so far away.
        local_emphasis: added to the logits of near frames below the timestep `emphasis_from`; the paper adds 10.
        global_emphasis: added to the logits of the sampled frames from that timestep on; the paper adds 10.
        emphasis_from: that timestep, on the scale the model is called with, usually 0 to 1000.

    Source: Video-Infinity, arXiv 2406.16260. Partsong adds the key set, exact norms, and the ends of the video.
    """

    axes: ClassVar[tuple[str, ...]] = ("clip",)
    kind: ClassVar[Kind] = "approximate"

    degree: Count | None = None
    window: Annotated[int, Whole(0)] | None = 8
    stride: Count | None = None
    local_emphasis: _Emphasis = 0.0
    global_emphasis: _Emphasis = 0.0
    emphasis_from: _Emphasis = 800.0

    def refuses(self, adapter: Adapter) -> str | None:
        """Refuses models without frames, and those whose frames cannot be separated from the text."""
        if adapter.factored is not None:
            return "it adds the positions of all frames in the middle of its blocks; use DynamicSequence"
        if adapter.whole is not None:
            return f"{adapter.whole}; {adapter.instead}"
        if adapter.frames is None:
            return f"its row has no frames to cut into clips; {adapter.instead}"
        if adapter.in_sections:
            return "frames of several sizes, old and new, are one sequence to it; use Ulysses"
        if any(JOINT in streams for streams in adapter.attention.values()):
            return "it joins frames and text in one sequence before its blocks; use Ulysses"
        if adapter.linear_attention or adapter.convolutions or adapter.whole_rows:
            return "its linear attention or convolutions look across frames; use Ulysses"
        if (self.local_emphasis or self.global_emphasis) and any(TEXT in s for s in adapter.attention.values()):
            return (
                "emphasis on frames would drown the text, which its frames attend to as well; leave the emphasis at 0"
            )
        return None

    def cut(self, module: nn.Module, adapter: Adapter, mesh: Mesh, clock: StepClock) -> ClipFrames | ClipTokens | None:
        """Returns the clip of this rank; None where one rank sees everything.

        Raises:
            UnsupportedError: the architecture has no frames, or another strategy cuts tokens.
        """
        axis = mesh.axis("clip")
        if axis.size == 1 and self.window is None:
            return None
        reason = self.refuses(adapter)
        if reason is not None:
            raise UnsupportedError(f"ClipParallel on {adapter.model}: {reason}")
        if mesh.axis(*TOKEN_AXES).size > 1:
            raise UnsupportedError(
                "ClipParallel gives every rank whole frames and does not compose with strategies that cut tokens yet; "
                "combine it with CfgParallel and DataParallel"
            )
        assert adapter.frames is not None
        emphasis = Emphasis(self.local_emphasis, self.global_emphasis, self.emphasis_from)
        attention = FrameAttention(axis, adapter.model, self.window, self.stride, emphasis)
        if adapter.frames.mixers:
            return ClipFrames(module, adapter, axis, attention)
        return ClipTokens(module, adapter, mesh, attention)
