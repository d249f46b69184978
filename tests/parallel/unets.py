"""Tiny random UNets, the inputs to call them with, and real pipelines around them; prompts come as embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    DDIMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
from peft import LoraConfig

from tests.parallel import video_unets as videos
from tests.tiny_models.autoencoders import kl_settings
from tests.tiny_models.weights import noise, randomized

WIDTH, LEVELS = 12, 3
#: Width of a text that is normed before it joins the image: that norm has 32 groups.
JOINED_WIDTH = 32


def plain_unet(**changed: Any) -> UNet2DConditionModel:
    settings = {
        "sample_size": 16,
        "block_out_channels": (8, 16, 16),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": WIDTH,
        "attention_head_dim": 4,
        "norm_num_groups": 4,
    }
    return UNet2DConditionModel(**settings | changed)


def _sdxl_unet() -> UNet2DConditionModel:
    return plain_unet(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 1, 2),
        attention_head_dim=(2, 4, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=58,
    )


def _ip_unet() -> UNet2DConditionModel:
    """A UNet with an IP-Adapter: its cross-attention sees two more tokens made of an image's embedding."""
    unet = plain_unet()
    unet.encoder_hid_proj = MultiIPAdapterImageProjection([ImageProjection(10, WIDTH, 2)])
    unet.config["encoder_hid_dim_type"] = "ip_image_proj"
    processors: dict[str, Any] = dict(unet.attn_processors)
    for name in processors:
        if name.endswith("attn2.processor"):
            size = unet.get_submodule(name.removesuffix(".processor")).inner_dim
            processors[name] = IPAdapterAttnProcessor2_0(size, WIDTH, num_tokens=(2,))
    unet.set_attn_processor(processors)
    return unet


def _lora_unet() -> UNet2DConditionModel:
    """A UNet with a LoRA on attention and on convolutions, also the halving ones: its low-rank part convolves too."""
    unet = plain_unet()
    unet.add_adapter(
        LoraConfig(r=2, target_modules=["to_q", "to_k", "conv_in", "conv1", "downsamplers.0.conv", "upsamplers.0.conv"])
    )
    return unet


def _joined_unet(**changed: Any) -> UNet2DConditionModel:
    """A UNet as of DeepFloyd IF: keys of the text join the image's, and residual blocks resample."""
    settings: dict[str, Any] = {
        "down_block_types": ("SimpleCrossAttnDownBlock2D", "ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D", "SimpleCrossAttnUpBlock2D"),
        "cross_attention_dim": JOINED_WIDTH,
        "cross_attention_norm": "group_norm",
        "resnet_time_scale_shift": "scale_shift",
        "class_embed_type": "timestep",
    }
    return plain_unet(**settings | changed)


def _hinted_unet() -> UNet2DConditionModel:
    """A UNet as of Kandinsky 2.2 with a hint, which convolutions of its own read; the finest level reads text alone."""
    few = {"only_cross_attention": (True, False, False), "mid_block_only_cross_attention": False}
    names = few | {"encoder_hid_dim_type": "image_proj", "encoder_hid_dim": 10, "addition_embed_type": "image_hint"}
    unet = _joined_unet(in_channels=8, class_embed_type=None, cross_attention_norm=None, **names)
    unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "add_k_proj", "conv1"]))
    return unet


def _inputs(height: int, width: int, batch: int) -> dict[str, Any]:
    return {
        "sample": torch.randn(batch, 4, height, width),
        "encoder_hidden_states": torch.randn(batch, 5, WIDTH),
        "timestep": torch.tensor(500.0),
    }


def _sdxl_inputs(height: int, width: int, batch: int) -> dict[str, Any]:
    added = {"text_embeds": torch.randn(batch, 10), "time_ids": torch.randn(batch, 6)}
    return _inputs(height, width, batch) | {"added_cond_kwargs": added}


