"""Names the knobs that the parts of the step cache read."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from partsong.parallel.step_cache.forecasts import ForecastName
from partsong.parallel.step_cache.measures import DecideName, MeasureName
from partsong.parallel.step_cache.tables import CacheCalibration

__all__ = ["CacheKnobs"]


class CacheKnobs(Protocol):
    """Describes the knobs of `StepCache`, which is defined above the parts that read them."""

    @property
    def threshold(self) -> float:
        """Estimated error below which blocks are left out."""
        ...

    @property
    def warmup_steps(self) -> int:
        """First steps that are computed in full."""
        ...

    @property
    def max_skips(self) -> int:
        """Steps in a row that may be left out."""
        ...

    @property
    def forecast(self) -> ForecastName:
        """Kind of forecast of what blocks add."""
        ...

    @property
    def keep_last(self) -> bool:
        """Whether the last step is always computed."""
        ...

    @property
    def mask(self) -> str | None:
        """The steps that are computed, where these are fixed."""
        ...

    @property
    def measure(self) -> MeasureName:
        """What is estimated."""
        ...

    @property
    def decide(self) -> DecideName:
        """Whether a step decides by its own measurement or by that of the previous step."""
        ...

    @property
    def calibration(self) -> CacheCalibration | Path | None:
        """Numbers of the model that measures need."""
        ...

    def leaves_out(self, step: int) -> bool:
        """Says whether the mask leaves out a step after the warm-up."""
        ...
