"""Makes the help of a command readable: whole sentences, an example, common options last, no empty defaults."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import tyro

from partsong.cli.option_types import Common

__all__ = ["EXAMPLES", "explain"]

#: A line to try, by the name of the class of options.
EXAMPLES = {
    "Image": 'partsong image "a red circle left of a blue square" --nproc 2 --strategy ulysses --out x.png',
    "Video": 'partsong video "a red circle moves left" --nproc 2 --strategy clip-parallel --out x.mp4',
    "Text": 'partsong text "sort : dog ant cat bat =" --show',
    "Think": 'partsong think "37+48-19=?" --model sums --strategy self-consistency:num=16 --show',
    "Oracle": "partsong eval oracle",
    "ParallelBench": "partsong eval parallelbench",
    "Reasoning": "partsong eval reasoning --tasks word-problems --strategies greedy self-consistency:num=8 --num 20",
    "PictureEval": "partsong eval images --model shapes --strategies ulysses displaced-patch --nproc 2",
    "VideoEval": "partsong eval videos --model motion --strategies clip-parallel --nproc 2",
    "Promises": "partsong eval promises --methods pdr token-ring",
    "PlannerEval": "partsong eval planner",
    "Bench": "partsong bench image",
    "Planning": "partsong plan --model flux-dev --gpus 4x4090",
    "Calibrating": "partsong calibrate --nproc 2",
    "Serving": "partsong serve --model shapes --model sums --nproc 2",
    "ServeCheck": "partsong serve check http://127.0.0.1:8000",
    "Env": "partsong env",
    "List": "partsong list support WanPipeline",
    "Demo": "partsong demo --out demo.html",
}

_BEFORE = "\n\nExample: "


def explain(kinds: Iterable[type], command: Sequence[str]) -> None:
    """Gives classes of options, and those that they choose from, their help.

    Args:
        kinds: the classes.
        command: the words of the command whose help was asked for; others get no example.
    """
    for kind in kinds:
        if not is_dataclass(kind):
            continue
        fields: dict[str, Field[Any]] = kind.__dataclass_fields__
        common = [name for name in Common.__dataclass_fields__ if name in fields]
        for name in common:  # to the end
            fields[name] = fields.pop(name)
        example, description = EXAMPLES.get(kind.__name__, ""), (kind.__doc__ or "").partition(_BEFORE)[0]
        is_asked = bool(command) and example.split()[1 : 1 + len(command)] == [*command]
        kind.__doc__ = f"{description}{_BEFORE}{example}" if is_asked else description
        for owner in kind.__mro__:
            _explain_own(owner)
        for chosen in get_type_hints(kind).values():
            explain((part for part in get_args(chosen) if isinstance(part, type)), command if len(command) > 1 else ())


def _explain_own(kind: type) -> None:
    """Puts the sentences behind a class' own fields where the parser keeps them as they are."""
    if "_is_explained" in vars(kind) or not is_dataclass(kind):
        return
    for name, text in _sentences(kind).items():
        default = kind.__dataclass_fields__[name].default
        more: dict[str, Any] = {"help_behavior_hint": ""} if default is None or default is False else {}
        if default is not MISSING:
            kind.__annotations__[name] = Annotated[kind.__annotations__[name], tyro.conf.arg(help=text, **more)]
    kind._is_explained = True  # type: ignore[attr-defined]


def _sentences(kind: type) -> dict[str, str]:
    """Returns the text behind each field of a class, without line breaks."""
    (written,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(written, ast.ClassDef)
    sentences = {}
    for line, after in zip(written.body, written.body[1:], strict=False):
        if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            sentences[line.target.id] = " ".join(str(after.value.value).split())
    return sentences
