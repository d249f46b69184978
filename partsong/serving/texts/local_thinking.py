"""Answers requests with a causal language model in this process, by any thinking method."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from partsong.errors import ArgumentError
from partsong.jobs.engines import EngineArguments, open_engine
from partsong.reasoning.calls.call import Completion, Request
from partsong.reasoning.calls.engine import Progress
from partsong.reasoning.local.engine import check_parameters
from partsong.reasoning.local.prompt import prompt_ids
from partsong.reasoning.scorers.verifier import VerifierAddress
from partsong.serving.texts.events import TextDone, TextEvent, TextRequest
from partsong.serving.texts.limits import TextLimits
from partsong.serving.texts.thinking import ThinkingJob, prepare_thinking, thinking_names

__all__ = ["ThinkingTexts"]


class ThinkingTexts:
    """Holds a `LocalEngine` or a `RanksEngine`, which all requests share.

    Args:
        model: a zoo name, a folder or a hub id.
        limits: what requests may ask for.
        verifier: scores texts for methods that take a scorer; None leaves them their own.
        **how: fields of `EngineArguments`.

    Raises:
        ArgumentError: the model cannot be loaded.
    """

    kind = "thinking"

    def __init__(self, model: str, limits: TextLimits, verifier: VerifierAddress | None = None, **how: Any) -> None:
        self.model, self.limits, self.strategies, self._verifier = model, limits, thinking_names(), verifier
        self.engine: Any = open_engine(EngineArguments(pretrained=model, **how))
        # Texts to continue are read as they stand; their calls run in the same batch.
        self._plain = _Plain(self.engine)

    def prepare(self, request: TextRequest) -> ThinkingJob:
        """Checks a request before any call; errors as in `prepare_thinking`.

        Raises:
            ArgumentError: the model's chat template refuses the messages, or they fill its context.
        """
        job = prepare_thinking(request, self.limits, self.model, self._verifier)
        check_parameters(job.parameters, self.engine.vocab_size)
        tokenizer = self._plain.tokenizer if request.plain else self.engine.tokenizer
        size, room = len(prompt_ids(tokenizer, job.chat)), self.engine.context
        if size >= room:
            raise ArgumentError(f"the messages have {size} tokens, and the model reads {room} in all: shorten them")
        return job

    async def run(self, job: ThinkingJob, emit: Callable[[TextEvent], None]) -> TextDone:
        """Answers a request; see `ThinkingJob.run`."""
        return await job.run(self._plain if job.request.plain else self.engine, emit)


class _Plain:
    """Reads the messages of an engine's calls as they stand, without the chat template."""

    def __init__(self, engine: Any) -> None:
        self.name, self._engine = engine.name, engine
        self.tokenizer = copy.deepcopy(engine.tokenizer)
        self.tokenizer.chat_template = None

    async def generate(self, request: Request, progress: Progress | None = None) -> Completion:
        return await self._engine.generate(request, progress, plain=True)

    async def close(self) -> None:
        await self._engine.close()
