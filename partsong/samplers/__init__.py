"""Runs the loops that turn a model and a schedule into a sample."""

from partsong.samplers.denoising.consistency import consistency, flow_estimate, flow_sigmas, trigflow_times
from partsong.samplers.denoising.rolling_noise import flow_blend, rolling_noise
from partsong.samplers.generate import generate, stream
from partsong.samplers.long_video.causal_checkpoint import load_causal_checkpoint
from partsong.samplers.long_video.sliding_windows import sliding_windows
from partsong.samplers.pipeline.paused import Denoise, Finished, PausedCall, Stepped

__all__ = [
    "Denoise",
    "Finished",
    "PausedCall",
    "Stepped",
    "consistency",
    "flow_blend",
    "flow_estimate",
    "flow_sigmas",
    "generate",
    "load_causal_checkpoint",
    "rolling_noise",
    "sliding_windows",
    "stream",
    "trigflow_times",
]
