"""Measures the cost and the gain of ParScale's streams.

``python benchmarks/parscale.py cost`` times P = 1, 2, 4 and 8 streams of one model beside wider models of the same
predicted loss, in turn in one process. It also computes the cost for a model of 1.6 billion parameters on a GPU.

``python benchmarks/parscale.py trained --runs FOLDER ...`` files what train_parscale.py or train_prices.py of
zoo/recipes/ measured in one or more folders, with 95 % intervals over seeds.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from transformers import Qwen2Config

from benchmarks.filing import file_result, markdown_table, result_path
from benchmarks.parscale_cost import HARDWARE, cost_table
from partsong.evals.bench.parscale import run
from partsong.reasoning.parscale.cost import LAWS


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Times streams and wider models."""

    out: Path = result_path(__file__, "cost")
    """Result files without suffix."""
    repeats: int = 5
    """Rounds; the median counts."""
    streams: tuple[int, ...] = (1, 2, 4, 8)
    """Values of P."""
    batches: tuple[int, ...] = (1, 4)
    """Numbers of texts at once."""
    prompt: int = 128
    """Tokens of each text."""
    new_tokens: int = 16
    """Steps to time in each round."""
    law: str = "stack-v2-python"
    """The law that says how many parameters are as good as P streams."""
    hardware: str = "h100-sxm"
    """Hardware of the computed rows."""


def large_model() -> Qwen2Config:
    """Returns a shape of Qwen2 with 1.3 billion parameters inside, or 1.6 with its embedding."""
    return Qwen2Config(
        hidden_size=2048,
        num_hidden_layers=28,
        intermediate_size=6144,
        num_attention_heads=16,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    )


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Files the recipe's measurements."""

    out: Path = result_path(__file__, "trained")
    """Result files without suffix."""
    runs: tuple[Path, ...]
    """Folders that the recipe wrote."""


def cost(config: Cost) -> None:
    """Times and computes the costs and writes the files."""
    torch.set_num_threads(1)
    rows = []
    for batch in config.batches:
        timed = run(
            repeats=config.repeats,
            streams=config.streams,
            batch=batch,
            prompt=config.prompt,
            new_tokens=config.new_tokens,
            law=config.law,
        )
        rows += [{**row, "where": "measured here", "batch": batch, "prompt": config.prompt} for row in timed]
    where = HARDWARE[config.hardware]
    for batch in (1, 64):
        # As many tokens are read as written, as in the paper's cost analysis.
        computed = cost_table(
            large_model(), streams=config.streams, batch=batch, prompt=64, new_tokens=64, hardware=where,
            law=LAWS[config.law],
        )  # fmt: skip
        rows += [{**row, "where": f"computed, {config.hardware}", "batch": batch, "prompt": 64} for row in computed]
    inside = rows[0]["parameters_inside"] / 1e6
    note = (
        f"Measured: a random Llama of {inside:.0f} M parameters inside (embeddings not counted), float32, one thread, "
        f"prompts of {config.prompt} tokens, then {config.new_tokens} steps; `parameters` is a wider model of one "
        f"stream whose predicted loss is that of P streams (law of {config.law}, extrapolated: it was fitted to models "
        f"of 0.5 to 4.4 billion). Computed: a Qwen2 shape of 1.6 billion parameters in 16 bit, roofline of "
        f"{config.hardware}. Memory is weights, keys and values; `+` is over one stream. Drift: largest difference of "
        "logits between steps with a cache and one forward without."
    )
    columns = ("where", "texts", "side", "P", "parameters", "memory, MB", "+", "prefill, ms", "step, ms", "+", "drift")
    table = markdown_table(columns, [_line(row) for row in rows])
    file_result(config.out, __file__, rows, "What streams cost", note, table)


def _line(row: dict[str, Any]) -> list[object]:
    step = row["seconds_median"] if "seconds_median" in row else row["token_seconds"]
    return [
        row["where"],
        row["batch"],
        row["side"],
        row["size"],
        f"{row['parameters'] / 1e6:.1f} M",
        f"{row['memory_bytes'] / 1e6:.0f}",
        f"{row['memory_added']:+.1%}",
        f"{row['prefill_seconds'] * 1e3:.2f}",
        f"{step * 1e3:.2f}",
        f"{row['token_added']:+.1%}",
        f"{row['drift']:.1e}" if "drift" in row else "",
    ]


