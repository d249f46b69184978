"""inspect_ai over ways to think: ``inspect eval TASK --model partsong/MODEL -M strategy=...``.

::

    inspect eval task.py --model partsong/smollm2-135m -M strategy=self-consistency:num=8 -M journal=calls.db
    inspect eval task.py --model partsong/qwen3-8b --model-base-url http://127.0.0.1:8000/v1 -M strategy=pdr

inspect finds the provider by the entry point this package declares; in a process of one's own, importing this module
registers it. It needs inspect_ai (``pip install 'partsong[eval]'``) and loads no torch before a model is asked for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Literal

from partsong.errors import ArgumentError, UnsupportedError
from partsong.evals.harness.strategy_engine import EngineArguments
from partsong.evals.harness.strategy_model import StrategyModel
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

#: Settings of a generation that are honoured, and those that are inspect's own affair.
_HONOURED = ("max_tokens", "temperature", "top_p", "stop_seqs", "seed")
_INSPECTS = (
    *("max_retries", "timeout", "attempt_timeout", "stream_idle_timeout", "max_connections", "adaptive_connections"),
    *("system_message", "max_tool_output", "cache", "cache_prompt", "fail_on_refusal"),
    *("parallel_tool_calls", "internal_tools", "reasoning_history"),
)
#: Settings that ask for nothing at these values.
_NOTHING = {"num_choices": 1, "best_of": 1, "logprobs": False, "batch": False, "frequency_penalty": 0.0}
_NOTHING |= {"presence_penalty": 0.0}


@modelapi(name="partsong")
def partsong() -> type[ModelAPI]:
    """The provider, by the name that stands before the slash."""
    return ThinkingAPI


class ThinkingAPI(ModelAPI):
    """A model of inspect that answers every generation with a strategy.

    The last message, a user's, is the strategy's question; a system message and earlier turns stand before every call
    it makes. Equal chats of one sample run get other draws each time, and so do epochs; with the same seed, samples and
    epochs an evaluation writes the same again.

    Args:
        model_name: what a `LocalEngine` loads, or with `base_url` the name under which a server has the model.
        base_url: of a server that speaks the OpenAI API (``--model-base-url``).
        api_key: must be left out: the key is read from the environment's ``OPENAI_API_KEY``.
        config: inspect's settings.
        strategy: such as "pdr:schedule=4-1"; ``;`` may stand between knobs.
        engine: answers, instead of a model by name; `get_model` is then to be called with ``memoize=False``.
        extract: how answers are found in texts, for votes; a name of `EXTRACTORS`.
        max_tokens: of each call, where ``max_tokens`` is not among inspect's settings.
        seed: of all draws; inspect's own ``seed`` changes the draws as well.
        journal: file of completed calls: an evaluation that is run again repeats none of them.
        budget_tokens: most tokens of all calls of a generation.
        concurrency: most calls under way, of all generations together. How many generations these belong to is
            inspect's ``max_connections``.
        **named: fields of `EngineArguments`: ``endpoint``, ``num_engines``, ``dtype``, ``device``.

    Raises:
        ArgumentError: no strategy, or what `StrategyModel`, `EngineArguments` or the engine refuse.
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
        max_tokens: int = 1024,
        seed: int = 0,
        journal: str | None = None,
        budget_tokens: int | None = None,
        concurrency: int = 64,
        **named: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        if strategy is None:
            raise ArgumentError("partsong needs a way to think: -M strategy=NAME[:KEY=VALUE;...], such as greedy")
        if api_key is not None:
            raise ArgumentError("api_key is not taken: put the server's key into the environment's OPENAI_API_KEY")
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise ArgumentError(f"max_tokens={max_tokens!r}; use a positive integer")
        if engine is not None and (named or base_url is not None):
            raise ArgumentError(f"engine= is ready to answer; leave out {', '.join([*named, 'base_url'])}")
        self.thinker = StrategyModel(
            strategy if isinstance(strategy, str) else ",".join(strategy),  # inspect cuts at commas
            _named(model_name, base_url, named) if engine is None else engine,
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
        """Of each call, where nobody says."""
        return self._room

    def max_connections(self) -> int:
        """Generations under way, where nobody says: as many as could be needed to keep all calls busy."""
        return self.thinker.concurrency

    def connection_key(self) -> str:
        """Generations of one engine are bounded together."""
        return self.thinker.engine.name

    def collapse_user_messages(self) -> bool:
        """Chat templates want users and assistants in turn."""
        return True

    def collapse_assistant_messages(self) -> bool:
        """Likewise."""
        return True

    async def aclose(self) -> None:
        """Closes the engine and the journal."""
        await self.thinker.close()

    # --- generation ---------------------------------------------------------------------------------------------------

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """Thinks about a chat.

        Returns:
            The text that the strategy accepted. ``usage`` counts all calls; ``metadata`` has the ``answer`` found in
            the text and what the run cost, as in `CallGraph.summary`.

        Raises:
            UnsupportedError: tools, pictures, settings that are not honoured, or inspect's trio backend.
            ArgumentError: a chat that does not end with a user's message.
            EngineError: the engine gave no answer.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError as error:
            raise UnsupportedError("partsong's engines run in asyncio: unset INSPECT_ASYNC_BACKEND") from error
        if tools:
            raise UnsupportedError(
                f"strategies write texts and call no tools, and {len(tools)} were given ({tools[0].name}, ...): use a "
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
        """Answers. How often the run of a sample has asked the same before is one of the labels of its draws."""
        run, sample, epoch = _sample()
        asked = json.dumps([[message.role, message.text] for message in chat])
        taken = self._taken.setdefault((run, asked), set())
        repeat = next(number for number in range(len(taken) + 1) if number not in taken)
        taken.add(repeat)
        try:
            return await self.thinker.answer(chat, parameters, sample, epoch, repeat, "" if seed is None else seed)
        except BaseException:
            taken.discard(repeat)  # whoever asks again asks for this one
            raise

    def _output(self, made: Answer, parameters: Parameters) -> ModelOutput:
        cost = made.summary
        written = cost["tokens_total"] + cost["tokens_wasted"]
        cut = made.stopped == "budget" or (made.answer is None and bool(cost["truncated"]))
        ended: Literal["max_tokens", "stop"] = "max_tokens" if cut else "stop"
        message = ChatMessageAssistant(
            content=_cut(made.text, parameters.stop), model=self.model_name, source="generate"
        )
        return ModelOutput(
            model=self.model_name,
            choices=[ChatCompletionChoice(message=message, stop_reason=ended)],
            usage=ModelUsage(
                input_tokens=cost["prefill"] - cost["prefill_cached"],
                input_tokens_cache_read=cost["prefill_cached"],
                output_tokens=written,
                total_tokens=cost["prefill"] + written,
            ),
            metadata={
                "strategy": self.thinker.strategy,
                "answer": made.answer,
                **{name: value for name, value in cost.items() if name != "stopped"},
                "stopped": made.stopped,
            },
        )


def _named(model_name: str, base_url: str | None, named: dict[str, Any]) -> EngineArguments:
    if base_url is not None:
        return EngineArguments(base_url=base_url, model=model_name, **named)
    return EngineArguments(pretrained=model_name, **named)


def _check(config: GenerateConfig) -> None:
    """Refuses settings that would change answers and are not honoured."""
    given = config.model_dump(exclude_none=True)
    asked = [name for name in given if name not in (*_HONOURED, *_INSPECTS) and given[name] != _NOTHING.get(name, [])]
    if asked:
        raise UnsupportedError(
            f"{', '.join(asked)}: not honoured by partsong's strategies, which know {', '.join(_HONOURED)}"
        )


def _message(message: ChatMessage) -> Message:
    calls = isinstance(message, ChatMessageAssistant) and message.tool_calls
    if isinstance(message, ChatMessageTool) or calls:
        raise UnsupportedError("the chat has calls of tools, which strategies do not make: use a solver without tools")
    if not isinstance(message.content, str):
        kinds = {part.type for part in message.content} - {"text", "reasoning"}
        if kinds:
            raise UnsupportedError(f"the chat has {', '.join(sorted(kinds))}; strategies read text alone")
    return Message(message.role, (message.text,))


def _sample() -> tuple[str, str, int]:
    """The sample run that asks, its sample and its epoch; nothing and epoch 1 outside of an evaluation."""
    try:
        from inspect_ai.solver._task_state import sample_state
    except ImportError:  # it is no public name; without it, epochs are told apart by the order in which they ask
        return "", "", 1
    state = sample_state()
    return ("", "", 1) if state is None else (state.uuid, str(state.sample_id), state.epoch)


def _cut(text: str, stops: Sequence[str]) -> str:
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
