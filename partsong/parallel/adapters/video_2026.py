"""Lists more video transformers: those made from Wan and HunyuanVideo, and those that make sound as well."""

from __future__ import annotations

from partsong.parallel.adapters.grid import CHANNELS_LAST, FRAMES_FIRST, VIDEO
from partsong.parallel.adapters.row import IMAGE, TEXT, Adapter, Frames, Split
from partsong.parallel.adapters.shared_cuts import (
    BOTH,
    HUNYUAN_ATTENTION,
    ONE,
    OPTIONAL,
    PAIR,
    PROJECTED,
    TEXT_TOKENS,
    TOKENS,
    Cuts,
    names,
    rotary,
)
from partsong.parallel.adapters.turns import Falling

__all__ = ["ROWS"]

_WHOLE = Split(dim=1, gathered=True)

_WAN = {"rope": rotary(1), "blocks.0": {"hidden_states": TOKENS}}
_WAN_INPUTS = ("hidden_states", "encoder_hidden_states", "timestep", "encoder_hidden_states_image")

_CROSS: Cuts = {"encoder_hidden_states": Split(dim=1, stream=TEXT, gathered=True, optional=True)}
_PER_TOKEN: Cuts = {
    "embedded_timestep": Split(dim=1, ndim=3, optional=True),
    "temb": Split(dim=1, ndim=3, optional=True),
}

