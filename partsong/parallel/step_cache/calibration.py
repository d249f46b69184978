"""Provides calibrated measures with the numbers for the model and the current generation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from partsong.errors import UnsupportedError
from partsong.parallel.step_cache.knobs import CacheKnobs
from partsong.parallel.step_cache.tables import FILE_NAME, CacheCalibration, calibration_path, read_calibrations
from partsong.parallel.strategy import Site

__all__ = ["Calibrated"]


class Calibrated:
    """Holds the calibration of a model for the current generation's number of steps.

    Args:
        knobs: hold the numbers, or name a file with them.
        denoiser: the model.

    Raises:
        UnsupportedError: nothing was calibrated for this model.
    """

    def __init__(self, knobs: CacheKnobs, denoiser: Site) -> None:
        self.measure, self.model, self.clock = knobs.measure, denoiser.adapter.model, denoiser.clock
        needed = "polynomial" if self.measure == "input" else "ratios"
        entries: Mapping[int | None, CacheCalibration]
        if isinstance(knobs.calibration, CacheCalibration):
            # A polynomial given by the user serves any number of steps.
            entries = {None if needed == "polynomial" else len(knobs.calibration.ratios): knobs.calibration}
        else:
            path = calibration_path(denoiser.module) if knobs.calibration is None else Path(knobs.calibration)
            entries = {} if path is None else {**read_calibrations(path)}
        self._entries = {num: entry for num, entry in entries.items() if getattr(entry, needed)}
        if not self._entries:
            noun = "polynomial" if needed == "polynomial" else "table of ratios"
            raise UnsupportedError(
                f'StepCache(measure="{self.measure}"): no {noun} is known of this {self.model}; put {FILE_NAME} '
                "into its folder with partsong.evals.cache_calibration, or give calibration="
            )
        self._is_dry = denoiser.shared.dry
        self.clock.on_begin(self._check)

    def output_change(self, change: float) -> float:
        """Estimates the relative change of the output from that of the modulated input; at least 0."""
        value = 0.0
        for coefficient in self._entry().polynomial:
            value = value * change + coefficient
        return max(value, 0.0)

    def ratio(self, step: int) -> float:
        """Returns the size of what all blocks add in a step over that in the previous step."""
        return self._entry().ratios[step + self.clock.passed_over]

    def _check(self) -> None:
        if self.clock.num_steps is not None and not self._is_dry:
            self._entry()

    def _entry(self) -> CacheCalibration:
        """Returns the calibration for this generation.

        Raises:
            UnsupportedError: nothing was calibrated for its number of steps.
        """
        num = None if self.clock.num_steps is None else self.clock.num_steps + self.clock.passed_over
        entry = self._entries.get(None) or self._entries.get(num)
        if entry is None:
            known = " and ".join(map(str, sorted(each for each in self._entries if each is not None)))
            raise UnsupportedError(
                f'StepCache(measure="{self.measure}"): this {self.model} was calibrated for {known} steps, and this '
                f"generation has {'an unknown number' if num is None else num}; calibrate it for that number with "
                'partsong.evals.cache_calibration, or use measure="first_block"'
            )
        return entry
