"""Lists UNets with temporal layers: frames are a batch to everything but a few modules, named here by class.

Those look along time at each position by itself, so the rows of all frames are cut like those of a picture.
"""

from __future__ import annotations

from partsong.parallel.adapters.row import Frames
from partsong.parallel.adapters.shared_cuts import names
from partsong.parallel.adapters.unet import unet

__all__ = ["ROWS"]

_RESIDUALS = "down_block_additional_residuals mid_block_additional_residual"
_INPUTS = "encoder_hidden_states cross_attention_kwargs timestep_cond"
_MASK = {"attention_mask": "masks over a frame's own positions are not supported; leave it out"}

ROWS = (
    unet(
        "AnimateDiff UNet",
        "UNetMotionModel",
        f"{_INPUTS} added_cond_kwargs",
        residuals=_RESIDUALS,
        frames=Frames(mixers=("AnimateDiffTransformer3D",), folded=("encoder_hidden_states", *names(_RESIDUALS))),
        refused=_MASK,
    ),
    unet(
        "Text-to-video UNet",
        "UNet3DConditionModel",
        f"{_INPUTS} class_labels",
        residuals=_RESIDUALS,
        frames=Frames(mixers=("TemporalConvLayer", "TransformerTemporalModel"), folded=names(_RESIDUALS)),
        refused=_MASK,
    ),
    unet(
        "Stable Video Diffusion UNet",
        "UNetSpatioTemporalConditionModel",
        "encoder_hidden_states added_time_ids",
        frames=Frames(
            dim=1,
            mixers=("TemporalResnetBlock", "TemporalBasicTransformerBlock"),
            numbered=("TransformerSpatioTemporalModel",),
        ),
    ),
)
