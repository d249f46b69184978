"""Says which blocks and layers of convolutional models may be cut into rows, and what they read.

They are listed by class name, so a model is supported through its parts and not by its own name.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from itertools import pairwise
from typing import Any, cast

from torch import nn

from partsong.errors import UnsupportedError

__all__ = [
    "AUTOENCODER_ADVICE",
    "AUTOENCODER_BLOCKS",
    "SELF_ATTENTION",
    "UNET_ADVICE",
    "UNET_BLOCKS",
    "border_rows",
    "check_convolution",
    "doubled_columns",
    "farthest_reach",
    "framed_norms",
    "halves_evenly",
    "is_causal",
    "is_low_rank",
    "is_off_the_path",
    "joins_text",
    "level_change",
    "level_changes",
    "reads_text",
    "reads_the_image",
    "refuse_unknown",
]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LAYERS = _names(
    "ModuleList ModuleDict Sequential Conv2d Linear GroupNorm LayerNorm RMSNorm SiLU ReLU Dropout Identity "
    "NonDynamicallyQuantizableLinear ParameterDict ResnetBlock2D Downsample2D Upsample2D UNetMidBlock2D Attention "
    "GELU Mish Sigmoid Tanh LeakyReLU Hardswish"
)
#: Parts of UNets that make videos. Frames are a batch to most of them, others look along time at each position.
_MOTION = (
    "UNetMotionModel DownBlockMotion CrossAttnDownBlockMotion UpBlockMotion CrossAttnUpBlockMotion "
    "UNetMidBlockCrossAttnMotion AnimateDiffTransformer3D SinusoidalPositionalEmbedding"
)
_THREE_D = (
    "UNet3DConditionModel DownBlock3D CrossAttnDownBlock3D UpBlock3D CrossAttnUpBlock3D UNetMidBlock3DCrossAttn "
    "TemporalConvLayer TransformerTemporalModel Conv3d"
)
_SPATIO_TEMPORAL = (
    "UNetSpatioTemporalConditionModel DownBlockSpatioTemporal CrossAttnDownBlockSpatioTemporal UpBlockSpatioTemporal "
    "CrossAttnUpBlockSpatioTemporal UNetMidBlockSpatioTemporal SpatioTemporalResBlock TemporalResnetBlock AlphaBlender "
    "TransformerSpatioTemporalModel TemporalBasicTransformerBlock TimestepEmbedding Timesteps"
)
_DREAM_LITE = (
    "BasicTransformerBlockDreamLite DepthwiseSeparableConv DreamLiteCrossAttnDownBlock2D DreamLiteUpBlock2D "
    "DreamLiteCrossAttnNoSelfAttnDownBlock2D DreamLiteCrossAttnNoSelfAttnUpBlock2D DreamLiteCrossAttnUpBlock2D "
    "DreamLiteDownBlock2D DreamLiteTransformer2DModel DreamLiteUNetMidBlock2DCrossAttn DreamLiteUNetModel "
    "ResnetBlock2DDreamLite"
)
#: Residual blocks, which may change the resolution inside.
_RESIDUAL = frozenset({"ResnetBlock2D", "ResnetBlock2DDreamLite"})
#: Modules of a UNet that process the image and that `RowSplit` can cut, or that look at each position by itself.
UNET_BLOCKS = _LAYERS.union(*map(_names, (_MOTION, _THREE_D, _SPATIO_TEMPORAL, _DREAM_LITE))) | _names(
    "UNet2DConditionModel DownBlock2D CrossAttnDownBlock2D UpBlock2D CrossAttnUpBlock2D UNetMidBlock2DCrossAttn "
    "Transformer2DModel BasicTransformerBlock FeedForward GEGLU GELU ApproximateGELU LinearActivation SwiGLU "
    "IPAdapterAttnProcessor2_0 UNet2DModel AttnDownBlock2D AttnUpBlock2D AvgPool2d ResnetDownsampleBlock2D "
    "ResnetUpsampleBlock2D SimpleCrossAttnDownBlock2D SimpleCrossAttnUpBlock2D UNetMidBlock2DSimpleCrossAttn "
    "AudioLDM2UNet2DConditionModel ControlNetModel ControlNetUnionModel SparseControlNetModel"
)
UNET_ADVICE = "use CfgParallel or DataParallel, which leave the model whole"
_KL = "Encoder Decoder DownEncoderBlock2D UpDecoderBlock2D AttnDownEncoderBlock2D AttnUpDecoderBlock2D"
_TINY = "EncoderTiny DecoderTiny AutoencoderTinyBlock Upsample"
_DEEP = (
    "ResBlock EfficientViTBlock SanaMultiscaleLinearAttention SanaMultiscaleAttentionProjection GLUMBConv "
    "DCDownBlock2d DCUpBlock2d"
)
_CAUSAL = "CausalConv3d RMS_norm Upsample Resample ResidualBlock AttentionBlock MidBlock UpBlock Encoder3d Decoder3d"
_VIDEO = "ZeroPad2d AvgDown3D DupUp3D WanResidualDownBlock WanResidualUpBlock"
#: The same for the encoders and decoders of autoencoders.
AUTOENCODER_BLOCKS = _LAYERS.union(
    *map(_names, (_KL, _TINY, _DEEP, _VIDEO)),
    (family + name for family in ("Wan", "QwenImage") for name in _CAUSAL.split()),
)
AUTOENCODER_ADVICE = "use ParallelVae(tile=32), which decodes overlapping tiles and is approximate, or drop ParallelVae"
#: Self-attention over the whole image in autoencoders.
SELF_ATTENTION = frozenset({"Attention", "WanAttentionBlock", "QwenImageAttentionBlock"})
#: Modules of a UNet that see time, text and other conditions but never the image, and those of a ControlNet that get
#: all rows of its hint.
_OFF_THE_PATH = (
    *("time_", "add_", "class_embedding", "encoder_hid_proj", "text_proj"),
    *("controlnet_cond_embedding", "control_add_embedding", "control_type_proj", "transformer_layes"),
    "spatial_ch_projs",
)
#: Models that end in a group norm, a function of each position and a convolution.
_ENDS_IN_NORM = _names("UNet2DConditionModel UNet2DModel Encoder Decoder")
#: Modules that put pairs of rows together, which must not be left with half a pair.
_PAIRS = frozenset({"DCDownBlock2d", "AvgDown3D", "AvgPool2d"})


def refuse_unknown(module: nn.Module, known: Set[str], advice: str) -> None:
    """Refuses a model with parts that may look across rows in an unknown way.

    Raises:
        UnsupportedError: names the part, says why and what to use.
    """
    for name, child in module.named_modules():
        kind = type(child)
        if is_off_the_path(name):
            continue
        reason: str | None = "is not known to this splitting into rows"
        if kind.__module__.startswith("peft."):
            reason = _adapter_problem(child)
        elif kind.__name__ in known:
            reason = _setting_problem(child)
        if reason is not None:
            where = f"{name} ({kind.__name__})" if name else kind.__name__
            raise UnsupportedError(f"{type(module).__name__}: {where} {reason}; {advice}")


def _setting_problem(child: Any) -> str | None:
    """Says why a module of a known class cannot be cut with its settings; None where it can."""
    kind = type(child).__name__
    if kind in _RESIDUAL and not all(isinstance(part, nn.Module | None) for part in _resampling(child)):
        return "filters the image where it changes its resolution"
    if kind == "Upsample2D" and child.use_conv_transpose:
        return "upsamples with a transposed convolution"
    if kind == "Transformer2DModel" and not child.is_input_continuous:
        return "takes patches or codes instead of an image"
    if kind.removeprefix("DreamLite").startswith(("Up", "CrossAttn")) and getattr(child, "s1", None):
        return "has FreeU on, which filters the whole image's spectrum"
    if kind == "Conv3d" and (child.kernel_size[-2] > 1 or child.stride[-2] > 1):
        return "convolves frames and rows at once"
    mode = getattr(child, "interpolation_mode", None) or (child.mode if isinstance(child, nn.Upsample) else "nearest")
    if not mode.startswith("nearest"):
        return f"interpolates ({mode}) between rows"
    if isinstance(child, nn.Upsample) and child.scale_factor not in (2.0, (2.0, 2.0)):
        return f"upsamples by {child.scale_factor}, and only 2 is known"
    return None


def _adapter_problem(child: Any) -> str | None:
    """Says why a layer of peft cannot be cut: only a plain LoRA computes with modules that hooks can reach."""
    if not isinstance(getattr(child, "base_layer", None), nn.Conv2d):
        return None  # a linear layer looks at each position by itself, with any adapter
    plain = hasattr(child, "lora_A") and not any(getattr(child, "use_dora", {}).values())
    return None if plain else "adapts a convolution in a way that looks across rows; merge the adapter (fuse_lora)"


def is_low_rank(name: str) -> bool:
    """Says whether a layer belongs to a LoRA, which reads the input of the layer beside it."""
    return ".lora_" in name


def is_off_the_path(name: str) -> bool:
    """Says whether a module of a UNet sees time, text and other conditions, but never this rank's rows."""
    return name.startswith(_OFF_THE_PATH)


