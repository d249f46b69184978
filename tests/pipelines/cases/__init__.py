"""The pipelines that are tried, by name, and those that are not, with the reason."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Collection

import diffusers

from partsong.parallel import ADAPTERS, Strategy
from tests.newer_names import demand, there
from tests.pipelines.case import DENOISERS, Case

#: Every module here lists its cases in ``HERE``, and in ``LEFT`` the pipelines of its families that have none.
_MODULES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]

CASES: dict[str, Case] = there(
    {case.name: case for module in _MODULES for case in module.HERE},
    lambda case: demand(getattr(diffusers, case.pipeline)),
)

#: The family of every case: the module that lists it.
FAMILY: dict[str, str] = {
    case.name: module.__name__ for module in _MODULES for case in module.HERE if case.name in CASES
}


#: Deprecated ones that diffusers hides where a package is missing.
_HIDDEN = ("AudioDiffusionPipeline", "SpectrogramDiffusionPipeline")
#: Deprecated older names, which newer versions of diffusers no longer have.
_RENAMED = ("Lumina2Text2ImgPipeline", "LuminaText2ImgPipeline")


def _general_reason(name: str) -> str | None:
    kind = getattr(diffusers, name)
    if "onnx" in kind.__module__:
        return "its models run outside torch, with no layers to put hooks on"
    if "deprecated" in kind.__module__ or hasattr(kind, "_last_supported_version") or name in (*_HIDDEN, *_RENAMED):
        return "diffusers has deprecated it"
    if "dummy" in kind.__module__:
        return "it needs a package that is not installed here"
    if name.endswith("ModularPipeline"):
        return "modular pipelines are made of blocks and have no call of their own to follow"
    return None


_GENERAL = {name: _general_reason(name) for name in dir(diffusers) if name.endswith("Pipeline")}

_TEXT = "it decodes text, which partsong.decode does"

_TRIED = {case.pipeline for case in CASES.values()}  # among them some that diffusers has deprecated
LEFT_OUT: dict[str, str] = {name: reason for name, reason in _GENERAL.items() if reason and name not in _TRIED} | {
    name: reason for module in _MODULES for name, reason in getattr(module, "LEFT", {}).items()
}
LEFT_OUT |= dict.fromkeys(("DiffusionGemmaPipeline", "LLaDA2Pipeline"), _TEXT)


def models_of(name: str) -> set[str]:
    """The classes of the denoisers that a pipeline is declared with."""
    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters
    kinds = (str(parameters[part].annotation) for part in DENOISERS if part in parameters)
    return {word for kind in kinds for word in re.findall(r"\w+", kind) if hasattr(diffusers, word)}


def cases_beside(strategy: Strategy, models: Collection[str]) -> list[str]:
    """One case for each model that a strategy does not refuse and that is none of these."""
    rows = {model for model, row in ADAPTERS.items() if not strategy.refuses(row)}
    first = {model: name for name in reversed(CASES) for model in models_of(CASES[name].pipeline)}
    return sorted({first[model] for model in (rows & first.keys()) - {*models}})


#: Classes of the denoisers of all pipelines that are tried.
MODELS: frozenset[str] = frozenset(model for case in CASES.values() for model in models_of(case.pipeline))
