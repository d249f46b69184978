"""`LocalEngine`: a transformers model in this process, many calls at a time."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import weakref
from collections.abc import Collection
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from partsong.errors import ArgumentError
from partsong.reasoning.calls.call import Completion, Parameters, Request
from partsong.reasoning.calls.engine import Progress
from partsong.reasoning.local.loading import load
from partsong.reasoning.local.model import LocalModel
from partsong.reasoning.local.prompt import prompt_of
from partsong.reasoning.local.scheduler import Scheduler
from partsong.reasoning.local.stops import AnswerText
from partsong.reasoning.local.thoughts import ThoughtEmbeddings
from partsong.reasoning.local.ticket import Ticket
from partsong.reasoning.local.worker import Worker
from partsong.seeds import check_seed

__all__ = ["LocalEngine"]


class LocalEngine:
    """Answers with a causal language model of transformers, in a thread of this process.

    Calls under way share everything they can. A prompt, or the beginning that two prompts have in common, is computed
    once, and so is an earlier answer that a later prompt goes on from; samples of one prompt are forks that read its
    keys without repeating them; rows join and leave the running batch at any step.

    What is drawn depends on prompt, parameters and ``request.seed`` alone. In float64 that was found to hold to the
    last token; in narrower types the batch changes logits in their last bits, which changes a token only where two
    candidates are that close.

    Args:
        model: a transformers folder, "smollm2-135m", a zoo name, a hub id, or a loaded model in eval mode (it stays as
            it is).
        tokenizer: of a loaded model; else the folder's own.
        dtype: of the weights; None is float32 on a CPU and the checkpoint's own on a GPU.
        device: None is the GPU if there is one, or where a loaded model is.
        max_rows: answers written together; further calls wait.
        prefill_chunk: most tokens of prompts computed beside a step of the rows.
        cache_mb: keys that are kept after use, in MB, for prompts to come; 0 keeps none.
        pack: linear layers over packed weights: several times faster for few rows on a CPU, for once more the memory
            where the model was given loaded. None packs on CPUs in float32, and in bfloat16 where the processor has
            the instructions (AVX-512 or AVX-NE-CONVERT).
        end_tokens: ids that end an answer; None takes those of the model and its tokenizer, an empty collection lets
            every answer run to its last token.
        thoughts: embeddings that mark the threads of forks (ParaThinker); None takes no notice of marks.
        name: for journals; None makes one of the model and the dtype.

    Raises:
        ArgumentError: a model, size or dtype that cannot be.
        ArgumentTypeError: an argument of the wrong type.
        UnsupportedError: a model whose results would be wrong, or packages that are missing.

    >>> from partsong.reasoning import Message, Parameters
    >>> async def ask():
    ...     engine = LocalEngine("lists-ar")
    ...     chat = (Message("user", ("sort : dog ant cat =",)),)
    ...     found = await engine.generate(Request(messages=chat, parameters=Parameters(max_tokens=9, temperature=0)))
    ...     await engine.close()
    ...     return found.text, found.finish, found.usage.prompt
    >>> asyncio.run(ask())
    ('ant cat dog', 'stop', 7)
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        max_rows: int = 64,
        prefill_chunk: int = 1024,
        cache_mb: float = 256.0,
        pack: bool | None = None,
        end_tokens: Collection[int] | None = None,
        thoughts: ThoughtEmbeddings | None = None,
        name: str | None = None,
    ) -> None:
        for what, count in (("max_rows", max_rows), ("prefill_chunk", prefill_chunk)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ArgumentError(f"{what}={count!r}; use a positive integer")
        if not (isinstance(cache_mb, int | float) and math.isfinite(cache_mb) and cache_mb >= 0):
            raise ArgumentError(f"cache_mb={cache_mb!r}; use 0 or more")
        loaded = load(model, tokenizer, dtype, device)
        self.tokenizer = loaded.tokenizer
        # Tokenizers are not to be used by two threads at once: this one belongs to the worker.
        self._decoder = copy.deepcopy(loaded.tokenizer)
        known = _end_tokens(loaded.module, loaded.tokenizer)
        self._ends = known if end_tokens is None else frozenset(end_tokens)
        self.model = LocalModel(loaded.module, pack=pack, owned=loaded.owned, thoughts=thoughts)
        self.name = name or f"local/{loaded.name}/{str(self.model.dtype).removeprefix('torch.')}"
        scheduler = Scheduler(
            self.model,
            max_rows=max_rows,
            prefill_chunk=prefill_chunk,
            kept_tokens=int(cache_mb * 1e6 / self.model.bytes_per_token),
        )
        self._worker = Worker(scheduler, self.name)
        self._end = weakref.finalize(self, _end, self._worker, self.model)

    async def generate(self, request: Request, progress: Progress | None = None) -> Completion:
        """Answers one request; see `Engine`.

        `Usage.completion` counts every drawn token, the one that ends the answer included; `Usage.cached` the tokens of
        the prompt that this call did not have to compute. Log-probabilities are the model's own, before temperature
        and nucleus. `progress` gets the text that is certain: what may be the beginning of a stop string waits.

        Raises:
            ArgumentError: parameters that cannot be, or a prompt that fills the model's context; before any work.
            EngineError: the engine is closed or was closed meanwhile, or the model failed.
        """
        _check(request.parameters, self.model.vocab_size)
        seed = check_seed(request.seed)
        prompt = prompt_of(self.tokenizer, request.messages)
        room = self.model.context - prompt.end
        if room < 1:
            raise ArgumentError(
                f"the prompt has {prompt.end} tokens and the model's context {self.model.context}, which leaves no "
                f"room for an answer: shorten the prompt"
            )
        loop = asyncio.get_running_loop()
        ticket = Ticket(
            prompt=prompt,
            parameters=request.parameters,
            seed=seed,
            most=min(request.parameters.max_tokens, room),
            ends=self._ends,
            text=AnswerText(self._decoder, request.parameters.stop),
            loop=loop,
            future=loop.create_future(),
            left=asyncio.Event(),
            progress=progress,
        )
        self._worker.submit(ticket)
        try:
            return await ticket.future
        except asyncio.CancelledError:
            self._worker.cancel(ticket)
            # The row leaves before the next step; who cancels again does not wait for that.
            with contextlib.suppress(asyncio.CancelledError):
                await ticket.left.wait()
            raise

    async def close(self) -> None:
        """Ends the thread; calls under way get an `EngineError`. Closing twice does nothing."""
        self._worker.close()
        await asyncio.to_thread(self._worker.join)
        self._end()


def _end(worker: Worker, model: LocalModel) -> None:
    worker.close()
    # A thread that is inside torch while the interpreter goes down takes the process with it.
    worker.join()
    model.close()


def _end_tokens(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All tokens that end an answer: those of the generation settings, the configuration and the tokenizer."""
    found: set[int] = set()
    for holder in (module.generation_config, module.config, tokenizer):
        ends = getattr(holder, "eos_token_id", None)
        found.update([ends] if isinstance(ends, int) else ends or ())
    return frozenset(found)


def _check(asked: Parameters, vocab_size: int) -> None:
    """Refuses parameters that mean nothing."""
    for name, low, high in (("max_tokens", 1, math.inf), ("logprobs", 0, vocab_size)):
        value = getattr(asked, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            most = f" and at most {high}" if high < math.inf else ""
            raise ArgumentError(f"{name}={value!r}; use an integer of at least {low}{most}")
    if not (isinstance(asked.temperature, int | float) and math.isfinite(asked.temperature) and asked.temperature >= 0):
        raise ArgumentError(f"temperature={asked.temperature!r}; use 0 or more")
    if not (isinstance(asked.top_p, int | float) and 0 < asked.top_p <= 1):
        raise ArgumentError(f"top_p={asked.top_p!r}; use 0 < top_p <= 1")
    if isinstance(asked.stop, str) or not all(isinstance(each, str) and each for each in asked.stop):
        raise ArgumentError(f"stop={asked.stop!r}; use a tuple of strings that are not empty")
