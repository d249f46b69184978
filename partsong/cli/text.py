"""Runs ``partsong text``: checks what needs no model, then decodes on the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partsong.cli.bounds import check_files
from partsong.cli.decoding import check_decoding, read_rule
from partsong.cli.options import Text
from partsong.cli.ranks import is_main, num_ranks, prepare_ranks, run_on_ranks
from partsong.errors import ArgumentError
from partsong.jobs.folder_source import find_text_model
from partsong.outputs import write_text

if TYPE_CHECKING:
    from partsong.jobs.texts import TextJob
    from partsong.kernels.speculation.drafter import DrafterKnobs

__all__ = ["decode_on_rank", "summary", "text"]


def text(options: Text) -> dict[str, Any]:
    """Decodes the text, prints it and returns the result by JSON key."""
    _check(options)
    from partsong.samplers.registry import parse_strategy
    from partsong.samplers.text import parse_cache

    nproc = num_ranks(options.nproc)
    drafters, shared = _drafters_and_sharing(options, nproc)
    strategies = tuple(map(parse_strategy, shared))
    rule = None if options.rule is None else read_rule(options.rule)
    cache = None if options.cache is None else parse_cache(options.cache)
    source = find_text_model(options.model, options.adapter)
    prepare_ranks(nproc, "partsong.jobs.texts")
    from partsong.jobs.texts import TextJob

    job = TextJob(
        folder=source.folder,
        zoo_name=source.zoo_name,
        prompt=options.prompt,
        adapter=options.adapter,
        rule=rule,
        cache=cache,
        max_new_tokens=options.max_new_tokens,
        block_size=options.block_size,
        open_blocks=options.open_blocks,
        verify=options.verify,
        speculate=drafters,
        temperature=options.temperature,
        seed=options.seed,
        chat=options.chat if options.chat or options.no_chat else None,
        template=options.template,
        dtype=options.dtype,
        device=options.device,
        threads=options.threads,
        compare=options.compare,
        ledger=None if options.ledger is None else Path(options.ledger),
        strategies=strategies,
    )
    return _make_result(options, nproc, shared, run_on_ranks(decode_on_rank, nproc, job, nproc, options.show))


def decode_on_rank(job: TextJob, nproc: int, show: bool) -> dict[str, Any]:
    """Decodes a job on this rank; the first one shows it and writes its files."""
    from partsong.cli.draw_text import viewer
    from partsong.jobs.drafting import drafter_apart, prepare_with_drafts
    from partsong.jobs.texts import prepare_text, run_text
    from partsong.parallel import Mesh, mesh_for

    with contextlib.ExitStack() as stack:
        if drafter_apart(job.speculate) is not None:
            loaded = prepare_with_drafts(job, stack.enter_context(Mesh(pipe=nproc, device=job.device)))
            if loaded is None:
                return {}
        else:
            mesh = None
            if nproc > 1:
                mesh = stack.enter_context(Mesh(**mesh_for(job.strategies, nproc), device=job.device))
                if not mesh.is_main:
                    return run_text(prepare_text(replace(job, ledger=None), mesh), None)
            loaded = prepare_text(job, mesh)
        shown = viewer(loaded, show=show)
        measured = run_text(loaded, shown.step if shown.watches else None)
        shown.end(measured["text"])
        return measured


def _drafters_and_sharing(options: Text, nproc: int) -> tuple[tuple[DrafterKnobs, ...], tuple[str, ...]]:
    """Reads what guesses tokens, and how ranks share the model."""
    from partsong.jobs.drafting import check_drafting_rank, drafter_apart
    from partsong.jobs.texts import DRAFTERS
    from partsong.kernels.speculation.registry import drafters_of

    drafters = drafters_of(options.speculate, DRAFTERS)
    check_drafting_rank(drafters, nproc, options.strategy)
    share = nproc > 1 and drafter_apart(drafters) is None
    # Ranks were asked for, so they share the model in the way that holds least on each.
    return drafters, options.strategy or ("tensor-parallel",) * share


def _make_result(options: Text, nproc: int, shared: Sequence[str], measured: dict[str, Any]) -> dict[str, Any]:
    if not is_main():
        return {}
    if options.out is not None:
        write_text(options.out, measured["text"] + "\n")
    return {
        "command": "text",
        "nproc": nproc,
        "strategy": " ".join(shared) or "serial",
        "seed": options.seed,
        "out": options.out,
        "ledger": options.ledger,
        "prompt": options.prompt,
        "model": options.model,
        **measured,
    }


def summary(result: dict[str, Any]) -> str:
    """Describes what the text cost in a few lines; the text itself has been printed."""
    forwards = {kind: number for kind, number in result["forwards"].items() if number}
    lines = [
        f"{_number(result['answer_tokens'], 'token')} in {_number(sum(forwards.values()), 'forward')} "
        f"({', '.join(f'{number} {kind}' for kind, number in forwards.items())}), "
        f"{result['answer_tokens_per_forward']:.2f} per forward; {result['seconds']:.3f} s, "
        f"{result['tokens_per_second']:.0f} tokens/s",
        f"rule {result['rule']}, cache {result['cache']}; {_certificate(result)}",
    ]
    if result["nproc"] > 1 and result["strategy"] != "serial":
        lines.append(f"{result['nproc']} ranks shared the model by {result['strategy']}")
    if result["verify"]:
        drafted = _number(result["tokens_drafted"], "token")
        lines.append(
            f"verify {result['verify']}: {_number(result['rows'], 'row')} in those forwards; {drafted} drafted, "
            f"{result['tokens_rejected']} of them rejected"
        )
    if result["speculate"]:
        guessed, kept = result["tokens_drafted"], result["tokens_drafted"] - result["tokens_rejected"]
        lines.append(
            f"{', '.join(result['speculate'])}: {_number(guessed, 'token')} guessed ahead, {kept} of them right"
        )
    if result["edits"]:
        lines.append(f"{_number(result['edits'], 'token')} changed or taken back later")
    if "speedup" in result:
        lines.append(_twin(result))
    if result["valid"] is not None:
        lines.append(f"the answer is {'valid' if result['valid'] else 'not valid'}")
    if result["out"] is not None:
        lines.append(f"written to {result['out']}")
    return "\n".join(lines)


def _certificate(result: dict[str, Any]) -> str:
    if result["certificate"] is None:
        return "no certificate: this rule revises tokens, or chooses places by the tokens it drew"
    return (
        f"certificate: within {result['certificate']:.3g} nats of one token at a time, "
        "under the model's own conditionals at temperature 1"
    )


def _twin(result: dict[str, Any]) -> str:
    here, there = len(result["token_ids"]), len(result["token_ids_serial"])
    agree = (
        "the same text" if result["same_text"] else f"{result['tokens_agreeing']} of {max(here, there)} tokens agree"
    )
    if here != there:
        agree += f" (it has {there}, this text {here})"
    what = "without drafts" if result["verify"] or result["speculate"] else "one token per step"
    return (
        f"{what}: {result['seconds_serial']:.3f} s in {_number(result['forwards_serial'], 'forward')}, "
        f"so {result['speedup']:.2f}x; {agree}"
    )


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _check(options: Text) -> None:
    if not options.prompt.strip() and options.template is None:
        raise ArgumentError("the prompt is empty; say what to answer, or give a --template to fill in")
    if options.chat and options.no_chat:
        raise ArgumentError("--chat and --no-chat contradict each other; give one of them")
    if is_main():
        check_files(options.out, options.json, options.ledger)
    check_decoding(options)
