"""Lists published models: the class and configuration of their denoiser, and what one of its calls looks like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from partsong.errors import ArgumentError
from partsong.planner.calls import (
    Call,
    cogvideox_call,
    flux2_call,
    flux_call,
    hunyuan_video_call,
    ltx_call,
    pixart_call,
    qwen_call,
    sana_call,
    sd3_call,
    sd_call,
    sdxl_call,
    wan_call,
    z_image_call,
)

__all__ = ["MODELS", "Encoder", "ModelRow", "model_named"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """Describes a text encoder.

    Attributes:
        name: what people call it.
        parameters: how many it has.
        tokens: of a prompt.
    """

    name: str
    parameters: float
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """Describes a pipeline whose weights need not be at hand.

    Attributes:
        name: what `recommend` and the command line call it.
        checkpoint: where its configuration comes from.
        pipeline: the class of the pipeline.
        denoiser: the class of its denoiser.
        config: values that differ from the defaults of that class.
        call: the arguments of one call for a size.
        steps: as its authors advise.
        height: pixels where nothing else is asked.
        width: pixels where nothing else is asked.
        frames: of a video; 1 where it makes pictures.
        multiple: pixels of which height and width are multiples.
        frame_multiple: a video has a multiple of so many frames, and one more; 1 where any number will do.
        branches: samples of a step that guidance asks for; 1 where the model was distilled to need one.
        joined: whether the branches are one call.
        coder: the class of its autoencoder.
        coder_config: values that differ from the defaults of that class.
        clip: latent frames of a short clip that the autoencoder decodes; None where it decodes pictures.
        latent_channels: of what the autoencoder decodes.
        downscale: pixels of a latent's side.
        encoders: its text encoders.
    """

    name: str
    checkpoint: str
    pipeline: str
    denoiser: str
    config: Mapping[str, Any] = field(default_factory=dict)
    call: Call
    steps: int
    height: int = 1024
    width: int = 1024
    frames: int = 1
    multiple: int = 16
    frame_multiple: int = 1
    branches: int = 1
    joined: bool = True
    coder: str = "AutoencoderKL"
    coder_config: Mapping[str, Any] = field(default_factory=dict)
    clip: int | None = None
    latent_channels: int = 16
    downscale: int = 8
    encoders: tuple[Encoder, ...] = ()


_CLIP_L = Encoder(name="CLIP-L", parameters=0.123e9, tokens=77)
_CLIP_G = Encoder(name="CLIP-bigG", parameters=0.695e9, tokens=77)
_UMT5 = Encoder(name="UMT5-XXL", parameters=5.68e9, tokens=512)
_GEMMA = Encoder(name="Gemma-2-2B", parameters=2.61e9, tokens=300)


def _t5(tokens: int) -> Encoder:
    return Encoder(name="T5-XXL", parameters=4.76e9, tokens=tokens)


#: The decoder that Stable Diffusion and its heirs share.
_KL: Mapping[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
}
_KL16: Mapping[str, Any] = {**_KL, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}

_SDXL: Mapping[str, Any] = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
_SD35: Mapping[str, Any] = {
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "pos_embed_max_size": 192,
    "qk_norm": "rms_norm",
}
_SD35_MEDIUM: Mapping[str, Any] = {
    "num_layers": 24,
    "num_attention_heads": 24,
    "caption_projection_dim": 1536,
    "pos_embed_max_size": 384,
    "qk_norm": "rms_norm",
    "dual_attention_layers": tuple(range(13)),
}
_FLUX_ENCODERS = (_CLIP_L, _t5(512))
_WAN: Mapping[str, Any] = {
    "height": 720,
    "width": 1280,
    "frames": 81,
    "frame_multiple": 4,
    "branches": 2,
    "joined": False,
    "coder": "AutoencoderKLWan",
    "clip": 3,
    "encoders": (_UMT5,),
}

#: Every row, older and smaller models first.
ROWS: tuple[ModelRow, ...] = (
    ModelRow(
        name="sd-1.5",
        checkpoint="stable-diffusion-v1-5/stable-diffusion-v1-5",
        pipeline="StableDiffusionPipeline",
        denoiser="UNet2DConditionModel",
        config={"cross_attention_dim": 768, "sample_size": 64},
        call=sd_call,
        steps=50,
        height=512,
        width=512,
        multiple=8,
        branches=2,
        coder_config=_KL,
        latent_channels=4,
        encoders=(_CLIP_L,),
    ),
    ModelRow(
        name="sdxl",
        checkpoint="stabilityai/stable-diffusion-xl-base-1.0",
        pipeline="StableDiffusionXLPipeline",
        denoiser="UNet2DConditionModel",
        config=_SDXL,
        call=sdxl_call,
        steps=50,
        multiple=8,
        branches=2,
        coder_config=_KL,
        latent_channels=4,
        encoders=(_CLIP_L, _CLIP_G),
    ),
    ModelRow(
        name="pixart-sigma",
        checkpoint="PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
        pipeline="PixArtSigmaPipeline",
        denoiser="PixArtTransformer2DModel",
        config={"caption_channels": 4096, "use_additional_conditions": False, "interpolation_scale": 2},
        call=pixart_call,
        steps=20,
        branches=2,
        coder_config=_KL,
        latent_channels=4,
        encoders=(_t5(300),),
    ),
    ModelRow(
        name="sd3.5-medium",
        checkpoint="stabilityai/stable-diffusion-3.5-medium",
        pipeline="StableDiffusion3Pipeline",
        denoiser="SD3Transformer2DModel",
        config=_SD35_MEDIUM,
        call=sd3_call,
        steps=28,
        branches=2,
        coder_config=_KL16,
        encoders=(_CLIP_L, _CLIP_G, _t5(256)),
    ),
    ModelRow(
        name="sd3.5-large",
        checkpoint="stabilityai/stable-diffusion-3.5-large",
        pipeline="StableDiffusion3Pipeline",
        denoiser="SD3Transformer2DModel",
        config=_SD35,
        call=sd3_call,
        steps=28,
        branches=2,
        coder_config=_KL16,
        encoders=(_CLIP_L, _CLIP_G, _t5(256)),
    ),
    ModelRow(
        name="sana-1.6b",
        checkpoint="Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers",
        pipeline="SanaPipeline",
        denoiser="SanaTransformer2DModel",
        call=sana_call,
        steps=20,
        multiple=32,
        branches=2,
        coder="AutoencoderDC",
        latent_channels=32,
        downscale=32,
        encoders=(_GEMMA,),
    ),
    ModelRow(
        name="flux-dev",
        checkpoint="black-forest-labs/FLUX.1-dev",
        pipeline="FluxPipeline",
        denoiser="FluxTransformer2DModel",
        config={"guidance_embeds": True},
        call=flux_call(512),
        steps=28,
        coder_config=_KL16,
        encoders=_FLUX_ENCODERS,
    ),
    ModelRow(
        name="flux-schnell",
        checkpoint="black-forest-labs/FLUX.1-schnell",
        pipeline="FluxPipeline",
        denoiser="FluxTransformer2DModel",
        call=flux_call(256),
        steps=4,
        coder_config=_KL16,
        encoders=(_CLIP_L, _t5(256)),
    ),
    ModelRow(
        name="flux2-dev",
        checkpoint="black-forest-labs/FLUX.2-dev",
        pipeline="Flux2Pipeline",
        denoiser="Flux2Transformer2DModel",
        call=flux2_call,
        steps=28,
        coder="AutoencoderKLFlux2",
        latent_channels=32,
        encoders=(Encoder(name="Mistral-Small-24B", parameters=24.0e9, tokens=512),),
    ),
    ModelRow(
        name="qwen-image",
        checkpoint="Qwen/Qwen-Image",
        pipeline="QwenImagePipeline",
        denoiser="QwenImageTransformer2DModel",
        call=qwen_call,
        steps=50,
        height=1328,
        width=1328,
        branches=2,
        joined=False,
        coder="AutoencoderKLQwenImage",
        clip=1,
        encoders=(Encoder(name="Qwen2.5-VL-7B", parameters=8.29e9, tokens=100),),
    ),
    ModelRow(
        name="z-image-turbo",
        checkpoint="Tongyi-MAI/Z-Image-Turbo",
        pipeline="ZImagePipeline",
        denoiser="ZImageTransformer2DModel",
        call=z_image_call,
        steps=8,
        coder_config=_KL16,
        encoders=(Encoder(name="Qwen3-4B", parameters=4.02e9, tokens=100),),
    ),
    ModelRow(
        name="cogvideox-5b",
        checkpoint="zai-org/CogVideoX-5b",
        pipeline="CogVideoXPipeline",
        denoiser="CogVideoXTransformer3DModel",
        config={"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
        call=cogvideox_call,
        steps=50,
        height=480,
        width=720,
        frames=49,
        frame_multiple=4,
        branches=2,
        coder="AutoencoderKLCogVideoX",
        clip=3,
        coder_config={
            "block_out_channels": (128, 256, 256, 512),
            "down_block_types": ("CogVideoXDownBlock3D",) * 4,
            "up_block_types": ("CogVideoXUpBlock3D",) * 4,
            "latent_channels": 16,
        },
        encoders=(_t5(226),),
    ),
    ModelRow(
        name="ltx-video",
        checkpoint="Lightricks/LTX-Video-0.9.7-dev",
        pipeline="LTXPipeline",
        denoiser="LTXVideoTransformer3DModel",
        config={"attention_head_dim": 128, "cross_attention_dim": 4096, "num_layers": 48},
        call=ltx_call,
        steps=40,
        height=704,
        width=1216,
        frames=121,
        multiple=32,
        frame_multiple=8,
        branches=2,
        coder="AutoencoderKLLTXVideo",
        clip=3,
        latent_channels=128,
        downscale=32,
        encoders=(_t5(256),),
    ),
    ModelRow(
        name="wan-1.3b",
        checkpoint="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        pipeline="WanPipeline",
        denoiser="WanTransformer3DModel",
        config={"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960},
        call=wan_call,
        steps=50,
        **{**_WAN, "height": 480, "width": 832},
    ),
    ModelRow(
        name="wan-14b",
        checkpoint="Wan-AI/Wan2.1-T2V-14B-Diffusers",
        pipeline="WanPipeline",
        denoiser="WanTransformer3DModel",
        call=wan_call,
        steps=50,
        **_WAN,
    ),
    ModelRow(
        name="hunyuan-video",
        checkpoint="hunyuanvideo-community/HunyuanVideo",
        pipeline="HunyuanVideoPipeline",
        denoiser="HunyuanVideoTransformer3DModel",
        call=hunyuan_video_call,
        steps=50,
        height=720,
        width=1280,
        frames=129,
        frame_multiple=4,
        coder="AutoencoderKLHunyuanVideo",
        clip=3,
        encoders=(Encoder(name="Llama-3-8B", parameters=8.03e9, tokens=351), _CLIP_L),
    ),
)

#: The rows by name.
MODELS: Mapping[str, ModelRow] = {row.name: row for row in ROWS}


def model_named(name: str) -> ModelRow:
    """Returns the row of a published model.

    Raises:
        ArgumentError: an unknown name; lists the known ones.
    """
    if name not in MODELS:
        raise ArgumentError(f"no model {name!r} is known to the planner; the known ones are {', '.join(MODELS)}")
    return MODELS[name]
