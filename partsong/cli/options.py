"""The commands and their options, as data; tyro makes the parser and the help from this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

__all__ = [
    "Asking",
    "Bench",
    "Command",
    "Decoding",
    "Demo",
    "Env",
    "Eval",
    "EvalSuite",
    "Image",
    "List",
    "Oracle",
    "ParallelBench",
    "Reasoning",
    "Sampling",
    "Text",
    "Think",
    "Video",
]

Path = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
Count = Annotated[int | None, tyro.conf.arg(metavar="N")]
Words = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class _Common:
    json: Path = None
    """Write the result to this file as JSON."""
    debug: bool = False
    """Show the traceback of an error instead of one line."""


@dataclass(frozen=True, kw_only=True)
class Sampling(_Common):
    """What image and video have in common."""

    nproc: Count = None
    """Ranks to start here; 1 if not given. Under torchrun the ranks are there already."""
    strategy: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]", help_behavior_hint="")
    ] = ()
    """How the ranks share the work (see `partsong list strategies`); repeat it to combine several."""
    steps: Count = None
    """Denoising steps; the model's own default if not given."""
    guidance: Annotated[float | None, tyro.conf.arg(metavar="SCALE")] = None
    """Guidance scale; the model's own default if not given."""
    height: Count = None
    """Height in pixels."""
    width: Count = None
    """Width in pixels."""
    negative_prompt: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """What not to draw."""
    set: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE", help_behavior_hint="")
    ] = ()
    """Any other argument of the pipeline's call, such as true_cfg_scale=4; repeat it for several."""
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Seed of the noise."""
    compare: bool = False
    """Also run the serial twin on one rank; reports speed-up and drift."""
    threads: Count = None
    """Threads per rank; 1 for several ranks or a zoo model, else what torch chooses."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Type of weights and arithmetic."""
    ledger: Path = None
    """Append one JSON line per rank and step to this file: computed, moved, waited."""


@dataclass(frozen=True, kw_only=True)
class Image(Sampling):
    """Sample an image from a text, on one or several ranks."""

    prompt: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT")]
    """What to draw; for class-conditional pipelines the name or number of a class."""
    model: Annotated[str, tyro.conf.arg(metavar="MODEL")] = "shapes"
    """A zoo name (see `partsong list models`), a local diffusers folder, or a hub id."""
    num_images: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Images of the prompt; image i looks the same in any number and on any number of ranks."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = "partsong.png"
    """PNG to write; several images are numbered."""


