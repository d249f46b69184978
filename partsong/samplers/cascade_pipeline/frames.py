"""Runs a model on several blocks of frames at once, one forward for each, which take turns at every attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from partsong.samplers.long_video.staged_frames import StagedFrames

__all__ = ["CascadeFrames"]

#: What belongs to one forward of the model, and changes in its course.
_OF_A_FORWARD = ("sizes", "_attended", "_reached")


class CascadeFrames(StagedFrames):
    """Runs whole forwards of a model, which may pause in their attentions while another one runs."""

    pauses = True

    def run(self, named: Mapping[str, Any]) -> Any:
        """Makes a call of the model and returns its output."""
        self.rotary.begin(named)
        return self._forward(named, None)

    def begin_forward(self, sample: Any) -> None:
        """Prepares for a call, and leaves what belongs to one that is paused."""
        self.sizes, self._attended = {}, Counter()
        super().begin_forward(sample)

    def state(self) -> dict[str, Any]:
        """Returns what belongs to the current forward, for `resume`."""
        return {name: vars(self)[name] for name in _OF_A_FORWARD}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on with a forward."""
        vars(self).update(state)
