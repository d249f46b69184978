"""The engine and the habits that arguments of another harness name: a model here, a server, or engines on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from partsong.errors import ArgumentError, UnsupportedError
from partsong.reasoning.answers.extract import final_choice, final_code, final_expression, final_math, final_number
from partsong.reasoning.answers.extract_rows import final_list
from partsong.reasoning.calls.answer import Extract
from partsong.reasoning.calls.engine import Engine

__all__ = ["EXTRACTORS", "EngineArguments", "extractor", "open_engine"]


def _whole(text: str) -> str | None:
    return text.strip() or None


#: Ways to find an answer in a text, so that answers that mean the same count as one.
EXTRACTORS: Mapping[str, Extract] = MappingProxyType(
    {
        "number": final_number,
        "choice": final_choice,
        "expression": final_expression,
        "math": final_math,
        "code": final_code,
        "list": final_list,
        "text": _whole,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineArguments:
    """Which model answers, and where.

    Attributes:
        pretrained: what a `LocalEngine` loads: a folder, a zoo name, "smollm2-135m", a hub id, or a loaded model.
        base_url: of a server that speaks the OpenAI API, instead; its key is the environment's ``OPENAI_API_KEY``.
        model: the name under which the server has it.
        endpoint: of the server.
        num_engines: puts so many `LocalEngine`s on a Ray cluster (see `RayEngine`); None is one in this process.
        dtype: name of a torch type; None and "auto" are the engine's own choice.
        device: None is the GPU if there is one.
    """

    pretrained: Any = None
    base_url: str | None = None
    model: str | None = None
    endpoint: Literal["chat", "completions"] = "chat"
    num_engines: int | None = None
    dtype: str | None = None
    device: str | None = None

    def validate(self) -> None:
        """Refuses arguments that do not name one model.

        Raises:
            ArgumentError: none, two, or arguments that belong to another kind.
        """
        if (self.pretrained is None) == (self.base_url is None):
            raise ArgumentError(
                "name a model: pretrained= for one in this process, or base_url= and model= of a server"
            )
        server = self.base_url is not None
        num = self.num_engines
        if num is not None and (isinstance(num, bool) or not isinstance(num, int) or num < 1):
            raise ArgumentError(f"num_engines={num!r}; use a positive integer, or leave it out for one in this process")
        if server and self.model is None:
            raise ArgumentError("base_url= needs model=: the name under which the server has it")
        if server and (self.num_engines is not None or self.dtype not in (None, "auto")):
            raise ArgumentError("num_engines= and dtype= are for pretrained=; a server has its own")
        if not server and (self.model is not None or self.endpoint != "chat"):
            raise ArgumentError("model= and endpoint= are for a server, base_url=; models here are pretrained=")
        if self.endpoint not in ("chat", "completions"):
            raise ArgumentError(f"endpoint={self.endpoint!r}; use chat or completions")


def open_engine(asked: EngineArguments) -> Engine:
    """Makes the engine.

    Raises:
        ArgumentError: arguments that cannot be, or a model that is not there.
        UnsupportedError: a package is missing.
    """
    asked.validate()
    if asked.base_url is not None:
        return _server(asked)
    return _local(asked) if asked.num_engines is None else _cluster(asked, asked.num_engines)


def _local(asked: EngineArguments) -> Engine:
    import torch

    from partsong.reasoning.local import LocalEngine

    name = None if asked.dtype == "auto" else asked.dtype
    dtype = None if name is None else getattr(torch, name, None)
    if name is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(f"dtype={name!r}; use a floating type of torch such as 'bfloat16'")
    return LocalEngine(asked.pretrained, dtype=dtype, device=asked.device)


def _cluster(asked: EngineArguments, num_engines: int) -> Engine:
    from partsong.reasoning.cluster import RayEngine

    dtype = None if asked.dtype == "auto" else asked.dtype
    return RayEngine(asked.pretrained, num_engines=num_engines, dtype=dtype, device=asked.device)


def _server(asked: EngineArguments) -> Engine:
    try:
        import openai  # noqa: F401
    except ImportError as error:
        raise UnsupportedError("base_url= needs the openai client: pip install 'partsong[reasoning]'") from error
    from partsong.reasoning.remote import OpenAIEngine

    assert asked.model is not None
    return OpenAIEngine(asked.model, base_url=asked.base_url, endpoint=asked.endpoint)


def extractor(name: str | None, task: Any = None) -> tuple[str, Extract]:
    """A way to find answers by its name in `EXTRACTORS`, with or without ``final_`` before it.

    Args:
        name: None is that of the zoo model's task, or "number".
        task: as `task_of` gives it.

    Returns:
        The name and the function.

    Raises:
        ArgumentError: no such way; names those there are.

    >>> extractor("final_choice")[1]("The answer is (B).")
    'B'
    """
    if name is None and task is not None:
        return "the model's own", task.answer_of
    plain = (name or "number").removeprefix("final_")
    if plain not in EXTRACTORS:
        raise ArgumentError(f"extract={name!r}; there are {', '.join(EXTRACTORS)}")
    return plain, EXTRACTORS[plain]
