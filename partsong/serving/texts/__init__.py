"""Serves text models: each in a process of its own, or at another server that speaks the OpenAI API."""

from partsong.serving.texts.limits import TextLimits
from partsong.serving.texts.local import LocalText
from partsong.serving.texts.served import ServedText, find_text
from partsong.serving.texts.upstream import Upstream, UpstreamText
from partsong.serving.texts.wire import TextSpec

__all__ = ["LocalText", "ServedText", "TextLimits", "TextSpec", "Upstream", "UpstreamText", "find_text"]
