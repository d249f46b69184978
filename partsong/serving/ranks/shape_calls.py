"""Makes the arguments of a denoiser's first call for any size, in shapes, by the pipeline's own code."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from partsong.errors import UnsupportedError
from partsong.parallel.hooks.arguments import ArgumentNames
from partsong.parallel.hooks.model_hooks import kept_arguments, signature_of
from partsong.parallel.hooks.replaced_method import Method, replace_method
from partsong.parallel.plan.dry_run import MixedValues
from partsong.planner.pipeline import default_sizes
from partsong.samplers.long_video.frame_counts import frames_to_sample
from partsong.serving.messages import JobWork
from partsong.serving.ranks.reach import Asked
from partsong.serving.ranks.served_model import ServedModel, call_arguments

__all__ = ["ShapeCalls", "usual_call", "without_numbers"]


class _ReachedError(BaseException):
    """Unwinds a call that has reached its denoiser; no pipeline catches it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class ShapeCalls:
    """Calls a copy of a pipeline, whose parts have shapes only, until it calls its denoiser.

    On the way the pipeline checks its arguments, its scheduler makes its steps, and the latents get their shape. No
    random number is drawn and nothing of the pipeline itself changes, so this may run beside its jobs.

    Args:
        model: before anything is attached to it.
        denoiser: what stands in for its own, with shapes only.
        encoded: what the pipeline's ``encode_prompt`` has returned for a prompt.
    """

    def __init__(self, model: ServedModel, denoiser: nn.Module, encoded: Any) -> None:
        self._pipe, self._denoiser, self._makes_videos = copy.copy(model.pipe), denoiser, model.makes_videos
        self._encoded = tree_map(_as_shape, encoded)
        work = JobWork(id="in shapes", prompt="a", arguments=model.defaults, out=())
        self._arguments = {**call_arguments(model, work), "generator": None}
        self._names = ArgumentNames(signature_of(denoiser))
        parts = {name: each for name, each in self._pipe.components.items() if isinstance(each, nn.Module)}
        bare = {name: without_numbers(each) for name, each in parts.items() if each is not model.denoiser}
        # The pipeline's own __setattr__ would write its configuration, which the copy shares.
        vars(self._pipe).update(bare | {model.part: denoiser, "encode_prompt": self._encode})

    def of(self, asked: Asked) -> dict[str, Any]:
        """Returns the arguments of the first call, by name; tensors of numbers have shapes only.

        Raises:
            Exception: whatever the pipeline raises.
        """
        pipe = copy.copy(self._pipe)
        vars(pipe)["scheduler"] = scheduler = copy.deepcopy(pipe.scheduler)
        # Its timesteps are compared with each other, which takes values.
        replace_method(scheduler, "set_timesteps", _with_values)
        named = {"height": asked.height, "width": asked.width, "num_inference_steps": asked.steps}
        frames = {"num_frames": frames_to_sample(pipe, asked.frames, in_blocks=True)} if self._makes_videos else {}
        hook = self._denoiser.register_forward_pre_hook(self._reach, with_kwargs=True)
        try:
            with torch.no_grad(), MixedValues():
                pipe(**{**self._arguments, **named, **frames})
        except _ReachedError as reached:
            return reached.arguments
        finally:
            hook.remove()
        raise UnsupportedError(f"{type(pipe).__name__} never calls its denoiser")

    def _reach(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        raise _ReachedError(kept_arguments(self._names.of(args, kwargs)))

    def _encode(self, *args: Any, **kwargs: Any) -> Any:
        return copy.copy(self._encoded)


def usual_call(model: ServedModel) -> Asked:
    """Returns what a model makes where a client asks for nothing else."""
    known = {name: value for name, value in model.defaults.items() if value is not None}
    sizes = {**default_sizes(model.pipe), **known}
    steps = inspect.signature(type(model.pipe).__call__).parameters.get("num_inference_steps")
    usual = 1 if steps is None or not isinstance(steps.default, int) else steps.default
    return Asked(sizes["height"], sizes["width"], sizes["num_frames"], known.get("num_inference_steps", usual))


def without_numbers(module: nn.Module) -> Any:
    """Copies a module whose weights have shapes only."""
    held: dict[int, Any] = {}
    for weight in module.parameters():
        held[id(weight)] = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
    for buffer in module.buffers():
        held[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, held).eval()


def _as_shape(value: Any) -> Any:
    """Returns a tensor without its numbers; whole ones, such as masks, stay: pipelines count them."""
    if not isinstance(value, Tensor):
        return value
    return value.to("meta" if value.is_floating_point() else "cpu")


def _with_values(set_timesteps: Method) -> Method:
    def set_on_host(*args: Any, **given: Any) -> Any:
        return set_timesteps(*args, **(given | {"device": "cpu"} if "device" in given else given))

    return set_on_host
