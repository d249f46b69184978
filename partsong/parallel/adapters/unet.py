"""Lists UNets, whose images are cut into rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from partsong.parallel.adapters.row import IMAGE, TEXT, Adapter, Split
from partsong.parallel.adapters.shared_cuts import Cuts, names, returned, whole

__all__ = ["MASK", "ROWS", "TEXT_BESIDE", "TRANSFORMERS", "unet"]

#: Where UNets have their blocks, and the attention to a picture inside these.
_BLOCKS = ("down_blocks.*", "mid_block", "up_blocks.*")
TRANSFORMERS = {f"{blocks}.attentions.*.transformer_blocks.*.attn1": (IMAGE,) for blocks in _BLOCKS}
#: Where the modules at the last paths are attentions themselves, keys of the text stand beside the image's.
TEXT_BESIDE = {**TRANSFORMERS, **{f"{blocks}.attentions.*": (TEXT, IMAGE) for blocks in _BLOCKS}}
MASK = {"attention_mask": "masks over the image's own positions are not supported; leave it out"}


def unet(
    family: str,
    model: str,
    inputs: str,
    *,
    attention: Mapping[str, tuple[str, ...]] = TRANSFORMERS,
    residuals: str = "",
    **more: Any,
) -> Adapter:
    """Makes the row of a UNet: its rows are cut behind the first convolution and leave with the last.

    `inputs` and `residuals` name arguments besides ``sample`` and ``timestep``; residuals are cut as well.
    """
    added: Cuts = {name: Split(dim=2, optional=True) for name in names(residuals)}
    return Adapter(
        family=family,
        model=model,
        rows=True,
        attention=attention,
        splits={"conv_in": returned(2), **({"": added} if added else {})},
        gather={"conv_out": Split(dim=2)},
        sample="sample",
        batched=names("sample timestep " + inputs),
        residuals=names(residuals),
        **more,
    )


_TEXT = "encoder_hidden_states encoder_attention_mask"
_COMMON = f"{_TEXT} cross_attention_kwargs class_labels timestep_cond"

ROWS = (
    unet(
        "SD UNet",
        "UNet2DConditionModel",
        f"{_COMMON} added_cond_kwargs",
        attention=TEXT_BESIDE,
        residuals="down_block_additional_residuals down_intrablock_additional_residuals mid_block_additional_residual",
        refused=MASK,
    ),
    unet(
        "Unconditional UNet",
        "UNet2DModel",
        "class_labels",
        attention={f"{blocks}.attentions.*": (IMAGE,) for blocks in _BLOCKS},
    ),
    unet(
        "AudioLDM 2 UNet",
        "AudioLDM2UNet2DConditionModel",
        f"{_COMMON} attention_mask encoder_hidden_states_1 encoder_attention_mask_1",
        # Without a text, the second attention of a block attends to the sound too.
        attention={path.replace("attn1", "attn*"): streams for path, streams in TRANSFORMERS.items()},
        refused=MASK,
    ),
    whole(
        "Kandinsky 3 UNet",
        "Kandinsky3UNet",
        "transposed convolutions and strided ones over pairs of rows change its resolution in mid-block",
        f"sample timestep {_TEXT}",
        sample="sample",
    ),
    unet(
        "DreamLite UNet",
        "DreamLiteUNetModel",
        f"{_COMMON} attention_mask added_cond_kwargs",
        refused=MASK,
        repeats_keys=True,
    ),
    whole(
        "Prior of image embeddings",
        "PriorTransformer",
        "it joins text, time and embedding to one sequence inside itself, where no layer shows what is text",
        "hidden_states timestep proj_embedding encoder_hidden_states attention_mask",
    ),
    whole(
        "Stable Cascade UNet",
        "StableCascadeUNet",
        "it normalises by the size of whole pictures and stretches them to other sizes from corner to corner",
        "sample timestep_ratio clip_text_pooled clip_text clip_img effnet pixels sca crp",
        sample="sample",
        timestep="timestep_ratio",
    ),
)
