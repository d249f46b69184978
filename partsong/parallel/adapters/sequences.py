"""Lists further models that join picture and text to one sequence inside, which is cut as one."""

from __future__ import annotations

from dataclasses import replace

from partsong.parallel.adapters.row import IMAGE, JOINT, TEXT, Adapter, Split
from partsong.parallel.adapters.shared_cuts import JOINT_TOKENS, ONE, OPTIONAL, TOKENS, names

__all__ = ["ROWS"]

#: Tokens come before the batch.
_FIRST = Split(dim=0, stream=JOINT)
#: The picture that is drawn stands behind what is given.
_TARGET = Split(dim=1, after="segments")

ROWS = (
    Adapter(
        family="Krea 2",
        model="Krea2Transformer2DModel",
        attention={"transformer_blocks.*.attn": (JOINT,)},
        splits={
            "transformer_blocks.0": {"hidden_states": JOINT_TOKENS},
            "transformer_blocks.*": {"image_rotary_emb": _FIRST},
        },
        gather={"transformer_blocks.-1": JOINT_TOKENS},
        blocks={"transformer_blocks": ONE},
        batched=names("hidden_states encoder_hidden_states timestep encoder_attention_mask"),
        shared=("position_ids",),
        repeats_keys=True,
    ),
    Adapter(
        family="ERNIE-Image",
        model="ErnieImageTransformer2DModel",
        attention={"layers.*.self_attention": (JOINT,)},
        splits={"layers.0": {"x": _FIRST}, "layers.*": {"rotary_pos_emb": JOINT_TOKENS, "temb": _FIRST}},
        gather={"layers.-1": _FIRST},
        blocks={"layers": ("x",)},
        batched=names("hidden_states timestep text_bth text_lens"),
    ),
    Adapter(
        family="Ideogram 4",
        model="Ideogram4Transformer2DModel",
        attention={"layers.*.attention": (JOINT,)},
        splits={"layers.0": {"hidden_states": JOINT_TOKENS}, "layers.*": {"image_rotary_emb": JOINT_TOKENS}},
        gather={"layers.-1": JOINT_TOKENS},
        blocks={"layers": ONE},
        batched=names("hidden_states timestep encoder_hidden_states position_ids segment_ids indicator"),
    ),
    Adapter(
        family="Bria FIBO 2",
        model="BriaFibo2Transformer2DModel",
        # Only picture tokens are refined first. The layers that summarise the text stay whole.
        attention={"noise_refiner.*.attention": (IMAGE,), "layers.*.attention": (JOINT,)},
        splits={
            "noise_refiner.0": {"x": TOKENS},
            "noise_refiner.*": {"freqs_cis": TOKENS, "noise_mask": OPTIONAL},
            "layers.0": {"x": JOINT_TOKENS},
            "layers.*": {"freqs_cis": JOINT_TOKENS, "noise_mask": JOINT_TOKENS},
        },
        gather={"noise_refiner.-1": TOKENS, "layers.-1": JOINT_TOKENS},
        blocks={"layers": ("x",)},
        batched=names("hidden_states timestep encoder_hidden_states encoder_attention_mask context_latents"),
    ),
    Adapter(
        family="Lumina",
        model="LuminaNextDiT2DModel",
        attention={"layers.*.attn1": (IMAGE,)},
        scaled_by_length="base_sequence_length",
        repeats_keys=True,
        splits={"patch_embedder": {index: Split(dim=1, output=True) for index in (0, 1, 3)}},
        gather={"norm_out": TOKENS},
        batched=names("hidden_states timestep encoder_hidden_states encoder_mask"),
        shared=("image_rotary_emb",),
    ),
    Adapter(
        family="OmniGen",
        model="OmniGenTransformer2DModel",
        attention={"layers.*.self_attn": (JOINT,)},
        seems_cross=True,
        splits={"layers.0": {"hidden_states": JOINT_TOKENS}, "layers.*": {"image_rotary_emb": _FIRST}},
        gather={"layers.-1": JOINT_TOKENS},
        blocks={"layers": ONE},
        batched=names("hidden_states timestep input_ids attention_mask input_img_latents input_image_sizes"),
        # It turns all samples by the first one's positions, and chooses its scale by the largest of all.
        shared=("position_ids",),
        numbered={"input_image_sizes": "input_img_latents"},
    ),
    Adapter(
        family="MiniMax-H3",
        model="MiniMaxH3Transformer3DModel",
        attention={"transformer_blocks.*.attn": (JOINT,)},
        # Words, sounds and frames stand where their indices say; all samples have the same layout. Both output layers
        # run on every token before those of one kind are taken out.
        splits={
            "transformer_blocks.0": {"hidden_states": JOINT_TOKENS},
            "transformer_blocks.*": {"adaln_indices": _FIRST, "rotary_emb": _FIRST},
            "norm_out": {"timestep_indices": _FIRST},
        },
        gather={"proj_out": JOINT_TOKENS, "audio_proj_out": JOINT_TOKENS},
        blocks={"transformer_blocks": ONE},
        batched=names("hidden_states audio_hidden_states encoder_hidden_states"),
        shared=names("timestep timestep_indices token_tags position_ids video_indices audio_indices text_indices"),
    ),
    Adapter(
        family="QwenImage 2.1",
        model="QwenImage21Transformer2DModel",
        # Words and pictures that are given come first and stay whole: each run of them is attended to by what comes
        # after it. After the first step only their keys are left, in a cache.
        attention={"transformer_blocks.*.attn": (TEXT, IMAGE)},
        keys_only=(TEXT,),
        splits={
            "transformer_blocks.0": {"hidden_states": _TARGET},
            "transformer_blocks.*": {
                "rotary_emb": replace(_TARGET, dim=0),
                "target_token_mask": replace(_TARGET, dim=0, optional=True),
            },
        },
        # Blocks keep keys of whole samples, so they are not named: no part of a sample goes through them alone.
        gather={"transformer_blocks.-1": _TARGET},
        batched=names("hidden_states encoder_hidden_states timestep img_shapes encoder_hidden_states_mask"),
        first=("img_shapes",),
        shared=("img_mask",),
    ),
)
