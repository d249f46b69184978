"""Real sizes of Wan, Hunyuan and those like them, which make videos."""

from __future__ import annotations

from typing import Any

from tests.parallel.real_size import Attends, Gathers, RealSize, full, present, real, whole

#: 81 frames of 480 x 832 pixels are 21 x 60 x 104 latents, in patches of 1 x 2 x 2; those of 720 x 1280, 21 x 90 x 160.
_SMALL, _LARGE = 21 * 30 * 52, 21 * 45 * 80


def _wan(channels: int, frames: int, height: int, width: int, **more: Any) -> Any:
    def inputs(batch: int) -> dict[str, Any]:
        return {
            "hidden_states": real(batch, channels, frames, height, width),
            "timestep": whole(batch),
            "encoder_hidden_states": real(batch, 512, 4096),
        } | {name: make(batch) for name, make in more.items()}

    return inputs


def _texts(width: int, length: int = 512) -> Any:
    return {"encoder_hidden_states": lambda b: real(b, length, width)}


WAN = (
    RealSize(
        model="WanTransformer3DModel",
        checkpoint="Wan-AI/Wan2.1-T2V-14B-Diffusers",
        inputs=_wan(16, 21, 90, 160),
        attends=(Attends(layers=40, tokens=(_LARGE,), heads=40, dim=128),),
        gathers=(Gathers(tokens=_LARGE, numbers=64),),
        output=((16, 21, 90, 160),),
    ),
    # 97 frames of 544 x 960 pixels.
    RealSize(
        model="SkyReelsV2Transformer3DModel",
        checkpoint="Skywork/SkyReels-V2-DF-14B-540P-Diffusers",
        config={"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824},
        inputs=_wan(
            16,
            25,
            68,
            120,
            timestep=lambda b: whole(b, 25),
            enable_diffusion_forcing=lambda b: True,
        ),
        attends=(Attends(layers=40, tokens=(25 * 34 * 60,), heads=40, dim=128),),
        gathers=(Gathers(tokens=25 * 34 * 60, numbers=5120),),
        output=((16, 25, 68, 120),),
    ),
    RealSize(
        model="WanVACETransformer3DModel",
        checkpoint="Wan-AI/Wan2.1-VACE-14B-diffusers",
        inputs=_wan(
            16,
            21,
            60,
            104,
            control_hidden_states=lambda b: real(b, 96, 21, 60, 104),
            control_hidden_states_scale=lambda b: real(8),
        ),
        attends=(Attends(layers=40 + 8, tokens=(_SMALL,), heads=40, dim=128),),
        gathers=(Gathers(tokens=_SMALL, numbers=64),),
        output=((16, 21, 60, 104),),
    ),
    # One frame tells of the character, 77 are made; a face adapter in every fifth block reads the video by frames.
    RealSize(
        model="WanAnimateTransformer3DModel",
        checkpoint="Wan-AI/Wan2.2-Animate-14B-Diffusers",
        config={"added_kv_proj_dim": 5120},
        inputs=_wan(
            36,
            21,
            90,
            160,
            encoder_hidden_states_image=lambda b: real(b, 257, 1280),
            pose_hidden_states=lambda b: real(b, 16, 20, 90, 160),
            face_pixel_values=lambda b: real(b, 3, 77, 512, 512),
        ),
        attends=(Attends(layers=40, tokens=(_LARGE,), heads=40, dim=128),),
        gathers=(Gathers(tokens=_LARGE, numbers=5120, times=8), Gathers(tokens=_LARGE, numbers=64)),
        output=((16, 21, 90, 160),),
    ),
    # 29 frames are eight of latents.
    RealSize(
        model="ChronoEditTransformer3DModel",
        checkpoint="nvidia/ChronoEdit-14B-Diffusers",
        config={"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
        inputs=_wan(36, 8, 90, 160, encoder_hidden_states_image=lambda b: real(b, 257, 1280)),
        attends=(Attends(layers=40, tokens=(8 * 45 * 80,), heads=40, dim=128),),
        gathers=(Gathers(tokens=8 * 45 * 80, numbers=64),),
        output=((16, 8, 90, 160),),
    ),
    RealSize(
        model="AnyFlowTransformer3DModel",
        checkpoint="the class' defaults, which are those of Wan 2.1 14B",
        inputs=_wan(
            16,
            21,
            60,
            104,
            hidden_states=lambda b: real(b, 21, 16, 60, 104),
            timestep=lambda b: full(b, 21),
            r_timestep=lambda b: full(b, 21),
        ),
        attends=(Attends(layers=40, tokens=(_SMALL,), heads=40, dim=128),),
        gathers=(Gathers(tokens=_SMALL, numbers=5120),),
        output=((21, 16, 60, 104),),
    ),
    # Nine frames of 48 x 80 latents to make, and before them two in fine patches, two in coarser, 16 in the coarsest.
    RealSize(
        model="HeliosTransformer3DModel",
        checkpoint="the class' defaults",
        values="autocast on its device, which meta tensors have not",
        inputs=_wan(
            16,
            9,
            48,
            80,
            indices_hidden_states=lambda b: full(1, 9),
            indices_latents_history_short=lambda b: full(1, 2),
            indices_latents_history_mid=lambda b: full(1, 2),
            indices_latents_history_long=lambda b: full(1, 16),
            latents_history_short=lambda b: real(b, 16, 2, 48, 80),
            latents_history_mid=lambda b: real(b, 16, 2, 48, 80),
            latents_history_long=lambda b: real(b, 16, 16, 48, 80),
        ),
        attends=(Attends(layers=40, tokens=(11 * 24 * 40 + 12 * 20 + 4 * 6 * 10,), heads=40, dim=128),),
        gathers=(Gathers(tokens=11 * 24 * 40 + 12 * 20 + 4 * 6 * 10, numbers=5120),),
        output=((16, 9, 48, 80),),
    ),
)

HUNYUAN = (
    # 129 frames of 720 x 1280 pixels.
    RealSize(
        model="HunyuanVideoTransformer3DModel",
        checkpoint="hunyuanvideo-community/HunyuanVideo",
        inputs=_wan(
            16,
            33,
            90,
            160,
            **_texts(4096, 256),
            encoder_attention_mask=lambda b: present(b, 256),
            pooled_projections=lambda b: real(b, 768),
            guidance=lambda b: real(b),
        ),
        attends=(Attends(layers=20 + 40, tokens=(33 * 45 * 80, 256), heads=24, dim=128),),
        gathers=(Gathers(tokens=33 * 45 * 80, numbers=64),),
        output=((16, 33, 90, 160),),
    ),
    # 121 frames of 720 x 1280 pixels, of which a latent has 16 x 16; words, letters and a given picture are the text.
    RealSize(
        model="HunyuanVideo15Transformer3DModel",
        checkpoint="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
        values="asks whether the given picture is all zeros",
        inputs=_wan(
            65,
            31,
            45,
            80,
            **_texts(3584, 1000),
            encoder_attention_mask=lambda b: present(b, 1000),
            encoder_hidden_states_2=lambda b: real(b, 256, 1472),
            encoder_attention_mask_2=lambda b: present(b, 256),
            image_embeds=lambda b: real(b, 729, 1152),
        ),
        attends=(Attends(layers=54, tokens=(31 * 45 * 80, 1000 + 256 + 729), heads=16, dim=128),),
        gathers=(Gathers(tokens=31 * 45 * 80, numbers=32),),
        output=((32, 31, 45, 80),),
    ),
    # Nine frames of 80 x 80 latents to make; two before them in fine patches, two in coarser, 16 in the coarsest.
    RealSize(
        model="HunyuanVideoFramepackTransformer3DModel",
        checkpoint="lllyasviel/FramePackI2V_HY",
        config={"has_image_proj": True, "has_clean_x_embedder": True},
        inputs=_wan(
            16,
            9,
            80,
            80,
            **_texts(4096, 256),
            encoder_attention_mask=lambda b: present(b, 256),
            pooled_projections=lambda b: real(b, 768),
            image_embeds=lambda b: real(b, 729, 1152),
            guidance=lambda b: real(b),
            indices_latents=lambda b: whole(9),
            indices_latents_clean=lambda b: whole(2),
            indices_latents_history_2x=lambda b: whole(2),
            indices_latents_history_4x=lambda b: whole(16),
            latents_clean=lambda b: real(b, 16, 2, 80, 80),
            latents_history_2x=lambda b: real(b, 16, 2, 80, 80),
            latents_history_4x=lambda b: real(b, 16, 16, 80, 80),
        ),
        attends=(Attends(layers=20 + 40, tokens=(11 * 1600 + 20 * 20 + 4 * 10 * 10, 256 + 729), heads=24, dim=128),),
        gathers=(Gathers(tokens=11 * 1600 + 20 * 20 + 4 * 10 * 10, numbers=3072),),
        output=((16, 9, 80, 80),),
    ),
    # 121 frames of 736 x 1280 pixels.
    RealSize(
        model="MotifVideoTransformer3DModel",
        checkpoint="the class' defaults",
        inputs=_wan(33, 31, 92, 160, encoder_attention_mask=lambda b: whole(b, 512)),
        attends=(Attends(layers=20 + 40, tokens=(31 * 46 * 80, 512), heads=24, dim=128),),
        gathers=(Gathers(tokens=31 * 46 * 80, numbers=64),),
        output=((16, 31, 92, 160),),
    ),
)
