"""lm-evaluation-harness over ways to think: ``lm_eval --model partsong --model_args strategy=...``.

`PartsongLM` hands over to `ThinkingLM` where ``strategy=`` is given; releases of the harness up to 0.4.13 need the
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
from typing import Any, NamedTuple, NoReturn

from partsong.errors import ArgumentError, UnsupportedError
from partsong.evals.harness.strategy_engine import EngineArguments
from partsong.evals.harness.strategy_model import StrategyModel
from partsong.evals.reasoning.pool import run_all
from partsong.progress import progress
from partsong.reasoning.calls.call import Message, Parameters
from partsong.reasoning.calls.engine import Engine

try:
    _LM: Any = importlib.import_module("lm_eval.api.model").LM
except ImportError as error:
    raise ImportError("this model needs lm-evaluation-harness: pip install 'partsong[eval]'") from error

__all__ = ["ThinkingLM"]

_LOG = logging.getLogger("partsong.evals.lm_eval")

#: Of the harness's names for one thing, the first that is given.
_ROOM = ("max_gen_toks", "max_new_tokens", "max_tokens")
_KNOWN = (*_ROOM, "until", "do_sample", "temperature", "top_p")
#: Change nothing where the most likely tokens are taken.
_OF_DRAWS = ("top_k", "min_p")
_ROLES = ("system", "user", "assistant")


class _Asked(NamedTuple):
    """A request of the harness: the chat, how its calls are drawn, how often the same was asked before, its ends."""

    chat: Sequence[Message]
    parameters: Parameters
    repeat: int
    until: tuple[str, ...]


class _ChatText(str):
    """A chat as the harness carries prompts around, as text; it still knows its messages."""

    messages: tuple[Message, ...]


class ThinkingLM(_LM):
    """A model of the harness that answers every request with a strategy, many requests at a time.

    ``results["config"]`` of a run holds `StrategyModel.costs`: strategy, engine, calls and tokens of all requests. What
    is written depends on prompt, seed and how often the prompt was asked before, on no order and no batch.

    Args:
        strategy: such as "pdr:schedule=4-1"; on command lines ``;`` stands between knobs, for the harness cuts at
            commas.
        device: of a model in this process; None is the GPU if there is one.
        engine: answers, instead of `named`; it stays the caller's to close.
        extract: how answers are found in texts, for votes; a name of `EXTRACTORS`.
        temperature: of all draws, whatever the task says: many tasks ask for 0, at which samples are all the same.
            None is what the task says, and 1.0 where it says nothing.
        top_p: where the task does not say.
        max_new_tokens: of each call, where the task does not say.
        seed: of all draws.
        journal: file of completed calls: the same command goes on after an interruption and repeats none of them.
        budget_tokens: most tokens of all calls of a request.
        concurrency: most calls under way, of all requests together.
        batch_size: must be left alone: calls are bounded by `concurrency`.
        max_batch_size: likewise.
        **named: which model answers: fields of `EngineArguments`, such as ``pretrained``, or ``base_url`` with
            ``model``.

    Raises:
        ArgumentError: what `StrategyModel`, `EngineArguments` or the engine refuse, before any request.
    """

    def __init__(
        self,
        strategy: str,
        *,
        device: str | None = None,
        engine: Engine | None = None,
        extract: str | None = None,
        temperature: float | None = None,
        top_p: float = 1.0,
        max_new_tokens: int = 1024,
        seed: int = 0,
        journal: str | None = None,
        budget_tokens: int | None = None,
        concurrency: int = 64,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        **named: Any,
    ) -> None:
        super().__init__()
        _check_batches(batch_size, max_batch_size)
        _check(temperature, top_p, max_new_tokens)
        if engine is not None and named:
            raise ArgumentError(f"engine= is ready to answer; leave out {', '.join(named)}")
        self.thinker = StrategyModel(
            strategy,
            _named(device, named) if engine is None else engine,
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
        """Tells request caches apart: prompts are chats, whatever model reads them."""
        return "partsong-chat"

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as one prompt that still knows its messages: the engine's own template makes the text of them.

        Raises:
            UnsupportedError: the task begins the answer itself, which a strategy cannot go on from.
        """
        if not add_generation_prompt:
            raise UnsupportedError(
                "the task begins the answer itself (gen_prefix), and a strategy has no single answer to begin: take a "
                "task without gen_prefix, or leave --apply_chat_template out"
            )
        if unknown := {turn["role"] for turn in chat_history} - set(_ROLES):
            raise UnsupportedError(
                f"the chat has messages of {', '.join(sorted(unknown))}; known are {', '.join(_ROLES)}"
            )
        made = _ChatText(json.dumps(chat_history, ensure_ascii=False))
        made.messages = tuple(Message(turn["role"], (turn["content"],)) for turn in chat_history)  # type: ignore[arg-type]
        return made

    def get_model_info(self) -> dict[str, Any]:
        """For ``results["config"]``: how was thought, and what it cost."""
        return {**self.thinker.costs(), "temperature": self.temperature}

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuses the harness's cache, which knows a text by its prompt alone.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "use_cache keeps one text per prompt, whatever strategy, seed and repeat it is of: leave it out and give "
            "journal=FILE in model_args, which keeps every call"
        )

    # --- requests -----------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What the strategy accepts, each up to the first of its stopping texts; "" where it accepts nothing.

        Every call of the strategy ends at the stopping texts as well: they are where this task's texts end.
        """
        asked = self._asked([request.args for request in requests])
        self._warn(asked)
        texts = [""] * len(asked)

        async def one(index: int, seats: asyncio.Semaphore) -> None:
            async with seats:
                here = asked[index]
                made = await self.thinker.answer(here.chat, here.parameters, here.repeat)
            texts[index] = _cut(made.text, here.until)
            bar.update(1)

        async def every() -> None:
            # As many as could be needed to keep all calls busy; more would only be begun and left waiting.
            seats = asyncio.Semaphore(self.thinker.concurrency)
            try:
                await run_all(one(index, seats) for index in range(len(asked)))
            finally:
                await self.thinker.rest()

        with progress(len(asked), "partsong: thinking", None if not disable_tqdm else False) as bar:
            asyncio.run(every())
        costs = self.thinker.costs()
        if 2 * costs["unanswered"] > costs["requests"]:
            _LOG.warning(
                "partsong: no answer was found in %d of %d requests by extract=%s, and their texts may be empty; "
                "extract=text takes any text",
                *(costs["unanswered"], costs["requests"], costs["extract"]),
            )
        _LOG.info("partsong: %s", self.get_model_info())
        return texts

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> NoReturn:
        """Refuses: a strategy writes, and what it writes has no likelihood.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"the task compares log-likelihoods, and strategy {self.thinker.strategy} writes texts, which have none: "
            f"take a task of output_type generate_until, or the model itself (--model hf, or --model partsong without "
            f"strategy=)"
        )

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> NoReturn:
        """Refuses like `loglikelihood`.

        Raises:
            UnsupportedError: always.
        """
        self.loglikelihood(requests)

    def _asked(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[_Asked]:
        """All requests, checked before the first is answered."""
        seen: Counter[tuple[str, str]] = Counter()
        found = []
        for prompt, options in requests:
            parameters, until = self._settings(options)
            key = (prompt, repr(parameters))
            chat = prompt.messages if isinstance(prompt, _ChatText) else (Message("user", (prompt,)),)
            found.append(_Asked(chat, parameters, seen[key], until))
            seen[key] += 1
        return found

    def _settings(self, options: Mapping[str, Any]) -> tuple[Parameters, tuple[str, ...]]:
        """How the calls of a request are drawn, and where its text ends."""
        temperature = float(1.0 if options.get("temperature") is None else options["temperature"])
        if options.get("do_sample") is False:
            temperature = 0.0
        temperature = temperature if self.temperature is None else self.temperature
        known = (*_KNOWN, *_OF_DRAWS) if temperature == 0.0 else _KNOWN
        if unknown := sorted(set(options) - set(known)):
            raise ArgumentError(
                f"the task asks for {', '.join(unknown)}, which this model does not honour at temperature "
                f"{temperature:g}; known are {', '.join(known)}"
            )
        room = next((int(options[name]) for name in _ROOM if options.get(name) is not None), self.room)
        top_p = float(self.top_p if options.get("top_p") is None else options["top_p"])
        _check(temperature, top_p, room)
        until = options.get("until") or ()
        stops = tuple(stop for stop in ((until,) if isinstance(until, str) else until) if stop)
        return Parameters(max_tokens=room, temperature=temperature, top_p=top_p, stop=stops), stops

    def _warn(self, asked: Sequence[_Asked]) -> None:
        cold = any(one.parameters.temperature == 0.0 for one in asked)
        if cold and not self.thinker.draws_once and not self._warned:
            self._warned = True
            _LOG.warning(
                "partsong: the task asks for temperature 0, at which all samples of %s are the same; give temperature= "
                "in model_args",
                self.thinker.strategy,
            )


def _check_batches(size: int | str | None, most: int | None) -> None:
    if size not in (None, 1, "1", "auto") or most is not None:
        raise ArgumentError(
            f"batch_size={size!r}, max_batch_size={most!r}: a strategy batches its calls by itself; leave them out and "
            f"give concurrency= in model_args"
        )


def _check(temperature: float | None, top_p: float, room: int) -> None:
    if temperature is not None and not 0.0 <= temperature < float("inf"):
        raise ArgumentError(f"temperature={temperature!r}; use 0 or more")
    if not 0.0 < top_p <= 1.0:
        raise ArgumentError(f"top_p={top_p!r}; use 0 < top_p <= 1")
    if isinstance(room, bool) or not isinstance(room, int) or room < 1:
        raise ArgumentError(f"max_new_tokens={room!r}; use a positive integer")


def _named(device: str | None, named: dict[str, Any]) -> EngineArguments:
    """Which model is asked for. The harness asks for cuda:0 where nobody has asked for anything; that is looked for."""
    if named.get("base_url") is not None:
        return EngineArguments(**named)
    if device is not None and device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            _LOG.warning("partsong: there is no %s here, the model is loaded to the CPU", device)
            device = None
    return EngineArguments(device=device, **named)


def _cut(text: str, until: Sequence[str]) -> str:
    return text[: min((text.find(stop) for stop in until if stop in text), default=len(text))]
