"""Lists all drafters by name: those that read only the text, and those that are models."""

from __future__ import annotations

from types import MappingProxyType

from partsong.kernels.speculation.registry import COMMON
from partsong.knobs import by_name
from partsong.reasoning.local.speculation.assistant import Assistant
from partsong.reasoning.local.speculation.head import TrainedHead
from partsong.reasoning.local.speculation.masked import Masked
from partsong.reasoning.local.speculation.saguaro import Saguaro

__all__ = ["DRAFTERS"]

#: Name -> knobs.
DRAFTERS = MappingProxyType({**COMMON, **by_name((Assistant, Saguaro, Masked)), "head": TrainedHead})
