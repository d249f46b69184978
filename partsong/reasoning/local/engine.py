"""Answers with a transformers model in this process, many calls at a time."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from partsong.errors import ArgumentError, UnsupportedError
from partsong.kernels.speculation.costs import costs_by_tokens, usual_costs
from partsong.kernels.speculation.drafter import DrafterKnobs
from partsong.kernels.speculation.registry import MODEL_FREE, drafters_of
from partsong.kernels.speculation.speculator import Speculator
from partsong.knobs import Count, Number, Whole, check_knobs, type_hints
from partsong.parallel import Mesh, Strategy
from partsong.parallel.loading.text_share import TextShare
from partsong.parallel.ranks.collectives import largest
from partsong.parallel.ranks.mesh import AXES
from partsong.reasoning.calls.call import Completion, Parameters, Request
from partsong.reasoning.calls.engine import EngineError, Progress
from partsong.reasoning.calls.thoughts import THINK_TAGS, are_open
from partsong.reasoning.local.loading import LoadedModel, load
from partsong.reasoning.local.lockstep import Lockstep, OpenCall
from partsong.reasoning.local.model import LocalModel
from partsong.reasoning.local.prompt import Prompt, prompt_of
from partsong.reasoning.local.quantized_linear import Weights
from partsong.reasoning.local.scheduler import Scheduler
from partsong.reasoning.local.speculation.registry import DRAFTERS
from partsong.reasoning.local.stops import AnswerText
from partsong.reasoning.local.thoughts import ThoughtEmbeddings
from partsong.reasoning.local.ticket import Ticket, WaitingCaller
from partsong.reasoning.local.worker import Worker, follow
from partsong.reasoning.threads.layout import TokenRun
from partsong.seeds import check_seed

__all__ = ["LocalEngine", "check_parameters"]


class LocalEngine:
    """Answers with a causal language model of transformers, in a thread of this process.

    Running calls share all they can. A prompt, or the beginning that two prompts have in common, is computed once.
    So is an earlier answer that a later prompt continues. Samples of one prompt are forks that read its keys without
    repeating them. Rows join and leave the running batch at any step.

    What is drawn depends only on the prompt, the parameters and ``request.seed``. In float64 that held to the last
    token in all tests. In narrower types the batch changes the last bits of logits, which changes a token only if
    two candidates are that close.

    Args:
        model: a transformers folder, "smollm2-135m", a zoo name, a hub id, or a loaded model in eval mode (it stays as
            it is).
        tokenizer: the tokenizer of a loaded model. Default: the folder's own.
        dtype: the type of the weights. Default: float32 on a CPU, the checkpoint's own on a GPU.
        device: where the model runs. Default: the GPU if there is one, or where a loaded model is.
        max_rows: how many answers are written together; further calls wait.
        prefill_chunk: how many tokens of prompts are computed beside a step of the rows, at most.
        cache_mb: how many MB of keys are kept after use for later prompts.
        pack: whether linear layers read packed weights. That is several times faster for few rows on a CPU, but takes
            the memory twice if the model was given loaded. None packs on CPUs in float32, and in bfloat16 where the
            processor has the instructions (AVX-512 or AVX-NE-CONVERT).
        weights: "int8" or "int4" rounds the weights of linear layers, which changes the model: it is faster for
            a few rows on a CPU, stays close to the float model, and its name says so. Products then take bfloat16
            inputs. None rounds nothing.
        end_tokens: ids that end an answer. None takes those of the model and its tokenizer. An empty collection lets
            every answer run to its last token.
        thoughts: embeddings that mark the threads of forks (ParaThinker); None ignores marks.
        speculate: what guesses tokens ahead, which a step then verifies: knobs such as ``Ngram()``, or their text form
            such as ``"ngram:length=8"``; several guess together. The text stays the same for any guesses, and comes
            sooner if they are right. `Usage.drafted` and `Usage.rejected` count them.
        step_costs: number of tokens in a step -> its time relative to a step over one token. As many guesses are
            verified as pay off at these costs. Default: measured ones, for large and small models on CPUs and for GPUs.
        name: what journals call the engine. Default: made from the model and the dtype.
        strategies: `TensorParallel`, `ShardedWeights` or `LayerPipeline`, which shares the model out over ranks. Every
            rank makes the engine; the first one answers, and the others `follow`. `RanksEngine` starts the ranks.
        mesh: the ranks. Default: all that were started, in a mesh of the engine's own.

    Raises:
        ArgumentError: no such model, or a size or dtype that it cannot have.
        ArgumentTypeError: an argument of the wrong type.
        UnsupportedError: a model whose results would be wrong or that cannot be shared out, or missing packages.

    >>> from partsong.reasoning import Message, Parameters
    >>> async def ask():
    ...     engine = LocalEngine("lists-ar")
    ...     chat = (Message("user", ("sort : dog ant cat =",)),)
    ...     answer = await engine.generate(Request(messages=chat, parameters=Parameters(max_tokens=9, temperature=0)))
    ...     await engine.close()
    ...     return answer.text, answer.finish, answer.usage.prompt
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
        max_rows: Count = 64,
        prefill_chunk: Count = 1024,
        cache_mb: Annotated[float, Number(0)] = 256.0,
        pack: bool | None = None,
        weights: Weights | None = None,
        end_tokens: Collection[int] | None = None,
        thoughts: ThoughtEmbeddings | None = None,
        speculate: DrafterKnobs | str | Sequence[DrafterKnobs | str] | None = None,
        step_costs: Mapping[int, float] | None = None,
        name: str | None = None,
        strategies: Sequence[Strategy] = (),
        mesh: Mesh | None = None,
    ) -> None:
        sizes = {"max_rows": max_rows, "prefill_chunk": prefill_chunk, "cache_mb": cache_mb, "weights": weights}
        check_knobs(type_hints(LocalEngine.__init__), sizes)
        drafters = drafters_of(speculate, DRAFTERS)
        costs = None if step_costs is None else costs_by_tokens(step_costs)
        _check_ranks(drafters, thoughts, strategies, mesh)
        share = TextShare(strategies, mesh) if strategies else None
        loaded = load(model, tokenizer, dtype, device, share)
        self._read(loaded, end_tokens)
        how: dict[str, Any] = {"thoughts": thoughts, "weights": weights, "share": share}
        self.model = LocalModel(loaded.module, pack=pack, owned=loaded.owned, **how)
        kind = "-".join(filter(None, (str(self.model.dtype).removeprefix("torch."), weights)))
        self.name = name or f"local/{loaded.name}/{kind}"
        self._lockstep = _lockstep(self.model)
        #: What guesses ahead: its drafters, and how many tokens their guesses gave.
        self.speculator = _speculator(self.model, self.tokenizer, drafters, costs, self._ends)
        kept = int(cache_mb * 1e6 / self.model.bytes_per_token)
        rooms: dict[str, Any] = {"max_rows": max_rows, "prefill_chunk": prefill_chunk, "kept_tokens": kept}
        self._scheduler = Scheduler(self.model, speculator=self.speculator, **rooms)
        self._start()

    def _read(self, loaded: LoadedModel, end_tokens: Collection[int] | None) -> None:
        """Keeps the tokenizer in the forms that are needed, and the tokens that end an answer."""
        self.tokenizer, self._plain_tokenizer = loaded.tokenizer, copy.deepcopy(loaded.tokenizer)
        self._plain_tokenizer.chat_template = None
        # Two threads may not use a tokenizer at once: this one belongs to the worker.
        self._decoder = copy.deepcopy(loaded.tokenizer)
        known = _end_tokens(loaded.module, loaded.tokenizer)
        self._ends = known if end_tokens is None else frozenset(end_tokens)

    def _start(self) -> None:
        is_first = self.model.plan is None or self.model.plan.mesh.is_main
        self._worker = Worker(self._scheduler, self.name, self._lockstep) if is_first else None
        self._end = weakref.finalize(self, _end, self._worker, self.model, self.speculator)
        self._numbers = itertools.count()

    @property
    def context(self) -> int:
        """Returns how many tokens a prompt and its answer may have."""
        return self.model.context

    @property
    def vocab_size(self) -> int:
        """Returns how many tokens the model knows."""
        return self.model.vocab_size

    async def generate(self, request: Request, progress: Progress | None = None, *, plain: bool = False) -> Completion:
        """Answers one request; see `Engine`. A plain one is read as its text stands, without the chat template.

        `Usage.completion` counts every drawn token, including the one that ends the answer. `Usage.cached` counts the
        tokens of the prompt that this call did not have to compute. Log-probabilities are the model's own, before
        temperature and nucleus. `progress` gets only text that is certain: what may begin a stop string waits.

        Raises:
            ArgumentError: parameters out of bounds, or a prompt that fills the model's context; before any work.
            EngineError: the engine is closed or was closed meanwhile, or the model failed.
        """
        if self._worker is None:
            raise EngineError("this rank follows the first one, which answers: call follow() here")
        ticket = self._ticket(request, plain)
        call = OpenCall(next(self._numbers), request, plain)
        caller = ticket.caller = WaitingCaller(call=call, progress=progress)
        self._worker.submit(ticket)
        return await caller.answer(functools.partial(self._worker.cancel, ticket))

    def follow(self) -> None:
        """Computes this rank's share of the first rank's answers, until the engine there is closed.

        Raises:
            EngineError: this is the first rank.
            DistributedError: a rank is gone, or the ranks no longer agree.
        """
        if self._worker is not None or self._lockstep is None:
            raise EngineError("only the other ranks of a shared model follow, and this one answers: call generate()")
        try:
            follow(self._scheduler, self._lockstep, self._ticket)
        except BaseException:
            if self.model.plan is not None:
                self.model.plan.abandon()
            raise
        finally:
            self._end()

    def join(self) -> None:
        """Waits until the engine has ended.

        Raises:
            DistributedError: that was since a rank is gone, or the ranks no longer agreed.
        """
        if self._worker is not None:
            self._worker.join()
            if self._worker.failure is not None:
                raise self._worker.failure

    def _ticket(self, request: Request, plain: bool) -> Ticket:
        """Checks a request and lays it out."""
        tokenizer = self._plain_tokenizer if plain else self.tokenizer
        check_parameters(request.parameters, self.model.vocab_size)
        seed = check_seed(request.seed)
        prompt = prompt_of(tokenizer, request.messages)
        room = self.model.context - prompt.end
        if room < 1:
            raise ArgumentError(
                f"the prompt has {prompt.end} tokens and the model's context {self.model.context}, which leaves no "
                f"room for an answer: shorten the prompt"
            )
        return Ticket(
            prompt=prompt,
            parameters=request.parameters,
            seed=seed,
            max_tokens=min(request.parameters.max_tokens, room),
            ends=self._ends,
            text=AnswerText(
                self._decoder,
                request.parameters.stop,
                opened=_begins_in_thoughts(tokenizer, request, prompt),
                in_thoughts=request.parameters.stop_in_thoughts,
            ),
        )

    async def close(self) -> None:
        """Ends the thread, and the ranks that follow; running calls get an `EngineError`. Twice does nothing."""
        if self._worker is not None:
            self._worker.close()
            await asyncio.to_thread(self._worker.join)
        self._end()


