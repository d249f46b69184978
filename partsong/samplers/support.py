"""Says which strategy works on which architecture; the strategies are asked, so table and behaviour agree."""

from __future__ import annotations

from partsong.parallel.adapters import ADAPTERS
from partsong.parallel.strategy import Strategy
from partsong.samplers.registry import strategies

__all__ = ["support_rows", "support_table"]

_HEAD = """# Support

Written from the code by `python -m tests.tables`; `partsong list support` prints the same. A plan
asks the same question before any work and raises the reason.

*exact* equals one rank up to rounding, *approximate* drifts and equals it at a setting its page names, *bounded* comes
with a certificate. Every cell that is not refused is in the tests, against the serial model: those of older families on
1 to 4 ranks, those of newer ones on 2 ranks and, with their pipelines, on 2 and 3.
"""
_TAIL = """
A transformer without a row is given one inferred from its structure where that is plain (embed, self-attending
blocks, project; the text by cross-attention). Its first call is computed serially as well and refused where the two
differ. Image-to-image, inpainting and ControlNet pipelines of a family work as the family does: a ControlNet runs on
every rank, its residuals are cut like the tokens they are added to.
"""


def support_rows() -> list[dict[str, str]]:
    """Lists a row per architecture: its family, its class, and for each strategy its class or ``refused``."""
    return [
        {"architecture": adapter.family, "model": adapter.model}
        | {kind.__name__: "refused" if kind().refuses(adapter) else kind().kind for kind in _denoising()}
        for adapter in ADAPTERS.values()
    ]


def support_table() -> str:
    """Writes the support page, as Markdown."""
    rows, reasons = support_rows(), _reasons()
    numbers = {reason: number for number, reason in enumerate(dict.fromkeys(reasons.values()), 1)}
    lines = ["| " + " | ".join(["architecture", *(f"`{name}`" for name in list(rows[0])[2:])]) + " |"]
    lines.append("|---" * (len(rows[0]) - 1) + "|")
    for row in rows:
        cells = [
            f"{cell} [{numbers[reasons[row['model'], name]]}]" if cell == "refused" else cell
            for name, cell in list(row.items())[2:]
        ]
        lines.append(f"| {row['architecture']} (`{row['model']}`) | " + " | ".join(cells) + " |")
    notes = [f"[{number}] {reason}." for reason, number in numbers.items()]
    return "\n".join([_HEAD, *lines, "", *(f"{note}\n" for note in notes), *_arguments(), _TAIL])


def _denoising() -> list[type[Strategy]]:
    """Lists what works on the denoiser; the autoencoders of a family are the subject of `ParallelVae`'s page."""
    return [kind for kind in strategies().values() if kind.denoises]


def _reasons() -> dict[tuple[str, str], str]:
    pairs = ((adapter, kind) for adapter in ADAPTERS.values() for kind in _denoising())
    reasons = {(adapter.model, kind.__name__): kind().refuses(adapter) for adapter, kind in pairs}
    return {pair: reason for pair, reason in reasons.items() if reason is not None}


def _arguments() -> list[str]:
    """Lists the arguments of a model's forward that are refused where its tokens are cut."""
    lines = ["Arguments of the model that are refused where its tokens or rows are cut:", ""]
    lines += ["| model | argument | why |", "|---|---|---|"]
    for adapter in ADAPTERS.values():
        lines += [f"| `{adapter.model}` | `{name}` | {reason} |" for name, reason in adapter.refused.items()]
    return lines
