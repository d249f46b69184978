"""Writes docs/results.md and its plots from the files in benchmarks/: ``python -m tests.results``.

A table of times comes from runs on an idle machine only: a file that says otherwise fails here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from tests.documents import ROOT
from tests.results_figures import FILES, drift_rows, figures
from tests.results_files import Row, filed, timed
from tests.svg import Series, plot

PAGE = ROOT / "docs" / "results.md"
#: The page with a name in braces wherever a table or a figure from a file stands.
TEMPLATE = ROOT / "tests" / "results_page.md"
IMAGES = ROOT / "docs" / "images"
UNETS = (FILES["unet"], FILES["unet_large"], FILES["unet_slow"])
LIMIT = "serial on every process"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def drift(value: float) -> str:
    """Returns a drift in two digits; a row whose drift is rounding says so by its exponent."""
    return f"{value:.0e}".replace("e-0", "e-")


def speeds(names: Iterable[str], cases: Iterable[str]) -> str:
    """Returns a table of speed-ups: a row for each size and link, a column for each case, the best in bold."""
    rows = [row for name in names for row in timed(name)]
    lines = []
    for size, link in dict.fromkeys((row["size"], row["link"]) for row in rows):
        by_case = {row["case"]: row for row in rows if (row["size"], row["link"]) == (size, link)}
        best = max(by_case[case]["ratio_to_serial"] for case in cases if case in by_case)
        cells = [_speed(by_case.get(case), best) for case in cases]
        lines.append([f"{size}, {_link(link)}", f"{by_case[LIMIT]['ratio_to_serial']:.2f}x", *cells])
    titles = [case if case.startswith("diffusers") else f"`{case}`" for case in cases]
    return table(["tokens, link", "limit", *titles], lines)


def _speed(row: Row | None, best: float) -> str:
    if row is None:
        return ""
    text = f"{row['ratio_to_serial']:.2f}x"
    text = f"**{text}**" if row["ratio_to_serial"] == best else text
    return text if row["relative_drift"] < 1e-6 else f"{text} ({drift(row['relative_drift'])})"


def _link(name: str) -> str:
    return {"1gbit": "1 Gbit/s", "500mbit": "500 Mbit/s"}.get(name, name)


def pictures() -> str:
    """Returns what the zoo's models paint under each strategy, against the serial picture."""
    rows = drift_rows()
    lines = []
    for model, case, ranks in dict.fromkeys((row["model"], row["case"], row["nproc"]) for row in rows):
        row = next(r for r in rows if (r["model"], r["case"], r["nproc"]) == (model, case, ranks))
        near = "" if case == "serial" else f"{row['psnr_median']:.1f} dB"
        least = "" if case == "serial" else f"{row['psnr_min']:.1f} dB"
        lines.append([f"`{model}`", _short(case), str(ranks), f"{row['facts_read']:.1%}", near, least])
    return table(["model", "strategy", "ranks", "facts read", "median PSNR", "lowest PSNR"], lines)


def _short(case: str) -> str:
    """Returns a strategy's text without the knobs that say nothing."""
    case = re.sub(r"\b(degree|num_patches|layers)=None(, )?", "", case).replace(", wire='none'", "").replace(", )", ")")
    return case if "(" not in case else f"`{case}`"


def videos() -> str:
    """Returns what is read from long videos of the zoo."""
    columns: dict[str, Callable[[Row], str]] = {
        "method": lambda row: _short(re.sub(r", (local_emphasis|noise|sink)=.*", ")", row["case"])),
        "facts read": lambda row: f"{row['facts_read']:.1%}",
        "identity kept": lambda row: f"{row['identity_kept']:.1%}",
        "jumps at borders": lambda row: f"{row['border_jump_ratio']:.2f}",
        "seconds": lambda row: f"{row['seconds']:.1f}",
        "first frame": lambda row: f"{row['first_frame_seconds']:.1f}",
    }
    rows = filed(FILES["video"])["rows"]
    return table(columns, ([cell(row) for cell in columns.values()] for row in rows))


def video_ranks() -> str:
    """Returns what long videos take on several numbers of ranks."""
    columns: dict[str, Callable[[Row], str]] = {
        "method": lambda row: _short(re.sub(r", (local_emphasis|noise|sink)=.*", ")", row["case"])),
        "ranks": lambda row: str(row["nproc"]),
        "facts read": lambda row: f"{row['facts_read']:.1%}",
        "seconds": lambda row: f"{row['seconds']:.1f}",
        "first frame": lambda row: f"{row['first_frame_seconds']:.1f}",
        "MB sent": lambda row: f"{row['bytes_sent'] / 1e6:.1f}",
    }
    rows = sorted(timed(FILES["video_ranks"]), key=lambda row: ("(" in row["case"], row["case"]))
    return table(columns, ([cell(row) for cell in columns.values()] for row in rows))


