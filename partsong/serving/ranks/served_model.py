"""Holds a replica's pipeline on one rank, and its current plan."""

from __future__ import annotations

import inspect
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image
from torch import nn

from partsong import zoo
from partsong.errors import PartsongError
from partsong.jobs.pipelines import RANK_TIMEOUT, picture_arguments, pipeline_class, read_pipeline, usual_dtype
from partsong.model_folders import DENOISERS
from partsong.parallel import Mesh, Plan, Strategy, mesh_for, parallelize
from partsong.parallel.adapters import adapter_for
from partsong.parallel.strategy import combined_kind, refuse
from partsong.planner.pipeline import downscale_of
from partsong.samplers.generate import check_arguments, check_prompt
from partsong.samplers.long_video.frame_counts import frames_to_sample
from partsong.samplers.registry import parse_strategy, strategies
from partsong.seeds import generators
from partsong.serving.errors import CannotMakeError, shortened
from partsong.serving.messages import Checked, JobWork, Ready
from partsong.serving.ranks.joined_calls import JoinedCalls
from partsong.serving.ranks.settings import ReplicaSettings

#: What a model is set to: strategies, and the name of an adapter or None.
Setting = tuple[tuple[str, ...], str | None]

#: Pipelines that take a list as several pictures of one call; others take it as one picture for each of several.
_WITH_SEVERAL = {
    "BriaFibo2Pipeline",
    "Flux2KleinKVPipeline",
    "Flux2KleinPipeline",
    "Flux2Pipeline",
    "QwenImage21Pipeline",
    "QwenImageEditPlusPipeline",
}

__all__ = [
    "ServedModel",
    "call_arguments",
    "can_join",
    "check_sizes",
    "check_work",
    "denoiser_arguments",
    "description",
    "read_mask",
]


class ServedModel:
    """Runs one pipeline under one plan at a time.

    Calls that take turns run the pipeline's own loop on every rank and share the denoiser's calls, so only the denoiser
    has a plan. A job that runs by itself has a plan on the pipeline.

    Args:
        settings: what to serve.
        mesh: all ranks; it is closed last.

    Attributes:
        pipe: the pipeline.
        denoiser: its transformer or UNet; of several, the first.
        part: the name of that component.
        joined: joins calls of the denoiser.
        setting: the strategies that the denoiser runs under, and the adapter that is switched on.
        makes_videos: whether it makes videos.
        tells_steps: whether the pipeline's call reports its steps.
        sample: the denoiser's argument with the latents.
        defaults: arguments of a call that a client need not give.
        loras: names of its adapters.
    """

    def __init__(self, settings: ReplicaSettings, mesh: Mesh) -> None:
        dtype = settings.dtype or usual_dtype(settings.folder, mesh.device)
        pipe = zoo.complete(settings.zoo_name, read_pipeline(settings.folder, settings.pipeline, dtype))
        self.pipe = pipe.to(mesh.device)
        self.pipe.set_progress_bar_config(disable=True)
        for name, path in settings.loras.items():
            self.pipe.load_lora_weights(str(path), adapter_name=name)
        self.loras = tuple(settings.loras)
        if self.loras:
            self.pipe.disable_lora()
        self.part = next(name for name in DENOISERS if isinstance(getattr(pipe, name, None), nn.Module))
        self.denoiser: nn.Module = getattr(pipe, self.part)
        self.joined = JoinedCalls(adapter_for(self.denoiser))
        known = inspect.signature(type(pipe).__call__).parameters
        self.makes_videos, self.tells_steps = "num_frames" in known, "callback_on_step_end" in known
        self.sample, self.defaults = adapter_for(self.denoiser).sample, dict(settings.defaults)
        self.setting: Setting = ((), None)
        self._mesh, self._meshes = mesh, {tuple(mesh.degrees.items()): mesh}
        self._plan: Plan | None = None

    def switch(self, setting: Setting) -> None:
        """Puts the strategies of a setting on the denoiser and switches its adapter on.

        Raises:
            PartsongError: as for `parallelize`; nothing is attached then.
        """
        self._take_off()
        names, lora = setting
        self._switch_lora(lora)
        if names and self._mesh.world_size > 1:
            self._plan = parallelize(self.denoiser, *map(parse_strategy, names), mesh=self._mesh_for(names))
        self.setting = setting

    def whole_plan(self, setting: Setting) -> Plan:
        """Returns a plan on the pipeline, for one job."""
        self._take_off()
        names, lora = setting
        self._switch_lora(lora)
        self.setting = ((), lora)
        return parallelize(self.pipe, *map(parse_strategy, names), mesh=self._mesh_for(names))

    def _switch_lora(self, name: str | None) -> None:
        if name == self.setting[1]:
            return
        if name is None:
            self.pipe.disable_lora()
        else:
            self.pipe.enable_lora()
            self.pipe.set_adapters(name)

    def _take_off(self) -> None:
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.undo()

    def _mesh_for(self, names: tuple[str, ...]) -> Mesh:
        degrees = mesh_for([parse_strategy(name) for name in names], self._mesh.world_size)
        key = tuple(degrees.items())
        if key not in self._meshes:
            self._meshes[key] = Mesh(**degrees, timeout=RANK_TIMEOUT)
        return self._meshes[key]

    def close(self) -> None:
        """Takes everything off and closes all meshes but the first."""
        self._take_off()
        for mesh in self._meshes.values():
            if mesh is not self._mesh:
                mesh.close()


