"""The nodes: pictures, edits and videos made by a partsong server, its denoiser as a model, and the strategy."""

from __future__ import annotations

import io as memory
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from comfy_api.latest import ComfyAPISync, InputImpl, io

from . import pictures
from .client import ServerClient, ServerError
from .denoiser import RemoteDenoiser, described

__all__ = ["PartsongEdit", "PartsongImage", "PartsongModel", "PartsongStrategy", "PartsongVideo"]

_STRENGTH = "How far to go from the picture, up to 1. -1 takes the model's own."
#: What travels between the strategy node and the others: the text that `partsong image --strategy` takes.
StrategyType = io.Custom("PARTSONG_STRATEGY")
NAMES = ["auto", "serial", *Path(__file__).with_name("strategies.txt").read_text(encoding="utf-8").split()]


class PartsongStrategy(io.ComfyNode):
    """Names how the workers of the server share the work."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describes the node."""
        return _schema(
            "Strategy",
            "How the server's workers share each picture. 'auto' lets its planner choose.",
            inputs=[
                io.Combo.Input("name", options=NAMES, default="auto"),
                io.String.Input(
                    "settings", default="", placeholder="warmup_steps=4", tooltip="KEY=VALUE, with commas."
                ),
                StrategyType.Input("also", optional=True, tooltip="Another strategy, used at the same time."),
            ],
            outputs=[StrategyType.Output("strategy", display_name="strategy")],
        )

    @classmethod
    def execute(cls, name: str, settings: str = "", also: str | None = None) -> io.NodeOutput:
        """Returns the strategy as text.

        Raises:
            ServerError: 'auto' or 'serial' is given settings or combined.
        """
        settings = settings.strip()
        if name in ("auto", "serial") and (settings or also):
            raise ServerError(f"{name!r} takes no settings and no second strategy; leave them out")
        if also in ("auto", "serial"):
            raise ServerError(f"{also!r} cannot be combined with {name!r}; connect only one of them")
        strategy = f"{name}:{settings}" if settings else name
        return io.NodeOutput(f"{also}+{strategy}" if also else strategy)


class PartsongImage(io.ComfyNode):
    """Makes pictures from a prompt."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describes the node."""
        return _schema(
            "Image",
            "Makes pictures on a partsong server, whose workers share each of them.",
            inputs=[*_common(), *_size(), io.Int.Input("count", default=1, min=1, max=64, tooltip="Pictures.")],
            outputs=[io.Image.Output("images", display_name="images"), _report()],
        )

    @classmethod
    def execute(cls, prompt: str, count: int = 1, width: int = 0, height: int = 0, **more: Any) -> io.NodeOutput:
        """Returns `[count, H, W, 3]` in 0..1 and a report."""
        client, job = _run("image", prompt, more, n=count, size=_size_text(width, height))
        contents = [client.fetch(output["url"]) for output in job["outputs"]]
        return io.NodeOutput(pictures.stack(contents), report(job))


class PartsongVideo(io.ComfyNode):
    """Makes a video from a prompt."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describes the node."""
        return _schema(
            "Video",
            "Makes a video on a partsong server.",
            inputs=[
                *_common(),
                *_size(),
                io.Int.Input("frames", default=0, min=0, max=100_000, tooltip="0 takes the model's own number."),
            ],
            outputs=[io.Video.Output("video", display_name="video"), _report()],
        )

    @classmethod
    def execute(cls, prompt: str, frames: int = 0, width: int = 0, height: int = 0, **more: Any) -> io.NodeOutput:
        """Returns the video and a report."""
        client, job = _run("video", prompt, more, num_frames=frames or None, size=_size_text(width, height))
        content = client.fetch(job["outputs"][0]["url"])
        return io.NodeOutput(InputImpl.VideoFromFile(memory.BytesIO(content)), report(job))


class PartsongEdit(io.ComfyNode):
    """Makes a picture from another one and a prompt."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describes the node."""
        return _schema(
            "Edit",
            "Changes a picture on a partsong server. With a mask, only what the mask covers.",
            inputs=[
                io.Image.Input("image"),
                *_common(),
                io.Float.Input(
                    "strength", default=-1.0, min=-1.0, max=1.0, step=0.01, optional=True, tooltip=_STRENGTH
                ),
                io.Mask.Input("mask", optional=True, tooltip="White is made anew. Not every model takes one."),
            ],
            outputs=[io.Image.Output("images", display_name="images"), _report()],
        )

    @classmethod
    def execute(cls, image: torch.Tensor, prompt: str, mask: torch.Tensor | None = None, **more: Any) -> io.NodeOutput:
        """Returns `[1, H, W, 3]` in 0..1 and a report.

        Raises:
            ServerError: the server ended its answer without a picture.
        """
        client = ServerClient()
        fields = _request(client, "image", prompt, more)
        fields = {name: value for name, value in fields.items() if name != "kind"}
        strength = more.get("strength", -1.0)
        fields |= {"strength": strength if strength > 0 else None}
        fields |= {"n": 1, "stream": "true", "partial_images": 3, "response_format": "b64_json"}
        files = {"image": pictures.encode(image)}
        if mask is not None:
            files["mask"] = pictures.encode_mask(mask, (image.shape[2], image.shape[1]))
        progress = NodeProgress()
        for name, data in client.stream("/v1/images/edits", fields, files, _interruption()):
            if name.endswith(".completed"):
                return io.NodeOutput(pictures.stack([pictures.unpack(data["b64_json"])]), report(data["partsong"]))
            if name.endswith(".partial_image"):
                progress.partial(data)
        raise ServerError("the server ended its answer without a picture; its log may say why")


