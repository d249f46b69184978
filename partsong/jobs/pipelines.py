"""Describes jobs that sample with a pipeline of diffusers, and loads the pipeline."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from partsong import zoo
from partsong.errors import ArgumentError, PartsongError, UnsupportedError
from partsong.foreign_messages import quiet_libraries
from partsong.model_folders import DENOISERS, read_settings
from partsong.parallel import Mesh, Strategy, measure_shares
from partsong.parallel.loading.weight_files import WeightFiles
from partsong.parallel.strategy import useful_shares
from partsong.progress import bar_settings

__all__ = [
    "RANK_TIMEOUT",
    "SamplingJob",
    "open_mesh",
    "open_pipeline",
    "picture_arguments",
    "pipeline_class",
    "read_pipeline",
    "usual_dtype",
]

#: Seconds a rank may wait for another: long, since the serial twin runs on one rank and large models load slowly.
RANK_TIMEOUT = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingJob:
    """Says what to sample, in plain values that can be sent to ranks.

    Attributes:
        folder: a diffusers pipeline folder.
        pipeline: class name of the pipeline.
        zoo_name: name of the zoo model, if it is one; its reader then scores the result.
        prompt: what to sample; for class-conditional pipelines the number of a class.
        arguments: further arguments of the pipeline call.
        strategies: what to attach.
        degrees: size of each mesh axis.
        shares: how fast each rank is; ``measured`` measures that first, None treats all alike.
        seed: of the noise.
        first: number of the first picture, or of the video; together with the seed it gives the noise.
        dtype: type of weights and arithmetic; None takes the checkpoint's own on a GPU, float32 on a CPU.
        threads: threads per rank; None leaves the choice to torch.
        compare: whether to run the serial twin too.
        out: file or folder to write.
        ledger: JSONL to write.
    """

    folder: Path
    pipeline: str
    zoo_name: str | None = None
    prompt: str | int
    arguments: Mapping[str, Any]
    strategies: tuple[Strategy, ...] = ()
    degrees: Mapping[str, Any]
    shares: tuple[float, ...] | Literal["measured"] | None = None
    seed: int = 0
    first: int = 0
    dtype: str | None = None
    threads: int | None = None
    compare: bool = False
    out: Path
    ledger: Path | None = None

    def prepare_process(self) -> None:
        """Sets the threads of this process and silences libraries."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        quiet_libraries()


@contextmanager
def open_mesh(job: SamplingJob) -> Iterator[Mesh]:
    """Opens the mesh of a job, with the shares of its ranks."""
    given = None if job.shares == "measured" else job.shares
    with Mesh(**job.degrees, shares=given, timeout=RANK_TIMEOUT) as mesh:
        if job.shares != "measured":
            yield mesh
            return
        measured = useful_shares(job.strategies, mesh.degrees, measure_shares(mesh))
        # The first mesh started the process group, which the second one shares, so the first must close last.
        with Mesh(**job.degrees, shares=measured, timeout=RANK_TIMEOUT) as cut:
            yield cut


def open_pipeline(job: SamplingJob, mesh: Mesh) -> Any:
    """Loads the whole pipeline of a job on the device of this rank; see `read_pipeline`."""
    dtype = job.dtype or usual_dtype(job.folder, mesh.device)
    pipe = zoo.complete(job.zoo_name, read_pipeline(job.folder, job.pipeline, dtype)).to(mesh.device)
    pipe.set_progress_bar_config(**bar_settings("steps", unit="step"))
    return pipe


def _check_cleaner(kind: type[Any]) -> None:
    """Refuses a pipeline that cleans every prompt with ftfy where that is not installed: diffusers fails in a call."""
    module = sys.modules[kind.__module__]
    cleaner = getattr(module, "basic_clean", None) or getattr(module, "_basic_clean", None)
    names = cleaner.__code__.co_names if inspect.isfunction(cleaner) else ()
    if "ftfy" in names and "is_ftfy_available" not in names and not hasattr(module, "ftfy"):
        raise UnsupportedError(f"{kind.__name__} cleans prompts with a package that is missing: pip install ftfy")


