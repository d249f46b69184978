"""Runs ``partsong think``: checks what needs no model, then asks the model many times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partsong import zoo
from partsong.cli.bounds import check_files
from partsong.cli.draw_threads import Threads
from partsong.cli.engines import local_model, make_engine, verifier_address
from partsong.cli.options import Think
from partsong.cli.question import read_question
from partsong.cli.ranks import refuse_torchrun
from partsong.errors import ArgumentError
from partsong.outputs import write_text

if TYPE_CHECKING:
    from partsong.reasoning import Answer, Budget, Parameters, Price
    from partsong.reasoning.calls.engine import Engine
    from partsong.reasoning.strategies import Thinking, Verifier

__all__ = ["extract_of", "summary", "think"]


def think(options: Think) -> dict[str, Any]:
    """Asks the question, prints the answer and returns the result by JSON key."""
    thinking, budget, parameters = _check(options)
    question = read_question(options.question, options.file)
    if (task := zoo.task_of(local_model(options))) is not None:
        task.parse(question)  # a small model reads questions of its own kind alone; the error shows them
    engine = make_engine(options)
    answer, extra = asyncio.run(_think(options, question, engine, thinking, budget, parameters))
    print(_shown(answer))
    if options.out is not None:
        write_text(options.out, (_texts(answer) if answer.answer is None else answer.text) + "\n")
    counts = {name: value for name, value in answer.summary.items() if name != "stopped"}
    return {
        "command": "think",
        "strategy": options.strategy,
        "nproc": options.nproc or 1,
        "seed": options.seed,
        "out": options.out,
        "ledger": options.ledger,
        "question": question,
        "answer": answer.answer,
        "text": answer.text,
        "stopped": answer.stopped,
        "spent": answer.summary["stopped"],
        "details": _json_keys(answer.details),
        "engine": engine.name,
        **counts,
        **extra,
    }


def _json_keys(value: Any) -> Any:
    """Returns a value whose keys are text, as JSON has it: methods count by the numbers of their samples."""
    return {str(key): _json_keys(item) for key, item in value.items()} if isinstance(value, dict) else value


def _shown(answer: Answer) -> str:
    """Returns what was asked for; where no text names it, the texts themselves."""
    return answer.answer if answer.answer is not None else _texts(answer) or "(no answer)"


def _texts(answer: Answer) -> str:
    texts = answer.details.get("texts", [answer.text])
    if len(texts) < 2:
        return "".join(texts)
    return "\n\n".join(f"--- {number} of {len(texts)}\n{text}" for number, text in enumerate(texts, 1))


async def _think(
    options: Think, question: str, engine: Engine, thinking: Thinking, budget: Budget, parameters: Parameters
) -> tuple[Answer, dict[str, Any]]:
    from partsong.ledger import Ledger
    from partsong.reasoning import Journal, Run
    from partsong.reasoning.calls.trace import write_trace
    from partsong.zoo import knobs_for

    drawing, verifier = Threads() if options.show else None, _verifier(options)
    journal = None if options.journal is None else Journal(options.journal, replay=options.replay)
    try:
        with Ledger(options.ledger):
            run = Run(
                engine,
                seed=options.seed,
                name=options.name,
                journal=journal,
                budget=budget,
                concurrency=options.concurrency,
                observer=drawing,
            )
            try:
                own = knobs_for(local_model(options), thinking.name, thinking.knobs)
                given = {"extract": extract_of(options), "parameters": parameters, **own}
                if verifier is not None:
                    given["scorer"] = verifier.scorer(thinking.name, question)
                answer = await thinking(run, question, **given)
            finally:
                if drawing is not None:
                    drawing.draw()
                if options.trace is not None:  # written even if the run failed
                    write_trace(run.graph, options.trace, title=f"{options.strategy}: {question}")
        return answer, {"replayed": run.replayed, "verdicts": None if verifier is None else verifier.spent}
    finally:
        if verifier is not None:
            await verifier.close()
        if journal is not None:
            journal.close()
        await engine.close()


def _verifier(options: Think) -> Verifier | None:
    address = verifier_address(options)
    return None if address is None else address.open()


def extract_of(options: Think) -> Callable[[str], str | None]:
    """Returns the function that finds an answer in a text."""
    from partsong.jobs.engines import extractor
    from partsong.zoo import task_of

    return extractor(options.extract, task_of(local_model(options)))[1]


def summary(result: dict[str, Any]) -> str:
    """Describes what the answer cost in a few lines; the answer itself has been printed."""
    lines = [
        f"{result['calls']} calls: {result['tokens_total']} tokens in all, {result['tokens_critical']} one after "
        f"another, {result['tokens_accepted']} on the answer's own path, {result['tokens_cancelled']} cancelled",
        f"{result['prefill']} prompt tokens, {result['prefill_cached']} of them computed before; "
        f"{result['seconds']:.2f} s with {result['engine']}",
    ]
    if result["tokens_drafted"]:
        kept = result["tokens_drafted"] - result["tokens_rejected"]
        lines.append(f"{result['tokens_drafted']} tokens guessed ahead, {kept} of them right")
    why = {"decided": "no missing vote could change the answer", "confident": "the votes were clear enough"}
    if share := (result["details"].get("shares") or {}).get(result["answer"]):
        lines.append(f"{share:.0%} of the votes are for this answer")
    if result["answer"] is None and result["text"].strip() and not result["details"].get("hint"):
        lines.append("no answer of the kind that --extract looks for was found, so the text is printed as it is")
    if result["stopped"] == "budget":
        lines.append(f"the budget ended the run: {result['spent']}")
    elif result["stopped"] in why:
        lines.append(f"ended early: {why[result['stopped']]}")
    for count, what in ((result["truncated"], "ran out of tokens"), (result["estimated"], "have estimated counts")):
        if count:
            lines.append(f"{count} of {result['calls']} calls {what}")
    if hint := result["details"].get("hint"):
        lines.append(hint)
    if result["verdicts"]:
        lines.append(
            f"the scorer gave {result['verdicts']['calls']} verdicts for {result['verdicts']['tokens']} tokens"
        )
    if result["replayed"]:
        lines.append(f"{result['replayed']} calls were read from the journal")
    return "\n".join(lines)


def _check(options: Think) -> tuple[Thinking, Budget, Parameters]:
    from partsong.reasoning import Budget, Parameters
    from partsong.reasoning.calls.trace import check_format
    from partsong.reasoning.scorers.verifier import takes_scorer
    from partsong.reasoning.strategies import STRATEGIES, parse_thinking

    refuse_torchrun("partsong think runs in one process")
    if options.replay and options.journal is None:
        raise ArgumentError("--replay needs --journal: the file to replay from")
    if options.trace is not None:
        check_format(Path(options.trace))
    check_files(options.out, options.json, options.ledger, options.trace)
    thinking = parse_thinking(options.strategy)
    if thinking.needs:
        raise ArgumentError(
            f"strategy {thinking.name} needs {', '.join(thinking.needs)}, which no option can give; call it in Python"
        )
    if verifier_address(options) is not None and not takes_scorer(thinking.name):
        names = ", ".join(filter(takes_scorer, STRATEGIES))
        raise ArgumentError(f"--scorer: strategy {thinking.name} takes none; these do: {names}")
    budget = Budget(
        tokens=options.budget_tokens,
        calls=options.budget_calls,
        seconds=options.budget_seconds,
        money=options.budget_money,
        price=None if options.price is None else _price(options.price),
    )
    budget.validate()
    parameters = Parameters(
        max_tokens=options.max_tokens, temperature=options.temperature, top_p=options.top_p, logprobs=options.logprobs
    )
    return thinking, budget, parameters


def _price(text: str) -> Price:
    """Reads ``PROMPT,ANSWER`` or ``PROMPT,CACHED,ANSWER``, per million tokens."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (2, 3) or any(not 0 <= value < 1e9 for value in values):
        raise ArgumentError(f"--price {text!r}; write PROMPT,ANSWER or PROMPT,CACHED,ANSWER per million tokens")
    from partsong.reasoning import Price

    return Price(prompt=values[0], cached=values[1] if len(values) == 3 else values[0], completion=values[-1])
