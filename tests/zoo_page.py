"""Writes docs/zoo.md from the models, the result files and the cards: ``python -m tests.zoo_page``.

Its pictures and answers come from ``python -m tests.zoo_samples``.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable
from statistics import mean
from typing import Any

from partsong import zoo
from partsong.zoo import ZooModel
from tests.documents import ROOT
from tests.results import table
from tests.results_files import filed, row
from tests.zoo_samples import CAPTIONS, MOVING, SAMPLES

PAGE = ROOT / "docs" / "zoo.md"
WEIGHTS = "zoo/partsong_zoo/weights"

INTRODUCTION = """# Bundled models

Small trained models (*the zoo*) to try things with: they sample on a laptop, and are trained well enough that a change
for the worse shows. `pip install . ./zoo ./zoo/pictures` installs all of them from a checkout; `shapes-few`,
`shapes-unet`, `shapes-experts` and `tiles` are in the last. `zoo.load("shapes")` loads one, `--model shapes` names one
on the command line, and `partsong list models` lists them. All are stock folders of diffusers or transformers, except
`shapes-experts`, which needs that of `shapes` beside it. Each was trained by a recipe of this repository on data that a
program draws.

*Facts read* is the part of a caption that a reader finds in the picture ([words](README.md#words)). Training times are
those of the recipe on processor cores. MB are those of the weights' folder.
"""

END = """`python -m tests.zoo_samples` draws the pictures and answers again, and `python -m tests.zoo_page` writes this
page. To train a model of your own, see the [recipes](../zoo/recipes/README.md).
"""


def shown() -> str:
    """Says what all pictures and clips below show."""
    pictures, clips = ("; ".join(captions) for captions in (CAPTIONS, MOVING))
    text = f"Pictures below have these captions, from left to right: {pictures}. Clips have these: {clips}."
    return textwrap.fill(text, 120, break_on_hyphens=False)


def parameters(model: ZooModel) -> int:
    """Counts the numbers in a model's weights by what the headers of its files say, without the heads beside them."""
    return sum(
        math.prod(entry["shape"])
        for path in model.folder.rglob("*.safetensors")
        if path.parent.name not in ("head", "dependence")
        for name, entry in _header(path).items()
        if name != "__metadata__"
    )


def _header(path: Any) -> dict[str, Any]:
    with path.open("rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def megabytes(model: ZooModel) -> float:
    """Returns the size of a model's folder."""
    return sum(path.stat().st_size for path in model.folder.rglob("*") if path.is_file()) / 1e6


def training(model: ZooModel) -> str:
    """Returns what the recipe's row in zoo/recipes/README.md says of its time."""
    name = model.recipe.rpartition("/")[2]
    text = (ROOT / "zoo" / "recipes" / "README.md").read_text(encoding="utf-8")
    expected = next(line for line in text.splitlines() if line.startswith(f"| `{name}`")).split(" | ")[2]
    match = re.match(r"On (one|two) (?:shared )?cores? about (.*?)(, then .*?)?[:.](?= |$)", expected)
    assert match is not None, f"zoo/recipes/README.md does not say how long {name} takes"
    return f"{match[2]}, {match[1]} core{'s' * (match[1] == 'two')}{match[3] or ''}"


def card(name: str, pattern: str) -> str:
    """Returns the one place of a model's card that a pattern's group finds."""
    text = " ".join((ROOT / WEIGHTS / name / "README.md").read_text(encoding="utf-8").split()) + " "
    found = re.findall(pattern, text)
    assert len(found) == 1, f"the card of {name} has {len(found)} places with {pattern}"
    return found[0]


def _facts(file: str, words: str, **fields: Any) -> tuple[str, str]:
    rows = (each for each in filed(file)["rows"] if all(each[key] == value for key, value in fields.items()))
    (share,) = {each["facts_read"] for each in rows}  # a serial run beside each number of ranks reads the same
    return f"{100 * share:.1f} % of facts, {words}", f"benchmarks/results/{file}.md"


def _motion(name: str) -> tuple[str, str]:
    share = card(name, r"Measured on 100 fresh captions \([^)]*\): ([\d.]+) % of the captions' facts")
    return f"{share} % of facts, 100 captions", f"{WEIGHTS}/{name}/README.md"


def _lists_mdlm() -> tuple[str, str]:
    rows = [
        each
        for each in filed("text/2026-11-22-zoo")["rows"]
        if (each["rule"], each["temperature"]) == ("entropy-bound", 0.0)
    ]
    right = f"{100 * mean(each['accuracy'] for each in rows):.0f} % of answers, mean of {len(rows)} tasks"
    return right, "benchmarks/results/text/2026-11-22-zoo.md"


def _lists_ar() -> tuple[str, str]:
    text = (ROOT / WEIGHTS / "lists-ar" / "README.md").read_text(encoding="utf-8")
    likeliest = [float(share) for share in re.findall(r"^\| \w+ \| (\d+) % \|", text, re.MULTILINE)]
    return f"{mean(likeliest):.0f} % of answers, mean of {len(likeliest)} tasks", f"{WEIGHTS}/lists-ar/README.md"


def _sums() -> tuple[str, str]:
    file, votes = "thinking/2026-11-26-zoo-sums", "self-consistency:num=8"
    greedy = row(file, task="countdown", strategy="greedy")
    vote = row(file, task="countdown", strategy=votes)
    shares = f"{100 * greedy['accuracy']:.0f} % of {greedy['problems']} countdowns"
    shares += f", {100 * vote['accuracy']:.0f} % by a vote of {votes.partition('=')[2]}"
    return shares, f"benchmarks/results/{file}.md"


def _products() -> tuple[str, str]:
    file = "threads/2026-11-22"
    all_of_them = row(file, task="all", strategy="threads")
    return (
        f"{100 * all_of_them['accuracy']:.1f} % of {all_of_them['problems']} products",
        f"benchmarks/results/{file}.md",
    )


#: What was measured, and the file that says so, of the models whose card does not say it after "In short:".
MEASURED: dict[str, Callable[[], tuple[str, str]]] = {
    "shapes": lambda: _facts("drift/2026-11-22-zoo", "100 captions", model="shapes", nproc=1, case="serial"),
    "shapes-few": lambda: _facts("steps/2026-11-26-few-steps", "200 captions, 4 steps", case="shapes-few, 4"),
    "shapes-unet": lambda: _facts(
        "drift/2026-11-26-zoo-unet", "100 captions", model="shapes-unet", nproc=1, case="serial"
    ),
    "shapes-experts": lambda: _facts("experts/2026-11-24", "100 captions, one expert asked", case="top 1"),
    "tiles": lambda: _facts("any-order/2026-11-25", "200 captions, 12 forwards", case="LPD, 12 steps"),
    "motion": lambda: _motion("motion"),
    "motion-causal": lambda: _motion("motion-causal"),
    "lists-mdlm": _lists_mdlm,
    "lists-ar": _lists_ar,
    "sums": _sums,
    "products": _products,
}


def measured(name: str) -> tuple[str, str]:
    """Returns what was measured of a model, and the file that says so."""
    return MEASURED[name]() if name in MEASURED else (card(name, r"In short: (.+?)\. "), f"{WEIGHTS}/{name}/README.md")


def models() -> str:
    """Returns a row for each model."""
    lines = []
    for name, model in zoo.MODELS.items():
        share, source = measured(name)
        lines.append(
            [
                f"[`{name}`](#{name})",
                model.kind,
                f"{parameters(model) / 1e6:.1f} M",
                f"{megabytes(model):.1f}",
                f"[{training(model)}](../{model.recipe})",
                f"{share} ([file](../{source}))",
            ]
        )
    return table(["model", "makes", "parameters", "MB", "training", "measured"], lines)


def section(model: ZooModel, samples: dict[str, Any]) -> str:
    """Returns what a model is, and a picture, a clip or an answer of it."""
    text = model.description[0].upper() + model.description[1:]
    text += f" [Card](../{WEIGHTS}/{model.name}/README.md)."
    lines = [f"## {model.name}", "", textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False), ""]
    if model.kind == "text":
        sample = samples[model.name]
        return "\n".join([*lines, "```text", sample["prompt"], f"-> {sample['text']}", "```", ""])
    suffix = "png" if model.kind == "image" else "gif"
    shares = ", ".join(f"{share:.2f}" for share in samples[model.name]["facts"])
    alt = f"Four {'pictures' if model.kind == 'image' else 'clips'} of {model.name}"
    return "\n".join([*lines, f"![{alt}](images/zoo-{model.name}.{suffix})", "", f"Facts read: {shares}.", ""])


def page() -> str:
    """Returns docs/zoo.md."""
    samples = json.loads(SAMPLES.read_text(encoding="utf-8"))
    sections = [section(model, samples) for model in zoo.MODELS.values()]
    return "\n".join([INTRODUCTION, models(), "", shown(), "", *sections, END])


def write() -> None:
    """Writes the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write()
