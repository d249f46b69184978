"""Runs thinking methods as models of lm-evaluation-harness: ``lm_eval --model partsong --model_args strategy=...``.

With ``strategy=`` the model is a `ThinkingLM` instead of a `PartsongLM`. Releases of the harness up to 0.4.13 need the
command line of `partsong.evals.harness.lm_eval_model`::

    python -m partsong.evals.harness.lm_eval_model run --model partsong \
        --model_args 'strategy=self-consistency:num=8,pretrained=smollm2-135m,temperature=0.7,journal=calls.db' \
        --tasks gsm8k

Importing this module needs the harness (``pip install 'partsong[eval]'``).
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, NoReturn

from partsong.errors import ArgumentError, UnsupportedError
from partsong.evals.harness.strategy_model import StrategyModel
from partsong.evals.harness.texts import check_options, cut, room_of, stops_of
from partsong.evals.reasoning.pool import run_all
from partsong.jobs.engines import EngineArguments
from partsong.knobs import Count, Number, check_knobs, type_hints
from partsong.progress import progress
from partsong.reasoning.calls.call import Message, Parameters
from partsong.reasoning.calls.engine import Engine

try:
    _LM: Any = importlib.import_module("lm_eval.api.model").LM
except ImportError as error:
    raise ImportError("this model needs lm-evaluation-harness: pip install 'partsong[eval]'") from error

__all__ = ["ThinkingLM"]

_LOG = logging.getLogger("partsong.evals.lm_eval")

#: Settings that change nothing when the most likely tokens are taken.
_OF_DRAWS = ("top_k", "min_p")
_ROLES = ("system", "user", "assistant")

Temperature = Annotated[float, Number(0.0)]
TopP = Annotated[float, Number(0.0, 1.0, above=True)]


class _Request(NamedTuple):
    """Holds a request of the harness; `repeat` counts its earlier occurrences."""

    chat: Sequence[Message]
    parameters: Parameters
    repeat: int
    until: tuple[str, ...]


class _ChatText(str):
    """Holds a chat as text, as the harness passes prompts on, and keeps its messages."""

    messages: tuple[Message, ...]


class ThinkingLM(_LM):
    """Answers every request of the harness with a strategy, many requests at a time.

    ``results["config"]`` of a run holds `StrategyModel.costs`: strategy, engine, calls and tokens of all requests. A
    text depends on the prompt, the seed and how often the prompt was asked before, but not on the order or the batch.

    Args:
        strategy: such as "pdr:schedule=4-1"; on command lines separate knobs by ``;``, because the harness splits at
            commas.
        device: of a model in this process; None is the GPU if there is one.
        engine: answers the calls, instead of `named`; the caller closes it.
        extract: how answers are found in texts, for votes; a name of `EXTRACTORS`.
        temperature: of all draws, also if the task asks for another; many tasks ask for 0, at which all samples are the
            same. None is the task's own, or 1.0.
        top_p: for tasks that do not set it.
        max_new_tokens: of each call, for tasks that do not set it.
        seed: of all draws.
        journal: file of completed calls; after an interruption the same command continues and repeats none of them.
        budget_tokens: at most this many tokens in all calls of a request.
        concurrency: at most this many calls at the same time, of all requests together.
        batch_size: must be left out, because `concurrency` bounds the calls.
        max_batch_size: must be left out too.
        **named: fields of `EngineArguments`, such as ``pretrained``, or ``base_url`` with ``model``.

    Raises:
        ArgumentError: `StrategyModel`, `EngineArguments` or the engine refuses an argument; raised before any request.
    """

    def __init__(
        self,
        strategy: str,
        *,
        device: str | None = None,
        engine: Engine | None = None,
        extract: str | None = None,
        temperature: Temperature | None = None,
        top_p: TopP = 1.0,
        max_new_tokens: Count = 1024,
        seed: int = 0,
        journal: str | None = None,
        budget_tokens: int | None = None,
        concurrency: int = 64,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        **named: Any,
    ) -> None:
        super().__init__()
        if batch_size not in (None, 1, "1", "auto") or max_batch_size is not None:
            raise ArgumentError(
                f"batch_size={batch_size!r}, max_batch_size={max_batch_size!r}; a strategy batches its calls itself, "
                f"so leave them out and give concurrency= in model_args"
            )
        _check(temperature, top_p, max_new_tokens)
        if engine is not None and named:
            raise ArgumentError(f"engine= needs no other arguments; leave out {', '.join(named)}")
        self.thinker = StrategyModel(
            strategy,
            _engine_arguments(device, named) if engine is None else engine,
            extract=extract,
            seed=seed,
            journal=journal,
            budget_tokens=budget_tokens,
            concurrency=concurrency,
        )
        self.temperature, self.top_p, self.room = temperature, top_p, max_new_tokens
        self._warned = False

    # --- what the harness asks about the model ------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        """Returns one name for all models, because prompts are chats for all of them."""
        return "partsong-chat"

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns a chat as one prompt that keeps its messages, for the engine's own template.

        Raises:
            UnsupportedError: the task begins the answer itself, which a strategy cannot continue.
        """
        if not add_generation_prompt:
            raise UnsupportedError(
                "the task begins the answer itself (gen_prefix), and a strategy has no single answer to begin: take a "
                "task without gen_prefix, or leave --apply_chat_template out"
            )
        if unknown := {turn["role"] for turn in chat_history} - set(_ROLES):
            raise UnsupportedError(
                f"the chat has messages of {', '.join(sorted(unknown))}; the roles are {', '.join(_ROLES)}"
            )
        chat = _ChatText(json.dumps(chat_history, ensure_ascii=False))
        chat.messages = tuple(Message(turn["role"], (turn["content"],)) for turn in chat_history)  # type: ignore[arg-type]
        return chat

    def get_model_info(self) -> dict[str, Any]:
        """Returns the strategy, the engine and the costs of all requests, for ``results["config"]``."""
        return {**self.thinker.costs(), "temperature": self.temperature}

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuses the harness's cache, which keeps one text per prompt.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "use_cache keeps one text per prompt, although texts differ by strategy, seed and repeat; leave it out and "
            "give journal=FILE in model_args, which keeps every call"
        )

    # --- requests -----------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the texts that the strategy accepts, up to their stopping texts, or "" where it has none.

        Every call of the strategy ends at the stopping texts as well.
        """
        checked = self._checked([request.args for request in requests])
        self._warn(checked)
        texts = [""] * len(checked)

        async def one(index: int, seats: asyncio.Semaphore) -> None:
            async with seats:
                request = checked[index]
                answer = await self.thinker.answer(request.chat, request.parameters, request.repeat)
            texts[index] = cut(answer.text, request.until)
            bar.update(1)

        async def every() -> None:
            # Enough to keep all calls busy; more requests would only begin and wait.
            seats = asyncio.Semaphore(self.thinker.concurrency)
            try:
                await run_all(one(index, seats) for index in range(len(checked)))
            finally:
                await self.thinker.rest()

        with progress(len(checked), "partsong: thinking", None if not disable_tqdm else False) as bar:
            asyncio.run(every())
        costs = self.thinker.costs()
        if 2 * costs["unanswered"] > costs["requests"]:
            _LOG.warning(
                "partsong: extract=%s found no answer in %d of %d requests, whose texts may be empty; "
                "extract=text takes any text",
                *(costs["extract"], costs["unanswered"], costs["requests"]),
            )
        _LOG.info("partsong: %s", self.get_model_info())
        return texts

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> NoReturn:
        """Refuses, because the texts of a strategy have no likelihood.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"the task compares log-likelihoods, and the texts of strategy {self.thinker.strategy} have none; take a "
            f"task of output_type generate_until, or the model itself (--model hf, or --model partsong without "
            f"strategy=)"
        )

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> NoReturn:
        """Refuses like `loglikelihood`.

        Raises:
            UnsupportedError: always.
        """
        self.loglikelihood(requests)

    def _checked(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[_Request]:
        """Checks all requests before the first is answered."""
        seen: Counter[tuple[str, str]] = Counter()
        checked = []
        for prompt, options in requests:
            parameters, until = self._settings(options)
            key = (prompt, repr(parameters))
            chat = prompt.messages if isinstance(prompt, _ChatText) else (Message("user", (prompt,)),)
            checked.append(_Request(chat, parameters, seen[key], until))
            seen[key] += 1
        return checked

    def _settings(self, options: Mapping[str, Any]) -> tuple[Parameters, tuple[str, ...]]:
        """Returns the parameters of a request's calls and its stopping texts."""
        temperature = float(1.0 if options.get("temperature") is None else options["temperature"])
        if options.get("do_sample") is False:
            temperature = 0.0
        temperature = temperature if self.temperature is None else self.temperature
        check_options(options, ("top_p",), _OF_DRAWS, temperature)
        room = room_of(options, self.room)
        top_p = float(self.top_p if options.get("top_p") is None else options["top_p"])
        _check(temperature, top_p, room)
        stops = stops_of(options)
        return Parameters(max_tokens=room, temperature=temperature, top_p=top_p, stop=stops), stops

    def _warn(self, requests: Sequence[_Request]) -> None:
        cold = any(request.parameters.temperature == 0.0 for request in requests)
        if cold and not self.thinker.draws_once and not self._warned:
            self._warned = True
            _LOG.warning(
                "partsong: the task asks for temperature 0, at which all samples of %s are the same; give temperature= "
                "in model_args",
                self.thinker.strategy,
            )


def _check(temperature: float | None, top_p: float, room: int) -> None:
    values = {"temperature": temperature, "top_p": top_p, "max_new_tokens": room}
    check_knobs(type_hints(ThinkingLM.__init__), values)


def _engine_arguments(device: str | None, named: dict[str, Any]) -> EngineArguments:
    """Names the model; the harness asks for cuda:0 by default, which this machine may not have."""
    if named.get("base_url") is not None:
        return EngineArguments(**named)
    if device is not None and device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            _LOG.warning("partsong: this machine has no %s, so the model is loaded to the CPU", device)
            device = None
    return EngineArguments(device=device, **named)
