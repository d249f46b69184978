"""The part of ComfyUI's public interface that the pack imports, as little as its nodes need.

Names and arguments are those of ``comfy_api.latest``; a node that uses one that is not here fails to import or to
describe itself.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import comfy_sampling

PACK = Path(__file__).resolve().parents[2] / "integrations" / "comfyui"


class Interrupted(Exception):
    """Stands for ComfyUI's own error of a run that the user has stopped."""


@dataclass
class Input:
    """One input of a node."""

    id: str
    kind: str
    options: dict[str, Any]


@dataclass
class Output:
    """One output of a node."""

    id: str
    kind: str


#: Which arguments an input of each type takes, beside its id.
WIDGET = {"display_name", "optional", "tooltip", "lazy", "default", "socketless", "force_input", "extra_dict"}
ARGUMENTS = {
    "INT": WIDGET | {"min", "max", "step", "control_after_generate", "display_mode"},
    "FLOAT": WIDGET | {"min", "max", "step", "round", "display_mode"},
    "STRING": WIDGET | {"multiline", "placeholder", "dynamic_prompts"},
    "COMBO": WIDGET | {"options", "control_after_generate", "upload", "remote"},
}
SOCKET = {"display_name", "optional", "tooltip", "lazy", "extra_dict"}


def io_type(kind: str) -> Any:
    """Makes a type of the graph with its Input and Output."""

    def make_input(id: str, **options: Any) -> Input:
        unknown = set(options) - ARGUMENTS.get(kind, SOCKET)
        assert not unknown, f"{kind}.Input takes no {unknown}"
        return Input(id, kind, options)

    def make_output(id: str, display_name: str | None = None, tooltip: str | None = None) -> Output:
        return Output(id, kind)

    return types.SimpleNamespace(Input=make_input, Output=make_output, io_type=kind)


@dataclass
class Schema:
    """What a node says of itself."""

    node_id: str
    display_name: str
    category: str
    description: str = ""
    inputs: list[Input] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)


class ComfyNode(ABC):
    """The base of all nodes."""

    @classmethod
    @abstractmethod
    def define_schema(cls) -> Schema: ...

    @classmethod
    @abstractmethod
    def execute(cls, **inputs: Any) -> Any: ...


class NodeOutput:
    """What a node returns."""

    def __init__(self, *values: Any) -> None:
        self.values = values


class ComfyExtension(ABC):
    """The base of a pack."""

    @abstractmethod
    async def get_node_list(self) -> list[type[ComfyNode]]: ...


class Comfy:
    """Stands for a running ComfyUI: hears progress, and can be stopped.

    Attributes:
        progress: (value, most, whether a picture came with it) of each report.
        stop: asked whether the user has stopped the run.
    """

    def __init__(self) -> None:
        self.progress: list[tuple[float, float, bool]] = []
        self.stop: Callable[[], bool] = lambda: False

    def set_progress(self, value: float, max_value: float, node_id: Any = None, preview_image: Any = None) -> None:
        """Notes a report."""
        self.progress.append((value, max_value, preview_image is not None))

    def throw_exception_if_processing_interrupted(self) -> None:
        """Raises where the run is stopped."""
        if self.stop():
            raise Interrupted

    def modules(self) -> dict[str, types.ModuleType]:
        """Returns the modules that the pack imports, by name."""
        names = {"INT": "Int", "FLOAT": "Float", "STRING": "String", "COMBO": "Combo"}
        names |= {"IMAGE": "Image", "MASK": "Mask", "VIDEO": "Video", "MODEL": "Model"}
        io = types.SimpleNamespace(
            **{name: io_type(kind) for kind, name in names.items()},
            Custom=io_type,
            Schema=Schema,
            ComfyNode=ComfyNode,
            NodeOutput=NodeOutput,
        )
        latest = types.ModuleType("comfy_api.latest")
        latest.__dict__.update(
            io=io,
            ComfyExtension=ComfyExtension,
            ComfyAPISync=lambda: types.SimpleNamespace(execution=self),
            InputImpl=types.SimpleNamespace(VideoFromFile=lambda file: ("video", file)),
        )
        management = types.ModuleType("comfy.model_management")
        check = self.throw_exception_if_processing_interrupted
        management.__dict__.update(
            throw_exception_if_processing_interrupted=check,
            get_torch_device=lambda: torch.device("cpu"),
            unet_offload_device=lambda: torch.device("cpu"),
        )
        packages = {name: types.ModuleType(name) for name in ("comfy_api", "comfy")}
        parts = {**comfy_sampling.modules(), "comfy.model_management": management}
        for name, module in parts.items():  # `import comfy.x` finds x as an attribute of comfy
            setattr(packages["comfy"], name.removeprefix("comfy."), module)
        return {**packages, **parts, "comfy_api.latest": latest}


@contextmanager
def pack_beside(patch: pytest.MonkeyPatch, url: str) -> Iterator[types.ModuleType]:
    """Imports the pack with a stub in ComfyUI's place, for a server at an address."""
    for name, module in Comfy().modules().items():
        patch.setitem(sys.modules, name, module)
    patch.setenv("PARTSONG_URL", url)
    patch.delenv("PARTSONG_API_KEY", raising=False)
    pack = load_pack()
    try:
        yield pack
    finally:
        for name in [name for name in sys.modules if name.startswith(pack.__name__)]:
            del sys.modules[name]


def load_pack(name: str = "partsong_comfy_pack") -> types.ModuleType:
    """Imports the pack as ComfyUI does: a folder by its path, whatever it is called."""
    spec = importlib.util.spec_from_file_location(name, PACK / "__init__.py", submodule_search_locations=[str(PACK)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
