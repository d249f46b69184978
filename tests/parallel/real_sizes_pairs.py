"""Real sizes of further models whose attention mixes picture and text; pictures of 1024 x 1024 pixels."""

from __future__ import annotations

from typing import Any

from tests.parallel.real_size import Attends, Gathers, RealSize, flags, present, real, whole
from tests.parallel.real_sizes_images import flux_like

#: 128 x 128 latents in patches of 2 x 2.
_TOKENS = 64 * 64


def _sizes(batch: int) -> dict[str, Any]:
    return {name: real(batch, 2) for name in ("original_size", "target_size", "crop_coords")}


PAIRS = (
    RealSize(
        model="ChromaTransformer2DModel",
        checkpoint="lodestones/Chroma1-HD",
        inputs=flux_like(512, 4096, attention_mask=lambda b: flags(b, 512 + _TOKENS)),
        attends=(Attends(layers=19 + 38, tokens=(512, _TOKENS), heads=24, dim=128),),
        gathers=(Gathers(tokens=_TOKENS, numbers=64),),
        output=((_TOKENS, 64),),
    ),
    RealSize(
        model="BriaTransformer2DModel",
        checkpoint="briaai/BRIA-3.2",
        config={"num_layers": 8, "num_single_layers": 28, "axes_dims_rope": [0, 56, 72]},
        inputs=flux_like(128, 4096),
        attends=(Attends(layers=8 + 28, tokens=(128, _TOKENS), heads=24, dim=128),),
        gathers=(Gathers(tokens=_TOKENS, numbers=64),),
        output=((_TOKENS, 64),),
    ),
    RealSize(
        model="BriaFiboTransformer2DModel",
        checkpoint="briaai/FIBO",
        config={"num_layers": 8, "num_single_layers": 38, "in_channels": 48, "axes_dims_rope": [0, 56, 72]},
        inputs=flux_like(
            1000,
            4096,
            channels=48,
            text_encoder_layers=lambda b: [real(b, 1000, 2048) for _ in range(46)],
            joint_attention_kwargs=lambda b: {"attention_mask": flags(b, 1, 1, 1000 + _TOKENS)},
        ),
        attends=(Attends(layers=8 + 38, tokens=(1000, _TOKENS), heads=24, dim=128),),
        gathers=(Gathers(tokens=_TOKENS, numbers=48),),
        output=((_TOKENS, 48),),
    ),
    RealSize(
        model="OvisImageTransformer2DModel",
        checkpoint="AIDC-AI/Ovis-Image-7B",
        inputs=flux_like(256, 2048),
        attends=(Attends(layers=6 + 27, tokens=(256, _TOKENS), heads=24, dim=128),),
        gathers=(Gathers(tokens=_TOKENS, numbers=64),),
        output=((_TOKENS, 64),),
    ),
    RealSize(
        model="LongCatImageTransformer2DModel",
        checkpoint="meituan-longcat/LongCat-Image",
        config={"num_layers": 10, "num_single_layers": 20},
        inputs=flux_like(512, 3584),
        attends=(Attends(layers=10 + 20, tokens=(512, _TOKENS), heads=24, dim=128),),
        gathers=(Gathers(tokens=_TOKENS, numbers=64),),
        output=((_TOKENS, 64),),
    ),
    # 2048 x 2048 pixels, of which a latent has 32 x 32.
    RealSize(
        model="HunyuanImageTransformer2DModel",
        checkpoint="hunyuanvideo-community/HunyuanImage-2.1-Diffusers",
        config={"text_embed_2_dim": 1472},
        inputs=lambda batch: {
            "hidden_states": real(batch, 64, 64, 64),
            "timestep": real(batch),
            "encoder_hidden_states": real(batch, 1000, 3584),
            "encoder_attention_mask": present(batch, 1000),
            "encoder_hidden_states_2": real(batch, 128, 1472),
            "encoder_attention_mask_2": present(batch, 128),
        },
        attends=(Attends(layers=20 + 40, tokens=(_TOKENS, 1128), heads=28, dim=128),),
        gathers=(Gathers(tokens=_TOKENS, numbers=64),),
        output=((64, 64, 64),),
    ),
    RealSize(
        model="CogView3PlusTransformer2DModel",
        checkpoint="zai-org/CogView3-Plus-3B",
        inputs=lambda batch: {
            "hidden_states": real(batch, 16, 128, 128),
            "encoder_hidden_states": real(batch, 224, 4096),
            "timestep": real(batch),
            **_sizes(batch),
        },
        attends=(Attends(layers=30, tokens=(224, _TOKENS), heads=64, dim=40),),
        gathers=(Gathers(tokens=_TOKENS, numbers=64),),
        output=((16, 128, 128),),
    ),
    RealSize(
        model="CogView4Transformer2DModel",
        checkpoint="zai-org/CogView4-6B",
        config={"num_layers": 28, "attention_head_dim": 128, "num_attention_heads": 32},
        inputs=lambda batch: {
            "hidden_states": real(batch, 16, 128, 128),
            "encoder_hidden_states": real(batch, 224, 4096),
            "timestep": real(batch),
            **_sizes(batch),
        },
        attends=(Attends(layers=28, tokens=(224, _TOKENS), heads=32, dim=128),),
        gathers=(Gathers(tokens=_TOKENS, numbers=64),),
        output=((16, 128, 128),),
    ),
    RealSize(
        model="GlmImageTransformer2DModel",
        checkpoint="zai-org/GLM-Image",
        config={"attention_head_dim": 128, "num_attention_heads": 32},
        inputs=lambda batch: {
            "hidden_states": real(batch, 16, 128, 128),
            "encoder_hidden_states": real(batch, 128, 1472),
            "prior_token_id": whole(batch, _TOKENS),
            "prior_token_drop": present(batch, _TOKENS),
            "timestep": real(batch),
            "target_size": real(batch, 2),
            "crop_coords": real(batch, 2),
        },
        attends=(Attends(layers=30, tokens=(128, _TOKENS), heads=32, dim=128),),
        gathers=(Gathers(tokens=_TOKENS, numbers=64),),
        output=((16, 128, 128),),
    ),
    RealSize(
        model="JoyImageEditTransformer3DModel",
        checkpoint="the class' defaults",
        inputs=lambda batch: {
            "hidden_states": real(batch, 16, 2, 128, 128),
            "timestep": real(batch),
            "encoder_hidden_states": real(batch, 1024, 4096),
        },
        attends=(Attends(layers=20, tokens=(2 * _TOKENS, 1024), heads=24, dim=128),),
        gathers=(Gathers(tokens=2 * _TOKENS, numbers=64),),
        output=((16, 2, 128, 128),),
    ),
    RealSize(
        model="JoyImageEditPlusTransformer3DModel",
        checkpoint="the class' defaults",
        inputs=lambda batch: {
            "hidden_states": real(batch, 2 * _TOKENS, 16, 1, 2, 2),
            "timestep": real(batch),
            "encoder_hidden_states": real(batch, 1024, 4096),
            "encoder_hidden_states_mask": whole(batch, 1024),
            "shape_list": [[(1, 64, 64), (1, 64, 64)]] * batch,
        },
        attends=(Attends(layers=20, tokens=(2 * _TOKENS, 1024), heads=24, dim=128),),
        gathers=(Gathers(tokens=2 * _TOKENS, numbers=64),),
        output=((2 * _TOKENS, 16, 1, 2, 2),),
    ),
    RealSize(
        model="HiDreamImageTransformer2DModel",
        checkpoint="HiDream-ai/HiDream-I1-Full",
        values="counts how many tokens each expert got",
        config={
            "patch_size": 2,
            "in_channels": 16,
            "caption_channels": [4096, 4096],
            "llama_layers": [*range(32), *[31] * 16],
            "axes_dims_rope": (64, 32, 32),
        },
        inputs=lambda batch: {
            "hidden_states": real(batch, 16, 128, 128),
            "timesteps": whole(batch),
            "encoder_hidden_states_t5": real(batch, 128, 4096),
            "encoder_hidden_states_llama3": real(32, batch, 128, 4096),
            "pooled_embeds": real(batch, 2048),
        },
        attends=(Attends(layers=48, tokens=(_TOKENS, 256, 128), heads=20, dim=128),),
        gathers=(Gathers(tokens=_TOKENS, numbers=64),),
        output=((16, 128, 128),),
    ),
    RealSize(
        model="PRXTransformer2DModel",
        checkpoint="Photoroom/prx-1024-t2i-beta",
        config={"axes_dim": [32, 32]},
        inputs=lambda batch: {
            "hidden_states": real(batch, 16, 128, 128),
            "timestep": real(batch),
            "encoder_hidden_states": real(batch, 256, 2304),
            "attention_mask": flags(batch, 256),
        },
        # Words are attended to and ask nothing; they travel as if they did.
        attends=(Attends(layers=16, tokens=(256, _TOKENS), heads=28, dim=64, mask=1),),
        gathers=(Gathers(tokens=_TOKENS, numbers=64),),
        output=((16, 128, 128),),
    ),
    RealSize(
        model="NucleusMoEImageTransformer2DModel",
        checkpoint="the class' defaults, with experts computed in one product: lists of their tokens would take values",
        config={"out_channels": 16, "use_grouped_mm": True},
        inputs=lambda batch: {
            "hidden_states": real(batch, _TOKENS, 64),
            "img_shapes": [(1, 64, 64)] * batch,
            "encoder_hidden_states": real(batch, 512, 3584),
            "encoder_hidden_states_mask": flags(batch, 512),
            "timestep": real(batch),
        },
        attends=(Attends(layers=24, tokens=(_TOKENS, 512), heads=16, dim=128),),
        # All blocks but four have experts, which choose among all tokens by two of their forms.
        gathers=(Gathers(tokens=_TOKENS, numbers=2 * 2048, times=20), Gathers(tokens=_TOKENS, numbers=64)),
        output=((_TOKENS, 64),),
    ),
    # Picture and text have blocks of their own before those for both.
    RealSize(
        model="Flux3Transformer2DModel",
        checkpoint="the class' defaults",
        inputs=lambda batch: {
            "hidden_states": real(batch, _TOKENS, 128),
            "encoder_hidden_states": real(batch, 512, 20480),
            "timestep": real(batch),
            "img_ids": whole(_TOKENS, 4),
            "txt_ids": whole(512, 4),
        },
        attends=(
            Attends(layers=5, tokens=(_TOKENS,), heads=24, dim=128),
            Attends(layers=5, tokens=(512,), heads=24, dim=128),
            Attends(layers=28, tokens=(512, _TOKENS), heads=24, dim=128),
        ),
        gathers=(Gathers(tokens=_TOKENS, numbers=128),),
        output=((_TOKENS, 128),),
    ),
)
