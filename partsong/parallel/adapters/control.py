"""Lists ControlNets, whose tokens or rows are cut as those of the model they steer.

A row here says where the tokens of the picture and of the hint enter. They do not leave: a rank computes its
share of each residual. ControlNets without a row are computed whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from partsong.parallel.adapters.row import IMAGE, TEXT, Adapter, Split
from partsong.parallel.adapters.shared_cuts import (
    EMBEDDED,
    FLUX_ATTENTION,
    PAIR,
    SANA,
    TEXT_TOKENS,
    TOKENS,
    Cuts,
    names,
    returned,
)
from partsong.parallel.adapters.unet import MASK, TEXT_BESIDE

__all__ = ["control_adapter_for"]

#: Positions of text and picture in one table: the text's are in front.
_POSITIONS: Cuts = {"image_rotary_emb": Split(dim=0, stream=TEXT, leading=True)}
_SD3_INPUTS = "pooled_projections encoder_hidden_states"
_SD3 = {**EMBEDDED, "pos_embed_input": returned()}
#: ControlNets of UNets: for one kind of hints, for several, and for some frames of a video.
_OF_UNETS = ("ControlNetModel", "ControlNetUnionModel", "SparseControlNetModel")

#: A row, and the ControlNets of its class that it describes.
_Fitting = tuple[Adapter, Callable[[Any], bool]]


def _net(
    family: str, model: str, inputs: str, *, fits: Callable[[Any], bool] = lambda net: True, **more: Any
) -> _Fitting:
    """Makes a row; `inputs` names arguments besides the sample, the hint and ``timestep``."""
    sample = more.get("sample", "hidden_states")
    batched = names(f"{sample} controlnet_cond timestep {inputs}")
    return Adapter(family=family, model=model, gather={}, batched=batched, **more), fits


ROWS: tuple[_Fitting, ...] = (
    _net(
        "Flux ControlNet",
        "FluxControlNetModel",
        "controlnet_mode encoder_hidden_states pooled_projections guidance",
        fits=lambda net: len(net.transformer_blocks) > 0,
        attention=FLUX_ATTENTION,
        # The text is cut after its embedder: a net for several kinds of hints puts a token for the kind in front.
        splits={
            "": {"hidden_states": TOKENS, "img_ids": Split(dim=-2)},
            "controlnet_x_embedder": {"input": TOKENS},
            "transformer_blocks.0": {"encoder_hidden_states": TEXT_TOKENS},
            "transformer_blocks.*": _POSITIONS,
            "single_transformer_blocks.*": _POSITIONS,
        },
    ),
    _net(
        "SD3 ControlNet",
        "SD3ControlNetModel",
        _SD3_INPUTS,
        fits=lambda net: net.pos_embed is not None and net.context_embedder is not None,
        attention={"transformer_blocks.*.attn": (IMAGE, TEXT), "transformer_blocks.*.attn2": (IMAGE,)},
        splits={**_SD3, "context_embedder": returned(stream=TEXT)},
    ),
    _net(
        "SD3 ControlNet that reads no text",
        "SD3ControlNetModel",
        _SD3_INPUTS,
        fits=lambda net: net.pos_embed is not None and net.context_embedder is None,
        attention={"transformer_blocks.*.attn": (IMAGE,)},
        splits=_SD3,
    ),
    _net(
        "Qwen-Image ControlNet",
        "QwenImageControlNetModel",
        "encoder_hidden_states encoder_hidden_states_mask img_shapes",
        attention={"transformer_blocks.*.attn": (TEXT, IMAGE)},
        splits={
            # The last step before the blocks, where picture and hint have become tokens.
            "transformer_blocks.0": PAIR,
            "transformer_blocks.*": {"encoder_hidden_states_mask": Split(dim=1, stream=TEXT, optional=True)},
            "pos_embed": {0: Split(dim=0, output=True), 1: Split(dim=0, stream=TEXT, output=True)},
        },
    ),
    _net(
        "HunyuanDiT ControlNet",
        "HunyuanDiT2DControlNetModel",
        "encoder_hidden_states text_embedding_mask encoder_hidden_states_t5 text_embedding_mask_t5 image_meta_size "
        "style",
        attention={"blocks.*.attn1": (IMAGE,)},
        splits={**EMBEDDED, "": {"image_rotary_emb": Split(dim=0, optional=True)}},
    ),
    _net(
        "Sana ControlNet",
        "SanaControlNetModel",
        "encoder_hidden_states encoder_attention_mask",
        **SANA,
        splits={"patch_embed": returned(), "transformer_blocks.*": {"height": Split(dim=0)}},
    ),
    # The first half of a UNet. Picture and hint are convolved whole, and what they add up to is cut before the first
    # block and for the first made from it.
    *(
        _net(
            "ControlNet of UNets",
            model,
            "encoder_hidden_states added_cond_kwargs",
            fits=lambda net: not net.config.global_pool_conditions,
            rows=True,
            attention=TEXT_BESIDE,
            splits={
                "down_blocks.0": {"hidden_states": Split(dim=2)},
                "controlnet_down_blocks.0": {"input": Split(dim=2)},
            },
            sample="sample",
            refused=MASK,
        )
        for model in _OF_UNETS
    ),
)


def control_adapter_for(module: nn.Module) -> Adapter | None:
    """Returns the row of a ControlNet; None where it has to be computed whole."""
    name = type(module).__name__
    return next((adapter for adapter, fits in ROWS if adapter.model == name and fits(module)), None)
