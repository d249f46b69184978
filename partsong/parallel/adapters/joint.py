"""Lists models whose attention mixes picture and text: both are cut, or the one sequence they are joined to."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from partsong.parallel.adapters.grid import IDS, PICTURE, SHAPES
from partsong.parallel.adapters.row import IMAGE, JOINT, TEXT, Adapter, Split
from partsong.parallel.adapters.shared_cuts import (
    EMBEDDED,
    FLUX_ATTENTION,
    JOINT_TOKENS,
    ONE,
    OPTIONAL,
    PAIR,
    PROJECTED,
    TEXT_FIRST,
    TEXT_TOKENS,
    TOKENS,
    Cuts,
    names,
    returned,
)

__all__ = ["ROWS", "flux"]

_FLUX_INPUTS: Cuts = {**PAIR, "img_ids": Split(dim=-2), "txt_ids": Split(dim=-2, stream=TEXT)}
_MASK = Split(dim=1, stream=JOINT, optional=True)


def flux(
    family: str,
    model: str,
    inputs: str = "",
    *,
    last: tuple[str, ...] = TEXT_FIRST,
    added: Cuts = MappingProxyType({}),
    residuals: str = "",
    **more: Any,
) -> Adapter:
    """Makes the row of a model built like Flux: blocks for picture and text side by side, then blocks for both at once.

    Their ids are cut as well, although a class' own plan leaves those of two dimensions whole, and all samples share
    them: with a batch in front, a model reads the first row only.

    Args:
        family: short name.
        model: class name.
        inputs: further arguments that hold the batch.
        last: what the blocks for both return anew.
        added: further cuts of arguments.
        residuals: arguments in which a ControlNet gives what it adds.
        more: other fields of the row.
    """
    return Adapter(
        family=family,
        model=model,
        grid=IDS,
        attention=FLUX_ATTENTION,
        splits={"": {**_FLUX_INPUTS, **added, **dict.fromkeys(names(residuals), OPTIONAL)}},
        gather=PROJECTED,
        blocks={"transformer_blocks": TEXT_FIRST, "single_transformer_blocks": last},
        batched=names("hidden_states encoder_hidden_states timestep " + inputs),
        shared=("img_ids", "txt_ids"),
        residuals=names(residuals),
        **more,
    )


ROWS = (
    Adapter(
        family="SD3",
        model="SD3Transformer2DModel",
        grid=PICTURE,
        attention={"transformer_blocks.*.attn": (IMAGE, TEXT), "transformer_blocks.*.attn2": (IMAGE,)},
        splits={
            **EMBEDDED,
            "context_embedder": returned(stream=TEXT),
            "": {"block_controlnet_hidden_states": OPTIONAL},
        },
        gather=PROJECTED,
        blocks={"transformer_blocks": TEXT_FIRST},
        shared=("skip_layers",),
        batched=names("joint_attention_kwargs hidden_states encoder_hidden_states timestep pooled_projections"),
        residuals=("block_controlnet_hidden_states",),
        refused_pipelines={
            "_set_pag_attn_processor": "perturbed guidance masks every pair of picture tokens in a layer, and such a "
            "mask cannot be cut with the tokens; use CfgParallel or DataParallel"
        },
    ),
    flux(
        "Flux",
        "FluxTransformer2DModel",
        "joint_attention_kwargs pooled_projections guidance",
        residuals="controlnet_block_samples controlnet_single_block_samples",
    ),
    flux(
        "Flux2",
        "Flux2Transformer2DModel",
        "guidance",
        last=ONE,
        refused={
            "kv_cache_mode": "the cache of reference tokens is filled by position; pass the reference picture anew "
            "each step, or use CfgParallel or DataParallel"
        },
        refused_pipelines={
            "_set_kv_attn_processors": "it keeps keys and values of reference tokens by position, which are not cut; "
            "use Flux2KleinPipeline, which passes the reference picture anew each step, or CfgParallel or DataParallel"
        },
    ),
    Adapter(
        family="QwenImage",
        model="QwenImageTransformer2DModel",
        grid=SHAPES,
        attention={"transformer_blocks.*.attn": (TEXT, IMAGE)},
        # This is the class' own plan, but it names the text and cuts the residuals as well.
        splits={
            "": {"controlnet_block_samples": OPTIONAL},
            "transformer_blocks.0": PAIR,
            "transformer_blocks.*": {
                "modulate_index": OPTIONAL,
                "encoder_hidden_states_mask": Split(dim=1, stream=TEXT, optional=True),
            },
            "pos_embed": {0: Split(dim=0, output=True), 1: Split(dim=0, stream=TEXT, output=True)},
        },
        gather=PROJECTED,
        blocks={"transformer_blocks": TEXT_FIRST},
        first=("img_shapes",),
        batched=names(
            "hidden_states encoder_hidden_states encoder_hidden_states_mask timestep img_shapes guidance "
            "additional_t_cond"
        ),
        residuals=("controlnet_block_samples",),
    ),
    Adapter(
        family="AuraFlow",
        model="AuraFlowTransformer2DModel",
        grid=PICTURE,
        attention={"joint_transformer_blocks.*.attn": (TEXT, IMAGE), "single_transformer_blocks.*.attn": (TEXT, IMAGE)},
        # The register tokens are put before the text inside the model: it is cut where the first block takes both.
        splits={**EMBEDDED, "joint_transformer_blocks.0": {"encoder_hidden_states": TEXT_TOKENS}},
        gather=PROJECTED,
        blocks={"joint_transformer_blocks": TEXT_FIRST, "single_transformer_blocks": ONE},
    ),
    # The two below join each picture with its own text, of any length, inside the model. That sequence is cut as one.
    # Earlier layers that refine only the picture are cut by themselves; the few that refine the text stay whole.
    Adapter(
        family="Lumina2",
        model="Lumina2Transformer2DModel",
        attention={"noise_refiner.*.attn": (IMAGE,), "layers.*.attn": (JOINT,)},
        splits={
            "noise_refiner.0": {"hidden_states": TOKENS},
            "noise_refiner.*": {"image_rotary_emb": TOKENS},
            "layers.0": {"hidden_states": JOINT_TOKENS},
            "layers.*": {"image_rotary_emb": JOINT_TOKENS, "attention_mask": _MASK},
        },
        gather={"noise_refiner.-1": TOKENS, "norm_out": JOINT_TOKENS},
        blocks={"layers": ONE},
        batched=names("hidden_states timestep encoder_hidden_states encoder_attention_mask"),
        trims_text=True,
        repeats_keys=True,
    ),
    Adapter(
        family="Z-Image",
        model="ZImageTransformer2DModel",
        attention={"noise_refiner.*.attention": (IMAGE,), "layers.*.attention": (JOINT,)},
        splits={
            "": {"controlnet_block_samples": _MASK},
            "noise_refiner.0": {"x": TOKENS},
            "noise_refiner.*": {"attn_mask": OPTIONAL, "freqs_cis": TOKENS, "noise_mask": OPTIONAL},
            "layers.0": {"x": JOINT_TOKENS},
            "layers.*": {"attn_mask": _MASK, "freqs_cis": JOINT_TOKENS, "noise_mask": _MASK},
            "all_final_layer.*": {"noise_mask": _MASK},
        },
        gather={"noise_refiner.-1": TOKENS, "all_final_layer.*": JOINT_TOKENS},
        blocks={"layers": ("x",)},
        sample="x",
        timestep="t",
        batched=names("x t cap_feats siglip_feats image_noise_mask"),
        per_sample=names("x cap_feats siglip_feats image_noise_mask"),
        padded={"controlnet_block_samples": ("cap_feats", 32)},
        residuals=("controlnet_block_samples",),
    ),
)
