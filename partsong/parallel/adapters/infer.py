"""Infers a row for a plain model that has none: one that embeds, runs self-attending blocks and projects.

Only the picture's tokens are cut; the text stays whole and is read by cross-attention. The structure does not show
everything, so an inferred row is trusted only after its first call has given the result of one rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters.row import IMAGE, Adapter, Gather, Split, Splits, read_class_plan
from partsong.parallel.hooks.model_hooks import signature_of

__all__ = ["inferred"]

#: Names of the argument with the noisy latents, and of the one with the timestep.
_SAMPLES, _TIMES = (
    ("hidden_states", "sample", "x", "latents"),
    (
        *("timestep", "t", "timesteps"),
        *("time", "sigma", "sigmas", "noise_level"),
    ),
)
#: Names of the layers that turn pictures into tokens `[B, L, C]` in diffusers models.
_EMBEDDERS = ("pos_embed", "patch_embed", "x_embedder", "img_in", "proj_in")
#: Usual names of cross-attention, for modules that do not say what they are.
_CROSS = ("attn2", "cross_attn", "cross_attention")
#: Prefixes of the names of text arguments.
_TEXT = ("encoder_", "txt_", "text_", "context", "caption")


def inferred(module: nn.Module) -> Adapter:
    """Infers the row of a plain token model, or one that leaves the input whole; both still have to be verified.

    Args:
        module: a denoiser without a row of its own.

    Raises:
        UnsupportedError: says what is missing or unclear.
    """
    try:
        return _of_tokens(module)
    except UnsupportedError as problem:
        row = _of_samples(module, str(problem))
        if row is None:
            raise
        return row


def _of_samples(module: nn.Module, problem: str) -> Adapter | None:
    """Returns a row by which samples and branches of guidance are shared out, which needs to know no layer.

    Returns:
        None where no argument is known to be the timestep: it may be no denoiser.
    """
    arguments, model = tuple(signature_of(module).parameters), type(module).__name__
    time = next((name for name in _TIMES if name in arguments), None)
    if time is None or arguments[0] == time:
        return None
    return Adapter(
        family=model,
        model=model,
        sample=next((name for name in _SAMPLES if name in arguments), arguments[0]),
        timestep=time,
        batched=arguments,
        whole=f"it has no row, and none could be inferred: {problem}; give parallelize() a row with adapter=",
        inferred=True,
        checked=True,
    )


def _of_tokens(module: nn.Module) -> Adapter:
    arguments = tuple(signature_of(module).parameters)
    sample = next((name for name in _SAMPLES if name in arguments), None)
    if sample is None:
        raise UnsupportedError(f"its forward takes {', '.join(arguments)}, and none of {', '.join(_SAMPLES)}")
    attention = {name: (IMAGE,) for name, child in module.named_modules() if _is_self_attention(name, child)}
    if not attention:
        raise UnsupportedError("it has no self-attention of diffusers' kinds")
    plan: Mapping[str, Any] | None = getattr(module, "_cp_plan", None)
    model = type(module).__name__
    # Cut text would need a gathered cross-attention; here every rank keeps all of it.
    keep_text = lambda key: None if str(key).startswith(_TEXT) else IMAGE  # noqa: E731
    splits, gather = read_class_plan(plan, model, keep_text) if plan else _from_structure(module)
    return Adapter(
        family=model,
        model=model,
        attention=attention,
        splits=splits,
        gather=gather,
        sample=sample,
        timestep=next((name for name in _TIMES if name in arguments), _TIMES[0]),
        batched=arguments,
        inferred=True,
        checked=True,
    )


def _attention_kinds() -> tuple[type, ...]:
    from diffusers.models.attention import AttentionModuleMixin  # takes seconds, and known rows do not need it
    from diffusers.models.attention_processor import Attention

    return Attention, AttentionModuleMixin


def _is_self_attention(name: str, module: nn.Module) -> bool:
    if not isinstance(module, _attention_kinds()):
        return False
    return not (getattr(module, "is_cross_attention", False) or name.rpartition(".")[2] in _CROSS)


def _from_structure(module: nn.Module) -> tuple[Splits, Gather]:
    """Finds the first layer with tokens and the last one by their kinds rather than by name."""
    children = list(module.named_children())
    attending = [place for place, (_, child) in enumerate(children) if _attends(child)]
    before, after = children[: attending[0]], children[attending[-1] + 1 :]
    embedder = next((name for name, child in before if _makes_patches(name, child)), None)
    if embedder is None:
        raise UnsupportedError("no layer before its blocks makes tokens of patches")
    last = next((name for name, child in reversed(after) if any(isinstance(m, nn.Linear) for m in child.modules())), "")
    if not last:
        raise UnsupportedError("no linear layer follows its blocks")
    return {embedder: {0: Split(dim=1, ndim=3, output=True)}}, {last: Split(dim=1)}


def _attends(module: nn.Module) -> bool:
    kinds = _attention_kinds()
    return any(isinstance(child, kinds) for child in module.modules())


def _makes_patches(name: str, module: nn.Module) -> bool:
    """Says whether a layer has a usual name for this, or a convolution whose stride is its kernel size."""
    convolutions = (child for child in module.modules() if isinstance(child, (nn.Conv1d, nn.Conv2d, nn.Conv3d)))
    return name in _EMBEDDERS or any(conv.stride == conv.kernel_size for conv in convolutions)
