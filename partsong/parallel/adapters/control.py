"""Lists ControlNets, whose tokens or rows are cut as those of the model they steer.

A row here says where the tokens of the picture and of the hint enter. They do not leave: a rank computes its
share of each residual. ControlNets without a row are computed whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from partsong.parallel.adapters.cross import EMBEDDED
from partsong.parallel.adapters.row import IMAGE, TEXT, Adapter, Split, row
from partsong.parallel.adapters.unet import BLOCKS, MASK, TRANSFORMERS

__all__ = ["control_adapter_for"]

_IMAGE, _TEXT = Split(dim=1), Split(dim=1, stream=TEXT)
#: The last steps before the blocks, where picture and hint have become tokens.
_HINTED = {"hidden_states": _IMAGE, "encoder_hidden_states": _TEXT}
#: Positions of text and picture in one table: the text's are in front.
_POSITIONS = {"image_rotary_emb": Split(dim=0, stream=TEXT, leading=True)}

_SD3 = row({**EMBEDDED, "pos_embed_input": {0: Split(dim=1, output=True)}})
_SD3_BATCHED = ("hidden_states", "controlnet_cond", "encoder_hidden_states", "pooled_projections", "timestep")

#: ControlNets of UNets: for one kind of hints, for several, and for some frames of a video.
_OF_UNETS = ("ControlNetModel", "ControlNetUnionModel", "SparseControlNetModel")


def _of_unet(model: str) -> Adapter:
    """Returns the row of a ControlNet that is the first half of a UNet.

    Picture and hint are convolved whole; their sum is cut before the first block and for the first residual, which is
    made from it.
    """
    return Adapter(
        family="ControlNet of UNets",
        model=model,
        rows=True,
        attention=row({**TRANSFORMERS, **{f"{blocks}.attentions.*": (TEXT, IMAGE) for blocks in BLOCKS}}),
        splits=row(
            {
                "down_blocks.0": {"hidden_states": Split(dim=2)},
                "controlnet_down_blocks.0": {"input": Split(dim=2)},
            }
        ),
        gather=row(),
        sample="sample",
        batched=("sample", "timestep", "encoder_hidden_states", "controlnet_cond", "added_cond_kwargs"),
        refused=row(attention_mask=MASK),
    )


ROWS: tuple[tuple[Adapter, Callable[[Any], bool]], ...] = (
    (
        Adapter(
            family="Flux ControlNet",
            model="FluxControlNetModel",
            attention=row(
                {"transformer_blocks.*.attn": (TEXT, IMAGE), "single_transformer_blocks.*.attn": (TEXT, IMAGE)}
            ),
            # The text is cut after its embedder: a net for several kinds of hints puts a token for the kind in front.
            splits=row(
                {
                    "": {"hidden_states": _IMAGE, "img_ids": Split(dim=-2)},
                    "controlnet_x_embedder": {"input": _IMAGE},
                    "transformer_blocks.0": {"encoder_hidden_states": _TEXT},
                    "transformer_blocks.*": _POSITIONS,
                    "single_transformer_blocks.*": _POSITIONS,
                }
            ),
            gather=row(),
            batched=(
                "hidden_states",
                "controlnet_cond",
                "controlnet_mode",
                "encoder_hidden_states",
                "pooled_projections",
                "timestep",
                "guidance",
            ),
        ),
        lambda net: len(net.transformer_blocks) > 0,
    ),
    (
        Adapter(
            family="SD3 ControlNet",
            model="SD3ControlNetModel",
            attention=row({"transformer_blocks.*.attn": (IMAGE, TEXT), "transformer_blocks.*.attn2": (IMAGE,)}),
            splits=row({**_SD3, "context_embedder": {0: Split(dim=1, stream=TEXT, output=True)}}),
            gather=row(),
            batched=_SD3_BATCHED,
        ),
        lambda net: net.pos_embed is not None and net.context_embedder is not None,
    ),
    (
        Adapter(
            family="SD3 ControlNet that reads no text",
            model="SD3ControlNetModel",
            attention=row({"transformer_blocks.*.attn": (IMAGE,)}),
            splits=_SD3,
            gather=row(),
            batched=_SD3_BATCHED,
        ),
        lambda net: net.pos_embed is not None and net.context_embedder is None,
    ),
    (
        Adapter(
            family="Qwen-Image ControlNet",
            model="QwenImageControlNetModel",
            attention=row({"transformer_blocks.*.attn": (TEXT, IMAGE)}),
            splits=row(
                {
                    "transformer_blocks.0": _HINTED,
                    "transformer_blocks.*": {"encoder_hidden_states_mask": Split(dim=1, stream=TEXT, optional=True)},
                    "pos_embed": {0: Split(dim=0, output=True), 1: Split(dim=0, stream=TEXT, output=True)},
                }
            ),
            gather=row(),
            batched=(
                "hidden_states",
                "controlnet_cond",
                "encoder_hidden_states",
                "encoder_hidden_states_mask",
                "timestep",
                "img_shapes",
            ),
        ),
        lambda net: True,
    ),
    (
        Adapter(
            family="HunyuanDiT ControlNet",
            model="HunyuanDiT2DControlNetModel",
            attention=row({"blocks.*.attn1": (IMAGE,)}),
            splits=row({**EMBEDDED, "": {"image_rotary_emb": Split(dim=0, optional=True)}}),
            gather=row(),
            batched=(
                "hidden_states",
                "timestep",
                "controlnet_cond",
                "encoder_hidden_states",
                "text_embedding_mask",
                "encoder_hidden_states_t5",
                "text_embedding_mask_t5",
                "image_meta_size",
                "style",
            ),
        ),
        lambda net: True,
    ),
    (
        Adapter(
            family="Sana ControlNet",
            model="SanaControlNetModel",
            linear_attention=row({"transformer_blocks.*.attn1": "SanaLinearAttnProcessor2_0"}),
            convolutions=("transformer_blocks.*.ff.conv_depth",),
            whole_rows=True,
            splits=row(
                {
                    "patch_embed": {0: Split(dim=1, output=True)},
                    "transformer_blocks.*": {"height": Split(dim=0)},
                }
            ),
            gather=row(),
            batched=(
                "hidden_states",
                "encoder_hidden_states",
                "timestep",
                "controlnet_cond",
                "encoder_attention_mask",
            ),
        ),
        lambda net: True,
    ),
    *((_of_unet(name), lambda net: not net.config.global_pool_conditions) for name in _OF_UNETS),
)


def control_adapter_for(module: nn.Module) -> Adapter | None:
    """Returns the row of a ControlNet; None where it has to be computed whole."""
    name = type(module).__name__
    return next((adapter for adapter, fits in ROWS if adapter.model == name and fits(module)), None)
