"""Knows the blocks of video models whose frames are cut into clips: their class names, and what they read."""

from __future__ import annotations

from typing import Any

from torch import nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import Adapter
from partsong.parallel.cuts.row_blocks import UNET_BLOCKS

__all__ = ["check_blocks", "frames_beyond"]

#: Names of modules that see time, text and other conditions, but never the video.
_OFF_THE_PATH = ("time_", "add_", "encoder_hid_proj")
#: FreeNoise's classes, which look at overlapping windows of frames one after another.
_FREE_NOISE = frozenset({"FreeNoiseTransformerBlock", "SplitInferenceModule"})
_ADVICE = "use CfgParallel or DataParallel, which leave the model whole"


def check_blocks(module: nn.Module, adapter: Adapter) -> None:
    """Refuses a model with parts that may look across frames in an unknown way.

    Raises:
        UnsupportedError: names the part, says why and what to use.
    """
    for name, child in module.named_modules():
        kind = type(child)
        if kind.__name__ in _FREE_NOISE:
            raise UnsupportedError(
                f"{adapter.model}: FreeNoise is on ({name}), which averages windows of its own; call "
                f"disable_free_noise() before parallelize(), or {_ADVICE}"
            )
        if name.startswith(_OFF_THE_PATH) or kind.__module__.startswith("peft."):
            continue
        if kind.__name__ not in UNET_BLOCKS:
            raise UnsupportedError(
                f"{adapter.model}: {name} ({kind.__name__}) is not known to this splitting into clips; {_ADVICE}"
            )


def frames_beyond(name: str, child: nn.Module) -> int:
    """Counts the frames that a layer reads to each side of its own, 0 for most layers.

    Raises:
        UnsupportedError: a convolution over frames changes their number, or has an adapter that hooks cannot reach.
    """
    layer: Any = child
    if isinstance(getattr(layer, "base_layer", None), nn.Conv3d) and not _is_plain_lora(layer):
        raise UnsupportedError(f"{name}: adapts a convolution over frames in a way that looks across them; fuse it")
    if not isinstance(child, nn.Conv3d):
        return 0
    span, padding = child.dilation[0] * (child.kernel_size[0] - 1), child.padding[0]
    if span == 0 and padding == 0 and child.stride[0] == 1:
        return 0
    if child.padding_mode != "zeros" or not isinstance(padding, int) or 2 * padding != span or child.stride[0] != 1:
        raise UnsupportedError(
            f"{name}: a convolution over {child.kernel_size[0]} frames with padding {child.padding!r} "
            f"({child.padding_mode}) and stride {child.stride[0]} cannot be cut; zero padding that keeps the number of "
            "frames can"
        )
    return padding


def _is_plain_lora(layer: Any) -> bool:
    return hasattr(layer, "lora_A") and not any(getattr(layer, "use_dora", {}).values())
