"""Declares the options of ``partsong serve``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from partsong.cli.option_types import Common, Count, Path, Positive
from partsong.knobs import Number, Whole

__all__ = ["ServeCheck", "Serving"]

_Repeated = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]


@dataclass(frozen=True, kw_only=True)
class Serving(Common):
    """Serve pictures, videos, text and thinking over HTTP, with the endpoints of the OpenAI API and a page."""

    config: Path = None
    """A TOML file with these options by their names, such as nproc = 2 and model = ["shapes"], and with users. Options
    of the command line are added to its lists, and stand in for its other values."""
    model: Annotated[_Repeated, tyro.conf.arg(metavar="MODEL", help_behavior_hint="")] = ()
    """A zoo name, a local folder of diffusers or transformers, or a hub id; repeat it for several. Each has its own
    processes."""
    nproc: Count = None
    """Ranks for each model of pictures or videos; 1 if not given."""
    replicas: Count = None
    """Copies of each model of pictures or videos, each on --nproc ranks, which share its jobs; 1 if not given. When
    ranks of one of several replicas die, another replica makes their jobs."""
    cluster: Literal["ray"] | None = None
    """Run the ranks on a Ray cluster, each on a GPU of its own where the cluster has some, and else on --threads cores.
    Jobs whose ranks are lost begin anew; replicas for which there is no room wait for nodes that join."""
    ray_address: Annotated[str | None, tyro.conf.arg(metavar="ADDRESS")] = None
    """Address of the Ray cluster; auto takes the one that runs on this machine. If not given, what the environment
    variable RAY_ADDRESS says, or a cluster of this machine alone, which ends with the server."""
    strategy: Annotated[_Repeated, tyro.conf.arg(metavar="NAME[:KEY=VALUE,...]", help_behavior_hint="")] = ()
    """How the ranks share the work where a client does not say; repeat it to combine several. If not given, what the
    planner recommends for this machine, or ulysses where `partsong calibrate` has not measured it."""
    text_nproc: Count = None
    """Ranks that share each causal language model; 1 if not given."""
    share: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """How they share it: tensor-parallel, the default, sharded-weights, layer-pipeline or token-experts."""
    upstream: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """Also serve the models of a server that speaks the OpenAI API, such as http://127.0.0.1:8080/v1, with every way
    to think. Its key is read from the environment variable OPENAI_API_KEY."""
    scorer: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """A server with the OpenAI API whose model scores texts for thinking methods that take a scorer, such as
    best-of-n, by how likely it says that a text is right. Its key is read from the environment variable
    PARTSONG_SCORER_KEY."""
    scorer_model: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """What that server calls the model."""
    scorer_kind: Annotated[str | None, tyro.conf.arg(metavar="KIND[:KEY=VALUE,...]")] = None
    """How that model answers: judge, the default, with a yes or a no; reward with a number for the text, process with
    one for each step, both at /pooling of vLLM; classify or score at the endpoints of those names."""
    served_name: Annotated[_Repeated, tyro.conf.arg(metavar="NAME=MODEL", help_behavior_hint="")] = ()
    """A further name for a model, for clients that ask for one of their own, such as gpt-image-1=shapes or
    gpt-4o=sums:self-consistency:num=8; repeat it for several."""
    host: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on. Any other than this machine's own demands a key."""
    port: Annotated[int, Whole(0, 65535), tyro.conf.arg(metavar="N")] = 8000
    """Port to listen on; 0 takes a free one."""
    root_path: Annotated[str, tyro.conf.arg(metavar="PATH")] = ""
    """Path under which a proxy shows the server, such as /pictures."""
    grace: Annotated[float, Number(0.0), tyro.conf.arg(metavar="SECONDS")] = 30.0
    """Seconds in which running jobs may finish when the server is asked to end; what waits is left to the next one."""
    log_format: Literal["text", "json"] = "text"
    """Form of the lines on standard error, of which every request has one."""
    key_file: Path = None
    """File with the key that clients must show; if not given, the environment variable PARTSONG_API_KEY holds it."""
    folder: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder for outputs and the journal of jobs; if not given, partsong/serve in the user's cache."""
    lora: Annotated[_Repeated, tyro.conf.arg(metavar="NAME=FILE", help_behavior_hint="")] = ()
    """An adapter that clients may ask for by this name; repeat it for several."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of weights and arithmetic; if not given, float32 on a CPU and the checkpoint's own type on a GPU."""
    threads: Count = None
    """Threads per rank; if not given, 1 for several ranks or a zoo model, and torch's own choice otherwise."""
    max_rows: Positive = 16
    """Most samples in one call of a model; guidance counts twice."""
    max_active: Positive = 16
    """Most jobs of a model that take turns step by step."""
    memory: Annotated[float | None, Number(0.0, above=True), tyro.conf.arg(metavar="GB")] = None
    """GB that a rank may take, by what the planner predicts: a job that needs more is refused, and jobs that fit alone
    but not together run one after the other. If not given, its part of the GPU's memory, or of the machine's."""
    max_waiting: Positive = 64
    """Most jobs of a model that wait; further ones are refused with 429."""
    max_pixels: Positive = 4096 * 4096
    """Most pixels of one picture or frame."""
    max_frames: Positive = 1000
    """Most frames of one video."""
    max_steps: Positive = 200
    """Most denoising steps of one job."""
    outputs: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Also keep what is made in this folder, in one folder for each day, with what was asked for as JSON."""
    outputs_days: Count = None
    """Days of --outputs that are kept, today included; all if not given."""
    keep_hours: Annotated[float, Number(0.0, above=True), tyro.conf.arg(metavar="HOURS")] = 24.0
    """How long outputs are kept."""


@dataclass(frozen=True, kw_only=True)
class ServeCheck(Common):
    """Ask a running server whether it is up and its models are ready, as a health probe does; ends with 1 if not."""

    url: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="URL")]
    """Address of the server, such as http://127.0.0.1:8000."""
    make: bool = False
    """Also make a picture of one step, a video of one step or a text of eight tokens with each model."""
    key_file: Path = None
    """File with the key to show; if not given, the environment variable PARTSONG_API_KEY holds it, if there is one."""
    timeout: Annotated[float, Number(0.0, above=True), tyro.conf.arg(metavar="SECONDS")] = 60.0
    """Seconds for each answer."""