#: 97.5 % quantiles of Student's t by degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)


#: Descriptions of the recipes' sides.
SIDES = {
    "one": "one stream of the backbone, trained from nothing",
    "wide": "one stream, feed-forward layers widened to as many parameters as P streams have in all, prefixes and "
    "network counted",
    "longer": "`wide` with P times the steps, hence as much computing as `streams`",
    "streams": "the backbone and P streams, all weights trained",
    "noise": "`streams`, which begin as prompts, beginning as noise instead",
    "frozen": "a backbone that stays as it is",
    "prefix": "it stays as it is, one stream after a longer prefix: as many parameters as P streams in all",
    "recycled": "it stays as it is, P streams and their network are trained",
}
#: Descriptions of the recipes, by a setting that only one of them has.
RECIPES = {
    "task": (
        "`zoo/recipes/train_parscale.py`, bytes of files that no side was shown. `one`, `wide` and `streams` begin "
        "with the same random weights, the frozen backbone is the same for all seeds"
    ),
    "shops": (
        "`zoo/recipes/train_prices.py`, the highest of as many prices as there are streams, questions drawn afresh. "
        "Each seed has its own prices, and a model that learned them one at a time, from which all its sides begin. "
        "Rates and sizes were chosen on seed 0; `noise` and `longer` have those of `streams` and `wide`"
    ),
}


def trained(config: Trained) -> None:
    """Reads the scores of the recipe and writes the files."""
    rows, settings, recipes = list[dict[str, Any]](), list[str](), set[str]()
    for folder in config.runs:
        scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
        knobs = {name: value for name, value in scores["config"].items() if name not in ("out", "stages", "items")}
        if "text" in knobs:
            knobs["text"] = Path(knobs["text"]).name or "Python's library"
        recipes |= {description for knob, description in RECIPES.items() if knob in knobs}
        settings.append(f"`{folder.name}`: {', '.join(f'{name} {value}' for name, value in knobs.items())}")
        rows += [{"run": folder.name, **row} for row in scores["rows"]]
    groups: dict[tuple[str, str, int, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["run"], row["side"], row["streams"], row["parameters"]), []).append(row)
    sides = [f"- `{side}`: {what}" for side, what in SIDES.items() if any(row["side"] == side for row in rows)]
    note = (
        f"Small models, {'; '.join(sorted(recipes))}. Within a run and a seed all sides have the same lessons in the "
        "same order; P streams compute P times as much per token. Intervals are Student's over seeds, of which each "
        "draws its own first weights and lessons. Sides:\n\n"
        + "\n".join(sides)
        + "\n\nSettings, one line a run:\n\n"
        + "\n".join(f"- {line}" for line in settings)
    )
    columns = ("run", "side", "P", "parameters", "seeds", "loss, nats a token", "tokens right", "rows right")
    table = markdown_table(columns, [_trained_line(key, group) for key, group in groups.items()])
    file_result(config.out, __file__, rows, "Streams trained here", note, table)


def _trained_line(key: tuple[str, str, int, int], group: list[dict[str, Any]]) -> list[object]:
    loss, tokens, right = (interval([row[name] for row in group]) for name in ("loss", "tokens_right", "rows_right"))
    return [*key, len(group), _shown(loss, "{:.4f}"), _shown(tokens, "{:.1%}"), _shown(right, "{:.1%}")]


def interval(values: list[float]) -> tuple[float, float]:
    """Returns the mean and the half width of the 95 % interval, which is infinite for one value."""
    if len(values) < 2:
        return values[0], math.inf
    return statistics.fmean(values), STUDENT[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))


def _shown(mean_and_half: tuple[float, float], form: str) -> str:
    mean, half = mean_and_half
    text = form.format(mean)
    return text if half == math.inf else f"{text} ({form.format(mean - half)} to {form.format(mean + half)})"


def main(config: Cost | Trained) -> None:
    """Runs the part that the command line names."""
    if isinstance(config, Cost):
        cost(config)
    else:
        trained(config)


if __name__ == "__main__":
    main(tyro.cli(Cost | Trained))  # type: ignore[arg-type]
