"""Lists further models that join picture and text to one sequence inside, which is cut as one."""

from __future__ import annotations

from partsong.parallel.adapters.row import IMAGE, JOINT, Adapter, Split, row

__all__ = ["ROWS"]

_TOKENS = Split(dim=1)
_JOINT = Split(dim=1, stream=JOINT)
#: Tokens come before the batch.
_FIRST = Split(dim=0, stream=JOINT)
_ONE = ("hidden_states",)

ROWS = (
    Adapter(
        family="Krea 2",
        model="Krea2Transformer2DModel",
        attention=row({"transformer_blocks.*.attn": (JOINT,)}),
        splits=row(
            {"transformer_blocks.0": row(hidden_states=_JOINT), "transformer_blocks.*": row(image_rotary_emb=_FIRST)}
        ),
        gather=row({"transformer_blocks.-1": _JOINT}),
        blocks=row(transformer_blocks=_ONE),
        batched=("hidden_states", "encoder_hidden_states", "timestep", "encoder_attention_mask"),
        shared=("position_ids",),
        repeats_keys=True,
    ),
    Adapter(
        family="ERNIE-Image",
        model="ErnieImageTransformer2DModel",
        attention=row({"layers.*.self_attention": (JOINT,)}),
        splits=row({"layers.0": row(x=_FIRST), "layers.*": row(rotary_pos_emb=_JOINT, temb=_FIRST)}),
        gather=row({"layers.-1": _FIRST}),
        blocks=row(layers=("x",)),
        batched=("hidden_states", "timestep", "text_bth", "text_lens"),
    ),
    Adapter(
        family="Ideogram 4",
        model="Ideogram4Transformer2DModel",
        attention=row({"layers.*.attention": (JOINT,)}),
        splits=row({"layers.0": row(hidden_states=_JOINT), "layers.*": row(image_rotary_emb=_JOINT)}),
        gather=row({"layers.-1": _JOINT}),
        blocks=row(layers=_ONE),
        batched=("hidden_states", "timestep", "encoder_hidden_states", "position_ids", "segment_ids", "indicator"),
    ),
    Adapter(
        family="Bria FIBO 2",
        model="BriaFibo2Transformer2DModel",
        # Only picture tokens are refined first. The layers that summarise the text stay whole.
        attention=row({"noise_refiner.*.attention": (IMAGE,), "layers.*.attention": (JOINT,)}),
        splits=row(
            {
                "noise_refiner.0": row(x=_TOKENS),
                "noise_refiner.*": row(freqs_cis=_TOKENS, noise_mask=Split(dim=1, optional=True)),
                "layers.0": row(x=_JOINT),
                "layers.*": row(freqs_cis=_JOINT, noise_mask=_JOINT),
            }
        ),
        gather=row({"noise_refiner.-1": _TOKENS, "layers.-1": _JOINT}),
        blocks=row(layers=("x",)),
        batched=(
            "hidden_states",
            "timestep",
            "encoder_hidden_states",
            "encoder_attention_mask",
            "context_latents",
        ),
    ),
    Adapter(
        family="Lumina",
        model="LuminaNextDiT2DModel",
        attention=row({"layers.*.attn1": (IMAGE,)}),
        scaled_by_length="base_sequence_length",
        repeats_keys=True,
        splits=row({"patch_embedder": row({index: Split(dim=1, output=True) for index in (0, 1, 3)})}),
        gather=row(norm_out=_TOKENS),
        batched=("hidden_states", "timestep", "encoder_hidden_states", "encoder_mask"),
        shared=("image_rotary_emb",),
    ),
    Adapter(
        family="OmniGen",
        model="OmniGenTransformer2DModel",
        attention=row({"layers.*.self_attn": (JOINT,)}),
        seems_cross=True,
        splits=row({"layers.0": row(hidden_states=_JOINT), "layers.*": row(image_rotary_emb=_FIRST)}),
        gather=row({"layers.-1": _JOINT}),
        blocks=row(layers=_ONE),
        batched=("hidden_states", "timestep", "input_ids", "attention_mask", "position_ids"),
    ),
    Adapter(
        family="QwenImage 2.1",
        model="QwenImage21Transformer2DModel",
        splits=row(),
        gather=row(),
        whole="its attention runs once for every run of words and every picture in the sequence, each over what comes "
        "before it, and keeps keys by their place",
        batched=(
            "hidden_states",
            "encoder_hidden_states",
            "timestep",
            "img_shapes",
            "img_mask",
            "encoder_hidden_states_mask",
        ),
        per_sample=("img_shapes",),
    ),
)
