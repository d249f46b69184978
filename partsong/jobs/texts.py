"""Runs a job of ``partsong text``: loads a model and its tokenizer, decodes a prompt, compares with plain decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from partsong import zoo
from partsong.accelerator import accelerator
from partsong.errors import ArgumentError, PartsongError, UnsupportedError
from partsong.foreign_messages import quiet_libraries
from partsong.kernels.speculation.drafter import DrafterKnobs
from partsong.kernels.speculation.registry import COMMON
from partsong.knobs import by_name, format_knobs
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy
from partsong.reasoning.local.speculation.saguaro import Saguaro
from partsong.samplers.text import (
    CACHES,
    RULES,
    Decoded,
    NoCache,
    Quota,
    Rule,
    Step,
    TextCache,
    decode_steps,
    load_text_model,
)
from partsong.samplers.text.request import DecodeRequest, check_request

__all__ = [
    "DRAFTERS",
    "LoadedText",
    "TextJob",
    "load_tokenizer",
    "open_text_model",
    "plain_ids",
    "prepare_text",
    "run_text",
]

#: Drafters of ``partsong text``, by name.
DRAFTERS = MappingProxyType({**COMMON, **by_name((Saguaro,))})


@dataclass(frozen=True, kw_only=True, slots=True)
class TextJob:
    """Says what to decode.

    Attributes:
        folder: a checkpoint folder with a tokenizer.
        zoo_name: name of the zoo model, if it is one; its reader then judges the answer.
        prompt: what to answer or continue; mask tokens in it are filled in.
        adapter: as in `decode`.
        rule: as in `decode`.
        cache: as in `decode`.
        max_new_tokens: as in `decode`; for a zoo model, None is the longest answer it was trained for.
        block_size: as in `decode`.
        open_blocks: as in `decode`.
        verify: as in `decode`.
        speculate: as in `decode`.
        temperature: as in `decode`.
        seed: as in `decode`.
        chat: whether the prompt goes through the tokenizer's chat template; None uses it if there is one.
        template: a text that must follow the prompt, with the tokenizer's mask token in place of gaps.
        dtype: name of a torch type; None is the checkpoint's own.
        device: None is the first GPU, or the CPU if there is none.
        threads: None leaves the choice to torch.
        compare: whether to decode one token per step as well; with `verify` or `speculate`, whether to decode without
            it as well.
        ledger: JSONL to write.
        strategies: how ranks share the model.
    """

    folder: Path
    zoo_name: str | None = None
    prompt: str
    adapter: str | None = None
    rule: Rule | None = None
    cache: TextCache | None = None
    max_new_tokens: int | None = None
    block_size: int | None = None
    open_blocks: int = 1
    verify: int = 0
    speculate: tuple[DrafterKnobs, ...] = ()
    temperature: float = 0.0
    seed: int = 0
    chat: bool | None = None
    template: str | None = None
    dtype: str | None = None
    device: str | None = None
    threads: int | None = None
    compare: bool = False
    ledger: Path | None = None
    strategies: tuple[Strategy, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedText:
    """Holds a job that is ready to run.

    Attributes:
        job: what to decode.
        tokenizer: of the model.
        ids: tokens of the prompt.
        request: the arguments of `decode`, checked and with defaults filled in.
        options: the same arguments as keywords of `decode_steps`.
    """

    job: TextJob
    tokenizer: Any
    ids: list[int]
    request: DecodeRequest
    options: dict[str, Any]

    @property
    def before_gap(self) -> list[int]:
        """Returns the tokens before the first gap of the prompt, which belong to the text; empty if it has no gap."""
        prompt = self.request.prompts[0]
        return prompt if len(prompt) < len(self.ids) else []

    def spell(self, tokens: list[int]) -> str:
        """Spells tokens as text, leaving out special ones."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def prepare_text(
    job: TextJob, mesh: Mesh | None = None, drafters: tuple[DrafterKnobs, ...] | None = None
) -> LoadedText:
    """Loads what a job needs and checks all of it before the first forward.

    Args:
        job: what to decode.
        mesh: the ranks that share the model; None for one.
        drafters: those of the job, which know this rank; None takes them as they are.

    Raises:
        ArgumentError: the tokenizer, chat template or model cannot be read, or the prompt or a knob does not fit.
        UnsupportedError: the model cannot be decoded with the rule or the cache.
    """
    tokenizer = load_tokenizer(job.folder)
    ids = _prompt_ids(job, tokenizer)
    model = open_text_model(
        job.folder,
        adapter=job.adapter,
        dtype=job.dtype,
        device=job.device,
        threads=job.threads or (1 if mesh is not None else None),
        zoo_name=job.zoo_name,
        strategies=job.strategies if mesh is not None else (),
        mesh=mesh,
    )
    options: dict[str, Any] = {
        "rule": job.rule,
        "cache": job.cache,
        "max_new_tokens": job.max_new_tokens,
        "block_size": job.block_size,
        "open_blocks": job.open_blocks,
        "verify": job.verify,
        "speculate": job.speculate if drafters is None else drafters,
        "temperature": job.temperature,
        "seed": job.seed,
    }
    if job.template is not None:
        options["template"] = [_template_ids(job, tokenizer, model)]
    elif job.max_new_tokens is None and job.zoo_name is not None and model.mask_token_id not in ids:
        options["max_new_tokens"] = zoo.MODELS[job.zoo_name].defaults["canvas"]
    if job.compare and model.adapter.noise == "uniform":
        raise UnsupportedError("models of uniform noise have no decoding of one token per step; leave --compare out")
    request = check_request(model, [ids], **options)
    return LoadedText(job=job, tokenizer=tokenizer, ids=ids, request=request, options=options)


