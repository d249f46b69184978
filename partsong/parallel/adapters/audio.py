"""Lists transformers that make sound; their tokens are moments in time."""

from __future__ import annotations

from partsong.parallel.adapters.row import IMAGE, Adapter, Split, row

__all__ = ["ROWS"]

_TOKENS = Split(dim=1)
_ROTARY = Split(dim=0)

ROWS = (
    Adapter(
        family="Stable Audio",
        model="StableAudioDiTModel",
        attention=row({"transformer_blocks.*.attn1": (IMAGE,)}),
        # One token in front of the sound describes the whole; the model adds and drops it.
        splits=row(
            {
                "transformer_blocks.0": row(hidden_states=_TOKENS),
                "transformer_blocks.*": row(
                    rotary_embedding=Split(dim=0, optional=True), attention_mask=Split(dim=1, optional=True)
                ),
            }
        ),
        gather=row(proj_out=_TOKENS),
        batched=(
            "hidden_states",
            "timestep",
            "encoder_hidden_states",
            "global_hidden_states",
            "attention_mask",
            "encoder_attention_mask",
        ),
        shared=("rotary_embedding",),
    ),
    Adapter(
        family="Stable Audio 3",
        model="StableAudio3DiTModel",
        attention=row({"transformer_blocks.*.self_attn": (IMAGE,)}),
        # Memory tokens stand in front of the sound; what is added to the sound has no values for them.
        splits=row(
            {
                "transformer_blocks.0": row(hidden_states=_TOKENS),
                "transformer_blocks.*": row(
                    rope=_ROTARY,
                    local_seq=Split(dim=1, tail=True, optional=True),
                    num_memory_tokens=Split(dim=0, leading=True, optional=True),
                ),
            }
        ),
        gather=row({"transformer_blocks.-1": _TOKENS}),
        attentions=2,
        batched=(
            "hidden_states",
            "timestep",
            "encoder_hidden_states",
            "global_hidden_states",
            "encoder_attention_mask",
            "local_add_cond",
        ),
    ),
    Adapter(
        family="ACE-Step",
        model="AceStepTransformer1DModel",
        attention=row({"layers.*.self_attn": (IMAGE,)}),
        # Every other layer attends to moments nearby; that mask is the same on every rank.
        splits=row({"layers.0": row(hidden_states=_TOKENS), "layers.*": row(position_embeddings=_ROTARY)}),
        gather=row({"layers.-1": _TOKENS}),
        batched=("hidden_states", "timestep", "timestep_r", "encoder_hidden_states", "context_latents"),
    ),
    Adapter(
        family="LongCat-AudioDiT",
        model="LongCatAudioDiTTransformer",
        attention=row({"blocks.*.self_attn": (IMAGE,)}),
        splits=row(
            {
                "blocks.0": row(hidden_states=_TOKENS),
                "blocks.*": row(mask=Split(dim=1, optional=True), rope=Split(dim=0, optional=True)),
            }
        ),
        # The input is added once more at the end, so that module gets all tokens.
        gather=row({"blocks.-1": _TOKENS}),
        batched=(
            "hidden_states",
            "encoder_hidden_states",
            "encoder_attention_mask",
            "timestep",
            "attention_mask",
            "latent_cond",
        ),
    ),
)