def _ip_inputs(height: int, width: int, batch: int) -> dict[str, Any]:
    return _inputs(height, width, batch) | {"added_cond_kwargs": {"image_embeds": [torch.randn(batch, 1, 10)]}}


def _control_inputs(height: int, width: int, batch: int) -> dict[str, Any]:
    """With residuals of every level, as a ControlNet makes them."""
    named = _inputs(height, width, batch)
    sizes = [(height, width)]
    for _ in range(LEVELS - 1):
        sizes.append(((sizes[-1][0] + 1) // 2, (sizes[-1][1] + 1) // 2))
    places = [(8, 0), (8, 0), (8, 1), (16, 1), (16, 2), (16, 2)]
    down = tuple(torch.randn(batch, channels, *sizes[level]) for channels, level in places)
    return named | {
        "down_block_additional_residuals": down,
        "mid_block_additional_residual": torch.randn(batch, 16, *sizes[2]),
    }


def _joined_inputs(height: int, width: int, batch: int) -> dict[str, Any]:
    """With a mask of the text, which differs between samples."""
    mask = torch.arange(5).expand(batch, 5) < torch.arange(3, 3 + batch)[:, None]
    text = torch.randn(batch, 5, JOINED_WIDTH)
    more = {"encoder_attention_mask": mask, "class_labels": torch.rand(batch) * 9}
    return _inputs(height, width, batch) | {"encoder_hidden_states": text} | more


def _hinted_inputs(height: int, width: int, batch: int) -> dict[str, Any]:
    """The embedding is the whole text, and the hint is eight times as large as the latent."""
    hint = torch.randn(batch, 3, height * 8, width * 8)
    added = {"image_embeds": torch.randn(batch, 10), "hint": hint}
    return _inputs(height, width, batch) | {"encoder_hidden_states": None, "added_cond_kwargs": added}


@dataclass(frozen=True)
class Unet:
    """How to make a tiny UNet and its inputs; the sides of its latents are multiples of a number."""

    build: Callable[[], Any]
    inputs: Callable[[int, int, int], dict[str, Any]] = field(default=_inputs)
    multiple: int = 1

    def model(self, dtype: torch.dtype) -> Any:
        return randomized(self.build(), dtype)

    def calls(self, size: tuple[int, int], dtype: torch.dtype, times: tuple[float, ...]) -> list[dict[str, Any]]:
        """One call per step, each with a sample of its own."""
        torch.manual_seed(5)
        height, width = (side - side % self.multiple for side in size)
        named = _cast(self.inputs(height, width, 2), dtype)
        change = torch.randn(named["sample"].shape, dtype=torch.float64).to(dtype)
        return [
            named | {"timestep": torch.tensor(time), "sample": named["sample"] + index * 0.3 * change}
            for index, time in enumerate(times)
        ]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if value is None or (isinstance(value, torch.Tensor) and not value.is_floating_point()):
        return value
    if isinstance(value, torch.Tensor):
        return value.to(dtype)
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return type(value)(_cast(item, dtype) for item in value)


UNETS = {
    "SD": Unet(plain_unet),
    "SDXL": Unet(_sdxl_unet, _sdxl_inputs),
    "SD + ControlNet": Unet(plain_unet, _control_inputs),
    "SD + IP-Adapter": Unet(_ip_unet, _ip_inputs),
    "SD + LoRA": Unet(_lora_unet),
    # Its finest level reads text alone.
    "SD upscaler": Unet(lambda: plain_unet(only_cross_attention=(True, False, False))),
    "IF": Unet(_joined_unet, _joined_inputs, multiple=4),
    "Kandinsky": Unet(_hinted_unet, _hinted_inputs, multiple=4),
    "AnimateDiff": Unet(videos.motion, videos.with_residuals(videos.motion_inputs)),
    "Text-to-video": Unet(videos.three_d_lora, videos.three_d_inputs),
    "Stable Video Diffusion": Unet(videos.spatio_temporal, videos.spatio_temporal_inputs),
}


def _vae(dtype: torch.dtype) -> AutoencoderKL:
    return randomized(AutoencoderKL(**kl_settings(3)), dtype)


def _plain(kind: Any, dtype: torch.dtype, unet: Any, **more: Any) -> Any:
    parts = {"text_encoder": None, "tokenizer": None, "safety_checker": None, "feature_extractor": None}
    scheduler: Any = DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1)
    return kind(vae=_vae(dtype), unet=unet, scheduler=scheduler, requires_safety_checker=False, **parts, **more)


def _sdxl(dtype: torch.dtype) -> StableDiffusionXLPipeline:
    parts: dict[str, Any] = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    scheduler: Any = EulerDiscreteScheduler()
    unet = UNETS["SDXL"].model(dtype)
    return StableDiffusionXLPipeline(
        vae=_vae(dtype),
        unet=unet,
        scheduler=scheduler,
        add_watermarker=False,
        force_zeros_for_empty_prompt=True,
        **parts,
    )


def _control(dtype: torch.dtype) -> Any:
    unet = UNETS["SD"].model(dtype)
    control = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(4, 8, 8))
    return _plain(StableDiffusionControlNetPipeline, dtype, unet, controlnet=randomized(control, dtype))


