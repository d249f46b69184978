"""Runs thinking methods as models of inspect_ai: ``inspect eval TASK --model partsong/MODEL -M strategy=...``.

::

    inspect eval task.py --model partsong/smollm2-135m -M strategy=self-consistency:num=8 -M journal=calls.db
    inspect eval task.py --model partsong/qwen3-8b --model-base-url http://127.0.0.1:8000/v1 -M strategy=pdr

inspect finds the provider by the entry point that this package declares. In your own process, importing this module
registers it. It needs inspect_ai (``pip install 'partsong[eval]'``) and loads no torch until a model is asked for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Literal

from partsong.errors import ArgumentError, UnsupportedError
from partsong.evals.harness.strategy_model import StrategyModel
from partsong.evals.harness.texts import cut
from partsong.jobs.engines import EngineArguments
from partsong.knobs import Count, check_value
from partsong.reasoning.calls.answer import Answer
from partsong.reasoning.calls.call import Message, Parameters
from partsong.reasoning.calls.engine import Engine

try:
    from inspect_ai.model import (
        ChatCompletionChoice,
        ChatMessage,
        ChatMessageAssistant,
        ChatMessageTool,
        GenerateConfig,
        ModelAPI,
        ModelOutput,
        ModelUsage,
        modelapi,
    )
    from inspect_ai.tool import ToolChoice, ToolInfo
except ImportError as error:
    raise ImportError("this provider needs inspect_ai: pip install 'partsong[eval]'") from error

__all__ = ["ThinkingAPI", "partsong"]

#: Settings of a generation that are supported, and those that inspect handles itself.
_SUPPORTED = ("max_tokens", "temperature", "top_p", "stop_seqs", "seed")
_INSPECTS = (
    *("max_retries", "timeout", "attempt_timeout", "stream_idle_timeout", "max_connections", "adaptive_connections"),
    *("system_message", "max_tool_output", "cache", "cache_prompt", "fail_on_refusal"),
    *("parallel_tool_calls", "internal_tools", "reasoning_history"),
)
#: Values at which other settings change nothing.
_NEUTRAL = {"num_choices": 1, "best_of": 1, "logprobs": False, "batch": False, "frequency_penalty": 0.0}
_NEUTRAL |= {"presence_penalty": 0.0}


@modelapi(name="partsong")
def partsong() -> type[ModelAPI]:
    """Returns the provider, whose name precedes the slash."""
    return ThinkingAPI


class ThinkingAPI(ModelAPI):
    """Answers every generation of inspect with a strategy.

    The last message, from the user, is the question of the strategy. A system message and earlier turns come before
    every call it makes. A chat that a sample run asks again gets other draws, and so does every epoch. With the same
    seed, samples and epochs an evaluation writes the same texts again.

    Args:
        model_name: the model that a `LocalEngine` loads, or with `base_url` the name that a server has for it.
        base_url: of a server that speaks the OpenAI API (``--model-base-url``).
        api_key: must be left out; the key is read from the environment variable ``OPENAI_API_KEY``.
        config: settings of inspect.
        strategy: such as "pdr:schedule=4-1"; knobs may be separated by ``;``.
        engine: answers the calls, instead of a model by name; call `get_model` with ``memoize=False`` then.
        extract: how answers are found in texts, for votes; a name of `EXTRACTORS`.
        max_tokens: of each call, unless inspect's settings have a ``max_tokens``.
        seed: of all draws; inspect's own ``seed`` changes the draws as well.
        journal: file of completed calls; an evaluation that is run again repeats none of them.
        budget_tokens: at most this many tokens in all calls of a generation.
        concurrency: at most this many calls at the same time, of all generations together. inspect's
            ``max_connections`` bounds the generations.
        **named: fields of `EngineArguments`: ``endpoint``, ``num_engines``, ``dtype``, ``device``.

    Raises:
        ArgumentError: there is no strategy, or `StrategyModel`, `EngineArguments` or the engine refuses an argument.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 - inspect's own signature; it is only read
        *,
        strategy: str | Sequence[str] | None = None,
        engine: Engine | None = None,
        extract: str | None = None,
        max_tokens: Count = 1024,
        seed: int = 0,
        journal: str | None = None,
        budget_tokens: int | None = None,
        concurrency: int = 64,
        **named: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        if strategy is None:
            raise ArgumentError("partsong needs a thinking method: -M strategy=NAME[:KEY=VALUE;...], such as greedy")
        if api_key is not None:
            raise ArgumentError(
                "leave out api_key; the server's key is read from the environment variable OPENAI_API_KEY"
            )
        check_value("max_tokens", max_tokens, Count)
        if engine is not None and (named or base_url is not None):
            raise ArgumentError(f"engine= needs no other arguments; leave out {', '.join([*named, 'base_url'])}")
        self.thinker = StrategyModel(
            strategy if isinstance(strategy, str) else ",".join(strategy),  # inspect splits it at commas
            _engine_arguments(model_name, base_url, named) if engine is None else engine,
            extract=extract,
            seed=seed,
            journal=journal,
            budget_tokens=budget_tokens,
            concurrency=concurrency,
        )
        self._room = max_tokens
        self._taken: dict[tuple[str, str], set[int]] = {}

    # --- what inspect asks about the model ----------------------------------------------------------------------------

    def max_tokens(self) -> int | None:
        """Returns the most tokens of a call, unless the settings say otherwise."""
        return self._room

    def max_connections(self) -> int:
        """Returns the most generations at the same time by default, which is enough to keep all calls busy."""
        return self.thinker.concurrency

    def connection_key(self) -> str:
        """Returns the engine's name, so that generations of one engine are bounded together."""
        return self.thinker.engine.name

    def collapse_user_messages(self) -> bool:
        """Returns True, because chat templates need users and assistants in turn."""
        return True

    def collapse_assistant_messages(self) -> bool:
        """Returns True, for the same reason."""
        return True

    async def aclose(self) -> None:
        """Closes the engine and the journal."""
        await self.thinker.close()

    # --- generation ---------------------------------------------------------------------------------------------------

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """Answers a chat with the strategy.

        Returns:
            The text that the strategy accepted. ``usage`` counts all calls. ``metadata`` has the ``answer`` found in
            the text and the cost of the run, as in `CallGraph.summary`.

        Raises:
            UnsupportedError: there are tools or pictures, a setting is not supported, or inspect runs in trio.
            ArgumentError: the chat does not end with a user's message.
            EngineError: the engine gave no answer.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError as error:
            raise UnsupportedError("partsong's engines run in asyncio: unset INSPECT_ASYNC_BACKEND") from error
        if tools:
            raise UnsupportedError(
                f"strategies write texts and call no tools, but {len(tools)} were given ({tools[0].name}, ...); use a "
                f"solver without tools, such as generate()"
            )
        _check(config)
        chat = [_message(message) for message in input]
        parameters = Parameters(
            max_tokens=config.max_tokens or self._room,
            temperature=1.0 if config.temperature is None else config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            stop=tuple(stop for stop in config.stop_seqs or () if stop),
        )
        return self._output(await self._answer(chat, parameters, config.seed), parameters)

    async def _answer(self, chat: list[Message], parameters: Parameters, seed: int | None) -> Answer:
        """Answers a chat; how often the run of a sample has asked it before is one of the labels of its draws."""
        run, sample, epoch = _sample()
        messages = json.dumps([[message.role, message.text] for message in chat])
        taken = self._taken.setdefault((run, messages), set())
        repeat = next(number for number in range(len(taken) + 1) if number not in taken)
        taken.add(repeat)
        try:
            return await self.thinker.answer(chat, parameters, sample, epoch, repeat, "" if seed is None else seed)
        except BaseException:
            taken.discard(repeat)  # another attempt gets the same number
            raise

    def _output(self, answer: Answer, parameters: Parameters) -> ModelOutput:
        cost = answer.summary
        written = cost["tokens_total"] + cost["tokens_wasted"]
        incomplete = answer.stopped == "budget" or (answer.answer is None and bool(cost["truncated"]))
        reason: Literal["max_tokens", "stop"] = "max_tokens" if incomplete else "stop"
        message = ChatMessageAssistant(
            content=cut(answer.text, parameters.stop), model=self.model_name, source="generate"
        )
        return ModelOutput(
            model=self.model_name,
            choices=[ChatCompletionChoice(message=message, stop_reason=reason)],
            usage=ModelUsage(
                input_tokens=cost["prefill"] - cost["prefill_cached"],
                input_tokens_cache_read=cost["prefill_cached"],
                output_tokens=written,
                total_tokens=cost["prefill"] + written,
            ),
            metadata={
                "strategy": self.thinker.strategy,
                "answer": answer.answer,
                **{name: value for name, value in cost.items() if name != "stopped"},
                "stopped": answer.stopped,
            },
        )


def _engine_arguments(model_name: str, base_url: str | None, named: dict[str, Any]) -> EngineArguments:
    if base_url is not None:
        return EngineArguments(base_url=base_url, model=model_name, **named)
    return EngineArguments(pretrained=model_name, **named)


def _check(config: GenerateConfig) -> None:
    """Refuses settings that would change answers and are not supported."""
    given = config.model_dump(exclude_none=True)
    others = [name for name in given if name not in (*_SUPPORTED, *_INSPECTS) and given[name] != _NEUTRAL.get(name, [])]
    if others:
        raise UnsupportedError(
            f"partsong's strategies do not support {', '.join(others)}; they support {', '.join(_SUPPORTED)}"
        )


def _message(message: ChatMessage) -> Message:
    calls = isinstance(message, ChatMessageAssistant) and message.tool_calls
    if isinstance(message, ChatMessageTool) or calls:
        raise UnsupportedError("the chat has calls of tools, which strategies do not make; use a solver without tools")
    if not isinstance(message.content, str):
        kinds = {part.type for part in message.content} - {"text", "reasoning"}
        if kinds:
            raise UnsupportedError(f"the chat has {', '.join(sorted(kinds))}; strategies read text alone")
    return Message(message.role, (message.text,))


def _sample() -> tuple[str, str, int]:
    """Returns the calling sample run, its sample and its epoch, or "", "" and 1 outside of an evaluation."""
    try:
        from inspect_ai.solver._task_state import sample_state
    except ImportError:  # not a public name; without it, epochs are distinguished by the order of their calls
        return "", "", 1
    state = sample_state()
    return ("", "", 1) if state is None else (state.uuid, str(state.sample_id), state.epoch)
