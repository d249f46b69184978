"""Lists UNets with temporal layers: frames are a batch to everything but a few modules, named here by class.

Those look along time at each position by itself, so the rows of all frames are cut like those of a picture.
"""

from __future__ import annotations

from partsong.parallel.adapters.row import Adapter, Frames, row
from partsong.parallel.adapters.unet import GATHER, TRANSFORMERS, cut_rows

__all__ = ["ROWS"]

_DOWN, _MIDDLE = "down_block_additional_residuals", "mid_block_additional_residual"
_MASK = row(attention_mask="masks over a frame's own positions are not supported; leave it out")

ROWS = (
    Adapter(
        family="AnimateDiff UNet",
        model="UNetMotionModel",
        frames=Frames(mixers=("AnimateDiffTransformer3D",), folded=("encoder_hidden_states", _DOWN, _MIDDLE)),
        rows=True,
        attention=row(TRANSFORMERS),
        splits=cut_rows(_DOWN, _MIDDLE),
        gather=GATHER,
        sample="sample",
        batched=(
            "cross_attention_kwargs",
            "sample",
            "encoder_hidden_states",
            "timestep",
            "timestep_cond",
            "added_cond_kwargs",
        ),
        residuals=(_DOWN, _MIDDLE),
        refused=_MASK,
    ),
    Adapter(
        family="Text-to-video UNet",
        model="UNet3DConditionModel",
        frames=Frames(mixers=("TemporalConvLayer", "TransformerTemporalModel"), folded=(_DOWN, _MIDDLE)),
        rows=True,
        attention=row(TRANSFORMERS),
        splits=cut_rows(_DOWN, _MIDDLE),
        gather=GATHER,
        sample="sample",
        batched=(
            "cross_attention_kwargs",
            "sample",
            "encoder_hidden_states",
            "timestep",
            "class_labels",
            "timestep_cond",
        ),
        residuals=(_DOWN, _MIDDLE),
        refused=_MASK,
    ),
    Adapter(
        family="Stable Video Diffusion UNet",
        model="UNetSpatioTemporalConditionModel",
        frames=Frames(
            dim=1,
            mixers=("TemporalResnetBlock", "TemporalBasicTransformerBlock"),
            numbered=("TransformerSpatioTemporalModel",),
        ),
        rows=True,
        attention=row(TRANSFORMERS),
        splits=cut_rows(),
        gather=GATHER,
        sample="sample",
        batched=("sample", "timestep", "encoder_hidden_states", "added_time_ids"),
    ),
)