def _picture(channels: int, size: tuple[int, int], dtype: torch.dtype, seed: int = 7) -> torch.Tensor:
    return noise(1, channels, *size, seed=seed, dtype=dtype).sigmoid()


@dataclass(frozen=True)
class UnetPipe:
    """How to build a Stable Diffusion pipeline, and what it takes besides prompts and a size."""

    build: Callable[[torch.dtype], Any]
    more: Callable[[tuple[int, int], torch.dtype], dict[str, Any]] = field(default=lambda size, dtype: {})

    def make(self, dtype: torch.dtype = torch.float64) -> Any:
        pipe = self.build(dtype)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def call(self, pipe: Any, size: tuple[int, int] = (88, 72), batch: int = 1, steps: int = 3) -> torch.Tensor:
        """One generation with guidance, ``return_dict`` left at its default."""
        dtype = pipe.unet.dtype
        named = {
            "prompt_embeds": noise(batch, 5, WIDTH, seed=1, dtype=dtype),
            "negative_prompt_embeds": noise(batch, 5, WIDTH, seed=2, dtype=dtype),
            "num_inference_steps": steps,
            "generator": torch.Generator().manual_seed(9),
            "output_type": "pt",
            **self.more(size, dtype),
        }
        if isinstance(pipe, StableDiffusionXLPipeline):
            named["pooled_prompt_embeds"] = noise(batch, 10, seed=3, dtype=dtype)
            named["negative_pooled_prompt_embeds"] = noise(batch, 10, seed=4, dtype=dtype)
        if "image" not in named or "mask_image" in named:
            named |= {"height": size[0], "width": size[1]}
        return torch.as_tensor(next(iter(pipe(**named).values())))


def _with_sd(kind: Any) -> Callable[[torch.dtype], Any]:
    return lambda dtype: _plain(kind, dtype, UNETS["SD"].model(dtype))


UNET_PIPES = {
    "SD": UnetPipe(_with_sd(StableDiffusionPipeline)),
    "SDXL": UnetPipe(_sdxl),
    "img2img": UnetPipe(
        _with_sd(StableDiffusionImg2ImgPipeline),
        lambda size, dtype: {"image": _picture(3, size, dtype), "strength": 0.9},
    ),
    "inpaint": UnetPipe(
        _with_sd(StableDiffusionInpaintPipeline),
        lambda size, dtype: {
            "image": _picture(3, size, dtype),
            "mask_image": _picture(1, size, dtype, seed=8).round(),
            "strength": 1.0,
        },
    ),
    "ControlNet": UnetPipe(_control, lambda size, dtype: {"image": _picture(3, size, dtype)}),
}
