"""Real sizes of models that make videos, and of those that make sound."""

from __future__ import annotations

from typing import Any

from tests.parallel.real_size import Attends, Gathers, RealSize, Rows, angles, flags, full, present, real, whole

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
        checkpoint="BestWishYsh/Helios-Base",
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

_COGVIDEOX = 13 * 30 * 45

OTHERS = (
    # 121 frames of 704 x 1216 pixels, of which a latent has 8 x 32 x 32.
    RealSize(
        model="LTXVideoTransformer3DModel",
        checkpoint="Lightricks/LTX-Video-0.9.7-dev",
        config={"attention_head_dim": 128, "cross_attention_dim": 4096, "num_layers": 48},
        inputs=lambda batch: {
            "hidden_states": real(batch, 16 * 22 * 38, 128),
            "encoder_hidden_states": real(batch, 256, 4096),
            "encoder_attention_mask": whole(batch, 256),
            "timestep": real(batch),
            "num_frames": 16,
            "height": 22,
            "width": 38,
            "rope_interpolation_scale": (8 / 25, 32, 32),
        },
        attends=(Attends(layers=48, tokens=(16 * 22 * 38,), heads=32, dim=128),),
        gathers=(Gathers(tokens=16 * 22 * 38, numbers=128),),
        output=((16 * 22 * 38, 128),),
    ),
    RealSize(
        model="CogVideoXTransformer3DModel",
        checkpoint="zai-org/CogVideoX-5b",
        config={"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
        inputs=lambda batch: {
            "hidden_states": real(batch, 13, 16, 60, 90),
            "encoder_hidden_states": real(batch, 226, 4096),
            "timestep": whole(batch),
            "image_rotary_emb": angles(_COGVIDEOX, 64),
        },
        attends=(Attends(layers=42, tokens=(226, _COGVIDEOX), heads=48, dim=64),),
        gathers=(Gathers(tokens=_COGVIDEOX, numbers=64),),
        output=((13, 16, 60, 90),),
    ),
    RealSize(
        model="ConsisIDTransformer3DModel",
        checkpoint="BestWishYsh/ConsisID-preview",
        config={
            "num_attention_heads": 48,
            "num_layers": 42,
            "in_channels": 32,
            "use_rotary_positional_embeddings": True,
            "is_train_face": True,
        },
        inputs=lambda batch: {
            "hidden_states": real(batch, 13, 32, 60, 90),
            "encoder_hidden_states": real(batch, 226, 4096),
            "timestep": whole(batch),
            "image_rotary_emb": angles(_COGVIDEOX, 64),
            "id_cond": real(batch, 1280),
            "id_vit_hidden": [real(batch, 577, 1024) for _ in range(5)],
        },
        attends=(Attends(layers=42, tokens=(226, _COGVIDEOX), heads=48, dim=64),),
        gathers=(Gathers(tokens=226, numbers=3072), Gathers(tokens=_COGVIDEOX, numbers=64)),
        output=((13, 16, 60, 90),),
    ),
    # 163 frames of 480 x 848 pixels.
    RealSize(
        model="MochiTransformer3DModel",
        checkpoint="genmo/mochi-1-preview",
        values="autocast on its device, which meta tensors have not",
        inputs=lambda batch: {
            "hidden_states": real(batch, 12, 28, 60, 106),
            "encoder_hidden_states": real(batch, 256, 4096),
            "encoder_attention_mask": present(batch, 256),
            "timestep": real(batch),
        },
        attends=(Attends(layers=48, tokens=(28 * 30 * 53, 256), heads=24, dim=128),),
        gathers=(Gathers(tokens=28 * 30 * 53, numbers=48),),
        output=((12, 28, 60, 106),),
    ),
    # 16 frames of 512 x 512 pixels; each is attended to by itself, and time where its tokens are.
    RealSize(
        model="LatteTransformer3DModel",
        checkpoint="maxin-cn/Latte-1",
        config={
            "attention_head_dim": 72,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 28,
            "cross_attention_dim": 1152,
            "attention_bias": True,
            "patch_size": 2,
            "activation_fn": "gelu-approximate",
            "num_embeds_ada_norm": 1000,
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "caption_channels": 4096,
        },
        inputs=lambda batch: {
            "hidden_states": real(batch, 4, 16, 64, 64),
            "encoder_hidden_states": real(batch, 120, 4096),
            "timestep": whole(batch),
        },
        attends=(Attends(layers=28 * 16, tokens=(1024,), heads=16, dim=72),),
        gathers=(Gathers(tokens=1024, numbers=32, times=16),),
        output=((8, 16, 64, 64),),
    ),
    # 121 frames of 512 x 768 pixels and five seconds of sound, which every rank has whole and which hears the video.
    RealSize(
        model="LTX2VideoTransformer3DModel",
        checkpoint="Lightricks/LTX-2",
        inputs=lambda batch: {
            "hidden_states": real(batch, 16 * 16 * 24, 128),
            "audio_hidden_states": real(batch, 126, 128),
            "encoder_hidden_states": real(batch, 1024, 3840),
            "audio_encoder_hidden_states": real(batch, 1024, 3840),
            "encoder_attention_mask": whole(batch, 1024),
            "audio_encoder_attention_mask": whole(batch, 1024),
            "timestep": real(batch),
            "num_frames": 16,
            "height": 16,
            "width": 24,
            "audio_num_frames": 126,
        },
        attends=(Attends(layers=48, tokens=(16 * 16 * 24,), heads=32, dim=128),),
        gathers=(Gathers(tokens=6144, numbers=4096, times=48), Gathers(tokens=6144, numbers=128)),
        output=((6144, 128), (126, 128)),
    ),
    # 121 frames of 512 x 768 pixels.
    RealSize(
        model="Kandinsky5Transformer3DModel",
        checkpoint="kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers",
        config={"in_visual_dim": 16, "out_visual_dim": 16, "model_dim": 1792, "ff_dim": 7168, "visual_cond": True},
        inputs=lambda batch: {
            "hidden_states": real(batch, 31, 64, 96, 33),
            "encoder_hidden_states": real(batch, 256, 3584),
            "timestep": real(batch),
            "pooled_projections": real(batch, 768),
            "visual_rope_pos": [whole(31), whole(32), whole(48)],
            "text_rope_pos": whole(256),
        },
        attends=(Attends(layers=32, tokens=(31 * 32 * 48,), heads=28, dim=64),),
        gathers=(Gathers(tokens=31 * 32 * 48, numbers=1792),),
        output=((31, 64, 96, 16),),
    ),
    RealSize(
        model="Kandinsky6Transformer3DModel",
        checkpoint="the class' defaults",
        inputs=lambda batch: {
            "hidden_states": real(batch, 31, 64, 96, 33),
            "encoder_hidden_states": real(batch, 256, 3584),
            "pooled_projections": real(batch, 768),
            "timestep": real(batch),
            "audio_hidden_states": real(batch, 157, 20),
        },
        attends=(Attends(layers=60, tokens=(31 * 32 * 48,), heads=32, dim=128),),
        gathers=(Gathers(tokens=31 * 32 * 48, numbers=4096, times=60), Gathers(tokens=31 * 32 * 48, numbers=4096)),
        output=((31, 64, 96, 16), (157, 20)),
    ),
    # 121 frames of 704 x 1280 pixels.
    RealSize(
        model="CosmosTransformer3DModel",
        checkpoint="nvidia/Cosmos-1.0-Diffusion-7B-Text2World, but for the mask of borders, which needs torchvision",
        config={"concat_padding_mask": False},
        inputs=lambda batch: {
            "hidden_states": real(batch, 16, 16, 88, 160),
            "timestep": real(batch),
            "encoder_hidden_states": real(batch, 512, 1024),
            "fps": 30,
        },
        attends=(Attends(layers=28, tokens=(16 * 44 * 80,), heads=32, dim=128),),
        gathers=(Gathers(tokens=16 * 44 * 80, numbers=64),),
        output=((16, 16, 88, 160),),
    ),
    # 88 frames of 720 x 1280 pixels.
    RealSize(
        model="AllegroTransformer3DModel",
        checkpoint="rhymes-ai/Allegro",
        inputs=lambda batch: {
            "hidden_states": real(batch, 4, 22, 90, 160),
            "encoder_hidden_states": real(batch, 512, 4096),
            "timestep": whole(batch),
            "encoder_attention_mask": whole(batch, 512),
            "image_rotary_emb": (
                tuple(angles(length, 32) for length in (22, 45, 80)),
                tuple(whole(1, 22 * 45 * 80) for _ in range(3)),
            ),
        },
        attends=(Attends(layers=32, tokens=(22 * 45 * 80,), heads=24, dim=96),),
        gathers=(Gathers(tokens=22 * 45 * 80, numbers=16),),
        output=((4, 22, 90, 160),),
    ),
    # 49 frames of 384 x 672 pixels.
    RealSize(
        model="EasyAnimateTransformer3DModel",
        checkpoint="alibaba-pai/EasyAnimateV5.1-12b-zh-diffusers",
        config={"in_channels": 16, "out_channels": 16, "patch_size": 2},
        inputs=lambda batch: {
            "hidden_states": real(batch, 16, 13, 48, 84),
            "timestep": real(batch),
            "encoder_hidden_states": real(batch, 256, 3584),
        },
        attends=(Attends(layers=48, tokens=(256, 13 * 24 * 42), heads=48, dim=64),),
        gathers=(Gathers(tokens=13 * 24 * 42, numbers=64),),
        output=((16, 13, 48, 84),),
    ),
    # Whole frames are cut. Sums of values by keys are single, those of keys half; a frame is read by its neighbours.
    RealSize(
        model="SanaVideoTransformer3DModel",
        checkpoint="Efficient-Large-Model/SANA-Video_2B_480p_diffusers",
        inputs=lambda batch: {
            "hidden_states": real(batch, 16, 21, 60, 104),
            "encoder_hidden_states": real(batch, 300, 2304),
            "encoder_attention_mask": whole(batch, 300),
            "timestep": whole(batch),
        },
        rows=(
            Rows(layers=20, all=20 * 112 * 112, itemsize=4),
            Rows(layers=20, all=20 * 112, up=2240 * 30 * 52, down=2240 * 30 * 52),
        ),
        gathers=(Gathers(tokens=_SMALL, numbers=64),),
        output=((16, 21, 60, 104),),
        grid=21,
    ),
)

SOUNDS = (
    # 47 seconds; one token in front tells of the whole.
    RealSize(
        model="StableAudioDiTModel",
        checkpoint="stabilityai/stable-audio-open-1.0",
        inputs=lambda batch: {
            "hidden_states": real(batch, 64, 1024),
            "timestep": real(batch),
            "encoder_hidden_states": real(batch, 130, 768),
            "global_hidden_states": real(batch, 1, 1536),
            "rotary_embedding": angles(1025, 32),
        },
        attends=(Attends(layers=24, tokens=(1025,), heads=24, dim=64),),
        gathers=(Gathers(tokens=1025, numbers=64),),
        output=((64, 1024),),
    ),
    # 64 tokens of memory stand in front; every layer attends twice.
    RealSize(
        model="StableAudio3DiTModel",
        checkpoint="the class' defaults",
        inputs=lambda batch: {
            "hidden_states": real(batch, 256, 1300),
            "timestep": real(batch),
            "encoder_hidden_states": real(batch, 257, 768),
            "global_hidden_states": real(batch, 768),
            "local_add_cond": real(batch, 257, 1300),
        },
        attends=(Attends(layers=2 * 24, tokens=(1364,), heads=24, dim=64),),
        gathers=(Gathers(tokens=1364, numbers=1536),),
        output=((256, 1300),),
    ),
    # Four minutes at 25 moments a second, two to a token.
    RealSize(
        model="AceStepTransformer1DModel",
        checkpoint="ACE-Step/Ace-Step1.5",
        inputs=lambda batch: {
            "hidden_states": real(batch, 6000, 64),
            "timestep": real(batch),
            "timestep_r": real(batch),
            "encoder_hidden_states": real(batch, 1000, 2048),
            "context_latents": real(batch, 6000, 128),
        },
        attends=(Attends(layers=24, tokens=(3000,), heads=16, kv_heads=8, dim=128),),
        gathers=(Gathers(tokens=3000, numbers=2048),),
        output=((6000, 64),),
    ),
    RealSize(
        model="LongCatAudioDiTTransformer",
        checkpoint="the class' defaults",
        inputs=lambda batch: {
            "hidden_states": real(batch, 701, 64),
            "encoder_hidden_states": real(batch, 120, 768),
            "encoder_attention_mask": flags(batch, 120),
            "timestep": real(batch),
            "attention_mask": flags(batch, 701),
            "latent_cond": real(batch, 701, 64),
        },
        attends=(Attends(layers=24, tokens=(701,), heads=24, dim=64, mask=1),),
        gathers=(Gathers(tokens=701, numbers=1536),),
        output=((701, 64),),
    ),
)
