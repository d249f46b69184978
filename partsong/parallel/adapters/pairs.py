"""Lists further models whose blocks take picture and text side by side and attend to both at once: each is cut."""

from __future__ import annotations

from partsong.parallel.adapters.grid import PICTURE
from partsong.parallel.adapters.joint import flux
from partsong.parallel.adapters.row import IMAGE, TEXT, Adapter, Split
from partsong.parallel.adapters.shared_cuts import (
    BOTH,
    HUNYUAN_ATTENTION,
    ONE,
    PAIR,
    PROJECTED,
    TEXT_FIRST,
    TEXT_TOKENS,
    TOKENS,
    names,
    returned,
    rotary,
)

__all__ = ["ROWS"]

#: Layers of the language model that HiDream's blocks read.
_LAYER = "layer"
_LAYERED = (IMAGE, TEXT, _LAYER, _LAYER)
_RESIDUALS = "controlnet_block_samples controlnet_single_block_samples"

ROWS = (
    # Chroma's mask of all tokens becomes one of queries and keys in the blocks, so it stays whole.
    flux("Chroma", "ChromaTransformer2DModel", "attention_mask joint_attention_kwargs", last=ONE, residuals=_RESIDUALS),
    flux("Bria", "BriaTransformer2DModel", "pooled_projections guidance", residuals=_RESIDUALS),
    flux(
        "Bria FIBO",
        "BriaFiboTransformer2DModel",
        "text_encoder_layers pooled_projections guidance joint_attention_kwargs",
        last=ONE,
        added={"text_encoder_layers": TEXT_TOKENS},
    ),
    flux("Ovis-Image", "OvisImageTransformer2DModel"),
    flux("LongCat-Image", "LongCatImageTransformer2DModel", "guidance"),
    Adapter(
        family="HunyuanImage",
        model="HunyuanImageTransformer2DModel",
        grid=PICTURE,
        # The layers that refine only the text stay whole, and so does the mask of picture and text.
        attention=HUNYUAN_ATTENTION,
        splits={"rope": rotary(0), "transformer_blocks.0": PAIR},
        gather=PROJECTED,
        blocks={"transformer_blocks": BOTH, "single_transformer_blocks": BOTH},
        batched=names(
            "hidden_states timestep timestep_r encoder_hidden_states encoder_attention_mask encoder_hidden_states_2 "
            "encoder_attention_mask_2 guidance"
        ),
    ),
    Adapter(
        family="CogView3",
        model="CogView3PlusTransformer2DModel",
        grid=PICTURE,
        attention={"transformer_blocks.*.attn1": (TEXT, IMAGE)},
        splits={"transformer_blocks.0": PAIR},
        gather=PROJECTED,
        blocks={"transformer_blocks": BOTH},
        batched=names("hidden_states encoder_hidden_states timestep original_size target_size crop_coords"),
    ),
    Adapter(
        family="CogView4",
        model="CogView4Transformer2DModel",
        grid=PICTURE,
        attention={"transformer_blocks.*.attn1": (TEXT, IMAGE)},
        splits={
            "": {"image_rotary_emb": Split(dim=0, optional=True)},
            "rope": rotary(0),
            "patch_embed": {0: Split(dim=1, output=True), 1: Split(dim=1, stream=TEXT, output=True)},
        },
        gather=PROJECTED,
        blocks={"transformer_blocks": BOTH},
        batched=names(
            "hidden_states encoder_hidden_states timestep original_size target_size crop_coords attention_mask"
        ),
        refused={"attention_mask": "the blocks widen it to the tokens at hand; leave it out, or use CfgParallel"},
    ),
    Adapter(
        family="GLM-Image",
        model="GlmImageTransformer2DModel",
        grid=PICTURE,
        attention={"transformer_blocks.*.attn1": (TEXT, IMAGE)},
        splits={
            "": {"image_rotary_emb": Split(dim=0, optional=True)},
            "rope": rotary(0),
            "image_projector": returned(),
            "prior_projector": returned(),
            "glyph_projector": returned(stream=TEXT),
        },
        gather=PROJECTED,
        blocks={"transformer_blocks": BOTH},
        batched=names(
            "hidden_states encoder_hidden_states prior_token_id prior_token_drop timestep target_size crop_coords "
            "attention_mask"
        ),
        refused={"attention_mask": "the blocks widen it to the tokens at hand; leave it out, or use CfgParallel"},
    ),
    Adapter(
        family="JoyImage",
        model="JoyImageEditTransformer3DModel",
        attention={"double_blocks.*.attn": (IMAGE, TEXT)},
        splits={"double_blocks.0": PAIR, "double_blocks.*": {"image_rotary_emb": Split(dim=0)}},
        gather=PROJECTED,
        blocks={"double_blocks": BOTH},
    ),
    Adapter(
        family="JoyImage Plus",
        model="JoyImageEditPlusTransformer3DModel",
        attention={"double_blocks.*.attn": (IMAGE, TEXT)},
        splits={"double_blocks.0": PAIR, "double_blocks.*": {"image_rotary_emb": TOKENS}},
        gather=PROJECTED,
        blocks={"double_blocks": BOTH},
        batched=names("hidden_states timestep encoder_hidden_states encoder_hidden_states_mask shape_list"),
        per_sample=("shape_list",),
    ),
    Adapter(
        family="HiDream",
        model="HiDreamImageTransformer2DModel",
        attention={"double_stream_blocks.*.block.attn1": _LAYERED, "single_stream_blocks.*.block.attn1": _LAYERED},
        # Every block gets another layer of the language model, so each is cut by itself before any are joined. Text
        # positions are all alike; positions and masks name the picture's tokens first.
        splits={
            "x_embedder": returned(),
            "caption_projection.*": {0: Split(dim=1, stream=_LAYER, output=True)},
            "caption_projection.-1": returned(stream=TEXT),
            "pe_embedder": {"ids": Split(dim=1, leading=True)},
            "double_stream_blocks.*": {"hidden_states_masks": Split(dim=1, leading=True, optional=True)},
            "single_stream_blocks.*": {"hidden_states_masks": Split(dim=1, leading=True, optional=True)},
        },
        gather={"final_layer": TOKENS},
        blocks={"double_stream_blocks": BOTH, "single_stream_blocks": ONE},
        timestep="timesteps",
        batched=names(
            "hidden_states timesteps encoder_hidden_states_t5 pooled_embeds img_ids img_sizes hidden_states_masks"
        ),
        layered=("encoder_hidden_states_llama3",),
    ),
    # Here the text is attended to and does not attend: only picture tokens pass through the blocks.
    Adapter(
        family="PRX",
        model="PRXTransformer2DModel",
        grid=PICTURE,
        attention={"blocks.*.attention": (TEXT, IMAGE)},
        keys_only=(TEXT,),
        splits={"img_in": returned(), "pe_embedder": returned(2)},
        gather={"final_layer": TOKENS},
        blocks={"blocks": ONE},
        batched=names("hidden_states timestep encoder_hidden_states attention_mask"),
    ),
    Adapter(
        family="Nucleus-Image",
        model="NucleusMoEImageTransformer2DModel",
        attention={"transformer_blocks.*.attn": (IMAGE, TEXT)},
        keys_only=(TEXT,),
        repeats_keys=True,
        # The experts choose among all tokens of a picture.
        gathered={"transformer_blocks.*.img_mlp": ("hidden_states", "hidden_states_unmodulated")},
        splits={"transformer_blocks.0": {"hidden_states": TOKENS}, "pos_embed": returned(0)},
        gather=PROJECTED,
        blocks={"transformer_blocks": ONE},
        batched=names(
            "hidden_states encoder_hidden_states encoder_hidden_states_mask timestep img_shapes attention_kwargs"
        ),
        first=("img_shapes",),
    ),
    Adapter(
        family="Flux 3",
        model="Flux3Transformer2DModel",
        # Picture and text first go through blocks of their own.
        attention={
            "mode_blocks.image.*.attn": (IMAGE,),
            "txt_mode_blocks.*.attn": (TEXT,),
            "single_transformer_blocks.*.attn": (TEXT, IMAGE),
        },
        splits={"": {**PAIR, "img_ids": Split(dim=0), "txt_ids": Split(dim=0, stream=TEXT)}},
        gather=PROJECTED,
        blocks={"single_transformer_blocks": TEXT_FIRST},
        batched=names("hidden_states encoder_hidden_states timestep target_timestep image_cond_hidden_states"),
        shared=names("img_ids txt_ids image_cond_ids"),
        refused={
            "image_cond_hidden_states": "reference pictures have blocks of their own, which are not cut; use "
            "CfgParallel or DataParallel"
        },
    ),
)
