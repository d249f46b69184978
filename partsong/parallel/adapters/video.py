"""Lists video transformers, which join all frames in one sequence or attend to frames and time in turn."""

from __future__ import annotations

from partsong.parallel.adapters.grid import FRAMES_FIRST, VIDEO, LatentGrid
from partsong.parallel.adapters.row import IMAGE, TEXT, Adapter, Factored, Frames, Split
from partsong.parallel.adapters.shared_cuts import (
    BOTH,
    HUNYUAN_ATTENTION,
    PAIR,
    PROJECTED,
    TOKENS,
    names,
    returned,
    rotary,
)
from partsong.parallel.adapters.turns import Falling, Learned, Woven

__all__ = ["ROWS"]

_ROTARY = {"use_rotary_positional_embeddings": True, "use_learned_positional_embeddings": False}

ROWS = (
    Adapter(
        family="Wan",
        model="WanTransformer3DModel",
        grid=VIDEO,
        attention={"blocks.*.attn1": (IMAGE,)},
        batched=names("hidden_states encoder_hidden_states timestep encoder_hidden_states_image"),
        frames=Frames(patch="patch_size", turns=Falling()),
    ),
    Adapter(
        family="SkyReels-V2",
        model="SkyReelsV2Transformer3DModel",
        grid=VIDEO,
        attention={"blocks.*.attn1": (IMAGE,)},
        splits={
            "rope": rotary(1),
            "blocks.0": {"hidden_states": TOKENS},
            # With a timestep for each frame, the modulation is [B, 6, S, C].
            "blocks.*": {"temb": Split(dim=2, ndim=4, optional=True)},
        },
        # The last modulation, also per token, is not a module's argument and cannot be cut, so it gets all tokens.
        gather={"blocks.-1": TOKENS},
        batched=names("hidden_states encoder_hidden_states timestep encoder_hidden_states_image fps"),
        frames=Frames(patch="patch_size", turns=Falling()),
    ),
    Adapter(
        family="LTX-Video",
        model="LTXVideoTransformer3DModel",
        grid=LatentGrid(sides=("num_frames", "height", "width")),
        attention={"transformer_blocks.*.attn1": (IMAGE,)},
        # The class' own plan cuts the text too; here it stays whole, and so does its mask.
        splits={"": {"hidden_states": TOKENS, "timestep": Split(dim=1, ndim=(2, 3), optional=True)}, "rope": rotary(1)},
        gather=PROJECTED,
        shared=("rope_interpolation_scale",),
        batched=names("hidden_states encoder_hidden_states timestep encoder_attention_mask video_coords"),
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
        grid=FRAMES_FIRST,
        attention={"transformer_blocks.*.attn1": (TEXT, IMAGE)},
        # Sine and cosine positions are added while text and video are one sequence, which is not cut yet.
        splits={"": {"image_rotary_emb": Split(dim=0, optional=True)}, "transformer_blocks.0": PAIR},
        gather=PROJECTED,
        blocks={"transformer_blocks": BOTH},
        shared=("image_rotary_emb",),
        batched=names("hidden_states encoder_hidden_states timestep timestep_cond ofs"),
        frames=Frames(
            dim=1, patch="patch_size_t", turns=Falling(others=(3, 8), needs=_ROTARY), positions="image_rotary_emb"
        ),
    ),
    Adapter(
        family="ConsisID",
        model="ConsisIDTransformer3DModel",
        grid=FRAMES_FIRST,
        # The face is read by cross-attention between blocks, and by layers of its own before them.
        attention={"transformer_blocks.*.attn1": (TEXT, IMAGE)},
        splits={"": {"image_rotary_emb": Split(dim=0, optional=True)}, "transformer_blocks.0": PAIR},
        # After its blocks it drops as many tokens as the whole text has.
        gather={"transformer_blocks.-1": Split(dim=1, stream=TEXT, items=(1,)), "proj_out": TOKENS},
        blocks={"transformer_blocks": BOTH},
        shared=("image_rotary_emb",),
        batched=names("hidden_states encoder_hidden_states timestep timestep_cond id_cond id_vit_hidden"),
        frames=Frames(dim=1),
    ),
    Adapter(
        family="HunyuanVideo",
        model="HunyuanVideoTransformer3DModel",
        grid=VIDEO,
        # The few layers that refine only the text stay whole, and so does the mask of video and text.
        attention=HUNYUAN_ATTENTION,
        splits={
            "rope": rotary(0),
            "transformer_blocks.0": PAIR,
            # Tokens of a given first frame have a timestep of their own.
            "transformer_blocks.*": {"num_tokens": Split(dim=0, leading=True, optional=True)},
            "single_transformer_blocks.*": {"num_tokens": Split(dim=0, leading=True, optional=True)},
        },
        gather=PROJECTED,
        blocks={"transformer_blocks": BOTH, "single_transformer_blocks": BOTH},
        batched=names(
            "hidden_states timestep encoder_hidden_states encoder_attention_mask pooled_projections guidance"
        ),
        frames=Frames(patch="patch_size_t", turns=Falling(channels="rope_axes_dim", base="rope_theta")),
    ),
    Adapter(
        family="Mochi",
        model="MochiTransformer3DModel",
        grid=VIDEO,
        attention={"transformer_blocks.*.attn1": (IMAGE, TEXT)},
        splits={
            "rope": rotary(0),
            "transformer_blocks.0": PAIR,
            "transformer_blocks.*": {"encoder_attention_mask": Split(dim=1, stream=TEXT, present=True)},
        },
        gather=PROJECTED,
        blocks={"transformer_blocks": BOTH},
        batched=names("hidden_states encoder_hidden_states timestep encoder_attention_mask"),
        frames=Frames(turns=Learned(parameter="pos_frequencies")),
    ),
    # The tokens of every frame are cut alike, so a rank has the same positions in all frames, at all times.
    Adapter(
        family="Latte",
        model="LatteTransformer3DModel",
        attention={"transformer_blocks.*.attn1": (IMAGE,)},
        splits={"pos_embed": returned(), "temporal_transformer_blocks.*": {"timestep": Split(dim=0, folded=True)}},
        gather=PROJECTED,
        batched=names("hidden_states timestep encoder_hidden_states encoder_attention_mask"),
        factored=Factored(
            spatial="transformer_blocks.*",
            temporal="temporal_transformer_blocks.*",
            per_frame=("timestep", "encoder_hidden_states", "encoder_attention_mask"),
            per_token=("timestep",),
        ),
    ),
)
