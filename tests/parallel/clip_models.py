"""Tiny random video models whose frames are cut into clips, inputs to call them with, and attention by definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import UNet3DConditionModel, UNetMotionModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from torch.overrides import TorchFunctionMode

from partsong import ClipParallel
from tests.parallel import video_families as more
from tests.parallel import video_families_2026 as newer
from tests.parallel import video_unets as unets
from tests.tiny_models.weights import randomized

#: Width of the texts; sides of a latent, and of its tokens.
WIDTH, SIDE, GRID = 12, 6, 3
#: Positions that the tiny AnimateDiff has.
LONGEST = 12
_TWO_LEVELS = {"sample_size": SIDE, "block_out_channels": (8, 16)}


def _motion() -> UNetMotionModel:
    blocks = {
        "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
        "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
    }
    return unets.motion(**_TWO_LEVELS, **blocks, motion_max_seq_length=LONGEST)


def _three_d() -> UNet3DConditionModel:
    blocks = {
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    }
    return unets.three_d(**_TWO_LEVELS, **blocks)


def _three_d_lora() -> Any:
    """With a LoRA on temporal attention and on the convolutions over time: its low-rank part convolves too."""
    unet = _three_d()
    return inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_q", "proj_in", "conv1.2", "conv4.3"]), unet)


def _motion_inputs(frames: int, batch: int) -> dict[str, Any]:
    """The text of each frame by itself, as AnimateDiff's pipelines pass it."""
    return {
        "sample": torch.randn(batch, 4, frames, SIDE, SIDE + 2),
        "encoder_hidden_states": torch.randn(batch * frames, 5, WIDTH),
    }


def _three_d_inputs(frames: int, batch: int) -> dict[str, Any]:
    return _motion_inputs(frames, batch) | {"encoder_hidden_states": torch.randn(batch, 5, WIDTH)}


def _spatio_temporal_inputs(frames: int, batch: int) -> dict[str, Any]:
    """Frames before channels, and a picture's embedding."""
    sample = torch.randn(batch, frames, 4, SIDE, SIDE + 2)
    return unets.spatio_temporal_inputs(SIDE, SIDE, batch) | {"sample": sample}