def _check_ranks(
    drafters: Sequence[DrafterKnobs],
    thoughts: ThoughtEmbeddings | None,
    strategies: Sequence[Strategy],
    mesh: Mesh | None,
) -> None:
    """Refuses what ranks that share a model cannot do, before anything is loaded."""
    if not strategies:
        if mesh is not None and mesh.world_size > 1:
            raise ArgumentError(
                f"mesh= has {mesh.world_size} ranks, and nothing says how they share the model; give strategies="
            )
        return
    if thoughts is not None:
        raise UnsupportedError("thoughts= belong to all heads of a layer, and a rank has some; use one rank")
    others = [each for each in drafters if not isinstance(each, tuple(MODEL_FREE.values()))]
    if others:
        raise UnsupportedError(
            f"{type(others[0]).__name__} reads states of the model, which ranks share; with strategies= speculate with "
            f"{', '.join(MODEL_FREE)}"
        )


def _lockstep(model: LocalModel) -> Lockstep | None:
    """Returns what keeps the ranks of a shared model alike; None where one rank has all of it."""
    if model.plan is None or model.plan.mesh.world_size == 1:
        return None
    # Ranks with more heads or weights than others still keep as many tokens, and guess as many.
    same = functools.partial(largest, model.plan.mesh.on_host(*AXES))
    model.num_weights, model.bytes_per_token = map(same, (model.num_weights, model.bytes_per_token))
    return Lockstep(model.plan.mesh)


