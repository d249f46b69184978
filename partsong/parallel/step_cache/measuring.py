"""Chooses the measure of a step cache, what it compares, and which samples decide for themselves."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from torch import nn

from partsong.errors import UnsupportedError
from partsong.parallel.adapters import places
from partsong.parallel.adapters.row import JOINT
from partsong.parallel.cuts.batch_rules import BatchRules
from partsong.parallel.cuts.block_lists import Block
from partsong.parallel.cuts.stacked_branches import has_stacked_branches
from partsong.parallel.step_cache.calibration import Calibrated
from partsong.parallel.step_cache.knobs import CacheKnobs
from partsong.parallel.step_cache.late_measures import LateFirstBlockChange, LateInputChange
from partsong.parallel.step_cache.measures import FirstBlockChange, InputChange, MagnitudeDrift, Measure, compared
from partsong.parallel.step_cache.spectrum import Spectrum, SpectrumBytes
from partsong.parallel.strategy import Site

__all__ = ["Measuring"]


class Measuring:
    """Makes the measures of one denoiser.

    Args:
        knobs: name the measure.
        denoiser: the denoiser.

    Attributes:
        place: what a measure compares: the first block's addition, the modulated input of that block, or nothing.
        decides_together: whether a batch is left out as a whole or not at all.
        spectrum: predicts what comparing spectra sends; None where none are compared.
    """

    def __init__(self, knobs: CacheKnobs, denoiser: Site) -> None:
        self.knobs, self.denoiser = knobs, denoiser
        is_open = knobs.mask is None and knobs.measure != "magnitude"
        self.place: Literal["first_block", "input", "nowhere"] = "nowhere"
        if is_open:
            self.place = "first_block" if knobs.measure == "first_block" else "input"
        # A mask fixes steps for all samples, and displaced messages are sent for all samples.
        self.decides_together = not is_open or any(other.reads_last_step for other in denoiser.strategies)
        is_calibrated = knobs.mask is None and knobs.measure in ("input", "magnitude")
        self.calibrated = Calibrated(knobs, denoiser) if is_calibrated else None
        self.spectrum = SpectrumBytes(denoiser) if is_open and knobs.measure == "spectral" else None

    def samples(self, batch: int) -> int:
        """Returns how many decisions a call for a batch makes."""
        return 1 if self.decides_together else batch

    def deciders(self, named: Mapping[str, Any]) -> int:
        """Returns how many samples of a call decide for themselves; 1 where the batch decides together."""
        total = len(named[self.denoiser.adapter.sample])
        if total > 1 and not self.decides_together:
            self.decides_together = not self._is_divisible(named, total)
        return self.samples(total)

    def _is_divisible(self, named: Mapping[str, Any], total: int) -> bool:
        """Says whether the model gives the same results for some samples of a call as in the whole batch."""
        adapter = self.denoiser.adapter
        # Padding to the longest item, and caches that the model fills, belong to the batch as a whole.
        if adapter.padded or any(named.get(name) is not None for name in (*adapter.layered, *adapter.per_sample)):
            return False
        if adapter.trims_text or adapter.attends_per_sample or has_stacked_branches(self.denoiser.module):
            return False
        try:
            BatchRules.of(adapter).cut(named, [0], total)
        except UnsupportedError:
            return False
        return True

    def measure(self, samples: int) -> Measure | None:
        """Returns a measure for the samples of one guidance branch; None where a mask decides."""
        if self.knobs.mask is not None:
            return None
        compare = partial(compared, samples=samples, ranks=self.denoiser.shared)
        is_late = self.knobs.decide == "late"
        if self.place == "first_block":
            return LateFirstBlockChange(compare, samples) if is_late else FirstBlockChange(compare)
        summed = LateInputChange if is_late else InputChange
        if self.spectrum is not None:
            spectrum = Spectrum(self.denoiser, samples)
            return summed(spectrum.compared, lambda change: change, spectrum.taken)
        assert self.calibrated is not None
        if self.place == "input":
            return summed(compare, self.calibrated.output_change)
        return MagnitudeDrift(self.calibrated.ratio, samples)

    def attention_in(self, block: Block) -> nn.Module:
        """Returns the attention of a block whose input is the modulated input that is measured.

        Raises:
            UnsupportedError: there is no attention in it, or it gets the text's tokens too where spectra are compared.
        """
        adapter, modules = self.denoiser.adapter, dict(self.denoiser.module.named_modules())
        paths = (*adapter.attention, *adapter.linear_attention)
        names = {name for path in paths for name in places(path, modules, optional=True)}
        inside = [name for name in modules if name in names and name.startswith(f"{block.name}.")]
        if not inside:
            raise UnsupportedError(
                f"StepCache on {adapter.model}: its first block has no self-attention whose input could be measured; "
                'use measure="first_block"'
            )
        if self.spectrum is not None and JOINT in (adapter.streams_of(inside[0]) or ()):
            raise UnsupportedError(
                f'StepCache(measure="spectral") on {adapter.model}: its first block gets text and picture as one '
                'sequence, which has no spectrum; use measure="first_block"'
            )
        return modules[inside[0]]
