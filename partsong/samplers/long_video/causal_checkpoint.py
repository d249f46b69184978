"""Loads causal Wan checkpoints as the repositories of Self-Forcing and its kin store them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.knobs import Count, check_value
from partsong.samplers.long_video.causal_block import CAUSAL_BLOCK

__all__ = ["load_causal_checkpoint"]

#: Where training code puts the weights in its file; the averaged ones come first.
_STATES = ("generator_ema", "generator", "model", "state_dict")
#: What wrappers of training code add to names.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")
#: Prefixes of the whole model.
_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.")
#: Classes that have Wan's blocks and names.
_MODELS = ("WanTransformer3DModel", "SkyReelsV2Transformer3DModel")


def load_causal_checkpoint(pipe: Any, path: str | os.PathLike[str], *, block: Count = 3, shift: float = 5.0) -> None:
    """Puts the weights of a causal few-step checkpoint into a Wan pipeline, for CascadePipeline.

    Self-Forcing, CausVid and LongLive publish one file of weights of Wan's transformer, with Wan's own names or those
    of diffusers. Text encoder and autoencoder are those of Wan. The transformer becomes causal, and the scheduler
    becomes one that steps as these models were trained.

    Args:
        pipe: a pipeline of Wan of the checkpoint's size, such as ``Wan-AI/Wan2.1-T2V-1.3B-Diffusers``. It is changed.
        path: the file, ``.safetensors`` or a pickle of tensors (``.pt``, ``.pth``, ``.ckpt``), which is read without
            running code. The averaged weights are taken where there are some.
        block: latent frames of a block: 3 for the published models of Self-Forcing, CausVid and LongLive.
        shift: of the noise levels towards noise.

    Raises:
        ArgumentTypeError: the pipeline has no transformer of Wan.
        ArgumentError: there is no such file, it cannot be read, or its weights are not those of the pipeline's model;
            the pipeline has not changed then.

    Source: Self-Forcing, arXiv 2506.08009.

    Example:
        >>> # pipe = WanPipeline.from_pretrained("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", torch_dtype=torch.bfloat16)
        >>> # load_causal_checkpoint(pipe, "self_forcing_dmd.pt")
        >>> # with parallelize(pipe, CascadePipeline(depth=4)) as plan:
        >>> #     generate(plan, prompt="a lighthouse", num_inference_steps=4, guidance_scale=1.0, num_frames=81)
    """
    from partsong.samplers.long_video.renoising_scheduler import RenoisingScheduler

    check_value("block", block, Count)
    model: Any = getattr(pipe, "transformer", None)
    if type(model).__name__ not in _MODELS:
        raise ArgumentTypeError(
            f"load_causal_checkpoint takes a pipeline with one of {', '.join(_MODELS)}, and {type(pipe).__name__} has "
            f"{type(model).__name__}"
        )
    weights = _with_names_of_diffusers(_plain_names(_read(Path(path)), Path(path)))
    _compare(model, weights, Path(path))
    model.load_state_dict(weights)
    model.register_to_config(**{CAUSAL_BLOCK: block})
    pipe.register_modules(scheduler=RenoisingScheduler(shift=shift))


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ArgumentError(f"no checkpoint {str(path)!r}; give a file of weights, .safetensors or .pt")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        held: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ArgumentError(
            f"{str(path)!r} cannot be read as a file of tensors ({str(error).splitlines()[0]}); use .safetensors, or a "
            "pickle that torch.save wrote of tensors alone"
        ) from error
    while isinstance(held, Mapping) and (inner := next((name for name in _STATES if name in held), None)):
        held = held[inner]
    return held if isinstance(held, Mapping) else {}


def _plain_names(state: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """Takes the wrappers' parts out of the names."""
    plain: dict[str, Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ArgumentError(
                f"{str(path)!r} holds {type(value).__name__} under {name!r}, where weights are expected"
            )
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        plain[name[len(prefix) :]] = value
    return plain


def _with_names_of_diffusers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    if not any(".self_attn." in name for name in weights):
        return weights
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    return convert_wan_transformer_to_diffusers(weights)


def _compare(model: Any, weights: Mapping[str, Tensor], path: Path) -> None:
    """Refuses weights whose names or shapes are not those of the model."""
    wanted = model.state_dict()
    for name in (*wanted, *weights):
        has, wants = weights.get(name), wanted.get(name)
        if has is None or wants is None or has.shape != wants.shape:
            raise ArgumentError(
                f"{str(path)!r} does not fit {type(model).__name__}: its {name} is {_shape(has)}, and the pipeline's "
                f"is {_shape(wants)}; use a pipeline of the checkpoint's size, such as Wan 2.1's 1.3B"
            )


def _shape(value: Tensor | None) -> str:
    return "missing" if value is None else str(list(value.shape))
