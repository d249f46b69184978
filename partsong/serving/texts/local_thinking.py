"""Answers requests with a causal language model in this process, by any thinking method."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from partsong.errors import ArgumentError
from partsong.jobs.engines import EngineArguments, open_engine
from partsong.reasoning.local.engine import LocalEngine, check_parameters
from partsong.reasoning.local.prompt import prompt_ids
from partsong.reasoning.scorers.verifier import VerifierAddress
from partsong.serving.texts.events import TextDone, TextEvent, TextRequest
from partsong.serving.texts.limits import TextLimits
from partsong.serving.texts.thinking import ThinkingJob, prepare_thinking, thinking_names

__all__ = ["ThinkingTexts"]


class ThinkingTexts:
    """Holds a `LocalEngine`, which all requests share.

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
        engine = open_engine(EngineArguments(pretrained=model, **how))
        assert isinstance(engine, LocalEngine)
        self.engine = engine
        # Texts to continue are read as they stand; their calls run in the same batch.
        self._plain = copy.copy(engine)
        self._plain.tokenizer = copy.deepcopy(engine.tokenizer)
        self._plain.tokenizer.chat_template = None

    def prepare(self, request: TextRequest) -> ThinkingJob:
        """Checks a request before any call; errors as in `prepare_thinking`.

        Raises:
            ArgumentError: the model's chat template refuses the messages, or they fill its context.
        """
        job = prepare_thinking(request, self.limits, self.model, self._verifier)
        check_parameters(job.parameters, self.engine.model.vocab_size)
        tokenizer = self._plain.tokenizer if request.plain else self.engine.tokenizer
        size, room = len(prompt_ids(tokenizer, job.chat)), self.engine.model.context
        if size >= room:
            raise ArgumentError(f"the messages have {size} tokens, and the model reads {room} in all: shorten them")
        return job

    async def run(self, job: ThinkingJob, emit: Callable[[TextEvent], None]) -> TextDone:
        """Answers a request; see `ThinkingJob.run`."""
        return await job.run(self._plain if job.request.plain else self.engine, emit)
