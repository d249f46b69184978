"""Trains a module in a stage that saves itself and continues where it was stopped. Importing this loads torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from partsong.errors import ArgumentError
from partsong.knobs import check_knobs, type_hints
from partsong_zoo.shapes.scenes import generator
from partsong_zoo.shapes_unet.muon import KernelMuon
from partsong_zoo.training.common import Average, Optimizers, World, schedule

__all__ = ["TrainingStage", "adam", "inside_matrices", "muon_and_adam", "read_average", "run_stages", "stages_of"]

#: Makes one step's loss, and a note for the log, from that step's own random generator.
Loss = Callable[[np.random.Generator], tuple[Tensor, str]]


def stages_of(asked: str, known: Sequence[str]) -> list[str]:
    """Returns the stages that a recipe is asked to run.

    Args:
        asked: their names, with commas between.
        known: all that it has.

    Raises:
        ArgumentError: one is not among them.

    >>> stages_of("train,export", ["train", "export", "evaluate"])
    ['train', 'export']
    """
    stages = asked.split(",")
    if unknown := [stage for stage in stages if stage not in known]:
        raise ArgumentError(f"no stage {unknown[0]!r}; there are {', '.join(known)}")
    return stages


def run_stages(config: Any, world: World, runners: Mapping[str, Callable[[Any, World], None]]) -> None:
    """Runs the stages that a recipe is asked for.

    Args:
        config: the recipe's, with the folder `out` and the names `stages`.
        world: the ranks.
        runners: all stages it has, in order.

    Raises:
        ArgumentError: a knob is out of its bounds, or a stage is not among them.
    """
    check_knobs(type_hints(type(config)), vars(config))
    stages = stages_of(config.stages, [*runners])
    Path(config.out).mkdir(parents=True, exist_ok=True)
    for stage in stages:
        runners[stage](config, world)
        world.wait()


def adam(parameters: list[nn.Parameter], rate: float, decay: float = 0.0) -> tuple[torch.optim.Optimizer, float]:
    """Returns Adam as all stages use it, with its peak learning rate."""
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=decay), rate


def muon_and_adam(
    module: nn.Module, inside: list[nn.Parameter], rates: tuple[float, float], decay: float
) -> Optimizers:
    """Returns orthogonalised momentum for the matrices `inside` the blocks, and Adam for all else that is trained."""
    chosen = {id(p) for p in inside}
    others = [p for p in module.parameters() if id(p) not in chosen and p.requires_grad]
    muon = KernelMuon(inside, lr=rates[0], weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    return [(muon, rates[0]), adam(others, rates[1])]


def inside_matrices(module: nn.Module, prefix: str = "model.layers.") -> list[nn.Parameter]:
    """Lists the matrices inside the layers of a module, for orthogonalised momentum."""
    return [p for n, p in module.named_parameters() if n.startswith(prefix) and p.ndim == 2]


def read_average(path: Path, part: str = "") -> dict[str, Tensor]:
    """Reads the averaged weights of a stage's checkpoint, on the CPU.

    Args:
        path: the checkpoint.
        part: a module inside the one that was trained; only its weights are returned, by their own names.
    """
    weights = torch.load(path, map_location="cpu", weights_only=True)["average"]
    prefix = f"{part}." if part else ""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


class TrainingStage:
    """Trains a module, keeps the average of its weights, and saves all that it needs to continue.

    Args:
        world: the ranks.
        path: the checkpoint; if it exists, the stage continues from it.
        module: what is trained, on the world's device; its averaged weights are `average.module`.
        optimizers: each with its peak learning rate.
        key: integers that, with the step, seed the step's random generator.
        steps: how many steps there are in all.
        minutes: how many minutes there are in all, pauses not counted; the stage ends at whichever comes first.
        save_minutes: minutes between checkpoints.
        unit: checkpoints are written only after a multiple of this many steps.
        report_every: steps between two lines of the log.
        rate_at: the learning rate, as a share of its peak, at a share of the stage.

    Attributes:
        step: how many steps have been made.
        spent: how many minutes they took.
    """

    def __init__(
        self,
        world: World,
        path: Path,
        module: Any,
        optimizers: Optimizers,
        *,
        key: tuple[int, ...],
        steps: int,
        minutes: float = math.inf,
        save_minutes: float,
        unit: int = 1,
        report_every: int = 50,
        rate_at: Callable[[float], float] = schedule,
    ) -> None:
        self.world, self.path, self.module, self.optimizers = world, path, module, optimizers
        self.key, self.steps, self.minutes, self.save_minutes = key, steps, minutes, save_minutes
        self.unit, self.report_every, self.rate_at = unit, report_every, rate_at
        self.parameters: list[nn.Parameter] = list(module.parameters())
        self.average = Average(module)
        self.step, self.spent = 0, 0.0
        if path.exists():
            self._resume()

    @property
    def progress(self) -> float:
        """Returns the share of the steps or of the minutes that is used up, whichever is larger."""
        return max(self.step / self.steps, self.spent / self.minutes)

    def _resume(self) -> None:
        state = torch.load(self.path, map_location=self.world.device, weights_only=True)
        self.module.load_state_dict(state["model"])
        self.average.module.load_state_dict(state["average"])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.spent, self.average.count = state["step"], state["spent"], state["step"]
        self.world.say(f"{self.path.stem} resumed at step {self.step}")

    def save(self) -> None:
        """Writes the checkpoint, replacing the old one at once, on rank 0."""
        if self.world.rank:
            return
        state = {
            "model": self.module.state_dict(),
            "average": self.average.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "step": self.step,
            "spent": self.spent,
        }
        torch.save(state, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)

    def run(self, loss_of: Loss) -> None:
        """Trains until the steps or the minutes are used up."""
        start, before, saved = time.time(), self.spent, self.spent
        losses: list[float] = []
        while self.progress < 1:
            if self.spent - saved >= self.save_minutes and self.step % self.unit == 0:
                self.save()
                saved = self.spent
            rng, progress = generator(*self.key, self.step), self.progress
            torch.manual_seed(int(rng.integers(2**62)))  # for losses that draw their noise from torch
            loss, note = loss_of(rng)
            self.world.descend(loss, self.parameters, self.optimizers, self.rate_at(progress))
            self.average.update(self.module)
            self.step += 1
            self.spent = before + self.world.minutes(start)
            losses.append(float(loss.detach()))
            if self.step % self.report_every == 0 or self.progress >= 1:
                mean = sum(losses) / len(losses)
                self.world.say(
                    f"{self.path.stem} {self.step} {progress:.3f} {self.spent:.1f} min loss {mean:.4f} {note}"
                )
                losses.clear()
        self.save()