def open_text_model(
    folder: Path,
    *,
    adapter: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    zoo_name: str | None = None,
    strategies: Sequence[Strategy] = (),
    mesh: Mesh | None = None,
) -> Any:
    """Loads the `TextModel` of a folder, with arguments as in `TextJob`, and without messages of transformers."""
    quiet_libraries("transformers")
    # A zoo model is too small to need several threads.
    if threads or zoo_name:
        torch.set_num_threads(threads or 1)
    return load_text_model(
        folder,
        adapter=adapter,
        dtype=None if dtype is None else getattr(torch, dtype),
        device=device or (accelerator() if mesh is None else mesh.device),
        strategies=strategies,
        mesh=mesh,
    )


def load_tokenizer(folder: Path) -> Any:
    """Loads the tokenizer of a checkpoint folder without running code of the folder.

    Raises:
        ArgumentError: the tokenizer cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ArgumentError(f"the tokenizer in {folder} cannot be read: {type(error).__name__}: {error}") from error


def run_text(loaded: LoadedText, watch: Callable[[Step], None] | None = None) -> dict[str, Any]:
    """Decodes a job.

    Args:
        loaded: from `prepare_text`.
        watch: called with every step; its time is not counted.

    Returns:
        The measured values by their JSON names. ``tokens`` and ``answer_tokens`` count the tokens that were decided, up
        to and including the end of the text, but not those that a template gives. ``tokens_per_forward`` divides by the
        forwards that denoise, ``answer_tokens_per_forward`` by all. Loading is not timed.

    Raises:
        NotANumberError: the model's logits are no numbers.
    """
    job, request = loaded.job, loaded.request
    drafted = job.verify or job.speculate
    plain = {} if drafted else {"rule": Quota(), "cache": NoCache(), "open_blocks": 1}
    serial = {**loaded.options, **plain, "verify": 0, "speculate": None}
    watched = watch is not None or job.ledger is not None
    if job.compare:  # warms up both, because the first forward costs more
        for options in (loaded.options, serial):
            next(decode_steps(request.model, [loaded.ids], **options))
    decoded, seconds = _timed(loaded, loaded.options, watched, watch, job.ledger)
    decoded.check()
    tokens, cost = decoded.tokens[0], decoded.summary()
    written = sum(given is None for given in request.answers[0][: len(tokens)])
    values: dict[str, Any] = {
        **cost,
        "text": loaded.spell([*loaded.before_gap, *tokens]),
        "token_ids": tokens,
        "answer_tokens": written,
        "answer_tokens_per_forward": written / sum(cost["forwards"].values()),
        "seconds": seconds,
        "tokens_per_second": written / seconds,
        "steps": decoded.steps,
        "stopped": decoded.stopped[0],
        "rule": format_knobs(request.rule, RULES),
        "cache": format_knobs(request.cache, CACHES),
        "verify": request.verify,
        "speculate": [format_knobs(knobs, DRAFTERS) for knobs in job.speculate],
        "adapter": request.model.adapter.name,
        "temperature": request.temperature,
        "threads": torch.get_num_threads(),
        "device": str(request.model.device),
    }
    values["valid"] = _valid(job, values["text"])
    return values | (_compared(loaded, serial, values, watched) if job.compare else {})


def _timed(
    loaded: LoadedText,
    options: dict[str, Any],
    watched: bool,
    watch: Callable[[Step], None] | None = None,
    ledger: Path | None = None,
) -> tuple[Decoded, float]:
    """Decodes, and returns the seconds without those of the watcher; writes a ledger record per step."""
    steps = decode_steps(loaded.request.model, [loaded.ids], watched=watched, **options)
    seconds = 0.0
    with Ledger(ledger) as records:
        while True:
            start = time.perf_counter()
            try:
                step = next(steps)
            except StopIteration as end:
                return end.value, seconds + time.perf_counter() - start
            spent = time.perf_counter() - start
            seconds += spent
            records.count(tokens=sum(event.kind == "commit" for event in step.events), seconds_compute=spent)
            records.step()
            if watch is not None:
                watch(step)


def _compared(loaded: LoadedText, serial: dict[str, Any], values: dict[str, Any], watched: bool) -> dict[str, Any]:
    decoded, seconds = _timed(loaded, serial, watched)
    tokens = decoded.tokens[0]
    text = loaded.spell([*loaded.before_gap, *tokens])
    return {
        "seconds_serial": seconds,
        "speedup": seconds / values["seconds"],
        "text_serial": text,
        "forwards_serial": sum(decoded.summary()["forwards"].values()),
        "token_ids_serial": tokens,
        # Compared position by position, up to the end of the shorter text.
        "tokens_agreeing": sum(a == b for a, b in zip(values["token_ids"], tokens, strict=False)),
        "same_text": values["token_ids"] == tokens,
        "valid_serial": _valid(loaded.job, text),
    }


def _valid(job: TextJob, text: str) -> bool | None:
    """Says whether the answer of a zoo model is right; None for other models and for prompts that it cannot parse."""
    if job.zoo_name is None:
        return None
    try:
        return bool(zoo.MODELS[job.zoo_name].task.check(job.prompt, text))
    except ArgumentError:  # such as a prompt with gaps
        return None


def _prompt_ids(job: TextJob, tokenizer: Any) -> list[int]:
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if job.chat and not has_template:
        raise ArgumentError(f"--chat: the tokenizer in {job.folder} has no chat template; leave it out")
    if job.zoo_name is not None and (tokenizer.mask_token is None or tokenizer.mask_token not in job.prompt):
        zoo.MODELS[job.zoo_name].task.parse(job.prompt)  # refuses unknown words
    if not (has_template if job.chat is None else job.chat) or not job.prompt:
        return plain_ids(job.prompt, tokenizer)
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": job.prompt}], tokenize=False, add_generation_prompt=True
        )
    except PartsongError:
        raise
    except Exception as error:
        raise ArgumentError(f"the chat template refuses the prompt ({error}); use --no-chat") from error
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def plain_ids(prompt: str, tokenizer: Any) -> list[int]:
    """Returns tokens including those the tokenizer adds before a text, but not those it adds after a finished one."""
    bare, whole = (list(tokenizer(prompt, add_special_tokens=special).input_ids) for special in (False, True))
    if tokenizer.mask_token_id in bare:
        return whole
    ends = [at + len(bare) for at in range(len(whole)) if whole[at : at + len(bare)] == bare]
    return whole[: ends[0]] if ends else whole


def _template_ids(job: TextJob, tokenizer: Any, model: Any) -> list[int]:
    ids = list(tokenizer(job.template, add_special_tokens=False).input_ids)
    mask = model.mask_token_id if model.adapter.noise == "mask" else None
    if mask not in ids and job.max_new_tokens is None:
        how = "it has no mask token, so" if mask is None else f"write {tokenizer.decode([mask])} for every gap, or"
        raise ArgumentError(f"--template has no gap to fill: {how} give --max-new-tokens to write after it")
    return ids
