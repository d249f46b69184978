"""A stage of training with accelerate that saves itself and continues as if it had not been stopped. Loads torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partsong.reasoning.training.thread_training import ThreadLesson, train_step
from partsong.zoo.training import Average, schedule

__all__ = ["Stage"]

_log = logging.getLogger(__name__)


class Stage:
    """A model, its average and its optimizers in training.

    Args:
        accelerator: of accelerate.
        path: the checkpoint; if it exists, the stage continues from it.
        model: what is trained; its averaged weights are `average.module`.
        optimizers: each with its peak learning rate.
        steps: in all.
        save_minutes: between checkpoints.
        unit: checkpoints are written behind whole units of so many steps.

    Attributes:
        lesson: the model with its loss, as accelerate prepared it.
        step: how many have been made.
    """

    def __init__(
        self,
        accelerator: Any,
        path: Path,
        model: Any,
        optimizers: list[tuple[torch.optim.Optimizer, float]],
        *,
        steps: int,
        save_minutes: float,
        unit: int = 1,
    ) -> None:
        self.accelerator, self.path, self.optimizers = accelerator, path, optimizers
        self.steps, self.save_minutes, self.unit = steps, save_minutes, unit
        self.model = model.to(accelerator.device).train()
        self.average = Average(self.model)
        self.step, self.spent = 0, 0.0
        if path.exists():
            self._resume()
        self.lesson: Any = accelerator.prepare(ThreadLesson(self.model))

    def _resume(self) -> None:
        state = torch.load(self.path, map_location=self.accelerator.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average.module.load_state_dict(state["average"])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.spent, self.average.count = state["step"], state["spent"], state["step"]
        self._say(f"{self.path.stem} resumed at step {self.step}")

    def _say(self, text: str) -> None:
        if self.accelerator.is_main_process:
            _log.info("%s", text)

    def save(self) -> None:
        """Writes the checkpoint, replacing the old one at once, on the first process."""
        if not self.accelerator.is_main_process:
            return
        state = {
            "model": self.model.state_dict(),
            "average": self.average.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "step": self.step,
            "spent": self.spent,
        }
        torch.save(state, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)

    def run(self, loss_of: Callable[[int], Tensor]) -> None:
        """Trains until the steps are made.

        Args:
            loss_of: the loss of a step.
        """
        start, before, saved, losses = time.time(), self.spent, self.spent, []
        parameters = list(self.model.parameters())
        while self.step < self.steps:
            if self.spent - saved >= self.save_minutes and self.step % self.unit == 0:
                self.save()
                saved = self.spent
            with self.accelerator.autocast():
                loss = loss_of(self.step)
            rate = schedule((self.step + 1) / self.steps)
            train_step(self.accelerator, loss, parameters, self.optimizers, scale=rate)
            self.average.update(self.model)
            self.step += 1
            self.spent = before + (time.time() - start) / 60
            losses.append(float(loss.detach()))
            if self.step % 20 == 0 or self.step == self.steps:
                self._say(f"{self.path.stem} {self.step}/{self.steps} {self.spent:.1f} min loss {_mean(losses):.4f}")
                losses.clear()
        self.save()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
