"""Declares the commands and their options as data; tyro makes the parser and the help from this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from partsong.cli.option_types import Calling, Common, Count, Path, Positive, Question, Seed, Temperature
from partsong.cli.planning_options import Calibrating, Planning
from partsong.cli.serving_options import ServeCheck, Serving
from partsong.knobs import Number, Whole

__all__ = [
    "Asking", "Bench", "Calibrating", "Decoding", "Demo", "Env", "Image", "List", "Planning", "Sampling", "ServeCheck",
    "Serving", "Text", "Think", "Video",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sampling(Calling):
    """Holds the options that image and video share."""

    strategy: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]", help_behavior_hint="")
    ] = ()
    """How the ranks share the work (see `partsong list strategies`); repeat it to combine several. If not given, or
    auto, what the planner recommends for this machine, or ulysses if `partsong calibrate` has not measured it."""
    shares: Annotated[str | None, tyro.conf.arg(metavar="N,N,...|measured")] = None
    """How fast each rank is, such as 2,1, for strategies that cut tokens or rows: a rank that is twice as fast takes
    twice as many. `measured` measures it first. If not given, all ranks are alike."""
    compare: bool = False
    """Also sample without strategies on one rank, and report the speed-up and how far apart the results are."""
    ledger: Path = None
    """Append one JSON line per rank and step to this file: what it computed, what it sent, how long it waited."""


@dataclass(frozen=True, kw_only=True)
class Image(Sampling):
    """Sample an image from a text, on one rank or several."""

    prompt: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT")]
    """What to draw; for a class-conditional pipeline the name or number of a class."""
    model: Annotated[str, tyro.conf.arg(metavar="MODEL")] = "shapes"
    """A zoo name (see `partsong list models`), a local diffusers folder, or a hub id."""
    rule: Annotated[str | None, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]")] = None
    """How a model of picture tokens decides them: lpd (in groups), assd or keyed-jacobi (see `partsong list rules`);
    lpd if not given."""
    num_images: Positive = 1
    """How many images of the prompt; image i does not depend on the number of images or ranks."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = "partsong.png"
    """Picture to write: .png or .webp, in which nothing is lost, or .jpg; several are numbered."""