def _with_residuals(inputs: Callable[[int, int], dict[str, Any]]) -> Callable[[int, int], dict[str, Any]]:
    """What a ControlNet adds, frames folded into the batch."""

    def make(frames: int, batch: int) -> dict[str, Any]:
        rows, half = batch * frames, (SIDE // 2, (SIDE + 2) // 2)
        sizes = [(8, SIDE, SIDE + 2), (8, SIDE, SIDE + 2), (8, *half), (16, *half)]
        return inputs(frames, batch) | {
            "down_block_additional_residuals": tuple(torch.randn(rows, *size) for size in sizes),
            "mid_block_additional_residual": torch.randn(rows, 16, *half),
        }

    return make


def _video(frames: int, batch: int) -> Tensor:
    return torch.randn(batch, 4, frames, SIDE, SIDE)


def _wan_inputs(frames: int, batch: int) -> dict[str, Any]:
    return more.wan_inputs(SIDE, batch) | {"hidden_states": _video(frames, batch)}


def _skyreels_inputs(frames: int, batch: int) -> dict[str, Any]:
    return _wan_inputs(frames, batch) | {"enable_diffusion_forcing": True}


def _ltx_inputs(frames: int, batch: int) -> dict[str, Any]:
    tokens = torch.randn(batch, frames * GRID**2, 4)
    sizes = {"num_frames": frames, "height": GRID, "width": GRID}
    return more.ltx_inputs(SIDE, batch) | {"hidden_states": tokens} | sizes


def _cogvideox_inputs(frames: int, batch: int) -> dict[str, Any]:
    angles = get_3d_rotary_pos_embed(16, ((0, 0), (GRID, GRID)), (GRID, GRID), frames)
    video = torch.randn(batch, frames, 4, SIDE, SIDE)
    return more.cogvideox_rotary_inputs(SIDE, batch) | {"hidden_states": video, "image_rotary_emb": angles}


def _consis_id_inputs(frames: int, batch: int) -> dict[str, Any]:
    face = {"id_cond": torch.randn(batch, 12), "id_vit_hidden": (torch.randn(batch, 5, 12),)}
    return {name: value for name, value in _cogvideox_inputs(frames, batch).items() if name != "ofs"} | face


def _hunyuan_video_inputs(frames: int, batch: int) -> dict[str, Any]:
    return more.hunyuan_video_inputs(SIDE, batch) | {"hidden_states": _video(frames, batch)}


def _mochi_inputs(frames: int, batch: int) -> dict[str, Any]:
    return more.mochi_inputs(SIDE, batch) | {"hidden_states": _video(frames, batch)}


def _as_wan(inputs: Callable[[int, int], dict[str, Any]]) -> Callable[[int, int], dict[str, Any]]:
    """The video as Wan is given it, and the model's other inputs."""
    return lambda frames, batch: inputs(SIDE, batch) | {"hidden_states": _video(frames, batch)}


def _vace_inputs(frames: int, batch: int) -> dict[str, Any]:
    control = torch.randn(batch, 6, frames, SIDE, SIDE)
    return _as_wan(newer.wan_vace_inputs)(frames, batch) | {"control_hidden_states": control}


def _allegro_inputs(frames: int, batch: int) -> dict[str, Any]:
    grids = torch.cartesian_prod(torch.arange(frames), torch.arange(GRID), torch.arange(GRID)).T[:, None]
    tables = tuple((torch.randn(size, 4).cos(), torch.randn(size, 4).sin()) for size in (frames, GRID, GRID))
    return _as_wan(newer.allegro_inputs)(frames, batch) | {"image_rotary_emb": (tables, tuple(grids))}


def _any_flow_inputs(frames: int, batch: int) -> dict[str, Any]:
    video, times = torch.randn(batch, frames, 4, SIDE, SIDE), torch.full((batch, frames), 400.0)
    return newer.any_flow_inputs(SIDE, batch) | {"hidden_states": video, "r_timestep": times}


@dataclass(frozen=True)
class Video:
    """How to make a tiny video model and its inputs.

    `unit` is how many tokens of a frame attend. With `times`, a frame has so many timesteps of its own, and the first
    one less noise, as in image-to-video. With `text`, so many tokens of text at most attend along with the frames, in
    front of them or behind; in a `ragged` model each sample has its own number.
    """

    build: Callable[[], Any]
    inputs: Callable[[int, int], dict[str, Any]]
    unit: int = 1
    times: int = 0
    text: int = 0
    text_first: bool = False
    ragged: bool = False

    def model(self, dtype: torch.dtype = torch.float64) -> Any:
        """The model with seeded random weights everywhere."""
        return randomized(self.build(), dtype)

    def call(self, frames: int, time: float = 500.0, batch: int = 2, dtype: torch.dtype = torch.float64) -> Any:
        """Seeded inputs."""
        torch.manual_seed(5)
        named = self.inputs(frames, batch) | {"timestep": torch.full((batch,), time)}
        if self.times:
            named["timestep"] = torch.full((batch, frames * self.times), time)
            named["timestep"][:, : self.times] /= 4
        return {name: _cast(value, dtype) for name, value in named.items()}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_cast(item, dtype) for item in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _build(make: Callable[[int], Any]) -> Callable[[], Any]:
    return lambda: make(SIDE)


VIDEOS = {
    "AnimateDiff": Video(_motion, _motion_inputs),
    "AnimateDiff + ControlNet": Video(_motion, _with_residuals(_motion_inputs)),
    "UNet3D": Video(_three_d, _three_d_inputs),
    "UNet3D + ControlNet": Video(_three_d, _with_residuals(_three_d_inputs)),
    "UNet3D + LoRA": Video(_three_d_lora, _three_d_inputs),
    "Stable Video Diffusion": Video(unets.spatio_temporal, _spatio_temporal_inputs),
    "Wan": Video(_build(more.wan), _wan_inputs, GRID**2),
    "Wan, first frame given": Video(_build(more.wan), _wan_inputs, GRID**2, times=GRID**2),
    "SkyReels-V2": Video(_build(more.skyreels), _wan_inputs, GRID**2),
    "SkyReels-V2, first frame given": Video(_build(more.skyreels), _skyreels_inputs, GRID**2, times=1),
    "LTX-Video": Video(_build(more.ltx), _ltx_inputs, GRID**2),
    "CogVideoX": Video(_build(more.cogvideox_rotary), _cogvideox_inputs, GRID**2, text=7, text_first=True),
    "ConsisID": Video(_build(newer.consis_id), _consis_id_inputs, GRID**2, text=7, text_first=True),
    "HunyuanVideo": Video(_build(more.hunyuan_video), _hunyuan_video_inputs, GRID**2, text=7),
    "HunyuanVideo, first frame given": Video(
        _build(more.hunyuan_video_first_frame), _hunyuan_video_inputs, GRID**2, text=7
    ),
    "Mochi": Video(_build(more.mochi), _mochi_inputs, GRID**2, text=7, ragged=True),
    "Wan VACE": Video(_build(newer.wan_vace), _vace_inputs, GRID**2),
    "ChronoEdit": Video(_build(newer.chrono_edit), _wan_inputs, GRID**2),
    "HunyuanVideo 1.5": Video(_build(newer.hunyuan_video_15), _as_wan(newer.hunyuan_video_15_inputs), GRID**2, text=17),
    "Cosmos": Video(_build(newer.cosmos), _as_wan(more.wan_inputs), GRID**2),
    "Allegro": Video(_build(newer.allegro), _allegro_inputs, GRID**2),
    "EasyAnimate": Video(_build(newer.easy_animate), _as_wan(more.wan_inputs), GRID**2, text=7, text_first=True),
    "AnyFlow": Video(_build(newer.any_flow), _any_flow_inputs, GRID**2, times=1),
}
#: Those that the knobs are tried out on; the others meet one setting that leaves frames out, and one that does not.
MAIN = ("AnimateDiff", "UNet3D", "Wan")


@contextmanager
def attention_by_definition(video: Video, frames: int, knobs: ClipParallel, time: float) -> Iterator[None]:
    """Attention between frames as `ClipParallel` defines it, written out: one key for every frame of the video.

    Frame f has its own key where it is near, else a copy of the key of its block's middle frame, else none. So there
    are no weights here, and no ranks. Text sees everything, and everything sees the text.
    """
    far_boost = knobs.global_emphasis if time >= knobs.emphasis_from else 0.0
    near_boost = knobs.local_emphasis if time < knobs.emphasis_from else 0.0
    picks, boosts = [], []
    for query in range(frames):
        picked, boost = [], []
        for frame in range(frames):
            near = knobs.window is None or query - knobs.window <= frame <= query + knobs.window
            if near:
                picked.append(frame)
            elif knobs.stride is not None:
                block = [g for g in range(frames) if g // knobs.stride == frame // knobs.stride]
                picked.append(block[(len(block) - 1) // 2])
            else:
                continue
            boost.append(near_boost if near else far_boost)
        picks.append(picked)
        boosts.append(boost)
    with _ByDefinition(video, picks, boosts) as mode:
        yield
    assert mode.calls, "no attention between frames was found"


class _ByDefinition(TorchFunctionMode):
    def __init__(self, video: Video, picks: list[list[int]], boosts: list[list[float]]) -> None:
        super().__init__()
        self.video, self.picks, self.boosts, self.calls = video, picks, boosts, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = {**dict(zip(("query", "key", "value"), args, strict=False)), **(kwargs or {})}
        if func is not F.scaled_dot_product_attention or not self._is_between_frames(named):
            return func(*args, **(kwargs or {}))
        self.calls += 1
        return self._attended(named["query"], named["key"], named["value"], named.get("attn_mask"))

    def _is_between_frames(self, named: dict[str, Any]) -> bool:
        length = named["query"].shape[2]
        text = length - len(self.picks) * self.video.unit
        return length == named["key"].shape[2] and 0 <= text <= self.video.text

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        tokens = len(self.picks) * self.video.unit
        text = q.shape[2] - tokens
        lengths = (text, tokens) if self.video.text_first else (tokens, text)
        cut = [x.split(lengths, dim=2)[:: -1 if self.video.text_first else 1] for x in (q, k, v)]
        (q, text_q), (k, text_k), (v, text_v) = cut
        q, k, v = (x.unflatten(2, (len(self.picks), self.video.unit)) for x in (q, k, v))
        hidden = torch.zeros(len(q), 1, 1, text, dtype=q.dtype)
        if mask is not None:
            mask = mask.any(dim=-2, keepdim=True)  # padding attends to nothing, which nothing sees
            hidden = hidden.masked_fill(~mask[..., :text] if self.video.text_first else ~mask[..., tokens:], -math.inf)
        seen = [([*range(len(self.picks))], [0.0] * len(self.picks), text_q)]
        seen = [*zip(self.picks, self.boosts, q.unbind(2), strict=True), *seen]
        out = []
        for pick, boost, queries in seen:
            keys, values = (torch.cat([x[:, :, pick].flatten(2, 3), y], 2) for x, y in ((k, text_k), (v, text_v)))
            near = torch.tensor(boost, dtype=q.dtype).repeat_interleave(self.video.unit)
            bias = torch.cat([near.expand(len(q), 1, 1, -1), hidden], dim=-1)
            out.append((queries @ keys.mT / math.sqrt(q.shape[-1]) + bias).softmax(-1) @ values)
        return torch.cat([out[-1], *out[:-1]] if self.video.text_first else out, dim=2)
