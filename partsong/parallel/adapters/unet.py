"""Lists UNets, whose images are cut into rows."""

from __future__ import annotations

from partsong.parallel.adapters.row import IMAGE, TEXT, Adapter, Split, row

__all__ = ["ROWS"]

_RESIDUALS = ("down_block_additional_residuals", "down_intrablock_additional_residuals")
_MIDDLE = "mid_block_additional_residual"
_MASK = "masks over the image's own positions are not supported; leave it out"

ROWS = (
    Adapter(
        family="SD UNet",
        model="UNet2DConditionModel",
        rows=True,
        attention=row(
            {
                f"{blocks}.attentions.*.transformer_blocks.*.attn1": (IMAGE,)
                for blocks in ("down_blocks.*", "mid_block", "up_blocks.*")
            },
            # Where these are attentions themselves, keys of the text stand beside the image's.
            **{f"{blocks}.attentions.*": (TEXT, IMAGE) for blocks in ("down_blocks.*", "mid_block", "up_blocks.*")},
        ),
        splits=row(
            {
                "conv_in": row({0: Split(dim=2, output=True)}),
                "": row({name: Split(dim=2, optional=True) for name in (*_RESIDUALS, _MIDDLE)}),
            }
        ),
        gather=row(conv_out=Split(dim=2)),
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
            _MIDDLE,
        ),
        residuals=_RESIDUALS,
        refused=row(attention_mask=_MASK),
    ),
    Adapter(
        family="Unconditional UNet",
        model="UNet2DModel",
        rows=True,
        attention=row({f"{blocks}.attentions.*": (IMAGE,) for blocks in ("down_blocks.*", "mid_block", "up_blocks.*")}),
        splits=row({"conv_in": row({0: Split(dim=2, output=True)})}),
        gather=row(conv_out=Split(dim=2)),
        sample="sample",
        batched=("sample", "timestep", "class_labels"),
    ),
    Adapter(
        family="AudioLDM 2 UNet",
        model="AudioLDM2UNet2DConditionModel",
        whole="no rule for rows covers its blocks, which take turns between texts and attend to the sound twice",
        splits=row(),
        gather=row(),
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
        whole="no rule for rows covers its separable convolutions and its attention with keys that heads share",
        splits=row(),
        gather=row(),
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
    ),
    Adapter(
        family="Prior of image embeddings",
        model="PriorTransformer",
        whole="it joins text, time and embedding to one sequence inside itself, where no layer shows what is text",
        splits=row(),
        gather=row(),
        batched=("hidden_states", "timestep", "proj_embedding", "encoder_hidden_states", "attention_mask"),
    ),
)
