"""Lists UNets, whose images are cut into rows."""

from __future__ import annotations

from partsong.parallel.adapters.row import IMAGE, Adapter, Split, row

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
            }
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
)
