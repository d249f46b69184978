"""Lists models whose attention mixes picture and text: both are cut, or the one sequence they are joined to."""

from __future__ import annotations

from partsong.parallel.adapters.cross import EMBEDDED, RESIDUALS
from partsong.parallel.adapters.row import IMAGE, JOINT, TEXT, Adapter, Split, row

__all__ = ["ROWS"]

_TEXT = Split(dim=1, stream=TEXT)
_JOINT = Split(dim=1, stream=JOINT)
_MASK = Split(dim=1, stream=JOINT, optional=True)
_BOTH = ("encoder_hidden_states", "hidden_states")
_ONE = ("hidden_states",)
_FLUX_INPUTS = {
    "hidden_states": Split(dim=1),
    "encoder_hidden_states": _TEXT,
    "img_ids": Split(dim=-2),
    "txt_ids": Split(dim=-2, stream=TEXT),
}
_FLUX_ATTENTION = row({"transformer_blocks.*.attn": (TEXT, IMAGE), "single_transformer_blocks.*.attn": (TEXT, IMAGE)})

ROWS = (
    Adapter(
        family="SD3",
        model="SD3Transformer2DModel",
        attention=row({"transformer_blocks.*.attn": (IMAGE, TEXT), "transformer_blocks.*.attn2": (IMAGE,)}),
        splits=row(
            {
                **EMBEDDED,
                "context_embedder": {0: Split(dim=1, stream=TEXT, output=True)},
                "": {"block_controlnet_hidden_states": RESIDUALS},
            }
        ),
        gather=row(proj_out=Split(dim=1)),
        blocks=row(transformer_blocks=_BOTH),
        shared=("skip_layers",),
        batched=("joint_attention_kwargs", "hidden_states", "encoder_hidden_states", "timestep", "pooled_projections"),
        residuals=("block_controlnet_hidden_states",),
        refused_pipelines=row(
            _set_pag_attn_processor="perturbed guidance masks every pair of picture tokens in a layer, and such a mask "
            "cannot be cut with the tokens; use CfgParallel or DataParallel"
        ),
    ),
    Adapter(
        family="Flux",
        model="FluxTransformer2DModel",
        attention=_FLUX_ATTENTION,
        splits=row(
            {"": {**_FLUX_INPUTS, "controlnet_block_samples": RESIDUALS, "controlnet_single_block_samples": RESIDUALS}}
        ),
        gather=row(proj_out=Split(dim=1)),
        blocks=row(transformer_blocks=_BOTH, single_transformer_blocks=_BOTH),
        shared=("img_ids", "txt_ids"),
        batched=(
            "joint_attention_kwargs",
            "hidden_states",
            "encoder_hidden_states",
            "timestep",
            "pooled_projections",
            "guidance",
        ),
        residuals=("controlnet_block_samples", "controlnet_single_block_samples"),
    ),
    Adapter(
        family="Flux2",
        model="Flux2Transformer2DModel",
        attention=_FLUX_ATTENTION,
        # The class' own plan leaves position ids of two dimensions whole.
        splits=row({"": _FLUX_INPUTS}),
        gather=row(proj_out=Split(dim=1)),
        blocks=row(transformer_blocks=_BOTH, single_transformer_blocks=_ONE),
        batched=("hidden_states", "encoder_hidden_states", "timestep", "guidance"),
        # With a batch in front, the model reads the first row only.
        shared=("img_ids", "txt_ids"),
        refused=row(
            kv_cache_mode="the cache of reference tokens is filled by position; pass the reference picture anew each "
            "step, or use CfgParallel or DataParallel"
        ),
    ),
    Adapter(
        family="QwenImage",
        model="QwenImageTransformer2DModel",
        attention=row({"transformer_blocks.*.attn": (TEXT, IMAGE)}),
        # This is the class' own plan, but it names the text and cuts the residuals as well.
        splits=row(
            {
                "": {"controlnet_block_samples": RESIDUALS},
                "transformer_blocks.0": {"hidden_states": Split(dim=1), "encoder_hidden_states": _TEXT},
                "transformer_blocks.*": {
                    "modulate_index": Split(dim=1, optional=True),
                    "encoder_hidden_states_mask": Split(dim=1, stream=TEXT, optional=True),
                },
                "pos_embed": {0: Split(dim=0, output=True), 1: Split(dim=0, stream=TEXT, output=True)},
            }
        ),
        gather=row(proj_out=Split(dim=1)),
        blocks=row(transformer_blocks=_BOTH),
        per_sample=("img_shapes",),
        batched=(
            "hidden_states",
            "encoder_hidden_states",
            "encoder_hidden_states_mask",
            "timestep",
            "img_shapes",
            "guidance",
            "additional_t_cond",
        ),
        residuals=("controlnet_block_samples",),
    ),
    Adapter(
        family="AuraFlow",
        model="AuraFlowTransformer2DModel",
        attention=row(
            {"joint_transformer_blocks.*.attn": (TEXT, IMAGE), "single_transformer_blocks.*.attn": (TEXT, IMAGE)}
        ),
        # The register tokens are put before the text inside the model: it is cut where the first block takes both.
        splits=row({**EMBEDDED, "joint_transformer_blocks.0": {"encoder_hidden_states": _TEXT}}),
        gather=row(proj_out=Split(dim=1)),
        blocks=row(joint_transformer_blocks=_BOTH, single_transformer_blocks=_ONE),
    ),
    # The two below join each picture with its own text, of any length, inside the model. That sequence is cut as one.
    # Earlier layers that refine only the picture are cut by themselves; the few that refine the text stay whole.
    Adapter(
        family="Lumina2",
        model="Lumina2Transformer2DModel",
        attention=row({"noise_refiner.*.attn": (IMAGE,), "layers.*.attn": (JOINT,)}),
        splits=row(
            {
                "noise_refiner.0": {"hidden_states": Split(dim=1)},
                "noise_refiner.*": {"image_rotary_emb": Split(dim=1)},
                "layers.0": {"hidden_states": _JOINT},
                "layers.*": {"image_rotary_emb": _JOINT, "attention_mask": _MASK},
            }
        ),
        gather=row({"noise_refiner.-1": Split(dim=1), "norm_out": _JOINT}),
        blocks=row(layers=_ONE),
        batched=("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask"),
        trims_text=True,
        repeats_keys=True,
    ),
    Adapter(
        family="Z-Image",
        model="ZImageTransformer2DModel",
        attention=row({"noise_refiner.*.attention": (IMAGE,), "layers.*.attention": (JOINT,)}),
        splits=row(
            {
                "": {"controlnet_block_samples": _MASK},
                "noise_refiner.0": {"x": Split(dim=1)},
                "noise_refiner.*": {
                    "attn_mask": Split(dim=1, optional=True),
                    "freqs_cis": Split(dim=1),
                    "noise_mask": Split(dim=1, optional=True),
                },
                "layers.0": {"x": _JOINT},
                "layers.*": {"attn_mask": _MASK, "freqs_cis": _JOINT, "noise_mask": _MASK},
                "all_final_layer.*": {"noise_mask": _MASK},
            }
        ),
        gather=row({"noise_refiner.-1": Split(dim=1), "all_final_layer.*": _JOINT}),
        blocks=row(layers=("x",)),
        sample="x",
        timestep="t",
        batched=("x", "t", "cap_feats", "siglip_feats", "image_noise_mask"),
        per_sample=("x", "cap_feats", "siglip_feats", "image_noise_mask"),
        padded=row(controlnet_block_samples=("cap_feats", 32)),
        residuals=("controlnet_block_samples",),
    ),
)
