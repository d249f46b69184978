"""What a rank of a Dynamo worker does, with a stand-in for the parts of Dynamo that the engine is built on."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from tests.documents import ROOT


class ModelInput(Enum):
    """Says in which form a worker takes its requests."""

    Text = "text"
    Tokens = "tokens"


class DiffusionEngine:
    """Is the base of engines for raw requests."""


def install(requests: list[dict[str, Any]], answers: list[Any]) -> None:
    """Puts the stand-in among the modules; its ``run`` sends these requests at once, as a frontend would."""

    async def ask(engine: Any, request: dict[str, Any]) -> Any:
        return [answer async for answer in engine.generate(request, SimpleNamespace())]

    async def serve(kind: Any) -> None:
        engine, config = await kind.from_args(None)
        assert config.model_input is ModelInput.Text and config.endpoint_types == "images"
        started = await engine.start(1)
        assert started.served_model_name == config.served_model_name
        probe = await engine.health_check_payload()
        answers.extend(
            await asyncio.gather(*(ask(engine, each) for each in (*requests, probe)), return_exceptions=True)
        )
        await engine.cleanup()
        await engine.cleanup()

    modules = {
        "common.backend.engine": {"DiffusionEngine": DiffusionEngine, "EngineConfig": SimpleNamespace},
        "common.backend.health_check": {"build_raw_health_check_payload": lambda body: {**body, "_HEALTH_CHECK": True}},
        "common.backend.run": {"run": lambda kind: asyncio.run(serve(kind))},
        "common.backend.worker": {"WorkerConfig": SimpleNamespace},
        "llm": {"ModelInput": ModelInput},
    }
    for name, contents in modules.items():
        parts = ["dynamo", *name.split(".")]
        for end in range(1, len(parts)):
            sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        sys.modules[".".join(parts)] = ModuleType(".".join(parts))
        vars(sys.modules[".".join(parts)]).update(contents)


def load(requests: list[dict[str, Any]], answers: list[Any]) -> Any:
    """Loads the integration with the stand-in in Dynamo's place."""
    install(requests, answers)
    path = ROOT / "integrations" / "dynamo" / "partsong_engine.py"
    spec = importlib.util.spec_from_file_location("partsong_engine", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(model: str, options: list[str], requests: list[dict[str, Any]]) -> list[Any]:
    """Runs a worker on this rank; the first returns an answer or an error for each request, and for the probe."""
    answers: list[Any] = []
    with patch.object(sys, "argv", ["partsong_engine", "--model", model, *options]):
        load(requests, answers).main()
    if dist.is_initialized():
        dist.destroy_process_group()
    assert answers or os.environ["RANK"] != "0"
    return answers
