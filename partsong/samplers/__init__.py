"""Loops: what turns a model and a schedule into a sample."""

from partsong.samplers.generate import generate, stream
from partsong.samplers.paused import Denoise, Finished, PausedCall, Stepped

__all__ = ["Denoise", "Finished", "PausedCall", "Stepped", "generate", "stream"]