@dataclass(frozen=True, kw_only=True)
class Video(Sampling):
    """Sample a video from a text, on one or several ranks; frames are written as they are done."""

    prompt: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT", help_behavior_hint="")] = ""
    """What to show; not needed with --resume."""
    model: Annotated[str, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")] = ""
    """A zoo name, a local diffusers folder, or a hub id; if not given, the zoo's motion, or motion-causal for
    timestep-pipeline."""
    frames: Count = None
    """Frames of the video; the model's own default if not given."""
    fps: Annotated[float, tyro.conf.arg(metavar="N")] = 16.0
    """Frames per second of the video."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = "partsong.mp4"
    """Video to write, .mp4 or .gif; a name without an ending is a folder of PNG files."""
    journal: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Keep the run's progress in this folder (dual-parallel and timestep-pipeline), for --resume."""
    resume: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Go on with the run of this journal, as it was called; --nproc, --out and --json may differ."""


@dataclass(frozen=True, kw_only=True)
class Decoding(_Common):
    """What text and eval have in common."""

    model: Annotated[str, tyro.conf.arg(metavar="MODEL")] = "lists-mdlm"
    """A text model of the zoo (see `partsong list models`), a local transformers folder, or a hub id."""
    adapter: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """How the model is decoded, such as mdlm or causal, where its configuration does not say."""
    cache: Annotated[str | None, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]")] = None
    """Which keys are used again (see `partsong list caches`); if not given, prefix where that is exact, else none."""
    max_new_tokens: Count = None
    """Places after the prompt; if not given, what suits the model."""
    block_size: Count = None
    """Places decided together; the model's own if not given."""
    open_blocks: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Blocks at work at once."""
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Seed of the draws."""
    threads: Count = None
    """Threads; 1 for a zoo model, else what torch chooses."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    """Type of weights and arithmetic; the checkpoint's own if not given."""
    device: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Where to compute, such as cpu or cuda:1; the first GPU if there is one."""


@dataclass(frozen=True, kw_only=True)
class Text(Decoding):
    """Continue or fill in a text with a diffusion or autoregressive language model, many tokens a step."""

    prompt: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT", help_behavior_hint="")] = ""
    """What to answer or continue; mask tokens in it are filled in. May be left out with --template."""
    rule: Annotated[str | None, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]")] = None
    """What to accept in a step (see `partsong list rules`); entropy-bound if not given."""
    temperature: float = 0.0
    """Of the draws; 0 takes the most likely tokens."""
    chat: bool = False
    """Put the prompt through the tokenizer's chat template; the default where there is one."""
    no_chat: bool = False
    """Give the prompt to the model as it is."""
    template: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """What must stand after the prompt, the tokenizer's mask token where something is to be filled in."""
    show: bool = False
    """Draw the text while it is decided, a colour per step; one line per step where that is no terminal."""
    compare: bool = False
    """Also decode one token per step, without a cache; reports speed-up and how many tokens agree."""
    out: Path = None
    """Write the text to this file too."""
    ledger: Path = None
    """Append one JSON line per step to this file: forwards, operations, tokens, seconds."""


@dataclass(frozen=True, kw_only=True)
class Asking(_Common):
    """What commands that ask a language model many times have in common."""

    model: Annotated[str | None, tyro.conf.arg(metavar="MODEL")] = None
    """A zoo name, a local transformers folder, a hub id, or what the --server calls it; if not given,
    smollm2-135m where it is installed, else the zoo's sums."""
    server: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """Ask a server that speaks the OpenAI API, such as http://127.0.0.1:8000/v1; its key is read from the
    environment's OPENAI_API_KEY."""
    endpoint: Literal["chat", "completions"] = "chat"
    """Of the server."""
    max_tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 512
    """Most tokens of one answer."""
    temperature: float = 1.0
    """Of the draws; 0 takes the most likely tokens."""
    top_p: float = 1.0
    """Nucleus of the draws."""
    concurrency: Annotated[int, tyro.conf.arg(metavar="N")] = 64
    """Most calls under way."""
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Seed of the draws."""
    threads: Count = None
    """Threads; 1 for a zoo model, else what torch chooses."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    """Type of weights and arithmetic; float32 on a CPU and the checkpoint's own on a GPU if not given."""
    device: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Where to compute, such as cpu or cuda:1; the first GPU if there is one."""


@dataclass(frozen=True, kw_only=True)
class Think(Asking):
    """Ask a language model along many threads, and say what the answer cost."""

    question: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="QUESTION")]
    """What to answer."""
    strategy: Annotated[str, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]")] = "self-consistency"
    """How to think (see `partsong list thinking`), such as pdr:schedule=8-4-1."""
    extract: Literal["number", "choice", "expression", "math", "code", "text"] | None = None
    """What an answer is, so that answers that mean the same count as one; if not given, what the zoo's sums is asked
    for, and a number for other models."""
    logprobs: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Alternatives to ask the model's confidence of at every token, where a strategy does not ask by itself."""
    budget_tokens: Count = None
    """Tokens of all answers together; what exceeds them is cancelled."""
    budget_calls: Count = None
    """Calls."""
    budget_seconds: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """Time."""
    budget_money: Annotated[float | None, tyro.conf.arg(metavar="AMOUNT")] = None
    """Money, at --price."""
    price: Annotated[str | None, tyro.conf.arg(metavar="PROMPT,ANSWER")] = None
    """Of a million tokens, or PROMPT,CACHED,ANSWER."""
    journal: Path = None
    """Keep completed calls in this file: the same command goes on after an interruption and repeats none."""
    name: Annotated[str, tyro.conf.arg(metavar="NAME")] = "think"
    """Tells the runs of a journal apart."""
    replay: bool = False
    """Answer from the journal alone, as it was; the model is not asked."""
    show: bool = False
    """Draw the threads while they are written; lines where that is no terminal."""
    trace: Path = None
    """Write all calls to this file: .jsonl, .json (for Perfetto) or .html (a page)."""
    out: Path = None
    """Write the text of the answer to this file."""
    ledger: Path = None
    """Append one JSON line per call to this file."""


@dataclass(frozen=True, kw_only=True)
class Eval(Decoding):
    """Measure decoding rules: how often the texts are valid, at how many tokens per forward."""

    suite: tyro.conf.Suppress[str] = ""
    rules: Words = ()
    """Rules, NAME[:KEY=VALUE,...] each; if not given, all that the suite compares (oracle) or the default rule."""
    tasks: Words = ()
    """Tasks of the suite; all if not given."""
    num: Count = None
    """Texts per rule and task; 1000 for oracle, 100 for parallelbench."""
    temperature: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Of the draws; if not given, 1 for oracle, 0 (the most likely tokens) for parallelbench."""
    batch_size: Count = None
    """parallelbench: problems decoded together; 32 if not given. Answers do not depend on it."""


@dataclass(frozen=True, kw_only=True)
class Oracle(Eval):
    """Decoding rules on tasks whose exact conditionals are known."""

    suite: tyro.conf.Suppress[str] = "oracle"


@dataclass(frozen=True, kw_only=True)
class ParallelBench(Eval):
    """Decoding rules and a model on list operations, sums and puzzles, after ParallelBench."""

    suite: tyro.conf.Suppress[str] = "parallelbench"


@dataclass(frozen=True, kw_only=True)
class Reasoning(Asking):
    """Ways to think and a model on problems with answers that can be checked; intervals and token counts."""

    tasks: Words = ("countdown", "word-problems")
    """Tasks drawn from a seed (countdown, list-operations, multiplication, sudoku, word-problems), benchmarks
    (gsm8k, math500, svamp ..., out of an installed package), or JSONL files."""
    strategies: Words = ("greedy", "single", "self-consistency:num=8", "pdr:schedule=4-1")
    """Ways to think, NAME[:KEY=VALUE,...] each (see `partsong list thinking`), and greedy; the first is what the others
    are compared with."""
    num: Annotated[int, tyro.conf.arg(metavar="N")] = 50
    """Problems of each task."""
    samples: Count = None
    """Draw so many samples of each problem once; strategies that need nothing else then cost nothing."""
    budget_tokens: Count = None
    """Most tokens of one problem under one strategy."""
    work: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Keep samples, calls and finished problems here: the same command goes on after an interruption."""
    plot: Path = None
    """Draw accuracy against tokens to this SVG file."""


@dataclass(frozen=True, kw_only=True)
class EvalSuite:
    """Measure: decoding rules, or ways to think."""

    suite: (
        Annotated[Oracle, tyro.conf.subcommand("oracle")]
        | Annotated[ParallelBench, tyro.conf.subcommand("parallelbench")]
        | Annotated[Reasoning, tyro.conf.subcommand("reasoning")]
    )
    """What to measure on (see `partsong list suites`)."""


@dataclass(frozen=True, kw_only=True)
class Bench(_Common):
    """Measure strategies against one process, kernels against each other, or ParScale against wider models."""

    name: Annotated[Literal["image", "kernels", "parscale"], tyro.conf.Positional]
    """What to measure."""
    repeats: Annotated[int, tyro.conf.arg(metavar="N")] = 5
    """Timed runs of each case; the median counts."""
    tokens: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...")] = ()
    """Tokens, one table section each; default 1024 and 4096 for image, 1k to 64k for kernels (1k on a CPU), a
    prompt of 256 for parscale."""
    nproc: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """image: ranks, one thread each; default 2."""
    models: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ()
    """image: models to measure; all if not given."""
    tune: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """kernels: also find the best tile sizes and backends for this GPU and merge them into FILE."""


@dataclass(frozen=True, kw_only=True)
class Env(_Common):
    """Show versions, devices, cores and attention backends."""


@dataclass(frozen=True, kw_only=True)
class List(_Common):
    """List what there is to choose from."""

    what: Annotated[
        Literal["models", "strategies", "support", "rules", "caches", "thinking", "suites"], tyro.conf.Positional
    ]
    """What to list."""


@dataclass(frozen=True, kw_only=True)
class Demo(_Common):
    """Sample a few captions serially and with each strategy, and write a page that shows them side by side."""

    nproc: Annotated[int, tyro.conf.arg(metavar="N")] = 2
    """Ranks to start, at least 2."""
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 7
    """Seed of the noise."""
    steps: Count = None
    """Denoising steps; the model's own default if not given."""
    repeats: Annotated[int, tyro.conf.arg(metavar="N")] = 3
    """Timed runs of each method; the median counts."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = "partsong-demo.html"
    """HTML page to write."""
    picture: Path = None
    """Also write the pictures side by side as one PNG."""


Command = (
    Annotated[Image, tyro.conf.subcommand("image")]
    | Annotated[Video, tyro.conf.subcommand("video")]
    | Annotated[Text, tyro.conf.subcommand("text")]
    | Annotated[Think, tyro.conf.subcommand("think")]
    | Annotated[EvalSuite, tyro.conf.subcommand("eval")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Env, tyro.conf.subcommand("env")]
    | Annotated[List, tyro.conf.subcommand("list")]
    | Annotated[Demo, tyro.conf.subcommand("demo")]
)
