"""Real sizes of models that make pictures, of 1024 x 1024 pixels where nothing else is said."""

from __future__ import annotations

from typing import Any

import torch

from tests.parallel.real_size import Attends, Gathers, RealSize, Rows, angles, flags, present, real, whole

#: 128 x 128 latents in patches of 2 x 2.
_TOKENS = 64 * 64


def flux_like(text: int, width: int, *, tokens: int = _TOKENS, channels: int = 64, ids: int = 3, **more: Any) -> Any:
    def inputs(batch: int) -> dict[str, Any]:
        return {
            "hidden_states": real(batch, tokens, channels),
            "encoder_hidden_states": real(batch, text, width),
            "timestep": real(batch),
            "img_ids": real(tokens, ids),
            "txt_ids": real(text, ids),
        } | {name: make(batch) for name, make in more.items()}

    return inputs


CROSS = (
    RealSize(
        model="DiTTransformer2DModel",
        checkpoint="facebook/DiT-XL-2-512",
        config={"sample_size": 64, "out_channels": 8},
        inputs=lambda batch: {
            "hidden_states": real(batch, 4, 64, 64),
            "timestep": whole(batch),
            "class_labels": whole(batch),
        },
        attends=(Attends(layers=28, tokens=(1024,), heads=16, dim=72),),
        gathers=(Gathers(tokens=1024, numbers=32),),
        output=((8, 64, 64),),
    ),
    RealSize(
        model="PixArtTransformer2DModel",
        checkpoint="PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
        config={"caption_channels": 4096, "use_additional_conditions": False, "interpolation_scale": 2},
        inputs=lambda batch: {
            "hidden_states": real(batch, 4, 128, 128),
            "encoder_hidden_states": real(batch, 300, 4096),
            "encoder_attention_mask": whole(batch, 300),
            "timestep": whole(batch),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        attends=(Attends(layers=28, tokens=(_TOKENS,), heads=16, dim=72),),
        gathers=(Gathers(tokens=_TOKENS, numbers=32),),
        output=((8, 128, 128),),
    ),
    RealSize(
        model="HunyuanDiT2DModel",
        checkpoint="Tencent-Hunyuan/HunyuanDiT-v1.2-Diffusers",
        config={
            "hidden_size": 1408,
            "num_layers": 40,
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 128,
            "mlp_ratio": 4.3637,
            "use_style_cond_and_image_meta_size": False,
        },
        inputs=lambda batch: {
            "hidden_states": real(batch, 4, 128, 128),
            "timestep": real(batch),
            "encoder_hidden_states": real(batch, 77, 1024),
            "text_embedding_mask": whole(batch, 77),
            "encoder_hidden_states_t5": real(batch, 256, 2048),
            "text_embedding_mask_t5": whole(batch, 256),
            "image_rotary_emb": angles(_TOKENS, 88),
        },
        attends=(Attends(layers=40, tokens=(_TOKENS,), heads=16, dim=88),),
        gathers=(Gathers(tokens=_TOKENS, numbers=32),),
        output=((8, 128, 128),),
    ),
    RealSize(
        model="SanaTransformer2DModel",
        checkpoint="Efficient-Large-Model/Sana_1600M_4Kpx_BF16_diffusers, 4096 x 4096 pixels",
        config={"sample_size": 128},
        inputs=lambda batch: {
            "hidden_states": real(batch, 32, 128, 128),
            "encoder_hidden_states": real(batch, 300, 2304),
            "encoder_attention_mask": whole(batch, 300),
            "timestep": whole(batch),
        },
        # The sums of values by keys, and of keys, are single; the convolution reads a row of 2 x 5600 channels.
        rows=(
            Rows(layers=20, all=70 * 33 * 32, itemsize=4),
            Rows(layers=20, up=11200 * 128, down=11200 * 128),
        ),
        gathers=(Gathers(tokens=128 * 128, numbers=32),),
        output=((32, 128, 128),),
        grid=128,
    ),
    RealSize(
        model="LuminaNextDiT2DModel",
        checkpoint="Alpha-VLLM/Lumina-Next-SFT-diffusers",
        config={"num_layers": 24, "num_kv_heads": 8},
        inputs=lambda batch: {
            "hidden_states": real(batch, 4, 128, 128),
            "timestep": real(batch),
            "encoder_hidden_states": real(batch, 256, 2048),
            "encoder_mask": flags(batch, 256),
            "image_rotary_emb": torch.empty((384, 384, 36), dtype=torch.complex64, device="meta"),
            "cross_attention_kwargs": {"base_sequence_length": _TOKENS},
        },
        attends=(Attends(layers=24, tokens=(_TOKENS,), heads=32, kv_heads=8, dim=72, mask=1),),
        gathers=(Gathers(tokens=_TOKENS, numbers=32),),
        output=((8, 128, 128),),
    ),
)

JOINT = (
    RealSize(
        model="SD3Transformer2DModel",
        checkpoint="stabilityai/stable-diffusion-3.5-large",
        config={
            "num_layers": 38,
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "pos_embed_max_size": 192,
            "qk_norm": "rms_norm",
        },
        inputs=lambda batch: {
            "hidden_states": real(batch, 16, 128, 128),
            "encoder_hidden_states": real(batch, 77 + 256, 4096),
            "pooled_projections": real(batch, 2048),
            "timestep": real(batch),
        },
        attends=(Attends(layers=38, tokens=(_TOKENS, 333), heads=38, dim=64),),
        gathers=(Gathers(tokens=_TOKENS, numbers=64),),
        output=((16, 128, 128),),
    ),
    RealSize(
        model="FluxTransformer2DModel",
        checkpoint="black-forest-labs/FLUX.1-dev",
        config={"guidance_embeds": True},
        inputs=flux_like(512, 4096, pooled_projections=lambda b: real(b, 768), guidance=lambda b: real(b)),
        attends=(Attends(layers=19 + 38, tokens=(512, _TOKENS), heads=24, dim=128),),
        gathers=(Gathers(tokens=_TOKENS, numbers=64),),
        output=((_TOKENS, 64),),
    ),
    RealSize(
        model="Flux2Transformer2DModel",
        checkpoint="black-forest-labs/FLUX.2-dev",
        inputs=flux_like(512, 15360, channels=128, ids=4, guidance=lambda b: real(b)),
        attends=(Attends(layers=8 + 48, tokens=(512, _TOKENS), heads=48, dim=128),),
        gathers=(Gathers(tokens=_TOKENS, numbers=128),),
        output=((_TOKENS, 128),),
    ),
    # 1328 x 1328 pixels are 166 x 166 latents and 83 x 83 tokens.
    RealSize(
        model="QwenImageTransformer2DModel",
        checkpoint="Qwen/Qwen-Image",
        inputs=lambda batch: {
            "hidden_states": real(batch, 6889, 64),
            "encoder_hidden_states": real(batch, 512, 3584),
            "encoder_hidden_states_mask": whole(batch, 512),
            "timestep": real(batch),
            "img_shapes": [[(1, 83, 83)]] * batch,
        },
        attends=(Attends(layers=60, tokens=(512, 6889), heads=24, dim=128, mask=1),),
        gathers=(Gathers(tokens=6889, numbers=64),),
        output=((6889, 64),),
    ),
    RealSize(
        model="AuraFlowTransformer2DModel",
        checkpoint="fal/AuraFlow-v0.3",
        config={"pos_embed_max_size": 9216},
        inputs=lambda batch: {
            "hidden_states": real(batch, 4, 128, 128),
            "encoder_hidden_states": real(batch, 256, 2048),
            "timestep": real(batch),
        },
        # Eight register tokens stand before the text.
        attends=(Attends(layers=4 + 32, tokens=(264, _TOKENS), heads=12, dim=256),),
        gathers=(Gathers(tokens=_TOKENS, numbers=16),),
        output=((4, 128, 128),),
    ),
    RealSize(
        model="Lumina2Transformer2DModel",
        checkpoint="Alpha-VLLM/Lumina-Image-2.0",
        config={"cap_feat_dim": 2304},
        inputs=lambda batch: {
            "hidden_states": real(batch, 16, 128, 128),
            "timestep": real(batch),
            "encoder_hidden_states": real(batch, 256, 2304),
            "encoder_attention_mask": present(batch, 256),
        },
        attends=(
            Attends(layers=2, tokens=(_TOKENS,), heads=24, kv_heads=8, dim=96),
            Attends(layers=26, tokens=(_TOKENS + 256,), heads=24, kv_heads=8, dim=96),
        ),
        gathers=(Gathers(tokens=_TOKENS, numbers=2304), Gathers(tokens=_TOKENS + 256, numbers=64)),
        output=((16, 128, 128),),
    ),
    RealSize(
        model="ZImageTransformer2DModel",
        checkpoint="Tongyi-MAI/Z-Image-Turbo",
        inputs=lambda batch: {
            "x": [real(16, 1, 128, 128) for _ in range(batch)],
            "t": real(batch),
            "cap_feats": [real(100, 2560) for _ in range(batch)],
        },
        # A text of 100 words is filled up to a multiple of 32.
        attends=(
            Attends(layers=2, tokens=(_TOKENS,), heads=30, dim=128),
            Attends(layers=30, tokens=(_TOKENS + 128,), heads=30, dim=128),
        ),
        gathers=(Gathers(tokens=_TOKENS, numbers=3840), Gathers(tokens=_TOKENS + 128, numbers=64)),
        output=((16, 1, 128, 128),),
    ),
)