def _begins_in_thoughts(tokenizer: PreTrainedTokenizerBase, request: Request, prompt: Prompt) -> bool:
    """Says whether the answer goes on in hidden reasoning that the prompt began, as some chat templates do."""
    last = request.messages[-1]
    if last.role == "assistant":
        return are_open(last.text)
    end = prompt.parts[-1]
    return isinstance(end, TokenRun) and str(tokenizer.decode(list(end.tokens[-16:]))).rstrip().endswith(THINK_TAGS[0])


def _end(worker: Worker | None, model: LocalModel, speculator: Speculator) -> None:
    if worker is not None:
        worker.close()
        # A thread that is inside torch while the interpreter shuts down would crash the process.
        worker.join()
        if worker.failure is not None and model.plan is not None:
            model.plan.abandon()
    speculator.close()
    model.close()


def _speculator(
    model: LocalModel,
    tokenizer: PreTrainedTokenizerBase,
    drafters: Sequence[DrafterKnobs],
    costs: tuple[float, ...] | None,
    ends: frozenset[int],
) -> Speculator:
    processor = torch.backends.cpu.get_cpu_capability() if model.device.type == "cpu" else None
    own = usual_costs(model.num_weights, processor, "rounded" if model.quantized else "packed")
    built = tuple(each.build(model, tokenizer) for each in drafters)
    return Speculator(built, costs or costs_by_tokens(own), ends, model.vocab_size)


def _end_tokens(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Collects all tokens that end an answer, from the generation settings, the configuration and the tokenizer."""
    ids: set[int] = set()
    for holder in (module.generation_config, module.config, tokenizer):
        ends = getattr(holder, "eos_token_id", None)
        ids.update([ends] if isinstance(ends, int) else ends or ())
    return frozenset(ids)


def check_parameters(parameters: Parameters, vocab_size: int) -> None:
    """Checks parameters against what a model in this process can do.

    Raises:
        ArgumentError: one is out of bounds.
    """
    bounds = {
        "max_tokens": Count,
        "logprobs": Annotated[int, Whole(0, vocab_size)],
        "temperature": Annotated[float, Number(0)],
        "top_p": Annotated[float, Number(0, 1, above=True)],
    }
    check_knobs(bounds, asdict(parameters))
    if isinstance(parameters.stop, str) or not all(isinstance(each, str) and each for each in parameters.stop):
        raise ArgumentError(f"stop={parameters.stop!r}; use a tuple of strings that are not empty")
