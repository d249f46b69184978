"""Lists UNets, whose images are cut into rows."""

from __future__ import annotations

from collections.abc import Mapping

from partsong.parallel.adapters.row import IMAGE, TEXT, Adapter, Split, row

__all__ = ["BLOCKS", "GATHER", "MASK", "ROWS", "TRANSFORMERS", "cut_rows"]

#: Where UNets have their blocks, and the attention to a picture inside these.
BLOCKS = ("down_blocks.*", "mid_block", "up_blocks.*")
TRANSFORMERS = {f"{blocks}.attentions.*.transformer_blocks.*.attn1": (IMAGE,) for blocks in BLOCKS}
MASK = "masks over the image's own positions are not supported; leave it out"
#: Where the rows leave a UNet.
GATHER = row(conv_out=Split(dim=2))


def cut_rows(*residuals: str) -> Mapping[str, Mapping[str | int, Split]]:
    """Returns the cuts of a UNet: its rows after the first convolution, and the residuals that it gets."""
    added = {"": row({name: Split(dim=2, optional=True) for name in residuals})} if residuals else {}
    return row({"conv_in": row({0: Split(dim=2, output=True)}), **added})


_RESIDUALS = (
    "down_block_additional_residuals",
    "down_intrablock_additional_residuals",
    "mid_block_additional_residual",
)

ROWS = (
    Adapter(
        family="SD UNet",
        model="UNet2DConditionModel",
        rows=True,
        # Where the modules at the last paths are attentions themselves, keys of the text are next to the image's.
        attention=row({**TRANSFORMERS, **{f"{blocks}.attentions.*": (TEXT, IMAGE) for blocks in BLOCKS}}),
        splits=cut_rows(*_RESIDUALS),
        gather=GATHER,
        sample="sample",
        batched=(
            "cross_attention_kwargs",
            "sample",
            "encoder_hidden_states",
            "timestep",
            "class_labels",
            "timestep_cond",
            "added_cond_kwargs",
            "encoder_attention_mask",
        ),
        residuals=_RESIDUALS,
        refused=row(attention_mask=MASK),
    ),
    Adapter(
        family="Unconditional UNet",
        model="UNet2DModel",
        rows=True,
        attention=row({f"{blocks}.attentions.*": (IMAGE,) for blocks in BLOCKS}),
        splits=cut_rows(),
        gather=GATHER,
        sample="sample",
        batched=("sample", "timestep", "class_labels"),
    ),
    Adapter(
        family="AudioLDM 2 UNet",
        model="AudioLDM2UNet2DConditionModel",
        rows=True,
        # Without a text, the second attention of a block attends to the sound too.
        attention=row({path.replace("attn1", "attn*"): streams for path, streams in TRANSFORMERS.items()}),
        splits=cut_rows(),
        gather=GATHER,
        sample="sample",
        batched=(
            "cross_attention_kwargs",
            "sample",
            "encoder_hidden_states",
            "timestep",
            "class_labels",
            "timestep_cond",
            "attention_mask",
            "encoder_attention_mask",
            "encoder_hidden_states_1",
            "encoder_attention_mask_1",
        ),
        refused=row(attention_mask=MASK),
    ),
    Adapter(
        family="Kandinsky 3 UNet",
        model="Kandinsky3UNet",
        whole="transposed convolutions and strided ones over pairs of rows change its resolution in mid-block",
        splits=row(),
        gather=row(),
        sample="sample",
        batched=("sample", "timestep", "encoder_hidden_states", "encoder_attention_mask"),
    ),
    Adapter(
        family="DreamLite UNet",
        model="DreamLiteUNetModel",
        rows=True,
        attention=row(TRANSFORMERS),
        splits=cut_rows(),
        gather=GATHER,
        sample="sample",
        batched=(
            "cross_attention_kwargs",
            "sample",
            "encoder_hidden_states",
            "timestep",
            "class_labels",
            "timestep_cond",
            "attention_mask",
            "added_cond_kwargs",
            "encoder_attention_mask",
        ),
        refused=row(attention_mask=MASK),
        repeats_keys=True,
    ),
    Adapter(
        family="Prior of image embeddings",
        model="PriorTransformer",
        whole="it joins text, time and embedding to one sequence inside itself, where no layer shows what is text",
        splits=row(),
        gather=row(),
        batched=("hidden_states", "timestep", "proj_embedding", "encoder_hidden_states", "attention_mask"),
    ),
    Adapter(
        family="Stable Cascade UNet",
        model="StableCascadeUNet",
        whole="it normalises by the size of whole pictures and stretches them to other sizes from corner to corner",
        splits=row(),
        gather=row(),
        sample="sample",
        timestep="timestep_ratio",
        batched=(
            "sample",
            "timestep_ratio",
            "clip_text_pooled",
            "clip_text",
            "clip_img",
            "effnet",
            "pixels",
            "sca",
            "crp",
        ),
    ),
)
