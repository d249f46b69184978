"""Nodes for ComfyUI that let a partsong server make pictures and videos."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .nodes import PartsongEdit, PartsongImage, PartsongModel, PartsongStrategy, PartsongVideo

__all__ = ["comfy_entrypoint"]


class PartsongExtension(ComfyExtension):
    """Lists the nodes of this pack."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Returns the classes of the nodes."""
        return [PartsongImage, PartsongEdit, PartsongVideo, PartsongModel, PartsongStrategy]


async def comfy_entrypoint() -> PartsongExtension:
    """Returns what ComfyUI loads."""
    return PartsongExtension()