class PartsongModel(io.ComfyNode):
    """Offers a server's denoiser as a model of ComfyUI, for its own samplers."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Describes the node."""
        return _schema(
            "Model",
            "A model whose every step is shared by the workers of a partsong server. Connect it to a KSampler; text "
            "encoders and the VAE are ComfyUI's own.",
            inputs=[
                io.String.Input("model", default="", tooltip="Empty takes the server's first one."),
                StrategyType.Input("strategy", optional=True, tooltip="Without one the planner chooses."),
            ],
            outputs=[io.Model.Output("sampled", display_name="model")],
        )

    @classmethod
    def execute(cls, model: str = "", strategy: str | None = None) -> io.NodeOutput:
        """Returns the model, without weights here.

        Raises:
            ServerError: the server or ComfyUI cannot sample it.
        """
        import comfy.model_management
        import comfy.model_patcher
        import comfy.supported_models

        client = ServerClient()
        remote = RemoteDenoiser(client, described(client, model.strip()), strategy)
        channels = {"in_channels": remote.in_channels, "out_channels": remote.in_channels}
        kind = getattr(comfy.supported_models, remote.config)
        config = kind({**channels, "disable_unet_model_creation": True})
        config.set_inference_dtype(remote.dtype, None)
        made = config.get_model({})
        made.diffusion_model = remote
        patcher = comfy.model_patcher.ModelPatcher(
            made,
            load_device=comfy.model_management.get_torch_device(),
            offload_device=comfy.model_management.unet_offload_device(),
        )
        return io.NodeOutput(patcher)


class NodeProgress:
    """Shows how far a job is on the node that runs."""

    def __init__(self) -> None:
        self._bar = ComfyAPISync().execution
        self._done = (0.0, 100.0)

    def __call__(self, name: str, data: dict[str, Any]) -> None:
        """Takes an event of a job."""
        if name == "job":
            self._done = (float(data.get("step") or 0), float(data.get("steps") or 1))
            self._bar.set_progress(value=self._done[0], max_value=self._done[1])
        elif name == "preview":
            self._show(data["b64_json"])

    def partial(self, data: dict[str, Any]) -> None:
        """Takes an unfinished picture of an edit, of which there are three."""
        self._done = (float(data.get("partial_image_index", 0)) + 1, 4.0)
        self._show(data["b64_json"])

    def _show(self, text: str) -> None:
        picture = pictures.decode(pictures.unpack(text))
        self._bar.set_progress(value=self._done[0], max_value=self._done[1], preview_image=picture)


def report(job: dict[str, Any]) -> str:
    """Returns what a job was and what it cost, as lines of text."""
    lines = [f"{job['model']}, strategy {job['strategy']} ({job.get('class') or 'no class'}), seed {job['seed']}"]
    if job.get("advice"):
        lines.append(job["advice"])
    if job.get("seconds") is not None:
        lines.append(f"{job['seconds']:.2f} s")
    for rank in job.get("ranks") or []:
        lines.append(f"rank {rank['rank']}: {rank['bytes_sent']} bytes sent, {rank['seconds_waiting']:.2f} s waiting")
    return "\n".join(lines)


def _schema(kind: str, description: str, **more: Any) -> io.Schema:
    return io.Schema(
        node_id=f"Partsong{kind}",
        display_name=f"Partsong {kind}",
        category="partsong",
        description=description,
        **more,
    )


def _run(kind: str, prompt: str, more: dict[str, Any], **fields: Any) -> tuple[ServerClient, dict[str, Any]]:
    client = ServerClient()
    return client, client.run({**_request(client, kind, prompt, more), **fields}, NodeProgress(), _interruption())


def _report() -> Any:
    return io.String.Output("report", display_name="report")


def _common() -> list[Any]:
    return [
        io.String.Input("prompt", multiline=True, default=""),
        io.String.Input("negative_prompt", multiline=True, default="", optional=True),
        io.String.Input("model", default="", optional=True, tooltip="Empty takes the server's first one of this kind."),
        io.Int.Input("seed", default=0, min=0, max=2**32 - 1, control_after_generate=True),
        io.Int.Input("steps", default=0, min=0, max=1000, optional=True, tooltip="0 takes the model's own number."),
        io.Float.Input(
            "guidance", default=-1.0, min=-1.0, max=100.0, step=0.1, optional=True, tooltip="-1 takes its own."
        ),
        StrategyType.Input("strategy", optional=True, tooltip="Without one the planner chooses."),
    ]


def _size() -> list[Any]:
    return [
        io.Int.Input(name, default=0, min=0, max=8192, step=8, optional=True, tooltip="0 takes the model's own.")
        for name in ("width", "height")
    ]


def _request(client: ServerClient, kind: str, prompt: str, more: dict[str, Any]) -> dict[str, Any]:
    guidance = more.get("guidance", -1.0)
    return {
        "kind": kind,
        "model": client.model(kind, (more.get("model") or "").strip()),
        "prompt": prompt,
        "seed": more.get("seed", 0),
        "strategy": more.get("strategy") or "auto",
        "num_inference_steps": more.get("steps") or None,
        "guidance_scale": None if guidance < 0 else guidance,
        "negative_prompt": (more.get("negative_prompt") or "").strip() or None,
    }


def _size_text(width: int, height: int) -> str | None:
    if not width and not height:
        return None
    if not width or not height:
        raise ServerError(f"width {width} and height {height}: give both, or leave both at 0 for the model's own size")
    return f"{width}x{height}"


def _interruption() -> Callable[[], None]:
    """Returns ComfyUI's own question whether the user has stopped the run; it raises if so."""
    from comfy.model_management import throw_exception_if_processing_interrupted

    return throw_exception_if_processing_interrupted