ROWS = (
    Adapter(
        family="Wan VACE",
        model="WanVACETransformer3DModel",
        grid=VIDEO,
        attention={"blocks.*.attn1": (IMAGE,), "vace_blocks.*.attn1": (IMAGE,)},
        # Every block of the control branch is given the video anew, and the control by the one before.
        splits={**_WAN, "vace_blocks.*": {"hidden_states": TOKENS}, "vace_blocks.0": {"control_hidden_states": TOKENS}},
        gather=PROJECTED,
        blocks={"blocks": ONE},
        long_skips=True,
        batched=(*_WAN_INPUTS, "control_hidden_states"),
        shared=("control_hidden_states_scale",),
        frames=Frames(patch="patch_size"),
    ),
    Adapter(
        family="Wan Animate",
        model="WanAnimateTransformer3DModel",
        attention={"blocks.*.attn1": (IMAGE,)},
        # The face is read frame by frame, and a rank's tokens are no whole number of frames.
        splits={**_WAN, "face_adapter.*": {"hidden_states": _WHOLE, 0: Split(dim=1, output=True)}},
        gather=PROJECTED,
        batched=(*_WAN_INPUTS, "pose_hidden_states", "face_pixel_values"),
        frames=Frames(patch="patch_size"),
    ),
    Adapter(
        family="ChronoEdit",
        model="ChronoEditTransformer3DModel",
        grid=VIDEO,
        attention={"blocks.*.attn1": (IMAGE,)},
        batched=_WAN_INPUTS,
        frames=Frames(patch="patch_size"),
    ),
    Adapter(
        family="HunyuanVideo 1.5",
        model="HunyuanVideo15Transformer3DModel",
        grid=VIDEO,
        attention={"transformer_blocks.*.attn": (IMAGE, TEXT)},
        splits={
            "rope": rotary(0),
            "transformer_blocks.0": PAIR,
            "transformer_blocks.*": {"attention_mask": TEXT_TOKENS},
        },
        gather=PROJECTED,
        blocks={"transformer_blocks": BOTH},
        batched=names(
            "hidden_states timestep encoder_hidden_states encoder_attention_mask timestep_r encoder_hidden_states_2 "
            "encoder_attention_mask_2 image_embeds"
        ),
        frames=Frames(patch="patch_size_t"),
    ),
    Adapter(
        family="FramePack",
        model="HunyuanVideoFramepackTransformer3DModel",
        attention=HUNYUAN_ATTENTION,
        # Earlier frames stand in front of the new ones, which are taken out at the end.
        splits={
            "transformer_blocks.0": PAIR,
            "transformer_blocks.*": {"freqs_cis": Split(dim=0)},
            "single_transformer_blocks.*": {"image_rotary_emb": Split(dim=0)},
        },
        gather={"single_transformer_blocks.-1": TOKENS},
        blocks={"transformer_blocks": BOTH, "single_transformer_blocks": BOTH},
        in_sections=True,
        batched=names(
            "hidden_states timestep encoder_hidden_states encoder_attention_mask pooled_projections image_embeds "
            "guidance latents_clean latents_history_2x latents_history_4x"
        ),
        shared=names("indices_latents indices_latents_clean indices_latents_history_2x indices_latents_history_4x"),
        frames=Frames(patch="patch_size_t"),
    ),
    # The sound is short and stays whole on every rank; the video is cut. What the sound hears of the video, a few
    # tokens' cross-attention to all of it, is put together for every rank.
    Adapter(
        family="LTX-2",
        model="LTX2VideoTransformer3DModel",
        attention={"transformer_blocks.*.attn1": (IMAGE,)},
        splits={
            "": {
                "hidden_states": TOKENS,
                "timestep": Split(dim=1, ndim=2, optional=True),
                "video_keyframes_mask": OPTIONAL,
            },
            "rope": rotary(-2),
            "transformer_blocks.*.audio_to_video_attn": {"query_rotary_emb": Split(dim=-2)},
            "transformer_blocks.*.video_to_audio_attn": {"encoder_hidden_states": _WHOLE},
        },
        gather=PROJECTED,
        blocks={"transformer_blocks": ("hidden_states", "audio_hidden_states")},
        batched=names(
            "hidden_states audio_hidden_states encoder_hidden_states audio_encoder_hidden_states timestep "
            "audio_timestep sigma audio_sigma encoder_attention_mask audio_encoder_attention_mask video_coords "
            "audio_coords perturbation_mask video_self_attention_mask video_keyframes_mask"
        ),
        refused={
            "video_self_attention_mask": "a mask of single queries cannot be cut; use CfgParallel or DataParallel"
        },
        skips_attention=True,
        frames=Frames(dim=1, argument="num_frames", sides=("height", "width")),
    ),
    Adapter(
        family="Kandinsky 5",
        model="Kandinsky5Transformer3DModel",
        grid=CHANNELS_LAST,
        # The few layers that refine only the text stay whole.
        attention={"visual_transformer_blocks.*.self_attention": (IMAGE,)},
        splits={
            "visual_transformer_blocks.0": {"visual_embed": TOKENS},
            "visual_transformer_blocks.*": {"rope": TOKENS},
        },
        gather={"visual_transformer_blocks.-1": TOKENS},
        blocks={"visual_transformer_blocks": ("visual_embed",)},
        batched=names("hidden_states encoder_hidden_states timestep pooled_projections"),
        shared=("visual_rope_pos", "text_rope_pos", "scale_factor"),
        block_choice="sparse_params",
        refused={
            "sparse_params": "its blocks of keys are chosen over all tokens; use Ulysses, Ring or Usp, or CfgParallel "
            "or DataParallel"
        },
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
        grid=VIDEO,
        attention={"transformer_blocks.*.attn1": (IMAGE,)},
        # Given frames have timesteps of their own, and every token has that of its frame.
        splits={
            "transformer_blocks.0": {"hidden_states": TOKENS},
            "transformer_blocks.*": {
                "image_rotary_emb": Split(dim=0, optional=True),
                "extra_pos_emb": OPTIONAL,
                "controlnet_residual": OPTIONAL,
                **_PER_TOKEN,
            },
            "norm_out": _PER_TOKEN,
        },
        gather=PROJECTED,
        batched=names("hidden_states timestep encoder_hidden_states attention_mask condition_mask"),
        shared=("padding_mask", "fps"),
        residuals=("block_controlnet_hidden_states",),
        frames=Frames(patch="patch_size"),
    ),
    Adapter(
        family="Cosmos 3",
        model="Cosmos3OmniTransformer",
        # The text is attended to by the video and, causally, by itself: it stays whole. A call makes one sample, and
        # its tensors have no batch dimension.
        attention={"layers.*.self_attn": (TEXT, IMAGE)},
        keys_only=(TEXT,),
        causal_text=True,
        splits={"layers.0": {"gen_seq": Split(dim=0)}, "layers.*": {"rotary_emb": Split(dim=0, items=(2, 3))}},
        gather={"norm_moe_gen": Split(dim=0)},
        sample="vision_tokens",
        timestep="vision_timesteps",
        batched=names("vision_tokens vision_timesteps input_ids sound_tokens action_tokens"),
    ),
    Adapter(
        family="Allegro",
        model="AllegroTransformer3DModel",
        grid=VIDEO,
        attention={"transformer_blocks.*.attn1": (IMAGE,)},
        least_tokens=2,  # its blocks take a single token for a dimension to drop
        # The rotary embedding is tables of angles, with an index into them for every token.
        splits={
            "transformer_blocks.0": {"hidden_states": TOKENS},
            "transformer_blocks.*": {
                "attention_mask": Split(dim=-1, optional=True),
                "image_rotary_emb": Split(dim=-1, items=(1,), optional=True),
            },
        },
        gather=PROJECTED,
        batched=names("hidden_states encoder_hidden_states timestep attention_mask encoder_attention_mask"),
        shared=("image_rotary_emb",),
        frames=Frames(patch="patch_size_t"),
    ),
    Adapter(
        family="EasyAnimate",
        model="EasyAnimateTransformer3DModel",
        grid=VIDEO,
        attention={"transformer_blocks.*.attn1": (TEXT, IMAGE)},
        splits={
            "transformer_blocks.0": PAIR,
            "transformer_blocks.*": {"image_rotary_emb": Split(dim=0, optional=True)},
        },
        gather=PROJECTED,
        blocks={"transformer_blocks": BOTH},
        batched=names(
            "hidden_states timestep timestep_cond encoder_hidden_states encoder_hidden_states_t5 inpaint_latents "
            "control_latents"
        ),
        frames=Frames(),
    ),
    Adapter(
        family="Motif-Video",
        model="MotifVideoTransformer3DModel",
        grid=VIDEO,
        attention=HUNYUAN_ATTENTION,
        # The few cross-attentions read all of the text, whose mask stays whole as well.
        splits={
            "rope": rotary(0),
            "transformer_blocks.0": PAIR,
            "transformer_blocks.*.cross_attn": _CROSS,
            "single_transformer_blocks.*.cross_attn": _CROSS,
        },
        gather=PROJECTED,
        blocks={"transformer_blocks": BOTH, "single_transformer_blocks": BOTH},
        batched=names("hidden_states timestep encoder_hidden_states encoder_attention_mask image_embeds"),
        frames=Frames(patch="patch_size_t"),
    ),
    # Convolutions over a frame and along time: whole frames are cut, and a rank needs its neighbours' last ones.
    Adapter(
        family="Sana-Video",
        model="SanaVideoTransformer3DModel",
        linear_attention={"transformer_blocks.*.attn1": "SanaLinearAttnProcessor3_0"},
        convolutions=("transformer_blocks.*.ff.conv_temp",),
        whole_frames=True,
        splits={
            "rope": rotary(1),
            "transformer_blocks.0": {"hidden_states": TOKENS},
            "transformer_blocks.*": {"frames": Split(dim=0), "timestep": Split(dim=1, ones=True)},
            "norm_out": {"temb": Split(dim=1, ones=True)},
            "": {"controlnet_block_samples": OPTIONAL},
        },
        gather=PROJECTED,
        batched=names("hidden_states encoder_hidden_states timestep guidance encoder_attention_mask attention_mask"),
        residuals=("controlnet_block_samples",),
        frames=Frames(patch="patch_size"),
    ),
    Adapter(
        family="Helios",
        model="HeliosTransformer3DModel",
        attention={"blocks.*.attn1": (IMAGE,)},
        # Earlier frames, coarser the older they are, stand in front of the new ones; a number counts the latter.
        splits={
            "blocks.0": {"hidden_states": TOKENS},
            "blocks.*": {
                "rotary_emb": TOKENS,
                "temb": Split(dim=1, ndim=4, optional=True),
                "original_context_length": Split(dim=0, tail=True, optional=True),
            },
        },
        gather={"blocks.-1": TOKENS},
        in_sections=True,
        batched=names(
            "hidden_states timestep encoder_hidden_states latents_history_short latents_history_mid "
            "latents_history_long"
        ),
        shared=names(
            "indices_hidden_states indices_latents_history_short indices_latents_history_mid "
            "indices_latents_history_long"
        ),
        frames=Frames(patch="patch_size"),
    ),
    Adapter(
        family="AnyFlow",
        model="AnyFlowTransformer3DModel",
        grid=FRAMES_FIRST,
        attention={"blocks.*.attn1": (IMAGE,)},
        splits={
            "blocks.0": {"hidden_states": TOKENS},
            "blocks.*": {"temb": Split(dim=1, ones=True), "rotary_emb": Split(dim=2)},
        },
        gather={"blocks.-1": TOKENS},
        batched=names("hidden_states timestep r_timestep encoder_hidden_states encoder_hidden_states_image"),
        frames=Frames(dim=1, patch="patch_size"),
    ),
    Adapter(
        family="Kandinsky 6",
        model="Kandinsky6Transformer3DModel",
        # As in LTX-2, the sound stays whole on every rank, and so do the layers that refine the text.
        attention={"visual_transformer_blocks.*.video_dec_block.self_attention": (IMAGE,)},
        splits={
            "visual_transformer_blocks.0": {"vis": TOKENS},
            "visual_transformer_blocks.*.video_dec_block.self_attention": {"rotary_emb": Split(dim=0)},
            "visual_transformer_blocks.*.va_cross_attention": {"rope_q": Split(dim=0, optional=True)},
            "visual_transformer_blocks.*.av_cross_attention": {"encoder_hidden_states": _WHOLE},
        },
        gather={"visual_transformer_blocks.-1": TOKENS},
        blocks={"visual_transformer_blocks": ("vis", "aud")},
        batched=names(
            "hidden_states encoder_hidden_states pooled_projections timestep audio_hidden_states "
            "encoder_attention_mask visual_token_type_ids"
        ),
        shared=("visual_rope_pos",),
        frames=Frames(dim=1, patch="patch_size"),
    ),
)
