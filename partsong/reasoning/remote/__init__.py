"""Asks servers with the OpenAI API. Importing this loads no client; making a call does."""

from partsong.reasoning.remote.engine import OpenAIEngine, Traffic
from partsong.reasoning.remote.errors import (
    DroppedError,
    GarbledError,
    KeyRefusedError,
    ModelNotServedError,
    RateLimitError,
    RemoteError,
    RequestRefusedError,
    ServerFailedError,
    StalledError,
    UnreachableError,
    WithheldError,
)
from partsong.reasoning.remote.timeouts import Patience

__all__ = [
    "DroppedError",
    "GarbledError",
    "KeyRefusedError",
    "ModelNotServedError",
    "OpenAIEngine",
    "Patience",
    "RateLimitError",
    "RemoteError",
    "RequestRefusedError",
    "ServerFailedError",
    "StalledError",
    "Traffic",
    "UnreachableError",
    "WithheldError",
]
