"""What a tiny pipeline is made of, and how one call of it is compared with another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from partsong.samplers import generate

#: The parts of a pipeline that denoise.
DENOISERS = ("transformer", "transformer_2", "unet", "decoder", "dit")


#: Of pipelines whose UNet has attention of another form than that of Stable Diffusion.
NO_COLUMNS = {"TensorParallel": "found no attention or feed-forward layer"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline and one call of it.

    Attributes:
        name: class of the pipeline, followed by what is put on it: ``StableDiffusionPipeline + IP-Adapter``.
        build: makes the pipeline with the same random weights in every process, in float64 where it can be.
        call: the arguments of a call for a number of samples, made anew each time: two or three steps, and guidance
            where the pipeline has it. The runner adds a generator where there is none, and turns the progress bar off.
        samples: how many samples the call asks for; 1 for pipelines that make one at a time.
        tolerance: largest relative difference from the serial result. Set it only where the pipeline itself leaves
            float64, to 1e-4, and say there where it does.
        refused: strategies that this pipeline, unlike others of its model, refuses when `parallelize` is called, with
            some words of the reason.
    """

    name: str
    build: Callable[[], Any]
    call: Callable[[int], dict[str, Any]]
    samples: int = 2
    tolerance: float = 1e-9
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def pipeline(self) -> str:
        """The class of the pipeline."""
        return self.name.partition(" + ")[0]

    def make(self) -> Any:
        """The pipeline, silent."""
        pipe = self.build()
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def run(self, pipe: Any, **more: Any) -> list[Tensor]:
        """One call; everything it returned, as tensors in float64."""
        torch.manual_seed(3)  # some pipelines draw noise that no generator governs
        named = {"generator": torch.Generator().manual_seed(9), **self.call(self.samples), **more}
        with torch.no_grad():
            output = pipe(**named)
        tensors = [tensor.double() for tensor in _tensors(output)]
        assert tensors, f"{self.name} returned nothing to compare"
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors), f"{self.name} returned NaN"
        return tensors


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, np.ndarray):
        yield torch.from_numpy(output)
    elif isinstance(output, Image.Image):
        yield torch.from_numpy(np.array(output))
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)


def distance(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest relative distance of two results; infinite where their shapes differ."""
    if [tensor.shape for tensor in got] != [tensor.shape for tensor in want]:
        return float("inf")
    apart = [(one - two).norm() / two.norm().clamp(min=1e-30) for one, two in zip(got, want, strict=True)]
    return max(value.item() for value in apart)


def denoisers(pipe: Any) -> list[nn.Module]:
    """The denoisers of a pipeline."""
    parts = (getattr(pipe, name, None) for name in DENOISERS)
    modules = [part for part in parts if isinstance(part, nn.Module)]
    return modules or [pipe.prior]


class Through:
    """Stands for a pipeline under a plan: a call goes through the plan's loop."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan

    def __call__(self, **arguments: Any) -> Any:
        return generate(self.plan, **arguments)
