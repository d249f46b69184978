"""Runs the tasks on a language model, and measures accuracy, tokens per forward and certificate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from partsong import seeds, zoo
from partsong.evals.parallelbench import BenchProblem, Language, problems, score, task_of, tasks
from partsong.knobs import Count, check_knobs, format_knobs, type_hints
from partsong.samplers.text import CACHES, RULES, Decoded, Rule, TextCache, decode, load_text_model
from partsong.samplers.text.request import check_request

__all__ = ["BenchRun", "ask", "reads_lists", "run"]

#: Scores of a problem; a row of `run` holds their means.
SCORES = ("score", "score_strict", "items")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRun:
    """Holds the measurements of one task.

    Attributes:
        row: as `run` returns it.
        samples: a flat row per problem with task, number, size, text, scores, tokens, answer_tokens, forwards and
            certificate.
    """

    row: dict[str, Any]
    samples: list[dict[str, Any]]


def run(model: Any, tokenizer: Any, *, names: Sequence[str] | None = None, **options: Any) -> list[dict[str, Any]]:
    """Asks a model several tasks of the benchmark.

    Args:
        model: as `decode` takes it.
        tokenizer: a transformers tokenizer. Questions go through its chat template if it has one.
        names: of the tasks; None is all tasks of the language.
        **options: as in `ask`.

    Returns:
        A flat row per task: ``task language num rule cache verify temperature accuracy score_strict items
        tokens_per_forward tokens_per_forward_all answer_tokens_per_forward certificate seconds``, and the counts these
        come from, ``tokens tokens_denoise answer_tokens forwards forwards_denoise rows edits``, so that rows can be
        added up. Accuracy is the fraction of valid answers. The first two numbers of tokens per forward count every
        token that was decided; a model that sees its whole canvas also decides many ends of text after the answer. The
        third counts only the answers, with one end each, and all forwards.

    Raises:
        ArgumentError: there is no such task or language, or `decode` refuses an argument.

    >>> from transformers import LlamaForCausalLM
    >>> from partsong_zoo.lists.model import build_model, build_tokenizer
    >>> rows = run(build_model("mdlm").eval(), build_tokenizer(), names=["copy"], num=2, adapter="mdlm")
    >>> rows[0]["task"], rows[0]["num"]
    ('copy', 2)
    """
    adapter = options.pop("adapter", None)
    if adapter is not None or not hasattr(model, "key_store"):
        model = load_text_model(model, adapter=adapter)
    language = options.setdefault("language", "lists" if reads_lists(tokenizer) else "chat")
    chosen = [task.name for task in tasks(language)] if names is None else list(names)
    for name in chosen:
        task_of(name, language)
    return [ask(model, tokenizer, name, **options).row for name in chosen]


def ask(
    model: Any,
    tokenizer: Any,
    name: str,
    *,
    num: Count = 100,
    seed: int = 0,
    language: Language | None = None,
    adapter: Any = None,
    rule: str | Rule | None = None,
    cache: str | TextCache | None = None,
    temperature: float = 0.0,
    max_new_tokens: int | None = None,
    batch_size: Count = 32,
    **options: Any,
) -> BenchRun:
    """Asks a model one task.

    Args:
        model: as `decode` takes it.
        tokenizer: a transformers tokenizer.
        name: of the task.
        num: how many problems.
        seed: of the problems and, at a temperature above 0, of the tokens; answers do not depend on `batch_size`.
        language: of the questions; None is "lists" if the tokenizer knows its words, and otherwise "chat".
        adapter: as in `decode`.
        rule: as in `decode`.
        cache: as in `decode`.
        temperature: as in `decode`.
        max_new_tokens: as in `decode`; None is the task's.
        batch_size: how many problems to decode together.
        **options: further arguments of `decode`.

    Returns:
        The measurements.

    Raises:
        ArgumentError: there is no such task or language, a number is out of range, or `decode` refuses an argument.
    """
    check_knobs(type_hints(ask), {"num": num, "batch_size": batch_size})
    language = language or ("lists" if reads_lists(tokenizer) else "chat")
    drawn = problems(name, num, seed, language=language)
    if adapter is not None or not hasattr(model, "key_store"):
        model = load_text_model(model, adapter=adapter)
    settings = {"rule": rule, "cache": cache, "temperature": temperature, **options}
    settings["max_new_tokens"] = _room(name, language) if max_new_tokens is None else max_new_tokens
    prompts = [_ids(problem, tokenizer) for problem in drawn]
    checked = check_request(model, prompts, **settings)
    token_seeds = [seeds.derive(seed, "parallelbench tokens", name, number) for number in range(num)]
    start = time.perf_counter()
    batches = [slice(low, low + batch_size) for low in range(0, num, batch_size)]
    parts = [decode(model, prompts[here], seed=token_seeds[here], **settings) for here in batches]
    seconds = time.perf_counter() - start
    answers = [pair for part in parts for pair in zip(part.tokens, part.tallies, strict=True)]
    samples = [_sample(problem, *answer, tokenizer) for problem, answer in zip(drawn, answers, strict=True)]
    head = {"task": name, "language": language, "num": num, "temperature": temperature}
    head |= {"rule": format_knobs(checked.rule, RULES), "cache": format_knobs(checked.cache, CACHES)}
    head["verify"] = checked.verify
    return BenchRun(row=head | _means(samples) | _costs(parts) | {"seconds": seconds}, samples=samples)


def reads_lists(tokenizer: Any) -> bool:
    """Says whether a tokenizer belongs to the zoo's `lists` models, so that it knows their words and few others."""
    if "lists-mdlm" not in zoo.MODELS:
        return False
    known, words = tokenizer.get_vocab(), zoo.task("lists").WORDS
    return len(known) < 2 * len(words) and all(word in known for word in words)


