"""Lists further models whose blocks take picture and text side by side and attend to both at once: each is cut."""

from __future__ import annotations

from collections.abc import Mapping

from partsong.parallel.adapters.cross import RESIDUALS
from partsong.parallel.adapters.row import IMAGE, TEXT, Adapter, Split, row

__all__ = ["ROWS"]

_TOKENS = Split(dim=1)
_TEXT = Split(dim=1, stream=TEXT)
_BOTH = ("encoder_hidden_states", "hidden_states")
_ONE = ("hidden_states",)
_SHARED_IDS = ("img_ids", "txt_ids")
#: Layers of the language model that HiDream's blocks read.
_LAYER = "layer"
_LAYERED = (IMAGE, TEXT, _LAYER, _LAYER)
_FLUX_INPUTS = row(
    hidden_states=_TOKENS,
    encoder_hidden_states=_TEXT,
    img_ids=Split(dim=-2),
    txt_ids=Split(dim=-2, stream=TEXT),
)
_FLUX_ATTENTION = row({"transformer_blocks.*.attn": (TEXT, IMAGE), "single_transformer_blocks.*.attn": (TEXT, IMAGE)})
_RESIDUAL_NAMES = ("controlnet_block_samples", "controlnet_single_block_samples")
_FLUX_LIKE = row({"": row({**_FLUX_INPUTS, **dict.fromkeys(_RESIDUAL_NAMES, RESIDUALS)})})


def _outputs(dim: int) -> Mapping[int, Split]:
    """Cuts the cosines and sines of a rotary embedding that a module returns."""
    return row({index: Split(dim=dim, output=True) for index in (0, 1)})