def read_pipeline(
    folder: Path, pipeline: str, dtype: str = "float32", *, given: Mapping[str, nn.Module | None] = MappingProxyType({})
) -> Any:
    """Reads a pipeline folder, from safetensors only and without code from the folder or the network.

    Args:
        folder: a diffusers pipeline folder.
        pipeline: class name of the pipeline, one of diffusers' own.
        dtype: name of a torch floating-point type.
        given: parts that are not read, by name: a module to use instead, or None to leave the part out.

    Raises:
        ArgumentError: diffusers cannot read the folder, or weights are missing in it; says why.
        UnsupportedError: this diffusers has no such pipeline, or it needs a package that is not installed.
    """
    kind = pipeline_class(pipeline)
    _check_cleaner(kind)
    # Folders of pipelines that were saved without some parts say so, but diffusers needs it as an argument, too.
    index = read_settings(folder, "model_index.json")
    absent = [name for name, entry in index.items() if isinstance(entry, list) and not any(entry)]
    parts: dict[str, Any] = {**dict.fromkeys(absent), **given}
    options: dict[str, Any] = {"torch_dtype": getattr(torch, dtype), "local_files_only": True, "use_safetensors": True}
    try:
        with warnings.catch_warnings():
            # Newer versions of diffusers call it dtype, but the oldest supported one knows only torch_dtype.
            warnings.filterwarnings("ignore", message=".*torch_dtype", category=FutureWarning)
            pipe = kind.from_pretrained(folder, **parts, **options)
    except PartsongError:
        raise
    except Exception as error:
        raise ArgumentError(f"the model folder {folder} cannot be loaded: {type(error).__name__}: {error}") from error
    for name, part in pipe.components.items():
        tensors = part.named_parameters() if isinstance(part, nn.Module) and name not in given else ()
        missing = [key for key, value in tensors if value.is_meta]
        if missing:
            raise ArgumentError(
                f"the model folder {folder} is not complete: the weights of its part {name} lack {len(missing)} "
                f"tensors, among them {missing[0]}"
            )
    return pipe


def usual_dtype(folder: Path, device: torch.device) -> str:
    """Returns the type to compute in: the type of most of the denoiser's weights on a GPU, float32 on a CPU."""
    part = next((folder / name for name in DENOISERS if (folder / name).is_dir()), None)
    if device.type == "cpu" or part is None:
        return "float32"
    with WeightFiles(part) as files:
        return str(files.most_common_dtype()).removeprefix("torch.")


def pipeline_class(name: str) -> Any:
    """Returns the class of diffusers that a folder names.

    Raises:
        UnsupportedError: this diffusers has no such pipeline.
    """
    import diffusers

    kind = getattr(diffusers, name, None)
    if not (inspect.isclass(kind) and issubclass(kind, diffusers.DiffusionPipeline)):
        raise UnsupportedError(
            f"the folder asks for the pipeline {name!r}, which diffusers {diffusers.__version__} does not have; "
            "upgrade diffusers (pipelines that bring their own code are not run)"
        )
    return kind


def picture_arguments(
    arguments: Mapping[str, Any], prompt: str | int, num: int, generator: list[torch.Generator]
) -> dict[str, Any]:
    """Returns the arguments of a pipeline's call for some pictures of one prompt, each with noise of its own.

    Args:
        arguments: all others.
        prompt: what to draw, or the number of a class.
        num: pictures.
        generator: one for each.
    """
    given = {**arguments, "generator": generator}
    if isinstance(prompt, int):
        return {**given, "class_labels": [prompt] * num}
    # Some pipelines have no num_images_per_prompt, so every text becomes a list.
    given["prompt"] = prompt
    texts = {name: value for name, value in given.items() if "prompt" in name and isinstance(value, str)}
    return given | {name: [text] * num for name, text in texts.items()}
