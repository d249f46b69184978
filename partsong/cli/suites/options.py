"""Defines the options of the suites of ``partsong eval``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from partsong.cli.option_types import Common, Count, Path, Positive, Seed, Words
from partsong.cli.options import Asking, Decoding
from partsong.cli.planning_options import PlannerEval
from partsong.cli.suites.picture_options import PictureEval, VideoEval
from partsong.knobs import Number

__all__ = ["Eval", "EvalSuite", "Oracle", "ParallelBench", "PlannerEval", "Promises", "Reasoning"]


@dataclass(frozen=True, kw_only=True)
class Eval(Decoding):
    """Measure decoding rules: how often their texts are valid, and how many tokens a forward gives."""

    suite: tyro.conf.Suppress[str] = ""
    rules: Words = ()
    """Rules to measure, NAME[:KEY=VALUE,...] each; if not given, all (oracle) or the default rule (parallelbench)."""
    tasks: Words = ()
    """Tasks of the suite; all of them if not given."""
    num: Count = None
    """How many texts per rule and task; if not given, 1000 for oracle and 100 for parallelbench."""
    temperature: Annotated[float | None, Number(0.0), tyro.conf.arg(metavar="FLOAT")] = None
    """How freely tokens are drawn; if not given, 1 for oracle and 0 (the most likely ones) for parallelbench."""
    batch_size: Count = None
    """parallelbench: how many problems to decode together; 32 if not given. Answers do not depend on it."""


@dataclass(frozen=True, kw_only=True)
class Oracle(Eval):
    """Measure decoding rules on tasks whose exact conditionals are known."""

    suite: tyro.conf.Suppress[str] = "oracle"


@dataclass(frozen=True, kw_only=True)
class ParallelBench(Eval):
    """Measure decoding rules with a model on list operations, sums and puzzles, after ParallelBench."""

    suite: tyro.conf.Suppress[str] = "parallelbench"


@dataclass(frozen=True, kw_only=True)
class Reasoning(Asking):
    """Measure thinking methods with a model on problems whose answers can be checked: intervals, token counts."""

    tasks: Words = ("countdown", "word-problems")
    """Tasks drawn from a seed (countdown, list-operations, multiplication, sudoku, word-problems), benchmarks from an
    installed package (gsm8k, humaneval, math-500, svamp ...), from --data or the hub (aime-2024, amc-2023,
    gpqa-diamond, livecodebench, mbpp ...), or JSONL files."""
    strategies: Words = ("greedy", "single", "self-consistency:num=8", "pdr:schedule=4-1")
    """Thinking methods, NAME[:KEY=VALUE,...] (see `partsong list thinking`), or greedy. The others are compared with
    the first."""
    num: Positive = 50
    """How many problems of each task."""
    samples: Count = None
    """Draw this many samples of each problem once; strategies that need only samples then share them."""
    budget_tokens: Count = None
    """At most this many tokens for one problem with one strategy."""
    data: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder with the files of benchmarks that no package carries, such as aime-2024.jsonl; the hub is asked if not
    given."""
    run_programs: bool = False
    """Run the programs that the model writes, in a sandbox, for humaneval, livecodebench and mbpp."""
    work: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Keep samples, calls and finished problems in this folder; after an interruption the same command continues."""
    plot: Path = None
    """Draw accuracy against tokens into this SVG file."""


@dataclass(frozen=True, kw_only=True)
class Promises(Common):
    """Measure what papers promise of their methods, on small models: does it hold, and at what cost."""

    methods: Words = ()
    """Which rows to measure, such as pdr or time-parallel; all of them if not given."""
    num: Positive = 150
    """Problems of a row."""
    samples: Positive = 64
    """Most samples of a problem, where a row draws a curve."""
    rounds: Positive = 5
    """How often each time is taken; the median counts."""
    seed: Seed = 11
    """Seed of all draws."""
    threads: Count = None
    """Threads of a process; 1 if not given."""
    work: Annotated[str, tyro.conf.arg(metavar="DIR")] = "promises"
    """Keep finished rows in this folder; after an interruption the same command continues."""


@dataclass(frozen=True, kw_only=True)
class EvalSuite:
    """Measure rules, thinking methods, pictures and videos, predictions, or what papers promise."""

    suite: (
        Annotated[Oracle, tyro.conf.subcommand("oracle")]
        | Annotated[ParallelBench, tyro.conf.subcommand("parallelbench")]
        | Annotated[Reasoning, tyro.conf.subcommand("reasoning")]
        | Annotated[PictureEval, tyro.conf.subcommand("images")]
        | Annotated[VideoEval, tyro.conf.subcommand("videos")]
        | Annotated[PlannerEval, tyro.conf.subcommand("planner")]
        | Annotated[Promises, tyro.conf.subcommand("promises")]
    )
    """What to measure on (see `partsong list suites`)."""
