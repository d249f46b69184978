"""Answers requests with a diffusion language model by any rule, many at a time, and sends text once it is stable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from partsong import zoo
from partsong.errors import ArgumentError
from partsong.jobs.folder_source import FolderSource
from partsong.jobs.texts import load_tokenizer, open_text_model, plain_ids
from partsong.knobs import format_knobs
from partsong.parallel import Mesh, Strategy
from partsong.reasoning.local.chat_tokens import chat_ids, quoting_ids
from partsong.samplers.text import RULES, Decoded, Step, TextStream, VariationBound, decode_steps, parse_rule
from partsong.samplers.text.dependence.folders import brings_head
from partsong.samplers.text.request import DecodeRequest, check_request
from partsong.serving.errors import ApiError
from partsong.serving.texts.events import TextDelta, TextDone, TextEvent, TextRequest
from partsong.serving.texts.rank_turns import RankTurns
from partsong.serving.texts.step_turns import StepTurns
from partsong.serving.texts.wire import TextSpec

__all__ = ["DiffusionJob", "DiffusionTexts"]

#: Fields that belong to thinking, with their neutral values.
_NEUTRAL = {
    "top_p": 1.0,
    "stop": (),
    "extract": None,
    "budget_tokens": None,
    "budget_calls": None,
    "budget_seconds": None,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionJob:
    """Holds a request that has been checked and can be decoded.

    Attributes:
        request: what was asked.
        ids: tokens of the prompt, mask tokens for gaps.
        options: the arguments of `decode_steps`.
        checked: the same, checked and with defaults filled in.
    """

    request: TextRequest
    ids: list[int]
    options: dict[str, Any]
    checked: DecodeRequest

    @property
    def before_gap(self) -> list[int]:
        """Returns the tokens before the first gap of the prompt, which belong to the text; empty without a gap."""
        prompt = self.checked.prompts[0]
        return prompt if len(prompt) < len(self.ids) else []


class DiffusionTexts:
    """Holds a diffusion language model and decodes with it.

    Args:
        source: where the model is.
        spec: how it is loaded, and what requests may ask for.
        strategies: how ranks share the model.
        mesh: these ranks; None for one.
        ranks: tells the other ranks of every step.

    Raises:
        ArgumentError: the model or its tokenizer cannot be read.
    """

    kind = "text"

    def __init__(
        self,
        source: FolderSource,
        spec: TextSpec,
        strategies: Sequence[Strategy] = (),
        mesh: Mesh | None = None,
        ranks: RankTurns | None = None,
    ) -> None:
        if spec.speculate or spec.weights:
            raise ArgumentError(
                f"speculate and weights are for causal models, and {spec.model} decides tokens in any order: leave "
                f"them out"
            )
        self.source, self.limits = source, spec.limits
        self.tokenizer = load_tokenizer(source.folder)
        how: dict[str, Any] = {"adapter": spec.adapter, "dtype": spec.dtype, "device": spec.device}
        how |= {"strategies": strategies, "mesh": mesh, "threads": spec.threads or (None if mesh is None else 1)}
        self.model = open_text_model(source.folder, zoo_name=source.zoo_name, **how)
        self._turns = StepTurns(ranks) if ranks is None or ranks.is_first else None

    @property
    def strategies(self) -> list[str]:
        """Lists the rules that fit the model, and need nothing that it does not bring."""
        noise, weighs = self.model.adapter.noise, brings_head(self.model)
        return [
            name
            for name, rule in RULES.items()
            if noise in rule.noise and not rule.probes and (weighs or not rule.weighs)
        ]

    def prepare(self, request: TextRequest) -> DiffusionJob:
        """Checks a request before the first forward.

        Raises:
            ArgumentError: the rule, a knob or the prompt does not fit.
            UnsupportedError: the model cannot be decoded so.
            ApiError: a field belongs to thinking.
        """
        for name, neutral in _NEUTRAL.items():
            if getattr(request, name) != neutral:
                what = f"{name} is for models that write one token after another; {self.source.folder.name} does not"
                raise ApiError(400, f"{what}: leave it out", param=name)
        rule = parse_rule(request.strategy) if request.strategy else None
        if rule is not None and rule.probes:
            raise ApiError(400, f"rule {request.strategy} needs a probe, which no request can give", param="model")
        if isinstance(rule, VariationBound) and rule.head is not None:
            raise ApiError(400, f"rule {request.strategy} names a folder of the server: leave head out", param="model")
        ids = self._ids(request)
        options: dict[str, Any] = {
            "rule": rule,
            "cache": request.cache,
            "max_new_tokens": self._length(request, ids),
            "block_size": request.block_size,
            "temperature": request.temperature or 0.0,
            "seed": request.seed,
        }
        return DiffusionJob(
            request=request, ids=ids, options=options, checked=check_request(self.model, [ids], **options)
        )

    async def run(self, job: DiffusionJob, emit: Callable[[TextEvent], None]) -> TextDone:
        """Decodes a request; it ends before the next step if the task that waits is cancelled.

        Raises:
            NotANumberError: the model's logits are no numbers.
        """

        def spell(tokens: Any) -> str:
            return self.tokenizer.decode([*job.before_gap, *tokens], skip_special_tokens=True)

        stream = TextStream(spell, skip=job.checked.stop_token_ids)

        def watch(step: Step) -> None:
            if new := stream.feed(step):
                emit(TextDelta(new))

        assert self._turns is not None, "other ranks follow the first one"
        steps = decode_steps(self.model, [job.ids], **job.options)
        decoded = await self._turns.run(steps, watch, (job.ids, job.options))
        decoded.check()
        text = spell(decoded.tokens[0])
        if text.startswith(stream.shown) and text != stream.shown:
            emit(TextDelta(text[len(stream.shown) :]))
        return _done(job, decoded, text)

    def close(self) -> None:
        """Ends decoding after the step it is in, on all ranks."""
        if self._turns is not None:
            self._turns.close()

    def _ids(self, request: TextRequest) -> list[int]:
        """Returns the tokens of the prompt; of a model without a chat template those of the messages' texts.

        Mask tokens in a text to continue are gaps; what a chat's message quotes of them is text.
        """
        prompt = "\n\n".join(text for _, text in request.messages)
        mask = self.tokenizer.mask_token
        has_gap = request.plain and mask is not None and mask in prompt
        if self.source.zoo_name is not None and not has_gap:
            zoo.MODELS[self.source.zoo_name].task.parse(prompt)  # refuses unknown words
        if request.plain or not getattr(self.tokenizer, "chat_template", None):
            if has_gap or mask is None or mask not in prompt:
                return plain_ids(prompt, self.tokenizer)
            return quoting_ids(self.tokenizer, prompt, mask)
        chat = [{"role": role, "content": text} for role, text in request.messages]
        try:
            return chat_ids(self.tokenizer, chat, add_generation_prompt=True)
        except ArgumentError:
            raise
        except (TemplateError, ValueError) as error:
            raise ArgumentError(f"the model's chat template refuses these messages: {error}") from error

    def _length(self, request: TextRequest, ids: list[int]) -> int | None:
        """Returns how many tokens to write; None where only the gaps of the prompt are filled."""
        if request.max_tokens is not None or self.model.mask_token_id in ids:
            return request.max_tokens
        if self.source.zoo_name is not None:
            return zoo.MODELS[self.source.zoo_name].defaults["canvas"]
        room = self.model.max_positions
        most = self.limits.default_tokens if room is None else min(self.limits.default_tokens, room - len(ids))
        return max(most, 1)


def _done(job: DiffusionJob, decoded: Decoded, text: str) -> TextDone:
    cost, tokens = decoded.summary(), decoded.tokens[0]
    written = sum(given is None for given in job.checked.answers[0][: len(tokens)])
    forwards = sum(cost["forwards"].values())
    filled = bool(job.before_gap) and job.request.max_tokens is None
    return TextDone(
        text=text,
        finish="stop" if filled or decoded.stopped[0] == "stop token" else "length",
        prompt_tokens=len(job.ids),
        cached_tokens=0,
        completion_tokens=written,
        report={
            "strategy": None,
            "rule": format_knobs(job.checked.rule, RULES),
            "answer": None,
            "stopped": decoded.stopped[0],
            "calls": 1,
            "tokens_critical": None,
            "tokens_accepted": written,
            "tokens_cancelled": 0,
            "forwards": forwards,
            "tokens_per_forward": written / forwards if forwards else None,
            "seed": job.request.seed,
        },
    )
