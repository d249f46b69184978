"""Lists transformers that make sound; their tokens are moments in time."""

from __future__ import annotations

from partsong.parallel.adapters.row import IMAGE, Adapter, Split
from partsong.parallel.adapters.shared_cuts import OPTIONAL, PROJECTED, TOKENS, names

__all__ = ["ROWS"]

_ROTARY = Split(dim=0)

ROWS = (
    Adapter(
        family="Stable Audio",
        model="StableAudioDiTModel",
        attention={"transformer_blocks.*.attn1": (IMAGE,)},
        # One token in front of the sound describes the whole; the model adds and drops it.
        splits={
            "transformer_blocks.0": {"hidden_states": TOKENS},
            "transformer_blocks.*": {"rotary_embedding": Split(dim=0, optional=True), "attention_mask": OPTIONAL},
        },
        gather=PROJECTED,
        batched=names(
            "hidden_states timestep encoder_hidden_states global_hidden_states attention_mask encoder_attention_mask"
        ),
        shared=("rotary_embedding",),
    ),
    Adapter(
        family="Stable Audio 3",
        model="StableAudio3DiTModel",
        attention={"transformer_blocks.*.self_attn": (IMAGE,)},
        # Memory tokens stand in front of the sound; what is added to the sound has no values for them.
        splits={
            "transformer_blocks.0": {"hidden_states": TOKENS},
            "transformer_blocks.*": {
                "rope": _ROTARY,
                "local_seq": Split(dim=1, tail=True, optional=True),
                "num_memory_tokens": Split(dim=0, leading=True, optional=True),
            },
        },
        gather={"transformer_blocks.-1": TOKENS},
        attentions=2,
        batched=names(
            "hidden_states timestep encoder_hidden_states global_hidden_states encoder_attention_mask local_add_cond"
        ),
    ),
    Adapter(
        family="ACE-Step",
        model="AceStepTransformer1DModel",
        attention={"layers.*.self_attn": (IMAGE,)},
        # Every other layer attends to moments nearby; that mask is the same on every rank.
        splits={"layers.0": {"hidden_states": TOKENS}, "layers.*": {"position_embeddings": _ROTARY}},
        gather={"layers.-1": TOKENS},
        batched=names("hidden_states timestep timestep_r encoder_hidden_states context_latents"),
    ),
    Adapter(
        family="LongCat-AudioDiT",
        model="LongCatAudioDiTTransformer",
        attention={"blocks.*.self_attn": (IMAGE,)},
        splits={
            "blocks.0": {"hidden_states": TOKENS},
            "blocks.*": {"mask": OPTIONAL, "rope": Split(dim=0, optional=True)},
        },
        # The input is added once more at the end, so that module gets all tokens.
        gather={"blocks.-1": TOKENS},
        batched=names("hidden_states encoder_hidden_states encoder_attention_mask timestep attention_mask latent_cond"),
    ),
    Adapter(
        family="MiniMax Music 3",
        model="MiniMaxMusic3Transformer1DModel",
        attention={"transformer_blocks.*.attn": (IMAGE,)},
        # One token in front of the sound holds the time; the model adds and drops it.
        splits={"transformer_blocks.0": {"hidden_states": TOKENS}, "transformer_blocks.*": {"rotary_emb": _ROTARY}},
        gather={"transformer_blocks.-1": TOKENS},
    ),
)
