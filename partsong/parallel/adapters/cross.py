"""Lists models that read the text by cross-attention: every rank keeps all of it, and only picture tokens are cut."""

from __future__ import annotations

from partsong.parallel.adapters.grid import PICTURE
from partsong.parallel.adapters.row import IMAGE, Adapter, Split
from partsong.parallel.adapters.shared_cuts import EMBEDDED, OPTIONAL, PROJECTED, SANA, TOKENS, names, returned

__all__ = ["ROWS"]

_ATTENTION = {"transformer_blocks.*.attn1": (IMAGE,)}

ROWS = (
    Adapter(
        family="DiT",
        model="DiTTransformer2DModel",
        grid=PICTURE,
        attention=_ATTENTION,
        splits=EMBEDDED,
        gather={"proj_out_2": TOKENS},
        batched=("hidden_states", "timestep", "class_labels"),
    ),
    Adapter(
        family="PixArt",
        model="PixArtTransformer2DModel",
        grid=PICTURE,
        attention=_ATTENTION,
        # The mask must be as long as the local tokens: diffusers silently pads one that is not.
        splits={**EMBEDDED, "": {"attention_mask": Split(dim=-1, optional=True)}},
        gather=PROJECTED,
        batched=names(
            "hidden_states encoder_hidden_states timestep added_cond_kwargs attention_mask encoder_attention_mask"
        ),
    ),
    Adapter(
        family="HunyuanDiT",
        model="HunyuanDiT2DModel",
        grid=PICTURE,
        attention={"blocks.*.attn1": (IMAGE,)},
        # The rotary embedding is a pair [S, D]; cross-attention turns its queries by it too.
        splits={
            **EMBEDDED,
            "": {"image_rotary_emb": Split(dim=0, optional=True), "controlnet_block_samples": OPTIONAL},
        },
        gather=PROJECTED,
        long_skips=True,
        shared=("image_rotary_emb",),
        batched=names(
            "hidden_states timestep encoder_hidden_states text_embedding_mask encoder_hidden_states_t5 "
            "text_embedding_mask_t5 image_meta_size style"
        ),
        residuals=("controlnet_block_samples",),
    ),
    Adapter(
        family="Sana",
        model="SanaTransformer2DModel",
        **SANA,
        splits={
            "patch_embed": returned(),
            "transformer_blocks.*": {"height": Split(dim=0)},
            "": {"controlnet_block_samples": OPTIONAL},
        },
        gather=PROJECTED,
        batched=names("hidden_states encoder_hidden_states timestep guidance encoder_attention_mask"),
        residuals=("controlnet_block_samples",),
    ),
)
