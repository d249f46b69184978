"""Answers a request by a thinking method over any engine. It does not load torch, since it also asks other servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from partsong.jobs.engines import extractor
from partsong.reasoning.calls.answer import Answer, Extract
from partsong.reasoning.calls.budget import Budget
from partsong.reasoning.calls.call import Message, Parameters
from partsong.reasoning.calls.engine import Engine
from partsong.reasoning.calls.engine_wrappers import ChatEngine
from partsong.reasoning.calls.graph import CallNode
from partsong.reasoning.calls.run import Run
from partsong.reasoning.scorers.verifier import Verifier, VerifierAddress, takes_scorer
from partsong.reasoning.strategies.registry import STRATEGIES, Thinking, parse_thinking
from partsong.serving.errors import ApiError
from partsong.serving.texts.events import TextDelta, TextDone, TextEvent, TextRequest, ThreadNews
from partsong.serving.texts.limits import TextLimits
from partsong.zoo import knobs_for, task_of

__all__ = ["SINGLE", "ThinkingJob", "prepare_thinking", "thinking_names"]

#: The thinking method where a model's name includes none.
SINGLE = "single"

Emit = Callable[[TextEvent], None]


def thinking_names() -> list[str]:
    """Lists the thinking methods that need nothing but text, `SINGLE` first."""
    names = [name for name in STRATEGIES if not parse_thinking(name).needs]
    return [SINGLE, *(name for name in names if name != SINGLE)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinkingJob:
    """Holds a request that has been checked and can be run.

    Attributes:
        request: what was asked.
        thinking: the thinking method with the knobs that the request sets.
        own: further knobs that the model needs.
        extract: finds the answer in a text.
        budget: what the request may spend.
        parameters: how answers are drawn.
        verifier: scores texts; None where the method takes no scorer, or has its own.
    """

    request: TextRequest
    thinking: Thinking
    own: dict[str, Any]
    extract: Extract
    budget: Budget
    parameters: Parameters
    verifier: VerifierAddress | None = None

    @property
    def chat(self) -> list[Message]:
        """Returns the messages as calls have them."""
        return [Message(cast(Any, role), (text,)) for role, text in self.request.messages]

    async def run(self, engine: Engine, emit: Emit) -> TextDone:
        """Answers the request; calls still running are cancelled with the task that awaits this.

        Args:
            engine: makes the calls.
            emit: takes events on the way.

        Raises:
            PartsongError: there is no answer.
        """
        *before, last = self.chat
        if before:
            engine = ChatEngine(engine, before)
        watcher = _Watcher(emit, threads=self.request.threads, streams=self.thinking.name == SINGLE)
        run = Run(engine, seed=self.request.seed, budget=self.budget, observer=watcher)
        verifier = None if self.verifier is None else self.verifier.open()
        scored = {} if verifier is None else {"scorer": verifier.scorer(self.thinking.name, last.text)}
        try:
            given = {"extract": self.extract, "parameters": self.parameters, **scored, **self.own}
            answer = await self.thinking(run, last.text, **given)
        finally:
            if verifier is not None:
                await verifier.close()
        if answer.text.startswith(watcher.shown) and answer.text != watcher.shown:
            emit(TextDelta(answer.text[len(watcher.shown) :]))
        return self._done(run, answer, verifier)

    def _done(self, run: Run, answer: Answer, verifier: Verifier | None) -> TextDone:
        spent = answer.summary
        ends = [run.graph.nodes[name].completion for name in answer.calls]
        whole = bool(answer.text) and all(end is not None and end.finish != "length" for end in ends)
        return TextDone(
            text=answer.text,
            finish="stop" if whole else "length",
            prompt_tokens=spent["prefill"],
            cached_tokens=spent["prefill_cached"],
            completion_tokens=spent["tokens_total"] + spent["tokens_wasted"],
            report={
                "strategy": self.request.strategy or SINGLE,
                "rule": None,
                "answer": answer.answer,
                "stopped": answer.stopped,
                "calls": spent["calls"],
                "tokens_critical": spent["tokens_critical"],
                "tokens_accepted": spent["tokens_accepted"],
                "tokens_cancelled": spent["tokens_cancelled"],
                "forwards": None,
                "tokens_per_forward": None,
                "seed": self.request.seed,
                "verdicts": None if verifier is None else verifier.spent,
            },
        )


def prepare_thinking(
    request: TextRequest, limits: TextLimits, model: str | None, verifier: VerifierAddress | None = None
) -> ThinkingJob:
    """Checks a request and resolves the names in it, before any call.

    Args:
        request: what was asked.
        limits: what may be asked for.
        model: name or folder of a model in this process, for the zoo's own knobs and answers; None for a server.
        verifier: scores texts for methods that take a scorer; None leaves them their own.

    Raises:
        ArgumentError: the strategy, a knob or the extractor is unknown.
        ApiError: the strategy needs more than text, or more calls than are allowed, or a field belongs elsewhere.
    """
    thinking = parse_thinking(request.strategy or SINGLE)
    if thinking.needs:
        needs = ", ".join(thinking.needs)
        raise ApiError(400, f"strategy {thinking.name} needs {needs}, which no request can give", param="model")
    limits.check_strategy(thinking.knobs)
    for name in ("cache", "block_size"):
        if getattr(request, name) is not None:
            raise ApiError(400, f"{name} is for diffusion language models; leave it out", param=name)
    calls = limits.max_calls if request.budget_calls is None else min(request.budget_calls, limits.max_calls)
    budget = Budget(tokens=request.budget_tokens, calls=calls, seconds=request.budget_seconds)
    budget.validate()
    parameters = Parameters(
        max_tokens=request.max_tokens or limits.default_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=request.top_p,
        stop=request.stop,
    )
    return ThinkingJob(
        request=request,
        thinking=thinking,
        own=knobs_for(model, thinking.name, thinking.knobs),
        extract=extractor(request.extract, task_of(model))[1],
        budget=budget,
        parameters=parameters,
        verifier=verifier if takes_scorer(thinking.name) else None,
    )


class _Watcher:
    """Turns the reports of a run into events. `shown` is the text of the answer that has been sent."""

    def __init__(self, emit: Emit, *, threads: bool, streams: bool) -> None:
        self.emit, self.threads, self.streams = emit, threads, streams
        self.shown = ""
        self._written: dict[str, str] = {}

    def __call__(self, node: CallNode, text: str) -> None:
        if self.streams and text:
            self.shown += text
            self.emit(TextDelta(text))
        if self.threads:
            self.emit(self._news(node, text))

    def _news(self, node: CallNode, text: str) -> ThreadNews:
        before = self._written.get(node.name, "")
        label = f"{'/'.join(node.request.path)} {node.request.sample}"
        news = ThreadNews(node.name, label, text, "running")
        if node.end is None:
            self._written[node.name] = before + text
            return news
        ended = node.completion
        if ended is None or ended.finish in ("halted", "cancelled"):
            return replace(news, status="cancelled")
        # An engine may hold back the end of a text until it is certain.
        rest = ended.text[len(before) :] if ended.text.startswith(before) else ""
        return replace(news, text=rest, status="finished")
