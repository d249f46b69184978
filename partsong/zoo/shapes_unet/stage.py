"""A stage of training that saves itself and continues as if it had not been stopped. Importing this loads torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from partsong.zoo.shapes.scenes import generator
from partsong.zoo.training import Average, World, schedule

#: Makes one step's loss, and a note for the log, from that step's own random generator.
Loss = Callable[[np.random.Generator], tuple[Tensor, str]]


def adam(parameters: list[nn.Parameter], rate: float) -> tuple[torch.optim.Optimizer, float]:
    """Adam as all stages use it, and its peak learning rate."""
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.0), rate


class Stage:
    """A module, its average and its optimizers in training.

    Args:
        world: The ranks.
        path: The checkpoint; if it exists, the stage continues from it.
        module: What is trained; its averaged weights are `average.module`.
        optimizers: Optimizers and their peak learning rates.
        key: Integers that, with the step, seed the step's random generator.
        steps: Steps in all.
        minutes: Minutes in all, stops not counted; the stage ends at whichever comes first.
        save_minutes: Minutes between checkpoints.
    """

    def __init__(
        self,
        world: World,
        path: Path,
        module: nn.Module,
        optimizers: list[tuple[torch.optim.Optimizer, float]],
        *,
        key: tuple[int, ...],
        steps: int,
        minutes: float,
        save_minutes: float,
    ) -> None:
        self.world, self.path, self.module, self.optimizers = world, path, module, optimizers
        self.key, self.steps, self.minutes, self.save_minutes = key, steps, minutes, save_minutes
        self.parameters = list(module.parameters())
        self.average = Average(module)
        self.step, self.spent = 0, 0.0
        if path.exists():
            self._resume()

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
        start, before, saved, losses = time.time(), self.spent, self.spent, []
        while True:
            self.spent = before + self.world.minutes(start)
            progress = max(self.step / self.steps, self.spent / self.minutes)
            if progress >= 1:
                break
            if self.spent - saved >= self.save_minutes:
                self.save()
                saved = self.spent
            rng = generator(*self.key, self.step)
            torch.manual_seed(int(rng.integers(2**62)))  # for losses that draw their noise from torch
            loss, note = loss_of(rng)
            self._descend(loss, schedule(progress))
            losses.append(float(loss.detach()))
            if self.step % 50 == 0:
                spent = f"{progress:.3f} {self.spent:.1f} min"
                self.world.say(f"{self.path.stem} {self.step} {spent} loss {np.mean(losses):.4f} {note}")
                losses.clear()
        self.save()

    def _descend(self, loss: Tensor, rate: float) -> None:
        """One step of every optimizer at `rate` times its peak learning rate."""
        self.module.zero_grad(set_to_none=True)
        loss.backward()
        self.world.average(self.parameters)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer, peak in self.optimizers:
            optimizer.param_groups[0]["lr"] = rate * peak
            optimizer.step()
        self.average.update(self.module)
        self.step += 1
