"""Lists more video transformers: those made from Wan and HunyuanVideo, and those that make sound as well."""

from __future__ import annotations

from collections.abc import Mapping

from partsong.parallel.adapters.row import IMAGE, TEXT, Adapter, Frames, Split, row
from partsong.parallel.adapters.turns import Falling

__all__ = ["ROWS"]

_TOKENS = Split(dim=1)
_TEXT = Split(dim=1, stream=TEXT)
_WHOLE = Split(dim=1, gathered=True)
_BOTH = ("hidden_states", "encoder_hidden_states")


def _outputs(dim: int) -> Mapping[int, Split]:
    """Cuts the cosines and sines of a rotary embedding that a module returns."""
    return row({index: Split(dim=dim, output=True) for index in (0, 1)})


_WAN = row({"rope": _outputs(1), "blocks.0": row(hidden_states=_TOKENS)})
_WAN_INPUTS = ("hidden_states", "encoder_hidden_states", "timestep", "encoder_hidden_states_image")

_CROSS = row(encoder_hidden_states=Split(dim=1, stream=TEXT, gathered=True, optional=True))
_PER_TOKEN = row(
    embedded_timestep=Split(dim=1, ndim=3, optional=True),
    temb=Split(dim=1, ndim=3, optional=True),
)

ROWS = (
    Adapter(
        family="Wan VACE",
        model="WanVACETransformer3DModel",
        attention=row({"blocks.*.attn1": (IMAGE,), "vace_blocks.*.attn1": (IMAGE,)}),
        # Every block of the control branch is given the video anew, and the control by the one before.
        splits=row(
            {
                **_WAN,
                "vace_blocks.*": row(hidden_states=_TOKENS),
                "vace_blocks.0": row(control_hidden_states=_TOKENS),
            }
        ),
        gather=row(proj_out=_TOKENS),
        blocks=row(blocks=("hidden_states",)),
        long_skips=True,
        batched=(*_WAN_INPUTS, "control_hidden_states"),
        shared=("control_hidden_states_scale",),
        frames=Frames(patch="patch_size"),
    ),
    Adapter(
        family="Wan Animate",
        model="WanAnimateTransformer3DModel",
        attention=row({"blocks.*.attn1": (IMAGE,)}),
        # The face is read frame by frame, and a rank's tokens are no whole number of frames.
        splits=row({**_WAN, "face_adapter.*": row({"hidden_states": _WHOLE, 0: Split(dim=1, output=True)})}),
        gather=row(proj_out=_TOKENS),
        batched=(*_WAN_INPUTS, "pose_hidden_states", "face_pixel_values"),
        frames=Frames(patch="patch_size"),
    ),
    Adapter(
        family="ChronoEdit",
        model="ChronoEditTransformer3DModel",
        attention=row({"blocks.*.attn1": (IMAGE,)}),
        batched=_WAN_INPUTS,
        frames=Frames(patch="patch_size"),
    ),
    Adapter(
        family="HunyuanVideo 1.5",
        model="HunyuanVideo15Transformer3DModel",
        attention=row({"transformer_blocks.*.attn": (IMAGE, TEXT)}),
        splits=row(
            {
                "rope": _outputs(0),
                "transformer_blocks.0": row(hidden_states=_TOKENS, encoder_hidden_states=_TEXT),
                "transformer_blocks.*": row(attention_mask=_TEXT),
            }
        ),
        gather=row(proj_out=_TOKENS),
        blocks=row(transformer_blocks=_BOTH),
        batched=(
            "hidden_states",
            "timestep",
            "encoder_hidden_states",
            "encoder_attention_mask",
            "timestep_r",
            "encoder_hidden_states_2",
            "encoder_attention_mask_2",
            "image_embeds",
        ),
        frames=Frames(patch="patch_size_t"),
    ),
    Adapter(
        family="FramePack",
        model="HunyuanVideoFramepackTransformer3DModel",
        attention=row({"transformer_blocks.*.attn": (IMAGE, TEXT), "single_transformer_blocks.*.attn": (IMAGE, TEXT)}),
        # Earlier frames stand in front of the new ones, which are taken out at the end.
        splits=row(
            {
                "transformer_blocks.0": row(hidden_states=_TOKENS, encoder_hidden_states=_TEXT),
                "transformer_blocks.*": row(freqs_cis=Split(dim=0)),
                "single_transformer_blocks.*": row(image_rotary_emb=Split(dim=0)),
            }
        ),
        gather=row({"single_transformer_blocks.-1": _TOKENS}),
        blocks=row(transformer_blocks=_BOTH, single_transformer_blocks=_BOTH),
        in_sections=True,
        batched=(
            "hidden_states",
            "timestep",
            "encoder_hidden_states",
            "encoder_attention_mask",
            "pooled_projections",
            "image_embeds",
            "guidance",
            "latents_clean",
            "latents_history_2x",
            "latents_history_4x",
        ),
        shared=(
            "indices_latents",
            "indices_latents_clean",
            "indices_latents_history_2x",
            "indices_latents_history_4x",
        ),
        frames=Frames(patch="patch_size_t"),
    ),
    # The sound is short and stays whole on every rank; the video is cut. What the sound hears of the video, a few
    # tokens' cross-attention to all of it, is put together for every rank.
    Adapter(
        family="LTX-2",
        model="LTX2VideoTransformer3DModel",
        attention=row({"transformer_blocks.*.attn1": (IMAGE,)}),
        splits=row(
            {
                "": row(
                    hidden_states=_TOKENS,
                    timestep=Split(dim=1, ndim=2, optional=True),
                    video_keyframes_mask=Split(dim=1, optional=True),
                ),
                "rope": _outputs(-2),
                "transformer_blocks.*.audio_to_video_attn": row(query_rotary_emb=Split(dim=-2)),
                "transformer_blocks.*.video_to_audio_attn": row(encoder_hidden_states=_WHOLE),
            }
        ),
        gather=row(proj_out=_TOKENS),
        blocks=row(transformer_blocks=("hidden_states", "audio_hidden_states")),
        batched=(
            "hidden_states",
            "audio_hidden_states",
            "encoder_hidden_states",
            "audio_encoder_hidden_states",
            "timestep",
            "audio_timestep",
            "sigma",
            "audio_sigma",
            "encoder_attention_mask",
            "audio_encoder_attention_mask",
            "video_coords",
            "audio_coords",
            "perturbation_mask",
            "video_self_attention_mask",
            "video_keyframes_mask",
        ),
        refused=row(
            video_self_attention_mask="a mask of single queries cannot be cut; use CfgParallel or DataParallel"
        ),
        skips_attention=True,
        frames=Frames(dim=1, argument="num_frames", sides=("height", "width")),
    ),
    Adapter(
        family="Kandinsky 5",
        model="Kandinsky5Transformer3DModel",
        # The few layers that refine only the text stay whole.
        attention=row({"visual_transformer_blocks.*.self_attention": (IMAGE,)}),
        splits=row(
            {
                "visual_transformer_blocks.0": row(visual_embed=_TOKENS),
                "visual_transformer_blocks.*": row(rope=_TOKENS),
            }
        ),
        gather=row({"visual_transformer_blocks.-1": _TOKENS}),
        blocks=row(visual_transformer_blocks=("visual_embed",)),
        batched=("hidden_states", "encoder_hidden_states", "timestep", "pooled_projections"),
        shared=("visual_rope_pos", "text_rope_pos", "scale_factor"),
        refused=row(sparse_params="its blocks of keys are chosen over all tokens; use CfgParallel or DataParallel"),
        frames=Frames(
            dim=1,
            patch="patch_size",
            turns=Falling(channels="axes_dims", slowed="scale_factor"),
            positions="visual_rope_pos",
        ),
    ),
    Adapter(
        family="Cosmos",
        model="CosmosTransformer3DModel",
        attention=row({"transformer_blocks.*.attn1": (IMAGE,)}),
        # Given frames have timesteps of their own, and every token has that of its frame.
        splits=row(
            {
                "transformer_blocks.0": row(hidden_states=_TOKENS),
                "transformer_blocks.*": row(
                    image_rotary_emb=Split(dim=0, optional=True),
                    extra_pos_emb=Split(dim=1, optional=True),
                    controlnet_residual=Split(dim=1, optional=True),
                    **_PER_TOKEN,
                ),
                "norm_out": _PER_TOKEN,
            }
        ),
        gather=row(proj_out=_TOKENS),
        batched=("hidden_states", "timestep", "encoder_hidden_states", "attention_mask", "condition_mask"),
        shared=("padding_mask", "fps"),
        residuals=("block_controlnet_hidden_states",),
        frames=Frames(patch="patch_size"),
    ),
    Adapter(
        family="Cosmos 3",
        model="Cosmos3OmniTransformer",
        # The text is attended to by the video and, causally, by itself: it stays whole. A call makes one sample, and
        # its tensors have no batch dimension.
        attention=row({"layers.*.self_attn": (TEXT, IMAGE)}),
        keys_only=(TEXT,),
        causal_text=True,
        splits=row({"layers.0": row(gen_seq=Split(dim=0)), "layers.*": row(rotary_emb=Split(dim=0, items=(2, 3)))}),
        gather=row(norm_moe_gen=Split(dim=0)),
        sample="vision_tokens",
        timestep="vision_timesteps",
        batched=("vision_tokens", "vision_timesteps", "input_ids", "sound_tokens", "action_tokens"),
    ),
    Adapter(
        family="Allegro",
        model="AllegroTransformer3DModel",
        attention=row({"transformer_blocks.*.attn1": (IMAGE,)}),
        # The rotary embedding is tables of angles, with an index into them for every token.
        splits=row(
            {
                "transformer_blocks.0": row(hidden_states=_TOKENS),
                "transformer_blocks.*": row(
                    attention_mask=Split(dim=-1, optional=True),
                    image_rotary_emb=Split(dim=-1, items=(1,), optional=True),
                ),
            }
        ),
        gather=row(proj_out=_TOKENS),
        batched=("hidden_states", "encoder_hidden_states", "timestep", "attention_mask", "encoder_attention_mask"),
        shared=("image_rotary_emb",),
        frames=Frames(patch="patch_size_t"),
    ),
    Adapter(
        family="EasyAnimate",
        model="EasyAnimateTransformer3DModel",
        attention=row({"transformer_blocks.*.attn1": (TEXT, IMAGE)}),
        splits=row(
            {
                "transformer_blocks.0": row(hidden_states=_TOKENS, encoder_hidden_states=_TEXT),
                "transformer_blocks.*": row(image_rotary_emb=Split(dim=0, optional=True)),
            }
        ),
        gather=row(proj_out=_TOKENS),
        blocks=row(transformer_blocks=_BOTH),
        batched=(
            "hidden_states",
            "timestep",
            "timestep_cond",
            "encoder_hidden_states",
            "encoder_hidden_states_t5",
            "inpaint_latents",
            "control_latents",
        ),
        frames=Frames(),
    ),
    Adapter(
        family="Motif-Video",
        model="MotifVideoTransformer3DModel",
        attention=row({"transformer_blocks.*.attn": (IMAGE, TEXT), "single_transformer_blocks.*.attn": (IMAGE, TEXT)}),
        # The few cross-attentions read all of the text, whose mask stays whole as well.
        splits=row(
            {
                "rope": _outputs(0),
                "transformer_blocks.0": row(hidden_states=_TOKENS, encoder_hidden_states=_TEXT),
                "transformer_blocks.*.cross_attn": _CROSS,
                "single_transformer_blocks.*.cross_attn": _CROSS,
            }
        ),
        gather=row(proj_out=_TOKENS),
        blocks=row(transformer_blocks=_BOTH, single_transformer_blocks=_BOTH),
        batched=("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask", "image_embeds"),
        frames=Frames(patch="patch_size_t"),
    ),
    # Convolutions over a frame and along time: whole frames are cut, and a rank needs its neighbours' last ones.
    Adapter(
        family="Sana-Video",
        model="SanaVideoTransformer3DModel",
        linear_attention=row({"transformer_blocks.*.attn1": "SanaLinearAttnProcessor3_0"}),
        convolutions=("transformer_blocks.*.ff.conv_temp",),
        whole_frames=True,
        splits=row(
            {
                "rope": _outputs(1),
                "transformer_blocks.0": row(hidden_states=_TOKENS),
                "transformer_blocks.*": row(frames=Split(dim=0), timestep=Split(dim=1, ones=True)),
                "norm_out": row(temb=Split(dim=1, ones=True)),
                "": row(controlnet_block_samples=Split(dim=1, optional=True)),
            }
        ),
        gather=row(proj_out=_TOKENS),
        batched=(
            "hidden_states",
            "encoder_hidden_states",
            "timestep",
            "guidance",
            "encoder_attention_mask",
            "attention_mask",
        ),
        residuals=("controlnet_block_samples",),
        frames=Frames(patch="patch_size"),
    ),
    Adapter(
        family="Helios",
        model="HeliosTransformer3DModel",
        attention=row({"blocks.*.attn1": (IMAGE,)}),
        # Earlier frames, coarser the older they are, stand in front of the new ones; a number counts the latter.
        splits=row(
            {
                "blocks.0": row(hidden_states=_TOKENS),
                "blocks.*": row(
                    rotary_emb=_TOKENS,
                    temb=Split(dim=1, ndim=4, optional=True),
                    original_context_length=Split(dim=0, tail=True, optional=True),
                ),
            }
        ),
        gather=row({"blocks.-1": _TOKENS}),
        in_sections=True,
        batched=(
            "hidden_states",
            "timestep",
            "encoder_hidden_states",
            "latents_history_short",
            "latents_history_mid",
            "latents_history_long",
        ),
        shared=(
            "indices_hidden_states",
            "indices_latents_history_short",
            "indices_latents_history_mid",
            "indices_latents_history_long",
        ),
        frames=Frames(patch="patch_size"),
    ),
    Adapter(
        family="AnyFlow",
        model="AnyFlowTransformer3DModel",
        attention=row({"blocks.*.attn1": (IMAGE,)}),
        splits=row(
            {
                "blocks.0": row(hidden_states=_TOKENS),
                "blocks.*": row(temb=Split(dim=1, ones=True), rotary_emb=Split(dim=2)),
            }
        ),
        gather=row({"blocks.-1": _TOKENS}),
        batched=(
            "hidden_states",
            "timestep",
            "r_timestep",
            "encoder_hidden_states",
            "encoder_hidden_states_image",
        ),
        frames=Frames(dim=1, patch="patch_size"),
    ),
    Adapter(
        family="Kandinsky 6",
        model="Kandinsky6Transformer3DModel",
        # As in LTX-2, the sound stays whole on every rank, and so do the layers that refine the text.
        attention=row({"visual_transformer_blocks.*.video_dec_block.self_attention": (IMAGE,)}),
        splits=row(
            {
                "visual_transformer_blocks.0": row(vis=_TOKENS),
                "visual_transformer_blocks.*.video_dec_block.self_attention": row(rotary_emb=Split(dim=0)),
                "visual_transformer_blocks.*.va_cross_attention": row(rope_q=Split(dim=0, optional=True)),
                "visual_transformer_blocks.*.av_cross_attention": row(encoder_hidden_states=_WHOLE),
            }
        ),
        gather=row({"visual_transformer_blocks.-1": _TOKENS}),
        blocks=row(visual_transformer_blocks=("vis", "aud")),
        batched=(
            "hidden_states",
            "encoder_hidden_states",
            "pooled_projections",
            "timestep",
            "audio_hidden_states",
            "encoder_attention_mask",
            "visual_token_type_ids",
        ),
        shared=("visual_rope_pos",),
        frames=Frames(dim=1, patch="patch_size"),
    ),
)