def call_arguments(model: ServedModel, work: JobWork) -> dict[str, Any]:
    """Returns the arguments of the pipeline's call for a job."""
    given, seeded = {**work.arguments, "output_type": "np"}, generators(work.seed, work.num)
    if model.makes_videos:
        if work.num_frames is not None:
            given["num_frames"] = frames_to_sample(model.pipe, work.num_frames, in_blocks=True)
        arguments = {**given, "prompt": work.prompt, "generator": seeded[0]}
    else:
        arguments = picture_arguments(given, work.prompt, work.num, seeded)
    if work.pictures:
        read = [_read_picture(picture) for picture in work.pictures]
        arguments["image"] = read if len(read) > 1 else read[0]
    if work.mask is not None:
        arguments["mask_image"] = read_mask(work.mask)
    return arguments


def read_mask(given: Path | bytes) -> Image.Image:
    """Reads a mask, white where the picture is made anew; clients of OpenAI make those parts transparent."""
    with Image.open(_readable(given)) as mask:
        if mask.mode in ("RGBA", "LA", "PA"):
            alpha = mask.getchannel("A")
            if np.asarray(alpha).min() < 255:
                return alpha.point(lambda value: 255 - value)
        return mask.convert("L")


def _read_picture(given: Path | bytes) -> Image.Image:
    with Image.open(_readable(given)) as picture:
        return picture.convert("RGB")


def _readable(given: Path | bytes) -> Path | io.BytesIO:
    return io.BytesIO(given) if isinstance(given, bytes) else given


def check_work(model: ServedModel, mesh: Mesh, work: JobWork) -> Checked:
    """Checks whether a job could be made, without any work and without the other ranks."""
    try:
        chosen = _chosen(model, mesh, work.strategies)
        if work.is_session:
            _check_session(model, chosen)
        else:
            check_arguments(type(model.pipe), work.arguments)
            check_prompt(work.prompt)
            _check_picture(model, work)
        if work.lora is not None and work.lora not in model.loras:
            known = ", ".join(model.loras) or "none"
            raise CannotMakeError(f"there is no adapter {work.lora!r} here; these are: {known}", "lora")
        return Checked(id=work.id, kind=combined_kind(chosen))
    except PartsongError as error:
        return Checked(id=work.id, error=error)


def _chosen(model: ServedModel, mesh: Mesh, names: tuple[str, ...]) -> tuple[Strategy, ...]:
    """Returns the strategies of a job.

    Raises:
        CannotMakeError: there is none of that name, or these ranks cannot run this model with it.
    """
    known = strategies()
    for name in (text.partition(":")[0] for text in names):
        if name not in known:
            here = ", ".join(("auto", *_legal(model, mesh), "serial"))
            raise CannotMakeError(f"there is no strategy {shortened(name)}; this model runs with {here}", "strategy")
    try:
        chosen = tuple(parse_strategy(name) for name in names)
        degrees = mesh_for(chosen, mesh.world_size if chosen else 1)
        refuse(chosen, adapter_for(model.denoiser), SimpleNamespace(degrees=degrees))  # type: ignore[arg-type]
    except PartsongError as error:
        raise CannotMakeError(str(error), "strategy") from error
    return chosen


