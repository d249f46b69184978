"""Defines the task of the `motion` models: fresh captions, their facts, videos of them, and a reader of videos.

`captions` draws sentences that training has not shown, `parse` tells a sentence's facts, `render` draws them for any
number of frames, `read` follows the objects of a video, `facts` / `facts_read` tell which of a caption's facts hold,
`identity_kept`, `border_jumps` and `trend` measure long videos.
"""

from partsong_zoo.motion.drawing import paint, render
from partsong_zoo.motion.grammar import GRAMMAR, captions, parse
from partsong_zoo.motion.measures import Jumps, border_jumps, facts, facts_read, identity_kept, trend
from partsong_zoo.motion.reader import Track, read
from partsong_zoo.motion.world import Mover, MovingItem, MovingScene, layout

__all__ = [
    "GRAMMAR",
    "MovingItem",
    "Jumps",
    "Mover",
    "MovingScene",
    "Track",
    "border_jumps",
    "captions",
    "facts",
    "facts_read",
    "identity_kept",
    "layout",
    "paint",
    "parse",
    "read",
    "render",
    "trend",
]