ROWS = (
    Adapter(
        family="Chroma",
        model="ChromaTransformer2DModel",
        attention=_FLUX_ATTENTION,
        # The mask of all tokens becomes one of queries and keys in the blocks, so it stays whole.
        splits=_FLUX_LIKE,
        gather=row(proj_out=_TOKENS),
        blocks=row(transformer_blocks=_BOTH, single_transformer_blocks=_ONE),
        batched=("hidden_states", "encoder_hidden_states", "timestep", "attention_mask", "joint_attention_kwargs"),
        shared=_SHARED_IDS,
        residuals=_RESIDUAL_NAMES,
    ),
    Adapter(
        family="Bria",
        model="BriaTransformer2DModel",
        attention=_FLUX_ATTENTION,
        splits=_FLUX_LIKE,
        gather=row(proj_out=_TOKENS),
        blocks=row(transformer_blocks=_BOTH, single_transformer_blocks=_BOTH),
        batched=("hidden_states", "encoder_hidden_states", "timestep", "pooled_projections", "guidance"),
        shared=_SHARED_IDS,
        residuals=_RESIDUAL_NAMES,
    ),
    Adapter(
        family="Bria FIBO",
        model="BriaFiboTransformer2DModel",
        attention=_FLUX_ATTENTION,
        splits=row({"": row({**_FLUX_INPUTS, "text_encoder_layers": _TEXT})}),
        gather=row(proj_out=_TOKENS),
        blocks=row(transformer_blocks=_BOTH, single_transformer_blocks=_ONE),
        batched=(
            "hidden_states",
            "encoder_hidden_states",
            "text_encoder_layers",
            "timestep",
            "pooled_projections",
            "guidance",
            "joint_attention_kwargs",
        ),
        shared=_SHARED_IDS,
    ),
    Adapter(
        family="Ovis-Image",
        model="OvisImageTransformer2DModel",
        attention=_FLUX_ATTENTION,
        splits=row({"": _FLUX_INPUTS}),
        gather=row(proj_out=_TOKENS),
        blocks=row(transformer_blocks=_BOTH, single_transformer_blocks=_BOTH),
        batched=("hidden_states", "encoder_hidden_states", "timestep"),
        shared=_SHARED_IDS,
    ),
    Adapter(
        family="LongCat-Image",
        model="LongCatImageTransformer2DModel",
        attention=_FLUX_ATTENTION,
        splits=row({"": _FLUX_INPUTS}),
        gather=row(proj_out=_TOKENS),
        blocks=row(transformer_blocks=_BOTH, single_transformer_blocks=_BOTH),
        batched=("hidden_states", "encoder_hidden_states", "timestep", "guidance"),
        shared=_SHARED_IDS,
    ),
    Adapter(
        family="HunyuanImage",
        model="HunyuanImageTransformer2DModel",
        # The layers that refine only the text stay whole, and so does the mask of picture and text.
        attention=row({"transformer_blocks.*.attn": (IMAGE, TEXT), "single_transformer_blocks.*.attn": (IMAGE, TEXT)}),
        splits=row(
            {
                "rope": _outputs(0),
                "transformer_blocks.0": row(hidden_states=_TOKENS, encoder_hidden_states=_TEXT),
            }
        ),
        gather=row(proj_out=_TOKENS),
        blocks=row(transformer_blocks=_BOTH[::-1], single_transformer_blocks=_BOTH[::-1]),
        batched=(
            "hidden_states",
            "timestep",
            "timestep_r",
            "encoder_hidden_states",
            "encoder_attention_mask",
            "encoder_hidden_states_2",
            "encoder_attention_mask_2",
            "guidance",
        ),
    ),
    Adapter(
        family="CogView3",
        model="CogView3PlusTransformer2DModel",
        attention=row({"transformer_blocks.*.attn1": (TEXT, IMAGE)}),
        splits=row({"transformer_blocks.0": row(hidden_states=_TOKENS, encoder_hidden_states=_TEXT)}),
        gather=row(proj_out=_TOKENS),
        blocks=row(transformer_blocks=_BOTH[::-1]),
        batched=(
            "hidden_states",
            "encoder_hidden_states",
            "timestep",
            "original_size",
            "target_size",
            "crop_coords",
        ),
    ),
    Adapter(
        family="CogView4",
        model="CogView4Transformer2DModel",
        attention=row({"transformer_blocks.*.attn1": (TEXT, IMAGE)}),
        splits=row(
            {
                "": row(image_rotary_emb=Split(dim=0, optional=True)),
                "rope": _outputs(0),
                "patch_embed": row({0: Split(dim=1, output=True), 1: Split(dim=1, stream=TEXT, output=True)}),
            }
        ),
        gather=row(proj_out=_TOKENS),
        blocks=row(transformer_blocks=_BOTH[::-1]),
        batched=(
            "hidden_states",
            "encoder_hidden_states",
            "timestep",
            "original_size",
            "target_size",
            "crop_coords",
            "attention_mask",
        ),
        refused=row(attention_mask="the blocks widen it to the tokens at hand; leave it out, or use CfgParallel"),
    ),
    Adapter(
        family="GLM-Image",
        model="GlmImageTransformer2DModel",
        attention=row({"transformer_blocks.*.attn1": (TEXT, IMAGE)}),
        splits=row(
            {
                "": row(image_rotary_emb=Split(dim=0, optional=True)),
                "rope": _outputs(0),
                "image_projector": row({0: Split(dim=1, output=True)}),
                "prior_projector": row({0: Split(dim=1, output=True)}),
                "glyph_projector": row({0: Split(dim=1, stream=TEXT, output=True)}),
            }
        ),
        gather=row(proj_out=_TOKENS),
        blocks=row(transformer_blocks=_BOTH[::-1]),
        batched=(
            "hidden_states",
            "encoder_hidden_states",
            "prior_token_id",
            "prior_token_drop",
            "timestep",
            "target_size",
            "crop_coords",
            "attention_mask",
        ),
        refused=row(attention_mask="the blocks widen it to the tokens at hand; leave it out, or use CfgParallel"),
    ),
    Adapter(
        family="JoyImage",
        model="JoyImageEditTransformer3DModel",
        attention=row({"double_blocks.*.attn": (IMAGE, TEXT)}),
        splits=row(
            {
                "double_blocks.0": row(hidden_states=_TOKENS, encoder_hidden_states=_TEXT),
                "double_blocks.*": row(image_rotary_emb=Split(dim=0)),
            }
        ),
        gather=row(proj_out=_TOKENS),
        blocks=row(double_blocks=_BOTH[::-1]),
        batched=("hidden_states", "timestep", "encoder_hidden_states"),
    ),
    Adapter(
        family="JoyImage Plus",
        model="JoyImageEditPlusTransformer3DModel",
        attention=row({"double_blocks.*.attn": (IMAGE, TEXT)}),
        splits=row(
            {
                "double_blocks.0": row(hidden_states=_TOKENS, encoder_hidden_states=_TEXT),
                "double_blocks.*": row(image_rotary_emb=_TOKENS),
            }
        ),
        gather=row(proj_out=_TOKENS),
        blocks=row(double_blocks=_BOTH[::-1]),
        batched=("hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_mask", "shape_list"),
        per_sample=("shape_list",),
    ),
    Adapter(
        family="HiDream",
        model="HiDreamImageTransformer2DModel",
        attention=row({"double_stream_blocks.*.block.attn1": _LAYERED, "single_stream_blocks.*.block.attn1": _LAYERED}),
        # Every block gets another layer of the language model, so each is cut by itself before any are joined. Text
        # positions are all alike; positions and masks name the picture's tokens first.
        splits=row(
            {
                "x_embedder": row({0: Split(dim=1, output=True)}),
                "caption_projection.*": row({0: Split(dim=1, stream=_LAYER, output=True)}),
                "caption_projection.-1": row({0: Split(dim=1, stream=TEXT, output=True)}),
                "pe_embedder": row(ids=Split(dim=1, leading=True)),
                "double_stream_blocks.*": row(hidden_states_masks=Split(dim=1, leading=True, optional=True)),
                "single_stream_blocks.*": row(hidden_states_masks=Split(dim=1, leading=True, optional=True)),
            }
        ),
        gather=row(final_layer=_TOKENS),
        blocks=row(double_stream_blocks=_BOTH[::-1], single_stream_blocks=_ONE),
        timestep="timesteps",
        batched=(
            "hidden_states",
            "timesteps",
            "encoder_hidden_states_t5",
            "pooled_embeds",
            "img_ids",
            "img_sizes",
            "hidden_states_masks",
        ),
        layered=("encoder_hidden_states_llama3",),
    ),
    # Here the text is attended to and does not attend: only picture tokens pass through the blocks.
    Adapter(
        family="PRX",
        model="PRXTransformer2DModel",
        attention=row({"blocks.*.attention": (TEXT, IMAGE)}),
        keys_only=(TEXT,),
        splits=row({"img_in": row({0: Split(dim=1, output=True)}), "pe_embedder": row({0: Split(dim=2, output=True)})}),
        gather=row(final_layer=_TOKENS),
        blocks=row(blocks=_ONE),
        batched=("hidden_states", "timestep", "encoder_hidden_states", "attention_mask"),
    ),
    Adapter(
        family="Nucleus-Image",
        model="NucleusMoEImageTransformer2DModel",
        attention=row({"transformer_blocks.*.attn": (IMAGE, TEXT)}),
        keys_only=(TEXT,),
        repeats_keys=True,
        # The experts choose among all tokens of a picture.
        gathered=row({"transformer_blocks.*.img_mlp": ("hidden_states", "hidden_states_unmodulated")}),
        splits=row(
            {"transformer_blocks.0": row(hidden_states=_TOKENS), "pos_embed": row({0: Split(dim=0, output=True)})}
        ),
        gather=row(proj_out=_TOKENS),
        blocks=row(transformer_blocks=_ONE),
        batched=(
            "hidden_states",
            "encoder_hidden_states",
            "encoder_hidden_states_mask",
            "timestep",
            "img_shapes",
            "attention_kwargs",
        ),
        per_sample=("img_shapes",),
    ),
)
