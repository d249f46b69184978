"""Checks the arguments of `decode`, before the first forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from partsong import seeds
from partsong.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from partsong.kernels.speculation.drafter import DrafterKnobs
from partsong.kernels.speculation.registry import drafters_of
from partsong.knobs import Count, Number, Share, Whole, check_knobs, type_hints
from partsong.samplers.text.caches import NoCache, PrefixCache, TextCache
from partsong.samplers.text.canvas import Grid
from partsong.samplers.text.dependence.folders import head_for
from partsong.samplers.text.dependence.head import DependenceHead
from partsong.samplers.text.loading import load_text_model
from partsong.samplers.text.model import MixingTextModel, TextAdapter, TextModel
from partsong.samplers.text.plainly_causal import why_not_plainly_causal
from partsong.samplers.text.registry import parse_cache, parse_rule
from partsong.samplers.text.rule import Rule
from partsong.samplers.text.rules import EntropyBound, VariationBound
from partsong.samplers.text.rules_revising import Renoise
from partsong.samplers.text.views import Probe

__all__ = ["DecodeRequest", "check_request", "row_seeds"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRequest:
    """Holds the checked arguments of `decode`; see there."""

    model: TextModel
    prompts: list[list[int]]
    answers: list[list[int | None]]
    rule: Rule
    cache: TextCache
    grid: Grid
    temperature: float
    row_seeds: list[int]
    stop_token_ids: tuple[int, ...]
    probe: Probe | DependenceHead | None
    verify: int
    speculate: tuple[DrafterKnobs, ...]


def check_request(
    model: Any,
    input_ids: Sequence[Sequence[int]] | Tensor,
    *,
    adapter: str | TextAdapter | None = None,
    rule: str | Rule | None = None,
    cache: str | TextCache | None = None,
    max_new_tokens: Annotated[int, Whole(0)] | None = None,
    template: Sequence[Sequence[int | None]] | None = None,
    attention_mask: Tensor | None = None,
    block_size: Count | None = None,
    open_blocks: Count = 1,
    open_at: Share = 0.5,
    temperature: Annotated[float, Number(0.0, 1e6)] = 0.0,
    seed: int | Sequence[int] = 0,
    stop_token_ids: Sequence[int] | None = None,
    probe: Probe | None = None,
    verify: Annotated[int, Whole(0)] = 0,
    speculate: DrafterKnobs | str | Sequence[DrafterKnobs | str] | None = None,
) -> DecodeRequest:
    """Checks all arguments of `decode` before the first forward; arguments and errors as there."""
    sizes = {"max_new_tokens": max_new_tokens, "block_size": block_size, "open_blocks": open_blocks, "verify": verify}
    check_knobs(type_hints(check_request), {**sizes, "open_at": open_at, "temperature": temperature})
    drafters, model = drafters_of(speculate), _text_model(model, adapter)
    rule, cache = _rule(rule, model, probe), _cache(cache, model.adapter)
    _check_drafts(verify, drafters, model, rule, cache)
    prompts, answers = _texts(rows_of(input_ids, attention_mask, model), template, max_new_tokens, rule, model)
    return DecodeRequest(
        model=model,
        prompts=prompts,
        answers=answers,
        rule=rule,
        cache=cache,
        grid=_grid(model.adapter, block_size, open_blocks, open_at),
        temperature=float(temperature),
        row_seeds=row_seeds(seed, len(prompts)),
        stop_token_ids=_stop_tokens(stop_token_ids, model),
        probe=head_for(model, rule.head) if isinstance(rule, VariationBound) and probe is None else probe,
        verify=verify,
        speculate=drafters,
    )


def check_verify(verify: int, rule: Rule, cache: TextCache, adapter: TextAdapter) -> None:
    """Refuses options with which the text would depend on which steps are checked together.

    Raises:
        UnsupportedError: the model has no masks, the rule looks back, or the cache keeps what is out of date.
    """
    name = type(rule).__name__
    if not verify:
        return
    if adapter.noise != "mask":
        raise UnsupportedError(
            f"verify drafts what masked positions would become, and the family {adapter.name!r} has none; leave it out"
        )
    if rule.revises or rule.remembers or rule.probes:
        why = "revises tokens" if rule.revises else "needs a probe" if rule.probes else "compares a step with the last"
        raise UnsupportedError(
            f"{name} {why}, which the rows of one forward cannot repeat; verify is for rules that only decide, such as "
            f"quota or entropy-bound"
        )
    exact = adapter.attention == "block_causal" and isinstance(cache, PrefixCache)
    if not (exact or isinstance(cache, NoCache) or cache.refresh_every == 1):
        raise UnsupportedError(
            f"{type(cache).__name__} keeps keys of the previous step, and steps that are checked together have none "
            f"before them; use cache='none' with verify, or 'prefix' with block diffusion"
        )


def _check_drafts(
    verify: int, drafters: tuple[DrafterKnobs, ...], model: TextModel, rule: Rule, cache: TextCache
) -> None:
    """Refuses drafted steps and guessed tokens where they could not be checked."""
    check_verify(verify, rule, cache, model.adapter)
    if drafters and (why := why_not_plainly_causal(model, rule, cache)) is not None:
        raise UnsupportedError(
            f"speculate guesses the next tokens of a causal model, and {why}; leave it out, or use verify"
        )


def _stop_tokens(tokens: Sequence[int] | None, model: TextModel) -> tuple[int, ...]:
    stops = model.eos_token_ids if tokens is None else tuple(tokens)
    _check_tokens("stop_token_ids", stops, model)
    return stops


def _text_model(model: Any, adapter: str | TextAdapter | None) -> Any:
    loads = adapter is not None or isinstance(model, str | Path) or not hasattr(model, "key_store")
    return load_text_model(model, adapter=adapter) if loads else model


def _rule(rule: str | Rule | None, model: TextModel, probe: Probe | None) -> Rule:
    if rule is None:
        rule = Renoise() if model.adapter.noise == "uniform" else EntropyBound()
    elif isinstance(rule, str):
        rule = parse_rule(rule)
    if not isinstance(rule, Rule):
        raise ArgumentTypeError(f"rule is a Rule or its name, found {type(rule).__name__}")
    rule.validate()
    _check_rule(rule, model, probe)
    return rule


def _cache(cache: str | TextCache | None, adapter: TextAdapter) -> TextCache:
    if cache is None:
        return PrefixCache() if adapter.attention != "full" and adapter.keeps_keys else NoCache()
    cache = parse_cache(cache) if isinstance(cache, str) else cache
    if not isinstance(cache, TextCache):
        raise ArgumentTypeError(f"cache is a TextCache or its name, found {type(cache).__name__}")
    cache.validate()
    if not adapter.keeps_keys and not isinstance(cache, NoCache):
        raise UnsupportedError(f"models of the family {adapter.name!r} keep no keys; use cache='none'")
    return cache


def _check_rule(rule: Rule, model: TextModel, probe: Probe | None) -> None:
    """Refuses rules that the model or the other arguments do not support."""
    adapter, name = model.adapter, type(rule).__name__
    if adapter.noise == "mask" and (model.mask_token_id is None or not 0 <= model.mask_token_id < model.vocab_size):
        raise ArgumentError(
            f"the model masks with token {model.mask_token_id}, which is not one of its {model.vocab_size} tokens; "
            f"give load_text_model the right mask_token_id"
        )
    if adapter.noise not in rule.noise:
        raise UnsupportedError(
            f"{name} does not fit noise of the kind {adapter.noise!r}; it is for {' and '.join(rule.noise)}. "
            f"Leave rule out for one that fits"
        )
    if adapter.noise == "none" and rule.revises:
        raise UnsupportedError(f"{name} revises tokens, and a causal model sees nothing after them; use another rule")
    if rule.shadows and (adapter.shifted or adapter.attention != "full"):
        raise UnsupportedError(
            f"{name} masks decided tokens beside themselves, which needs a model that sees its whole text and reads a "
            f"token where it stands; the family {adapter.name!r} does not"
        )
    if rule.mixes and not isinstance(model, MixingTextModel):
        raise UnsupportedError(
            f"{name} lets the model read mixtures of a token and the mask, and {type(model).__name__} has no "
            f"forward_mixed; use token-editing, which is the same without mixtures"
        )
    if rule.probes and probe is None:
        raise ArgumentError(f"{name} needs probe=, a function that gives the mutual information of positions")
    _check_tokens(name, rule.bars, model)


def rows_of(input_ids: Sequence[Sequence[int]] | Tensor, mask: Tensor | None, model: TextModel) -> list[list[int]]:
    """Returns the prompts as lists, without padding."""
    if isinstance(input_ids, Tensor):
        if input_ids.dim() != 2 or input_ids.is_floating_point():
            raise ArgumentError(f"input_ids is int [B, L]; found {input_ids.dtype} {tuple(input_ids.shape)}")
        if mask is not None and mask.shape != input_ids.shape:
            raise ArgumentError(
                f"attention_mask is {tuple(mask.shape)}, input_ids {tuple(input_ids.shape)}; give both one shape"
            )
        keep = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
        if not torch.equal(keep, (keep.cumsum(1) > 0) & (keep.flip(1).cumsum(1).flip(1) > 0)):
            raise ArgumentError("attention_mask hides tokens between others; padding stands at the ends of a row")
        input_ids = [ids[kept].tolist() for ids, kept in zip(input_ids, keep, strict=True)]
    elif mask is not None:
        raise ArgumentError("attention_mask goes with a tensor of prompts; lists need none")
    prompts = [list(map(int, row)) for row in input_ids]
    if not prompts:
        raise ArgumentError("there are no prompts: give at least one row of token ids")
    for number, row in enumerate(prompts):
        _check_tokens(f"prompt {number}", row, model)
    return prompts


def _check_tokens(name: str, tokens: Sequence[int | None], model: TextModel) -> None:
    wrong = [t for t in tokens if t is not None and not 0 <= t < model.vocab_size]
    if wrong:
        raise ArgumentError(f"{name} has token {wrong[0]}, but the model has {model.vocab_size} tokens")


def _texts(
    rows: list[list[int]],
    template: Sequence[Sequence[int | None]] | None,
    max_new_tokens: int | None,
    rule: Rule,
    model: TextModel,
) -> tuple[list[list[int]], list[list[int | None]]]:
    """Returns prompts and what follows them, for which the model has room."""
    prompts, answers = _answers(rows, template, max_new_tokens, model)
    _check_room(prompts, answers, rule, model)
    return prompts, answers


def _answers(
    prompts: list[list[int]],
    template: Sequence[Sequence[int | None]] | None,
    max_new_tokens: int | None,
    model: TextModel,
) -> tuple[list[list[int]], list[list[int | None]]]:
    """Cuts each prompt at its first position to fill; returns the prompts and what follows."""
    adapter, mask = model.adapter, model.mask_token_id if model.adapter.noise == "mask" else None
    starts = [row.index(mask) if mask in row else len(row) for row in prompts]
    answers: list[list[int | None]] = [
        [None if token == mask else token for token in row[start:]] for row, start in zip(prompts, starts, strict=True)
    ]
    if template is not None:
        if len(template) != len(prompts):
            raise ArgumentError(f"template has {len(template)} rows for {len(prompts)} prompts")
        for number, (answer, row) in enumerate(zip(answers, template, strict=True)):
            _check_tokens(f"row {number} of the template", row, model)
            answer += [None if token == mask else token for token in row]
    given = template is not None or any(answers)
    room = 128 if model.max_positions is None else model.max_positions - max(map(len, prompts))
    count = (0 if given else max(min(room, 128), 1)) if max_new_tokens is None else max_new_tokens
    answers = [answer + [None] * count for answer in answers]
    if not any(None in answer for answer in answers):
        raise ArgumentError("there is nothing to fill: max_new_tokens is 0 and no position is open")
    prompts = [row[:start] for row, start in zip(prompts, starts, strict=True)]
    if adapter.noise == "none" and any(t is not None for a in answers for t in a[_first_open(a) :]):
        raise UnsupportedError("a causal model sees nothing after the gap it fills; give it a beginning only")
    if adapter.shifted and not all(prompts):
        raise ArgumentError("this model reads a token at the place before it, so every prompt needs a token")
    return prompts, answers


def _first_open(answer: list[int | None]) -> int:
    return answer.index(None) if None in answer else len(answer)


def _check_room(prompts: list[list[int]], answers: list[list[int | None]], rule: Rule, model: TextModel) -> None:
    """Refuses more than the model has positions for, and given tokens that the rule would move."""
    most = model.max_positions
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if most is not None and len(prompt) + len(answer) > most:
            raise ArgumentError(
                f"prompt {number} has {len(prompt)} tokens and {len(answer)} are to follow, but the model has "
                f"{most} positions; shorten it, or lower max_new_tokens to {max(most - len(prompt), 0)}"
            )
    if rule.moves and any(t is not None for answer in answers for t in answer[_first_open(answer) :]):
        raise UnsupportedError(
            f"{type(rule).__name__} moves tokens, and given ones between others must stay where they are; "
            f"give a beginning only, or use another rule"
        )


def _grid(adapter: TextAdapter, block_size: int | None, open_blocks: int, open_at: float) -> Grid:
    grid = Grid(block_size=block_size or 32, open_blocks=open_blocks, open_at=open_at)
    if adapter.noise == "none":
        if block_size not in (None, 1) or open_blocks > 1:
            raise UnsupportedError("a causal model decides one token after another; leave out block_size, open_blocks")
        return replace(grid, block_size=1)
    if adapter.block_size is None:
        return grid
    if block_size is not None and adapter.block_size % block_size:
        raise UnsupportedError(
            f"block_size={block_size} does not divide the model's own blocks of {adapter.block_size}; use a divisor"
        )
    if adapter.noise == "uniform" and (open_blocks > 1 or block_size not in (None, adapter.block_size)):
        raise UnsupportedError(f"this model denoises canvases of {adapter.block_size} tokens, one after another")
    return replace(grid, block_size=block_size or adapter.block_size, origin=adapter.block_origin)


def row_seeds(seed: int | Sequence[int], rows: int, noun: str = "prompts") -> list[int]:
    """Returns a seed for each row, of one seed or a list of them; `noun` is what rows are called in an error."""
    if isinstance(seed, int):
        return [seeds.derive(seed, "row", row) for row in range(rows)]
    if len(seed) != rows:
        raise ArgumentError(f"seed lists {len(seed)} seeds for {rows} {noun}; give one for each, or a single one")
    return [seeds.check_seed(one) for one in seed]