def large() -> str:
    """Returns what pictures of several times the training size take on several numbers of ranks."""
    columns: dict[str, Callable[[Row], str]] = {
        "model": lambda row: f"`{row['model']}`",
        "pixels": lambda row: " x ".join(map(str, row["size"])),
        "method": lambda row: _short(re.sub(r"\(.*", "()", row["case"])),
        "ranks": lambda row: str(row["nproc"]),
        "facts read": lambda row: f"{row['facts_read']:.1%}",
        "seams": lambda row: f"{row['seams']:.2f}",
        "seconds": lambda row: f"{row['seconds']:.1f}",
    }
    return table(columns, ([cell(row) for cell in columns.values()] for row in timed(FILES["large"])))


def rules() -> str:
    """Returns how well each decoding rule does with a model that is never wrong."""
    rows = filed(FILES["oracle"])["rows"]
    lines = []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        own = [row for row in rows if row["rule"] == rule]
        speed = math.exp(sum(math.log(row["tokens_per_forward"]) for row in own) / len(own))
        lines.append((min(row["valid"] for row in own), speed, rule))
    cells = ([f"`{rule}`", f"{valid:.0%}", f"{speed:.2f}"] for valid, speed, rule in sorted(lines)[::-1])
    return table(["rule", "valid, least", "tokens per forward"], cells)


def plots() -> dict[Path, str]:
    """Returns the plots of the page."""
    rows = timed(FILES["fit"])
    cases = (LIMIT, "TensorParallel", "Ring", "Ulysses", "DisplacedPatch", "diffusers Ulysses", "diffusers ring")
    by_tokens = [
        Series(
            "limit" if case == LIMIT else case,
            [(row["size"], row["ratio_to_serial"]) for row in rows if row["case"] == case],
        )
        for case in cases
    ]
    slowest = (row for row in timed(FILES["slow"]) if row["link"] == "500mbit")
    slow = [row for row in slowest if row["case"] != LIMIT and row["relative_drift"]]
    by_drift = [Series(row["case"], [(row["relative_drift"], row["seconds_median"])]) for row in slow]
    return {
        IMAGES / "speed-by-tokens.svg": plot("Speed-up of two processes", "tokens", "times one process", by_tokens),
        IMAGES / "drift-against-seconds.svg": plot(
            "1024 tokens at 500 Mbit/s", "drift of a step", "seconds of a step", by_drift
        ),
        IMAGES / "accuracy-of-rules.svg": plot(
            "lists-mdlm, mean of 13 tasks", "tokens per forward", "right answers", _rules_of_a_model()
        ),
        IMAGES / "accuracy-of-thinking.svg": plot(
            "sums, 150 countdowns", "tokens of a question", "right answers", _thinking_of_a_model()
        ),
    }


def _rules_of_a_model() -> list[Series]:
    """Returns how often a trained model is right under each rule at temperature 1, against its tokens per forward."""
    rows = [row for row in filed(FILES["lists"])["rows"] if row["temperature"] == 1.0]
    series = []
    for rule in sorted({row["rule"] for row in rows}):
        own = [row for row in rows if row["rule"] == rule]
        speed = math.exp(sum(math.log(row["tokens_per_forward"]) for row in own) / len(own))
        series.append(Series(rule, [(speed, sum(row["accuracy"] for row in own) / len(own))]))
    return series


def _thinking_of_a_model() -> list[Series]:
    """Returns how often a trained model is right under each thinking method, against all tokens that it takes."""
    rows = (row for row in filed(FILES["sums"])["rows"] if row["task"] == "countdown")
    return [Series(row["strategy"], [(row["tokens_total"], row["accuracy"])]) for row in rows]


def page() -> str:
    """Returns docs/results.md as the files say it."""
    exact = ("Ring", "Ulysses", "TensorParallel", "DisplacedPatch", "diffusers ring", "diffusers Ulysses")
    wires = ("Ring", "Ring(wire='int8')", "Ulysses(wire='int8')", "DisplacedPatch", "DisplacedPatch(wire='1bit')")
    unet = ("SyncPatch", "Ring", "Ulysses", "DisplacedPatch", "DisplacedPatch(norms='forecast')")
    packed = ("sync-patch", "ring", "displaced-patch:warmup_steps=1,norms=forecast")
    tables = {
        "images": speeds([FILES["fit"]], exact),
        "slow links": speeds([FILES["slow"]], (*wires, "diffusers ring", "diffusers Ulysses")),
        "unets": speeds(UNETS, unet),
        "packed unets": speeds((FILES["unet_packed"], FILES["unet_packed_large"]), packed),
        "pictures": pictures(),
        "videos": videos(),
        "video ranks": video_ranks(),
        "large": large(),
        "rules": rules(),
    }
    # A page for people, in Markdown: nothing in it is to be escaped.
    template = Environment(undefined=StrictUndefined, autoescape=False).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    return template.render(tables=tables, **figures()) + "\n"


def documents() -> dict[Path, str]:
    """Returns every file that is made from results, with what it should say."""
    return {PAGE: page(), **plots()}


if __name__ == "__main__":
    for path, text in documents().items():
        path.write_text(text, encoding="utf-8")
