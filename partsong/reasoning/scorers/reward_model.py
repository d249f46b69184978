"""Scores texts by reward models, which answer with numbers instead of words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from partsong.errors import ArgumentError
from partsong.knobs import read_knobs
from partsong.reasoning.remote import GarbledError, ModelNotServedError, OpenAIEngine
from partsong.reasoning.strategies.steps import Aggregate

__all__ = ["JUDGE", "RewardModel", "check_scorer_kind"]

#: The kind of scorer that answers with words: it is asked in a chat.
JUDGE = "judge"

#: Tags after the steps of known process-reward models: Qwen2.5-Math-PRM's, and Math-Shepherd's.
StepTag = Literal["<extra_0>", "ки"]
#: How far a chance may lie beyond 0 or 1, since servers round.
_ROUNDING = 1e-3
_COLUMNS: dict[str, Any] = {"label": int | None, "logits": bool}


def _chat(question: str, text: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": text}],
        "use_activation": True,
    }


def _one_text(question: str, text: str) -> dict[str, Any]:
    return {"input": f"{question}\n\n{text}"}


def _pair(question: str, text: str) -> dict[str, Any]:
    return {"text_1": question, "text_2": text}


@dataclass(frozen=True, slots=True)
class _Asking:
    """Says how one kind of reward model is asked.

    Attributes:
        paths: where it may be, from the root of the server.
        body: what it is sent, of the question and the text, beside the name of the model.
        field: where the numbers are in ``data[0]`` of the reply.
        knobs: names and types of what can be set.
    """

    paths: tuple[str, ...]
    body: Callable[[str, str], dict[str, Any]]
    field: str
    knobs: Mapping[str, Any]


_KINDS = {
    # vLLM's Pooling API: a number for the text or for each of its tokens, of which the last one has read everything.
    "reward": _Asking(("/pooling",), _chat, "data", _COLUMNS),
    # The same with a number for each step, read where the tag after the step is.
    "process": _Asking(("/pooling",), _chat, "data", {"aggregate": Aggregate, "tag": StepTag | str, **_COLUMNS}),
    # The Classification API of SGLang and vLLM, which have it at different paths.
    "classify": _Asking(("/v1/classify", "/classify"), _one_text, "probs", _COLUMNS),
    # vLLM's Score API: a cross-encoder of two texts.
    "score": _Asking(("/score",), _pair, "score", {"logits": bool}),
}


def check_scorer_kind(kind: str) -> tuple[str, dict[str, Any]]:
    """Reads a kind of scorer, ``NAME[:key=value,...]``, into its name and what the text sets.

    Raises:
        ArgumentError: there is no such kind or option; names those that there are.

    >>> check_scorer_kind("process:aggregate=min")
    ('process', {'aggregate': 'min'})
    """
    return read_knobs(
        kind, {JUDGE: {}, **{name: row.knobs for name, row in _KINDS.items()}}, "kind of scorer", "kinds of scorer"
    )


class RewardModel:
    """Asks a reward model behind a server for the chance that a text is right.

    Args:
        engine: knows the server and the name of the model.
        kind: how the model is asked, ``NAME[:key=value,...]``. ``reward`` asks vLLM's ``/pooling``, and takes the last
            number where there is one for each token. ``process`` does so with a tag after each paragraph, and joins the
            numbers of the steps. ``classify`` asks ``/classify`` of vLLM or SGLang, and ``score`` vLLM's ``/score``.
            The options are ``aggregate`` (``last``, ``min`` or ``prod`` of the steps; the default is ``last``), ``tag``
            (``<extra_0>``), ``label`` (which of several classes means right, from 0; the last one by default) and
            ``logits`` (``true`` for models whose numbers are not chances yet).

    Raises:
        ArgumentError: there is no such kind, or it is the judge's.

    >>> engine = OpenAIEngine("Qwen/Qwen2.5-Math-PRM-7B", base_url="http://127.0.0.1:8000/v1", api_key="")
    >>> RewardModel(engine, "process:aggregate=min").kind
    'process'
    """

    def __init__(self, engine: OpenAIEngine, kind: str) -> None:
        self.kind, knobs = check_scorer_kind(kind)
        if self.kind == JUDGE:
            raise ArgumentError(f"a {JUDGE} answers with words; use one of {', '.join(_KINDS)}, or a Verifier of it")
        self._engine, self._asking, self._paths = engine, _KINDS[self.kind], _KINDS[self.kind].paths
        self._aggregate: Aggregate = knobs.get("aggregate", "last")
        self._tag: str = knobs.get("tag", "<extra_0>") if self.kind == "process" else ""
        self._label: int | None = knobs.get("label")
        self._logits: bool = knobs.get("logits", False)

    async def score(self, question: str, text: str) -> tuple[float, int]:
        """Returns the chance, from 0 to 1, that a text is right, and the tokens that this took.

        Raises:
            ArgumentError: the numbers do not fit the kind of scorer.
            RemoteError: there is no answer, or no number in it.
        """
        steps = self._steps(text)
        body = self._asking.body(question, "".join(step + self._tag for step in steps))
        reply = await self._reply({"model": self._engine.dialect.model, **body})
        rows = self._rows(reply)
        if self._tag and len(rows) != len(steps):
            raise ArgumentError(
                f"{self._where} answers with {len(rows)} numbers for {len(steps)} steps; use tag= for what the model "
                f"reads after a step, instead of {self._tag}, and pool by steps"
            )
        chances = [self._chance(row) for row in rows]
        score = {"last": chances[-1], "min": min(chances), "prod": math.prod(chances)}[self._aggregate]
        usage = reply.get("usage")
        tokens = usage.get("prompt_tokens", 0) if isinstance(usage, Mapping) else 0
        return score, tokens if isinstance(tokens, int) else 0

    async def close(self) -> None:
        """Closes the connections."""
        await self._engine.close()

    @property
    def _where(self) -> str:
        return f"the reward model {self._engine.dialect.model} at {self._engine.base_url}"

    def _steps(self, text: str) -> list[str]:
        """Returns the paragraphs of a text, or all of it as one where a model has no tag for steps."""
        if not self._tag:
            return [text]
        # A tag that the text itself has would count as the end of a step.
        paragraphs = (step.strip() for step in re.split(r"\n\s*\n", text.replace(self._tag, "")))
        return [step for step in paragraphs if step] or [""]

    async def _reply(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sends a body to the first path that there is, and keeps to it from then on."""
        absent: ModelNotServedError | None = None
        for path in self._paths:
            try:
                reply = await self._engine.post(path, body)
            except ModelNotServedError as error:
                absent = error
                continue
            self._paths = (path,)
            if not isinstance(reply, Mapping):
                raise self._no_number(reply)
            return cast(Mapping[str, Any], reply)
        assert absent is not None
        raise await self._explain(absent) from None

    async def _explain(self, error: ModelNotServedError) -> ModelNotServedError:
        model, paths = self._engine.dialect.model, " or ".join(self._asking.paths)
        served = await self._engine.models()
        if model not in served:
            names = ", ".join(served) or "none"
            return ModelNotServedError(
                f"{self._engine.base_url} has no model {model!r}; served are: {names}", status=404
            )
        others = ", ".join(name for name in (JUDGE, *_KINDS) if name != self.kind)
        return ModelNotServedError(
            f"{self._engine.base_url} has no {paths}, where a scorer of the kind {self.kind} is asked; serve the model "
            f"with it (vllm serve --runner pooling), or use another kind: {others}",
            status=404,
            words=error.words,
        )

    def _rows(self, reply: Mapping[str, Any]) -> list[list[float]]:
        """Returns the numbers of the reply: one row for each token or step, or one row of the whole text."""
        data: Any = reply.get("data")
        first: Any = data[0] if isinstance(data, list) and data else None
        numbers: Any = first.get(self._asking.field) if isinstance(first, Mapping) else None
        rows: list[Any] = numbers if isinstance(numbers, list) else [numbers]
        if not rows or not isinstance(rows[0], list):
            rows = [rows]
        for row in rows:
            if not isinstance(row, list) or not row or not all(_is_number(number) for number in row):
                raise self._no_number(reply)
        return rows

    def _chance(self, row: Sequence[float]) -> float:
        label = len(row) - 1 if self._label is None else self._label
        if not 0 <= label < len(row):
            raise ArgumentError(
                f"{self._where} knows {len(row)} classes, and label={label} is none of them; use 0 to {len(row) - 1}"
            )
        if self._logits:
            logits = row if len(row) > 1 else [*row, 0.0]  # the chance of one class is a sigmoid
            powers = [math.exp(logit - max(logits)) for logit in logits]
            return powers[label] / sum(powers)
        if not -_ROUNDING <= row[label] <= 1.0 + _ROUNDING:
            raise ArgumentError(
                f"{self._where} answers with {row[label]:.6g}, which is no chance from 0 to 1; where its numbers are "
                f"logits, use {self.kind}:logits=true"
            )
        return min(max(float(row[label]), 0.0), 1.0)

    def _no_number(self, reply: object) -> GarbledError:
        words = " ".join(str(reply).split())[:120]
        return GarbledError(f"{self._where} answers without a number in data[0].{self._asking.field}: {words}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
