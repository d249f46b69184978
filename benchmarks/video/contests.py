"""Times video strategies against one process in turn: whole videos, their first block, and how long ranks are idle.

The models have random weights and the size of a small real one, and latents are not decoded. ``DualParallel`` and
``TimestepPipeline`` are compared with the same loop on one rank. ``ClipParallel`` is compared with the pipeline's own
call, and with itself on one rank, where it attends to equally few keys.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from partsong.foreign_messages import quiet_libraries
from partsong.jobs.compare import gather
from partsong.ledger import Ledger
from partsong.parallel import Mesh, Strategy, parallelize
from partsong.parallel.clip.strategy import ClipParallel
from partsong.parallel.ranks.launch import launch
from partsong.samplers import generate, stream
from partsong.samplers.dual_parallel.strategy import DualParallel
from partsong.samplers.timestep_pipeline.strategy import TimestepPipeline

__all__ = ["run"]

#: Latent frames of a block, and denoising steps.
BLOCK, STEPS = 4, 8
FEW_STEPS, WIDTH, HEADS = 4, 384, 6


def bench_video_pipeline(causal: bool, block: int) -> Any:
    """Builds a Wan pipeline of 16 M random parameters for videos of many blocks.

    Args:
        causal: whether frames see only the past.
        block: how many latent frames see each other in a causal model.
    """
    from diffusers import (
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        SkyReelsV2Transformer3DModel,
        WanPipeline,
        WanTransformer3DModel,
    )

    sizes: dict[str, Any] = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": HEADS,
        "attention_head_dim": WIDTH // HEADS,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": WIDTH,
        "freq_dim": 256,
        "ffn_dim": 4 * WIDTH,
        "num_layers": 8,
        "rope_max_seq_len": 512,
    }
    torch.manual_seed(0)
    model: Any = WanTransformer3DModel(**sizes)
    if causal:
        model = SkyReelsV2Transformer3DModel(**sizes, num_frame_per_block=block)
    vae: Any = AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    tokenizer: Any = None
    return WanPipeline(tokenizer, tokenizer, vae, FlowMatchEulerDiscreteScheduler(shift=3.0), model.eval())


@dataclass(frozen=True, slots=True)
class Contest:
    """Describes a video to sample on one rank and on all."""

    name: str
    serial: Strategy | None
    parallel: Strategy
    axis: str
    steps: int
    blocks: int
    side: int
    causal: bool = False


def contests(blocks: int, side: int) -> list[Contest]:
    """Lists the timed cases."""
    dual = DualParallel(block_frames=BLOCK, context=BLOCK)
    clip = ClipParallel(window=BLOCK, stride=BLOCK)
    few, layers = TimestepPipeline(window=2), TimestepPipeline(window=2, pipe_degree=2)
    return [
        Contest("ClipParallel", None, clip, "clip", STEPS, blocks, side),
        Contest("ClipParallel against itself", clip, clip, "clip", STEPS, blocks, side),
        Contest("DualParallel", dual, dual, "pipe", STEPS, blocks, side),
        Contest("TimestepPipeline", few, few, "stage", FEW_STEPS, 2 * blocks, side, causal=True),
        # With one step only the layers can be shared among the ranks.
        Contest("TimestepPipeline, layers", few, layers, "pipe", 1, 4 * blocks, side, causal=True),
    ]


@dataclass(slots=True)
class Times:
    """Holds the seconds until each part was done, for every repeat."""

    all: list[list[float]] = field(default_factory=list)

    @property
    def whole(self) -> float:
        """Returns the median seconds of a whole video."""
        return statistics.median(times[-1] for times in self.all)

    @property
    def first(self) -> float:
        """Returns the median seconds until the first part was there."""
        return statistics.median(times[0] for times in self.all)

    def steady(self, skipped: int) -> float | None:
        """Returns the median seconds between two parts after the first `skipped` ones; None if no others follow."""
        gaps = [(t[-1] - t[skipped]) / (len(t) - 1 - skipped) for t in self.all if len(t) > skipped + 1]
        return statistics.median(gaps) if gaps else None


def run(*, nproc: int = 2, repeats: int = 5, blocks: int = 16, side: int = 8) -> list[dict[str, Any]]:
    """Times all contests.

    Args:
        nproc: ranks, one thread each.
        repeats: rounds; the median counts.
        blocks: of each video, with four latent frames each.
        side: of a frame; it has the square of this number of tokens.

    Returns:
        A row per contest: ``name size seconds_median seconds_serial ratio_to_serial first_seconds first_seconds_serial
        steady_ratio idle idle_predicted bytes_sent``.
    """
    return launch(_on_rank, nproc, nproc, repeats, blocks, side)


def _on_rank(nproc: int, repeats: int, blocks: int, side: int) -> list[dict[str, Any]]:
    quiet_libraries()
    torch.set_num_threads(1)
    rows = []
    for contest in contests(blocks, side):
        pipe = bench_video_pipeline(contest.causal, BLOCK)
        pipe.set_progress_bar_config(disable=True)
        degrees: dict[str, Any] = {contest.axis: nproc}
        with Mesh(**degrees, timeout=1800.0) as mesh:
            serial, parallel, sent = _rounds(contest, pipe, mesh, repeats)
            if mesh.is_main:
                rows.append(_row(contest, nproc, serial, parallel, sent))
    return rows


def _call(contest: Contest) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    return {
        "prompt_embeds": torch.randn(1, 32, WIDTH, generator=draw),
        "guidance_scale": 1.0,
        "num_frames": contest.blocks * BLOCK * 4 - 3,
        "height": 16 * contest.side,
        "width": 16 * contest.side,
        "num_inference_steps": contest.steps,
        "generator": torch.Generator().manual_seed(0),
        "output_type": "latent",
    }


def _rounds(contest: Contest, pipe: Any, mesh: Mesh, repeats: int) -> tuple[Times, Times, int]:
    serial, parallel, sent = Times(), Times(), 0
    for repeat in range(repeats + 1):
        if mesh.is_main:
            _note(serial, repeat, lambda: _alone(contest, pipe, mesh))
        gather(mesh, [0.0], "wait for one rank")
        with parallelize(pipe, contest.parallel, mesh=mesh) as plan, Ledger(flops=False) as ledger:
            _note(parallel, repeat, lambda plan=plan: _times(lambda: _parts(plan, contest)))
        gather(mesh, [0.0], "end of a round")
        sent = int(ledger.summary().get("bytes_sent", 0))
    return serial, parallel, sent


def _note(times: Times, repeat: int, action: Callable[[], list[float]]) -> None:
    """Runs a round and keeps its times, unless it is the first, which warms up."""
    seconds = action()
    if repeat:
        times.all.append(seconds)


def _alone(contest: Contest, pipe: Any, mesh: Mesh) -> list[float]:
    if contest.serial is None:
        return _times(lambda: [pipe(**_call(contest))])
    with parallelize(pipe, contest.serial, mesh=mesh.alone()) as plan:
        return _times(lambda: _parts(plan, contest))


def _parts(plan: Any, contest: Contest) -> Any:
    if plan.loop is None:
        return [generate(plan, **_call(contest))]
    return stream(plan, **_call(contest))


def _times(make: Callable[[], Any]) -> list[float]:
    start, times = time.perf_counter(), []
    for _ in make():
        times.append(time.perf_counter() - start)
    return times


def _row(contest: Contest, nproc: int, serial: Times, parallel: Times, sent: int) -> dict[str, Any]:
    ratio = serial.whole / parallel.whole
    row: dict[str, Any] = {
        "name": contest.name,
        "size": contest.blocks * BLOCK * 4 - 3,
        "seconds_median": parallel.whole,
        "seconds_serial": serial.whole,
        "ratio_to_serial": ratio,
        "first_seconds": parallel.first,
        "first_seconds_serial": serial.first,
        "bytes_sent": sent,
        "seconds_all": parallel.all,
        "seconds_serial_all": serial.all,
    }
    if isinstance(contest.parallel, DualParallel):
        bubble = nproc**2 - 1  # in visits, see the test that counts them
        row["idle_predicted"] = bubble / (contest.steps * contest.blocks + bubble)
        row["idle"] = 1 - ratio / nproc
    if contest.causal:
        alone, together = serial.steady(nproc), parallel.steady(nproc)
        row["steady_ratio"] = alone / together if alone and together else None
    return row
