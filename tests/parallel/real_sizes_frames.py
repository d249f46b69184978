"""Real sizes of further models that make videos."""

from __future__ import annotations

from tests.parallel.real_size import Attends, Gathers, RealSize, Rows, angles, present, real, whole

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
        gathers=(Gathers(tokens=21 * 30 * 52, numbers=64),),
        output=((16, 21, 60, 104),),
        grid=21,
    ),
)