@dataclass(frozen=True, kw_only=True)
class Video(Sampling):
    """Sample a video from a text, on one rank or several; frames are written as soon as they are done."""

    prompt: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT", help_behavior_hint="")] = ""
    """What to show; not needed with --resume."""
    model: Annotated[str, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")] = ""
    """A zoo name, a local diffusers folder, or a hub id. If not given, it is motion of the zoo, or motion-causal with
    timestep-pipeline and motion-clean with cascade-pipeline."""
    frames: Count = None
    """Frames of the video; the model's own default if not given."""
    fps: Annotated[float, tyro.conf.arg(metavar="N")] = 16.0
    """Frames per second of the video."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = "partsong.mp4"
    """Video to write, .mp4 or .gif; a name without an ending is a folder of PNG files."""
    journal: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Keep the progress of the run in this folder, for --resume; only with dual-parallel or timestep-pipeline."""
    resume: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Continue the run of this journal with the options it was started with; --nproc, --out and --json may differ."""


#: What guesses tokens ahead.
Drafters = Annotated[
    tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]", help_behavior_hint="")
]


@dataclass(frozen=True, kw_only=True)
class Decoding(Common):
    """Holds the options that text and eval share."""

    model: Annotated[str, tyro.conf.arg(metavar="MODEL")] = "lists-mdlm"
    """A text model of the zoo (see `partsong list models`), a local transformers folder, or a hub id."""
    adapter: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """How to decode the model, such as mdlm or causal, if its configuration does not say."""
    cache: Annotated[str | None, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]")] = None
    """Which keys to use again (see `partsong list caches`); if not given, prefix where that is exact, else none."""
    max_new_tokens: Count = None
    """How many tokens to write after the prompt at most; if not given, what suits the model."""
    block_size: Count = None
    """Tokens of a block; the model's own number if not given."""
    open_blocks: Positive = 1
    """How many blocks are decoded at the same time."""
    verify: Annotated[int, Whole(0)] = 0
    """How many steps to draft beyond the next one, and to check in the same forward: the same text in fewer forwards,
    of one row for each step. 0 checks none."""
    seed: Seed = 0
    """Seed for drawing tokens."""
    threads: Count = None
    """Threads; if not given, 1 for a zoo model and torch's own choice otherwise."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    """Type of weights and arithmetic; the checkpoint's own if not given."""
    device: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Where to compute, such as cpu or cuda:1; if not given, the first GPU or else the CPU."""


@dataclass(frozen=True, kw_only=True)
class Text(Decoding):
    """Continue or fill in a text, many tokens a step, with a diffusion or autoregressive language model."""

    prompt: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT", help_behavior_hint="")] = ""
    """What to answer or continue. Mask tokens in it are filled in. It may be left out with --template."""
    rule: Annotated[str | None, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]")] = None
    """Which tokens a step accepts (see `partsong list rules`); entropy-bound if not given."""
    temperature: Temperature = 0.0
    """How freely tokens are drawn; 0 takes the most likely ones."""
    nproc: Count = None
    """Ranks that share the model's weights, or of which one drafts; torchrun's number under torchrun, and otherwise 1
    if not given."""
    strategy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]")] = ()
    """How ranks share them: tensor-parallel, the default, sharded-weights, layer-pipeline or token-experts."""
    chat: bool = False
    """Put the prompt through the tokenizer's chat template; the default if it has one."""
    no_chat: bool = False
    """Give the prompt to the model as it is."""
    speculate: Drafters = ()
    """Guess tokens of a causal model ahead and verify them, with ngram or jacobi (see `partsong list drafters`): the
    text is the same and comes sooner where guesses are right. May be given several times. With saguaro:model=MODEL a
    second model drafts on the second rank of --nproc 2."""
    template: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """A text that must follow the prompt, with the tokenizer's mask token wherever something should be filled in."""
    show: bool = False
    """Draw the text while it is decoded, one colour per step; if the output is not a terminal, one line per step."""
    compare: bool = False
    """Also decode one token per step without a cache, and report the speed-up and how many tokens agree; with
    --verify or --speculate, also decode the same without it."""
    out: Path = None
    """Write the text to this file too."""
    ledger: Path = None
    """Append one JSON line per step to this file: forwards, operations, tokens and seconds."""


@dataclass(frozen=True, kw_only=True)
class Asking(Common):
    """Holds the options of commands that ask a language model many times."""

    model: Annotated[str | None, tyro.conf.arg(metavar="MODEL")] = None
    """A zoo name, a local transformers folder, a hub id, or the name a --server has for the model. If not given, it
    is smollm2-135m if that is installed, and otherwise sums of the zoo."""
    server: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """Ask a server that speaks the OpenAI API, such as http://127.0.0.1:8000/v1. Its key is read from the environment
    variable OPENAI_API_KEY."""
    endpoint: Literal["chat", "completions"] = "chat"
    """Which of the server's endpoints to ask."""
    max_tokens: Positive = 512
    """At most this many tokens in one answer."""
    temperature: Temperature = 1.0
    """How freely tokens are drawn; 0 takes the most likely ones."""
    speculate: Drafters = ()
    """Guess tokens ahead and verify them (see `partsong list drafters`): the text is the same and comes sooner where
    guesses are right. May be given several times. Only for a model in this process."""
    top_p: Annotated[float, Number(0.0, 1.0, above=True)] = 1.0
    """Draw only from the most likely tokens that together have this probability."""
    concurrency: Positive = 64
    """At most this many calls at the same time."""
    seed: Seed = 0
    """Seed for drawing tokens."""
    threads: Count = None
    """Threads; if not given, 1 for a zoo model and torch's own choice otherwise."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    """Type of weights and arithmetic; if not given, float32 on a CPU and the checkpoint's own type on a GPU."""
    weights: Literal["int8", "int4"] | None = None
    """Round the weights of linear layers on a CPU: another model, near the given one, and faster for a few samples."""
    device: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Where to compute, such as cpu or cuda:1; if not given, the first GPU or else the CPU."""
    nproc: Count = None
    """Ranks of this machine that share a model in this process; 1 if not given."""
    share: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """How they share it: tensor-parallel, the default, sharded-weights, layer-pipeline or token-experts."""


@dataclass(frozen=True, kw_only=True)
class Think(Asking):
    """Ask a language model many times at once, and report what the answer cost."""

    question: Question = None
    """What to answer. `-` reads it from standard input, and so does leaving it out if that is no terminal."""
    file: Path = None
    """Read the question from this file."""
    strategy: Annotated[str, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]")] = "self-consistency"
    """How to think (see `partsong list thinking`), such as pdr:schedule=8-4-1."""
    extract: Literal["number", "choice", "expression", "math", "code", "text"] | None = None
    """What kind of answer to look for, so that answers with the same meaning count as one; texts without one are shown
    whole. If not given, it is a number, and for sums of the zoo what that model is asked for."""
    scorer: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """A server with the OpenAI API whose model scores texts, for strategies that take a scorer, such as best-of-n: by
    how likely it says that a text is right. Its key is read from the environment variable PARTSONG_SCORER_KEY."""
    scorer_model: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """What that server calls the model."""
    scorer_kind: Annotated[str | None, tyro.conf.arg(metavar="KIND[:KEY=VALUE,...]")] = None
    """How that model answers: judge, the default, with a yes or a no; reward with a number for the text, process with
    one for each step, both at /pooling of vLLM; classify or score at the endpoints of those names."""
    logprobs: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """How many alternatives to ask for at every token; strategies that weigh confidence ask for them by themselves."""
    budget_tokens: Count = None
    """Stop after this many tokens in all answers together; calls that are still writing are cancelled."""
    budget_calls: Count = None
    """Stop after this many calls."""
    budget_seconds: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """Stop after this many seconds."""
    budget_money: Annotated[float | None, tyro.conf.arg(metavar="AMOUNT")] = None
    """Stop when this much money is spent, at the prices of --price."""
    price: Annotated[str | None, tyro.conf.arg(metavar="PROMPT,ANSWER")] = None
    """What a million tokens cost; PROMPT,CACHED,ANSWER prices cached prompt tokens separately."""
    journal: Path = None
    """Keep completed calls in this file; after an interruption the same command continues and repeats none of them."""
    name: Annotated[str, tyro.conf.arg(metavar="NAME")] = "think"
    """Name of this run in the journal, which can hold several runs."""
    replay: bool = False
    """Repeat the answer from the journal alone; the model is not asked."""
    show: bool = False
    """Draw the threads while they are written; if standard error is not a terminal, write a line per event."""
    trace: Path = None
    """Write all calls to this file: .jsonl, .json for Perfetto, or .html for a page to read."""
    out: Path = None
    """Write the text of the answer to this file."""
    ledger: Path = None
    """Append one JSON line per call to this file."""


@dataclass(frozen=True, kw_only=True)
class Bench(Common):
    """Measure strategies, kernels or ParScale against what they are to replace, or share what was measured of GPUs."""

    name: Annotated[Literal["image", "kernels", "parscale", "share"], tyro.conf.Positional]
    """What to measure, or share: to write an anonymous copy of what `make gpu` wrote, for an issue."""
    file: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")] = None
    """share: the file."""
    repeats: Positive = 5
    """How often to time each case; the median counts."""
    tokens: Annotated[tuple[int, ...], Whole(1), tyro.conf.arg(metavar="N ...")] = ()
    """Numbers of tokens, a section each; else 1024 and 4096, 1024 to 65536 for kernels (CPU: 1024), parscale 256."""
    nproc: Count = None
    """image: how many ranks, one thread each; 2 if not given."""
    models: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ()
    """image: which models to measure; all of them if not given."""
    strategy: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]", help_behavior_hint="")
    ] = ()
    """image: what to time instead of the usual strategies, with + between those that work together; repeat it for
    several. auto is the exact mix that the planner predicts to be fastest on this machine."""
    profile: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """image: also write Chrome traces of one step of every case into FOLDER."""
    tune: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """kernels: also find the best tile sizes and backends for this GPU, and merge them into FILE."""


@dataclass(frozen=True, kw_only=True)
class Env(Common):
    """Show versions, devices, cores and attention backends of this machine."""


@dataclass(frozen=True, kw_only=True)
class List(Common):
    """List what there is to choose from."""

    what: Annotated[
        Literal["models", "strategies", "support", "rules", "caches", "drafters", "thinking", "suites"],
        tyro.conf.Positional,
    ]
    """What to list."""
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """Show support for these models only: any part of a family, of a class of a model or pipeline, or of a hub name."""


@dataclass(frozen=True, kw_only=True)
class Demo(Common):
    """Sample a few captions serially and with each strategy, and write a page that shows them side by side."""

    nproc: Annotated[int, Whole(2), tyro.conf.arg(metavar="N")] = 2
    """How many ranks to start, at least 2."""
    seed: Seed = 7
    """Seed of the noise."""
    steps: Count = None
    """Denoising steps; the model's own default if not given."""
    repeats: Positive = 3
    """How often to time each method; the median counts."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = "partsong-demo.html"
    """HTML page to write."""
    picture: Path = None
    """Also write the pictures side by side as one PNG."""