def joins_text(attention: Any) -> bool:
    """Says whether an attention of diffusers puts keys of the text in front of the image's."""
    return attention.added_kv_proj_dim is not None


def reads_text(module: nn.Module) -> bool:
    """Says whether a model has cross-attention to a text; without a text, it would attend to the image."""
    attentions: list[Any] = [
        child
        for name, child in module.named_modules()
        if type(child).__name__ == "Attention" and not is_off_the_path(name)
    ]
    return any(child.is_cross_attention for child in attentions)


def reads_the_image(attention: Any) -> bool:
    """Says whether an attention of diffusers has keys of the image, not only of the text."""
    return not (attention.only_cross_attention if joins_text(attention) else attention.is_cross_attention)


def is_causal(child: nn.Module) -> bool:
    """Says whether a module is a convolution over frames that pads by itself, as those of video autoencoders."""
    return isinstance(child, nn.Conv3d) and hasattr(child, "_padding")


def border_rows(child: nn.Module) -> int:
    """Returns how many rows a convolution reads beyond each of its own, above and below; 0 for other modules."""
    if isinstance(child, nn.Conv2d) or is_causal(child):
        conv: Any = child
        return conv.dilation[-2] * (conv.kernel_size[-2] - 1)
    return 0


def farthest_reach(module: nn.Module) -> int:
    """Returns the rows that a rank needs at the coarsest level, so that no convolution reaches beyond the next rank."""
    return max((border_rows(child) + 1) // 2 for child in module.modules())


def check_convolution(name: str, child: nn.Module) -> None:
    """Refuses a convolution that neither keeps nor halves the height.

    Raises:
        UnsupportedError: names it and says which convolutions can be cut.
    """
    conv: Any = child
    padding = conv._padding[2] if is_causal(conv) else conv.padding[-2]
    span, stride = border_rows(conv), conv.stride[-2]
    kept = isinstance(padding, int) and ((stride == 1 and 2 * padding == span) or (stride == 2 and span == 2))
    if conv.padding_mode != "zeros" or not kept or (is_causal(conv) and stride > 1):
        raise UnsupportedError(
            f"{name}: a convolution of {conv.kernel_size[-2]} rows with padding {padding!r} ({conv.padding_mode}) "
            f"and stride {stride} cannot be cut into rows; zero padding that keeps or halves the height can"
        )


def level_change(child: nn.Module) -> int:
    """Returns -1 for a module that doubles the rows, 1 for one that halves them without a convolution's stride."""
    kind = type(child).__name__
    if kind in ("Upsample2D", "DCUpBlock2d") or isinstance(child, nn.Upsample):
        return -1
    return int(
        isinstance(child, nn.AvgPool2d) or (kind == "DCDownBlock2d" and bool(getattr(child, "downsample", False)))
    )


def level_changes(modules: Mapping[str, nn.Module]) -> dict[str, int]:
    """Says after which modules the image has another number of rows, with the changes that `level_change` returns.

    A residual block may resample both of its branches, each before a convolution. There only the first convolution of
    the main branch counts, since only the norm after it depends on the number of rows.
    """
    changes = {name: change for name, child in modules.items() if (change := level_change(child))}
    for name, child in modules.items():
        if type(child).__name__ in _RESIDUAL and any(part is not None for part in _resampling(child)):
            inside = (f"{name}.upsample", f"{name}.downsample")
            changes = {place: change for place, change in changes.items() if not place.startswith(inside)}
            changes[f"{name}.conv1"] = -1 if child.upsample is not None else 1  # type: ignore[union-attr]
    return changes


def _resampling(block: Any) -> tuple[Any, Any]:
    """Returns the modules that change the resolution inside a residual block: up and down, or None."""
    return block.upsample, block.downsample


def halves_evenly(module: nn.Module) -> bool:
    """Says whether a model takes only heights that halve without a rest."""
    return any(type(child).__name__ in _PAIRS for child in module.modules())


def framed_norms(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Names the group norms that a convolution follows, with nothing between but a function of each position.

    Such a norm can receive the rows around a rank's own with the statistics that it waits for anyway, and pass them on
    to the convolution. Beyond the image there are zeros, which the function between must keep.
    """
    pairs = {}
    for name, child in modules.items():
        block, inside = cast("Any", child), f"{name}." if name else ""
        if type(child).__name__ == "ResnetBlock2D" and _keeps_zero(block.nonlinearity):
            pairs |= {} if any(_resampling(block)) else {f"{inside}norm1": f"{inside}conv1"}
            pairs |= {} if block.time_embedding_norm == "scale_shift" else {f"{inside}norm2": f"{inside}conv2"}
        elif type(child).__name__ in _ENDS_IN_NORM and _keeps_zero(getattr(block, "conv_act", None)):
            pairs[f"{inside}conv_norm_out"] = f"{inside}conv_out"
    return {norm: conv for norm, conv in pairs.items() if _frames(modules.get(norm), modules.get(conv))}


def _keeps_zero(function: Any) -> bool:
    return type(function).__name__ in ("SiLU", "Mish", "GELU", "ReLU", "Identity")


def _frames(norm: Any, conv: Any) -> bool:
    """Says whether a norm and a convolution are plain ones, and the latter reads as many rows above as below."""
    return type(norm) is nn.GroupNorm and type(conv) is nn.Conv2d and conv.stride[0] == 1 and border_rows(conv) > 0


def doubled_columns(modules: Mapping[str, nn.Module]) -> set[str]:
    """Names the convolutions that read a just enlarged image, in which every column appears twice."""
    names = set()
    for name, child in modules.items():
        inside = [f"{name}.{part}" for part, _ in child.named_children()]
        if type(child).__name__ == "Upsample2D" or getattr(child, "interpolate", None) is True:
            names.update(inside)
        if type(child).__name__ in _RESIDUAL and _resampling(child)[0] is not None:
            names.add(f"{name}.conv1")
        if isinstance(child, nn.Sequential):
            names.update(after for before, after in pairwise(inside) if isinstance(modules[before], nn.Upsample))
    return names
