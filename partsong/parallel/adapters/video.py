"""Lists video transformers, which join all frames in one sequence or attend to frames and time in turn."""

from __future__ import annotations

from collections.abc import Mapping

from partsong.parallel.adapters.row import IMAGE, TEXT, Adapter, Factored, Frames, Split, row
from partsong.parallel.adapters.turns import Falling, Learned, Woven

__all__ = ["ROWS"]

_TOKENS = Split(dim=1)
_TEXT = Split(dim=1, stream=TEXT)
_BOTH = ("hidden_states", "encoder_hidden_states")


def _outputs(dim: int) -> Mapping[int, Split]:
    """Cuts the cosines and sines of a rotary embedding that a module returns."""
    return row({index: Split(dim=dim, output=True) for index in (0, 1)})


_ROTARY = row(use_rotary_positional_embeddings=True, use_learned_positional_embeddings=False)

ROWS = (
    Adapter(
        family="Wan",
        model="WanTransformer3DModel",
        attention=row({"blocks.*.attn1": (IMAGE,)}),
        batched=("hidden_states", "encoder_hidden_states", "timestep", "encoder_hidden_states_image"),
        frames=Frames(patch="patch_size", turns=Falling()),
    ),
    Adapter(
        family="SkyReels-V2",
        model="SkyReelsV2Transformer3DModel",
        attention=row({"blocks.*.attn1": (IMAGE,)}),
        splits=row(
            {
                "rope": _outputs(1),
                "blocks.0": row(hidden_states=_TOKENS),
                # With a timestep for each frame, the modulation is [B, 6, S, C].
                "blocks.*": row(temb=Split(dim=2, ndim=4, optional=True)),
            }
        ),
        # The last modulation, also per token, is not a module's argument and cannot be cut, so it gets all tokens.
        gather=row({"blocks.-1": _TOKENS}),
        batched=("hidden_states", "encoder_hidden_states", "timestep", "encoder_hidden_states_image", "fps"),
        frames=Frames(patch="patch_size", turns=Falling()),
    ),
    Adapter(
        family="LTX-Video",
        model="LTXVideoTransformer3DModel",
        attention=row({"transformer_blocks.*.attn1": (IMAGE,)}),
        # The class' own plan cuts the text too; here it stays whole, and so does its mask.
        splits=row(
            {"": row(hidden_states=_TOKENS, timestep=Split(dim=1, ndim=(2, 3), optional=True)), "rope": _outputs(1)}
        ),
        gather=row(proj_out=_TOKENS),
        shared=("rope_interpolation_scale",),
        batched=("hidden_states", "encoder_hidden_states", "timestep", "encoder_attention_mask", "video_coords"),
        frames=Frames(
            dim=1,
            argument="num_frames",
            sides=("height", "width"),
            turns=Woven(length=20.0, scale="rope_interpolation_scale", refused="video_coords"),
        ),
    ),
    Adapter(
        family="CogVideoX",
        model="CogVideoXTransformer3DModel",
        attention=row({"transformer_blocks.*.attn1": (TEXT, IMAGE)}),
        # Sine and cosine positions are added while text and video are one sequence, which is not cut yet.
        splits=row(
            {
                "": row(image_rotary_emb=Split(dim=0, optional=True)),
                "transformer_blocks.0": row(hidden_states=_TOKENS, encoder_hidden_states=_TEXT),
            }
        ),
        gather=row(proj_out=_TOKENS),
        blocks=row(transformer_blocks=_BOTH),
        shared=("image_rotary_emb",),
        batched=("hidden_states", "encoder_hidden_states", "timestep", "timestep_cond", "ofs"),
        frames=Frames(
            dim=1, patch="patch_size_t", turns=Falling(others=(3, 8), needs=_ROTARY), positions="image_rotary_emb"
        ),
    ),
    Adapter(
        family="ConsisID",
        model="ConsisIDTransformer3DModel",
        # The face is read by cross-attention between blocks, and by layers of its own before them.
        attention=row({"transformer_blocks.*.attn1": (TEXT, IMAGE)}),
        splits=row(
            {
                "": row(image_rotary_emb=Split(dim=0, optional=True)),
                "transformer_blocks.0": row(hidden_states=_TOKENS, encoder_hidden_states=_TEXT),
            }
        ),
        # After its blocks it drops as many tokens as the whole text has.
        gather=row({"transformer_blocks.-1": Split(dim=1, stream=TEXT, items=(1,)), "proj_out": _TOKENS}),
        blocks=row(transformer_blocks=_BOTH),
        shared=("image_rotary_emb",),
        batched=(
            "hidden_states",
            "encoder_hidden_states",
            "timestep",
            "timestep_cond",
            "id_cond",
            "id_vit_hidden",
        ),
        frames=Frames(dim=1),
    ),
    Adapter(
        family="HunyuanVideo",
        model="HunyuanVideoTransformer3DModel",
        # The few layers that refine only the text stay whole, and so does the mask of video and text.
        attention=row({"transformer_blocks.*.attn": (IMAGE, TEXT), "single_transformer_blocks.*.attn": (IMAGE, TEXT)}),
        splits=row(
            {
                "rope": _outputs(0),
                "transformer_blocks.0": row(hidden_states=_TOKENS, encoder_hidden_states=_TEXT),
                # Tokens of a given first frame have a timestep of their own.
                "transformer_blocks.*": row(num_tokens=Split(dim=0, leading=True, optional=True)),
                "single_transformer_blocks.*": row(num_tokens=Split(dim=0, leading=True, optional=True)),
            }
        ),
        gather=row(proj_out=_TOKENS),
        blocks=row(transformer_blocks=_BOTH, single_transformer_blocks=_BOTH),
        batched=(
            "hidden_states",
            "timestep",
            "encoder_hidden_states",
            "encoder_attention_mask",
            "pooled_projections",
            "guidance",
        ),
        frames=Frames(patch="patch_size_t", turns=Falling(channels="rope_axes_dim", base="rope_theta")),
    ),
    Adapter(
        family="Mochi",
        model="MochiTransformer3DModel",
        attention=row({"transformer_blocks.*.attn1": (IMAGE, TEXT)}),
        splits=row(
            {
                "rope": _outputs(0),
                "transformer_blocks.0": row(hidden_states=_TOKENS, encoder_hidden_states=_TEXT),
                "transformer_blocks.*": row(encoder_attention_mask=Split(dim=1, stream=TEXT, present=True)),
            }
        ),
        gather=row(proj_out=_TOKENS),
        blocks=row(transformer_blocks=_BOTH),
        batched=("hidden_states", "encoder_hidden_states", "timestep", "encoder_attention_mask"),
        frames=Frames(turns=Learned(parameter="pos_frequencies")),
    ),
    # The tokens of every frame are cut alike, so a rank has the same positions in all frames, at all times.
    Adapter(
        family="Latte",
        model="LatteTransformer3DModel",
        attention=row({"transformer_blocks.*.attn1": (IMAGE,)}),
        splits=row(
            {
                "pos_embed": row({0: Split(dim=1, output=True)}),
                "temporal_transformer_blocks.*": row(timestep=Split(dim=0, folded=True)),
            }
        ),
        gather=row(proj_out=_TOKENS),
        batched=("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask"),
        factored=Factored(
            spatial="transformer_blocks.*",
            temporal="temporal_transformer_blocks.*",
            per_frame=("timestep", "encoder_hidden_states", "encoder_attention_mask"),
            per_token=("timestep",),
        ),
    ),
)
