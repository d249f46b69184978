"""Runs ``partsong plan``, ``partsong calibrate`` and ``partsong eval planner``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from partsong.cli.plan_all import overview, overview_summary
from partsong.cli.planning_options import Calibrating, PlannerEval, Planning
from partsong.cli.ranks import refuse_torchrun, under_torchrun
from partsong.cli.table import table
from partsong.cores import usable_cores
from partsong.errors import ArgumentError
from partsong.outputs import check_writable

__all__ = ["calibrate", "calibrate_summary", "evaluate", "evaluate_summary", "plan", "plan_summary"]


def plan(options: Planning) -> dict[str, Any]:
    """Predicts every legal mix of strategies and returns rows, best first."""
    refuse_torchrun("partsong plan runs in one process")
    from partsong.jobs.planning import paste, subject_for, text_model_for
    from partsong.planner.recommend import advise_number

    start = time.perf_counter()
    if options.model is None:
        return overview(options, *_machine(options))
    if (text := text_model_for(options.model)) is not None:
        return _planned_text(options, options.model, text, start)
    if options.prompt is not None:
        raise ArgumentError(f"--prompt is for language models, and {options.model} is none; leave it out")
    if options.plot is not None:
        check_writable(options.plot)
    machine, source = _machine(options)
    subject, name = subject_for(options.model)
    asked = {key: getattr(options, key) for key in ("height", "width", "frames", "steps", "batch", "max_drift")}
    advice = advise_number(subject, machine, **asked, processes=usable_cores())
    if options.plot is not None:
        from partsong.planner.plot import draw

        draw(subject, machine, Path(options.plot), **asked)
    return _result(options, machine, source, start, advice, advice.choice.strategy) | {
        "nproc": advice.machine.ranks,
        "rows": [_row(row) for row in advice.rows],
        "paste": paste(name, advice, subject, **asked),
    }


def _result(options: Planning, machine: Any, source: str, start: float, advice: Any, strategy: str) -> dict[str, Any]:
    """Returns what every plan says, of pictures and of texts."""
    return {
        "command": "plan",
        "model": options.model,
        "devices": f"{machine.ranks}x {machine.device.name}, {machine.link.name}",
        "calibration": source,
        "nproc": machine.ranks,
        "strategy": strategy,
        "seconds": time.perf_counter() - start,
        "sentence": advice.sentence,
        "serial_seconds": advice.serial.seconds,
        "serial_fits": advice.fits_serial,
        "refused": [{"strategy": each.strategy, "reason": each.reason} for each in advice.refused],
        "top": options.top,
    }


def _planned_text(options: Planning, name: str, model: Any, start: float) -> dict[str, Any]:
    from partsong.jobs.planning import paste_text
    from partsong.planner.texts import plan_texts

    pictures = {"height": None, "width": None, "frames": None, "steps": None, "plot": None, "max_drift": 0.0}
    if given := [f"--{key.replace('_', '-')}" for key, usual in pictures.items() if getattr(options, key) != usual]:
        raise ArgumentError(f"{', '.join(given)}: {name} is a language model, which takes --prompt and --batch")
    machine, source = _machine(options)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1024
    prompt = options.prompt or min(1024, context - 1)
    if prompt >= context:
        raise ArgumentError(f"--prompt {prompt}: {name} has {context} positions; use at most {context - 1}")
    advice = plan_texts(model, machine, prompt=prompt, rows=options.batch)
    best = advice.choice
    strategy, ranks = ("serial", 1) if best is None else (best.strategy, best.ranks)
    estimates = (*advice.rows, advice.serial) if advice.fits_serial else advice.rows
    return _result(options, machine, source, start, advice, strategy) | {
        "prompt_tokens": prompt,
        "rows": [_text_row(each) for each in sorted(estimates, key=lambda each: each.seconds)],
        "paste": [] if best is None else paste_text(name, strategy, ranks),
    }


def _machine(options: Planning) -> tuple[Any, str]:
    from partsong.planner.calibration import find_calibration
    from partsong.planner.devices import USUAL_LINK
    from partsong.planner.machines import machine_named

    if options.gpus is not None:
        if options.nproc is not None:
            raise ArgumentError("--nproc is for this machine; --gpus says how many devices there are, as in 4x4090")
        kind = options.gpus.rpartition("x")[2].lower()
        machine = machine_named(
            options.gpus,
            options.link or USUAL_LINK.get(kind, "pcie4"),
            memory=None if options.memory is None else options.memory * 1e9,
            per_node=options.per_node,
            across=options.across,
        )
        return machine, f"public figures, not measured: {machine.device.source}; {machine.link.source}"
    for name in ("link", "per_node", "across", "memory"):
        if getattr(options, name) is not None:
            raise ArgumentError(f"--{name.replace('_', '-')} goes with --gpus, which names the devices")
    ranks = options.nproc or 2
    if (measured := find_calibration(ranks)) is None:
        raise ArgumentError("name the devices, as in --gpus 4x4090, or measure this machine: partsong calibrate")
    return measured.machine(ranks), f"measured: {measured.name}"


def _row(row: Any) -> dict[str, Any]:
    return {
        "strategy": row.strategy,
        "seconds": row.seconds,
        "seconds_low": row.seconds_low,
        "seconds_high": row.seconds_high,
        "bytes_sent": row.bytes_sent,
        "memory_mb": row.memory / 1e6,
        "class": row.kind,
        "drift": row.drift,
        "drift_file": row.drift_file,
        "tiled": row.tiled,
        "reason": row.reason,
    }


def _text_row(row: Any) -> dict[str, Any]:
    return {
        "strategy": row.strategy,
        "seconds": row.seconds,
        "prompt_seconds": row.prompt_seconds,
        "tokens_per_second": row.tokens_per_second,
        "bytes_sent": row.bytes_sent,
        "weights_mb": row.weights / 1e6,
        "keys_mb": row.keys / 1e6,
        "memory_mb": row.memory / 1e6,
        "class": "exact",
    }


def plan_summary(result: dict[str, Any]) -> str:
    """Returns a sentence, a table of the best mixes, and lines to paste."""
    if result["model"] is None:
        return overview_summary(result)
    if "prompt_tokens" in result:
        return _text_summary(result)
    lines = [("seconds", "likely", "GB", "GB sent", "class", "strategy")]
    for row in result["rows"][: result["top"]]:
        likely = f"{row['seconds_low']:.3g} to {row['seconds_high']:.3g}"
        drift = f"{row['class']}, {row['drift']:.2g}" if row["drift"] else row["class"]
        mix = row["strategy"] + (" (decoding in tiles)" if row["tiled"] else "")
        numbers = (f"{row['seconds']:.3g}", likely, f"{row['memory_mb'] / 1e3:.1f}", f"{row['bytes_sent'] / 1e9:.2f}")
        lines.append((*numbers, drift, mix))
    refused = len(result["refused"])
    notes = [f"{refused} mixes cannot run here; --json says why." if refused else "", f"From {result['calibration']}."]
    parts = [result["sentence"], _table(lines), " ".join(filter(None, notes)), *result["paste"]]
    return "\n\n".join(parts)


def _text_summary(result: dict[str, Any]) -> str:
    lines: list[tuple[str, ...]] = [
        ("ms a token", "tokens/s", "s to read", "GB", "of weights", "of keys", "MB sent", "strategy")
    ]
    for row in result["rows"][: result["top"]]:
        memory = (row["memory_mb"] / 1e3, row["weights_mb"] / 1e3, row["keys_mb"] / 1e3)
        numbers = (f"{row['seconds'] * 1e3:.3g}", f"{row['tokens_per_second']:.3g}", f"{row['prompt_seconds']:.3g}")
        moved = f"{row['bytes_sent'] / 1e6:.3g}"
        lines.append((*numbers, *(f"{each:.3g}" for each in memory), moved, row["strategy"]))
    refused = [f"{each['strategy']}: {each['reason']}" for each in result["refused"]]
    notes = f"Prompts of {result['prompt_tokens']} tokens. From {result['calibration']}."
    return "\n\n".join([result["sentence"], _table(lines), *refused, notes, *result["paste"]])


def calibrate(options: Calibrating) -> dict[str, Any]:
    """Measures this machine and writes the result."""
    from partsong.planner.calibration import calibrate as measure_machine
    from partsong.planner.calibration import calibrate_here, calibration_folder

    start = time.perf_counter()
    if options.out is not None:
        check_writable(options.out)
    if under_torchrun():
        if options.nproc is not None:
            raise ArgumentError("--nproc starts ranks, and torchrun has started them; leave it out")
        measured = calibrate_here(threads=options.threads or 1)
        if measured is None:
            return {}
    else:
        measured = measure_machine(options.nproc or 2, threads=options.threads or 1)
    file = Path(options.out) if options.out else calibration_folder() / f"{measured.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    measured.write(file)
    return {
        "command": "calibrate",
        "nproc": measured.ranks,
        "seconds": time.perf_counter() - start,
        "out": str(file),
        "flops": measured.device.flops,
        "bandwidth": measured.device.bandwidth,
        "dispatch": measured.device.dispatch,
        "link_latency": measured.link.latency,
        "link_bandwidth": measured.link.bandwidth,
        "link_shared": measured.link.shared,
        "spread": measured.spread,
    }


def calibrate_summary(result: dict[str, Any]) -> str:
    """Says what was measured, and where it is kept."""
    shared = ", which all ranks share" if result["link_shared"] else ""
    return (
        f"A rank computes {result['flops'] / 1e9:.3g} GFLOP/s, moves {result['bandwidth'] / 1e9:.3g} GB/s of memory "
        f"and begins an operator in {result['dispatch'] * 1e6:.3g} µs.\n"
        f"A message takes {result['link_latency'] * 1e3:.3g} ms and a second for every "
        f"{result['link_bandwidth'] / 1e9:.3g} GB{shared}.\n"
        f"Steps of a denoiser lie within a factor of {result['spread']:.2f} of what this predicts.\n"
        f"{result['seconds']:.0f} s; kept in {result['out']}"
    )


def evaluate(options: PlannerEval) -> dict[str, Any]:
    """Compares predictions with published latencies and returns a row for each."""
    refuse_torchrun("partsong eval runs in one process")
    from partsong.evals.planner.published import DATA, read_points, run, summarise

    start, file = time.perf_counter(), DATA if options.data is None else Path(options.data)
    rows = run(file)
    others = [{"row": row, "reason": reason} for row, reason in read_points(file)[1]]
    seconds = time.perf_counter() - start
    return {"command": "eval", "suite": "planner", "nproc": 1, "seconds": seconds, "rows": rows, **summarise(rows)} | {
        "not_predicted": others
    }


def evaluate_summary(result: dict[str, Any]) -> str:
    """Returns a table of rows, and the errors in a few lines."""
    lines = [("devices", "method", "published s", "from data sheets", "two constants", "group")]
    for row in result["rows"]:
        if "refused" in row:
            continue
        fitted = "" if row["fitted"] is None else f"{row['fitted']:.4g} ({row['fitted_error']:+.1%})"
        plain = f"{row['predicted']:.4g} ({row['error']:+.1%})"
        lines.append((str(row["ranks"]), row["method"], f"{row['seconds']:g}", plain, fitted, row["group"]))
    refused, unknown = sum("refused" in row for row in result["rows"]), len(result["not_predicted"])
    errors = {name: _percent(value) for name, value in result.items() if name.endswith(("_median", "_p90", "_ordered"))}
    return "\n".join(
        (
            _table(lines),
            f"{result['profiles_only']} rows from data sheets alone: median error {errors['profiles_only_median']}, "
            f"nine in ten within {errors['profiles_only_p90']}.",
            f"{result['held_out']} rows held out from two constants: median error {errors['held_out_median']}, nine in "
            f"ten within {errors['held_out_p90']}.",
            f"{result['pairs']} pairs of a group: {errors['pairs_ordered']} in the right order.",
            f"{refused} rows are of mixes that do not run here, {unknown} of models, devices or methods that the "
            "planner does not know.",
        )
    )


def _table(lines: list[tuple[str, ...]]) -> str:
    return table([{str(place): text for place, text in enumerate(line)} for line in lines])


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:.1f} %"