def description(settings: ReplicaSettings, model: ServedModel, mesh: Mesh) -> Ready:
    """Describes the model to the server."""
    known = inspect.signature(pipeline_class(settings.pipeline).__call__).parameters
    return Ready(
        strategies=tuple(_legal(model, mesh)),
        defaults=dict(settings.defaults),
        kind="video" if "num_frames" in known else "image",
        takes_picture="image" in known,
        takes_pictures=settings.pipeline in _WITH_SEVERAL,
        takes_mask="mask_image" in known,
        denoiser=_denoiser_facts(model.denoiser),
        session_strategies=tuple(name for name, kind in strategies().items() if _suits_sessions(kind())),
    )


def denoiser_arguments(denoiser: nn.Module) -> list[str]:
    """Returns the names of the arguments that a client may send a denoiser."""
    known = inspect.signature(type(denoiser).forward).parameters
    return [name for name in known if name not in ("self", "return_dict")]


def _denoiser_facts(denoiser: nn.Module) -> dict[str, Any]:
    config = dict(getattr(denoiser, "config", {}))
    plain = {name: value for name, value in config.items() if name[0] != "_" and _is_plain(value)}
    dtype = str(next(denoiser.parameters()).dtype).removeprefix("torch.")
    return {
        "class": type(denoiser).__name__,
        "arguments": denoiser_arguments(denoiser),
        "dtype": dtype,
        "config": plain,
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def can_join(names: tuple[str, ...], calls_per_step: int) -> bool:
    """Says whether jobs under these strategies can take turns step by step.

    What a strategy keeps from one step to the next belongs to one generation, so only those that keep nothing can.
    `CfgParallel` and `LayerPipeline` keep something where the pipeline calls its model once per branch.
    """
    return all(_is_stateless(parse_strategy(name), calls_per_step) for name in names)


def _is_stateless(strategy: Strategy, calls_per_step: int) -> bool:
    if strategy.expects_calls and calls_per_step > 1:
        return False
    keeps = strategy.has_loop or strategy.reads_last_step or strategy.uses_all_ranks
    return strategy.kind == "exact" and strategy.denoises and not keeps


def _legal(model: ServedModel, mesh: Mesh) -> list[str]:
    """Lists the strategies that the ranks can run the model with as they are."""
    legal = []
    for name, kind in strategies().items():
        strategy = kind()
        try:
            degrees = mesh_for([strategy], mesh.world_size)
            refuse((strategy,), adapter_for(model.denoiser), SimpleNamespace(degrees=degrees))  # type: ignore[arg-type]
        except PartsongError:
            continue
        if mesh.world_size > 1 and strategy.denoises:
            legal.append(name)
    return legal


def _check_session(model: ServedModel, chosen: tuple[Strategy, ...]) -> None:
    """Refuses a session on what a client cannot call by itself."""
    parts = [name for name in DENOISERS if isinstance(getattr(model.pipe, name, None), nn.Module)]
    if len(parts) > 1:
        raise CannotMakeError(
            f"this model has several denoisers ({', '.join(parts)}), and a session calls one", "model"
        )
    for strategy in chosen:
        if not _suits_sessions(strategy):
            why = "samples with a loop of its own" if strategy.has_loop else "is not about the denoiser"
            raise CannotMakeError(f"{type(strategy).__name__} {why}, so a session cannot have it", "strategy")


def _suits_sessions(strategy: Strategy) -> bool:
    return strategy.denoises and not strategy.has_loop


def _check_picture(model: ServedModel, work: JobWork) -> None:
    """Refuses text alone where the pipeline's call demands a picture."""
    image = inspect.signature(type(model.pipe).__call__).parameters.get("image")
    if image is not None and image.default is image.empty and not work.pictures:
        how = "as input_reference of /v1/videos" if model.makes_videos else "to /v1/images/edits"
        raise CannotMakeError(f"this model begins with a picture, and none was sent: send one {how}", "image")


def check_sizes(model: ServedModel, work: JobWork) -> None:
    """Refuses sides that are no whole latents, where nothing better is known of what the model makes."""
    factor = downscale_of(model.pipe)
    height, width = (work.arguments.get(name) or 0 for name in ("height", "width"))
    if height % factor or width % factor:
        near = "x".join(str(max(1, side // factor) * factor) for side in (width, height))
        raise CannotMakeError(f"size {width}x{height} is no multiple of {factor} pixels; ask for {near}", "size")