def _room(name: str, language: Language) -> int:
    """Returns the places for an answer and its end; the zoo's models were trained on canvases of 12 and 24."""
    task = task_of(name, language)
    return task.max_new_tokens if language == "chat" else 24 if task.lists == "latin" else 12


def _ids(problem: BenchProblem, tokenizer: Any) -> list[int]:
    if problem.language == "chat" and getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(problem.messages(), tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False).input_ids
    return tokenizer(problem.prompt()).input_ids


def _sample(problem: BenchProblem, tokens: list[int], tally: Any, tokenizer: Any) -> dict[str, Any]:
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    if problem.language == "chat" and not getattr(tokenizer, "chat_template", None):
        # A model without a chat template does not stop after its answer but continues with another question.
        text = text.strip().partition("\n\n")[0].partition("\nQuestion:")[0]
    return {
        "task": problem.task,
        "number": problem.number,
        "size": problem.size,
        "text": text,
        **score(problem, text),
        "tokens": tally.num_tokens,
        "answer_tokens": len(tokens),
        "forwards": tally.num_forwards,
        "certificate": tally.certificate,
    }


def _means(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    means = {name: sum(sample[name] for sample in samples) / len(samples) for name in SCORES}
    return {"accuracy": means["score"], "score_strict": means["score_strict"], "items": means["items"]}


def _costs(parts: Sequence[Decoded]) -> dict[str, Any]:
    """Sums up the costs of all batches; the certificate is the largest of any answer."""
    tallies = [tally for part in parts for tally in part.tallies]
    whole = Decoded(tokens=[], stopped=[], tallies=tallies, steps=sum(part.steps for part in parts)).summary()
    answered, forwards = sum(len(row) for part in parts for row in part.tokens), sum(whole["forwards"].values())
    return {
        "tokens_per_forward": whole["tokens_per_forward"],
        "tokens_per_forward_all": whole["tokens_per_forward_all"],
        "answer_tokens_per_forward": answered / forwards,
        "certificate": whole["certificate"],
        "tokens": whole["tokens"],
        "tokens_denoise": sum(tally.tokens["denoise"] for tally in tallies),
        "answer_tokens": answered,
        "forwards": forwards,
        "forwards_denoise": whole["forwards"]["denoise"],
        "rows": whole["rows"],
        "edits": whole["edits"],
    }
