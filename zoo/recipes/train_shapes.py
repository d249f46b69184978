"""Trains `shapes`, the zoo's text-to-image model, from nothing: "a red circle left of a blue square" at 64 x 64.

The result is a stock Stable-Diffusion-3 pipeline folder that `DiffusionPipeline.from_pretrained` loads. There are four
stages, each of which can be resumed and is skipped if its result is there:

1. `vae`: trains a small convolutional autoencoder (a 4 x 16 x 16 latent) on scenes drawn on the fly;
2. `pool`: draws scenes once and encodes them, so that the long stage never runs the encoder;
3. `text`: two small CLIP text encoders learn to tell a caption's facts, so that they bind attributes early;
4. `flow`: the transformer learns rectified flow on the latents, with captions worded anew at every use.

Run on a GPU or one core:    python zoo/recipes/train_shapes.py --out runs/shapes
Run on two or more cores:    torchrun --nproc-per-node 2 zoo/recipes/train_shapes.py --out runs/shapes
Measure an exported folder:  python zoo/recipes/train_shapes.py --stages evaluate --out runs/shapes --captions 200

On a busy CPU several processes of one thread each (with gradients averaged over gloo) beat many threads. Data, weights
and noise follow `--seed` and the number of processes. Every stage ends at its number of steps or minutes, whichever
comes first, and its learning rate falls to zero by then. By default only the steps count.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL, DiffusionPipeline, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from diffusers.models.attention_processor import JointAttnProcessor2_0
from torch import Tensor, nn

from partsong_zoo.folders import save_pipeline
from partsong_zoo.shapes.comprehension import build_heads, text_loss
from partsong_zoo.shapes.grammar import describe
from partsong_zoo.shapes.model import (
    Generator,
    TextEncoders,
    build_silent_encoder,
    build_silent_tokenizer,
    build_tokenizer,
    build_vae,
    draw_sigmas,
    token_ids,
)
from partsong_zoo.shapes.pool import autoencoder_loss, build_pool, pictures, rank_pool, restored_quality
from partsong_zoo.shapes.scenes import Thing, draw_things, generator
from partsong_zoo.shapes.scoring import score
from partsong_zoo.training.common import World, mixed_precision
from partsong_zoo.training.recipe import file_report, recipe_config
from partsong_zoo.training.stage import TrainingStage, adam, muon_and_adam

PLAIN: dict[str, Any] = dict.fromkeys(("mid_block_add_attention", "use_quant_conv", "use_post_quant_conv"), False)
STAGES: tuple[str, ...] = ("vae", "pool", "text", "flow", "evaluate")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/shapes"  # The folder for everything that is written.
    stages: str = ",".join(STAGES[:4])  # The stages to run, with commas between.
    seed: int = 0  # The seed of all draws.
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # Where to train: cpu or cuda.
    vae_steps: int = 1050  # Most steps of stage `vae`.
    vae_minutes: float = 60.0  # Most minutes of stage `vae`.
    vae_batch: int = 16  # Pictures per step and rank.
    vae_channels: int = 16  # Width of the autoencoder.
    pool_size: int = 60_000  # Encoded examples of all ranks together.
    text_steps: int = 570  # Most steps of stage `text`.
    text_minutes: float = 60.0  # Most minutes of stage `text`.
    text_batch: int = 128  # Captions per step and rank.
    flow_steps: int = 2410  # Most steps of stage `flow`.
    flow_minutes: float = 600.0  # Most minutes of stage `flow`.
    flow_batch: int = 96  # Pictures per step of all ranks.
    heads: int = 6  # Attention heads.
    depth: int = 6  # Layers.
    muon_rate: float = 3e-3  # Peak learning rate of orthogonalised momentum.
    adam_rate: float = 1.2e-3  # Peak learning rate of Adam.
    shift: float = 3.0  # The scheduler's shift towards noise.
    caption_dropout: float = 0.1  # Share of empty captions, for guidance.
    export_minutes: float = 10.0  # Minutes between checkpoints, and between exports.
    captions: int = 60  # Fresh captions to evaluate.
    steps: int = 28  # Denoising steps to evaluate with.
    guidance: float = 5.0  # Guidance scale to evaluate with.
    nulls: int = 1  # Zeros that stand for the silent third encoder.


# --- stage 1: the autoencoder -----------------------------------------------------------------------------------------


def train_vae(config: Config, world: World) -> None:
    """Runs stage 1; writes `vae/` with the latent's mean and scale in its configuration."""
    if (Path(config.out) / "vae" / "config.json").exists():
        return
    torch.manual_seed(config.seed)
    vae: Any = build_vae(config.vae_channels, **PLAIN).to(world.device, memory_format=torch.channels_last)
    stage = TrainingStage(
        world,
        Path(config.out) / "vae.pt",
        vae,
        [adam(list(vae.parameters()), 2e-3)],
        key=(11, config.seed, world.rank),
        steps=config.vae_steps,
        minutes=config.vae_minutes,
        save_minutes=config.export_minutes,
    )

    stage.run(autoencoder_loss(vae, world, config.vae_batch))
    if world.rank == 0:
        finish_vae(config, vae)


@torch.no_grad()
def finish_vae(config: Config, vae: Any) -> None:
    """Measures latent statistics and quality on new scenes, and saves."""
    rng = generator(12, config.seed)
    images = pictures([draw_things(rng) for _ in range(256)]).to(vae.device)
    mean = vae.encode(images).latent_dist.mean
    vae.register_to_config(shift_factor=float(mean.mean()), scaling_factor=float(1 / mean.std()))
    vae.save_pretrained(Path(config.out) / "vae")
    print(f"vae saved: {restored_quality(vae, images):.2f} dB on {len(images)} new scenes")


# --- stage 2: the pool of encoded scenes ------------------------------------------------------------------------------


def pool_scenes(config: Config, world: World) -> list[list[Thing]]:
    """Draws this rank's share of the scenes, the same at every call."""
    share = config.pool_size // world.size
    return [draw_things(generator(13, config.seed, world.rank, index)) for index in range(share)]


def encode_pool(config: Config, world: World) -> None:
    """Runs stage 2: encodes this rank's scenes into `pool-RANK-of-SIZE.npy`, float16, normalised."""
    vae = AutoencoderKL.from_pretrained(Path(config.out) / "vae")
    build_pool(rank_pool(Path(config.out), world), pool_scenes(config, world), world, vae)


# --- stage 3: the text encoders ---------------------------------------------------------------------------------------


def training_captions(scenes: list[list[Thing]], rng: np.random.Generator) -> list[str]:
    """Writes one caption per scene, worded anew, never a held-out one."""
    return [describe(things, rng) or "" for things in scenes]


def train_text(config: Config, world: World) -> None:
    """Runs stage 3; writes `text.pt`."""
    path = Path(config.out) / "text.pt"
    if path.exists():
        return
    torch.manual_seed(config.seed)
    both = nn.ModuleDict({"text": TextEncoders(), "heads": build_heads()}).to(world.device)
    text, heads = cast("Any", both["text"]), cast("Any", both["heads"])
    stage = TrainingStage(
        world,
        Path(config.out) / "text-stage.pt",
        both,
        [adam(list(both.parameters()), 2e-3, decay=0.01)],
        key=(15, config.seed, world.rank),
        steps=config.text_steps,
        minutes=config.text_minutes,
        save_minutes=config.export_minutes,
    )

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        captions = [c for c in training_captions([draw_things(rng) for _ in range(config.text_batch)], rng) if c]
        loss, exact = text_loss(text, heads, captions)
        return loss, f"all facts right {exact:.2f}"

    stage.run(loss_of)
    if world.rank == 0:
        torch.save(text.state_dict(), path)


# --- stage 4: the transformer -----------------------------------------------------------------------------------------


class FlowStage(TrainingStage):
    """Trains the transformer and its text encoders, and exports the pipeline folder with every checkpoint."""

    def __init__(self, config: Config, world: World) -> None:
        torch.manual_seed(config.seed)
        model = Generator(config.heads, config.depth)
        model.text.load_state_dict(torch.load(Path(config.out) / "text.pt", weights_only=True))
        model = model.to(world.device)
        blocks = model.transformer.transformer_blocks
        matrices = [p for n, p in blocks.named_parameters() if p.ndim == 2 and ("attn." in n or "ff" in n)]
        self.config = config
        super().__init__(
            world,
            Path(config.out) / "flow.pt",
            model,
            muon_and_adam(model, matrices, (config.muon_rate, config.adam_rate), 0.02),
            key=(14, config.seed, world.rank),
            steps=config.flow_steps,
            minutes=config.flow_minutes,
            save_minutes=config.export_minutes,
        )

    def save(self) -> None:
        """Writes the checkpoint and the pipeline folder, on rank 0."""
        super().save()
        if self.world.rank == 0:
            export(self.config, self.average.module)


def train_flow(config: Config, world: World) -> None:
    """Runs stage 4, which writes `flow.pt` and `export/` every `export_minutes` and at the end."""
    stage = FlowStage(config, world)
    latents = np.load(rank_pool(Path(config.out), world))
    scenes, batch = pool_scenes(config, world), config.flow_batch // world.size

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        picked = rng.integers(len(latents), size=batch)
        captions = training_captions([scenes[i] for i in picked], rng)
        dropped = rng.random(batch) < config.caption_dropout
        ids = token_ids(["" if drop else c for c, drop in zip(captions, dropped, strict=True)]).to(world.device)
        clean = torch.from_numpy(latents[picked]).float().to(world.device)
        sigma = draw_sigmas(batch, config.shift).to(world.device)
        nulls = torch.where(torch.rand(batch) < 0.5, 1, 256).to(world.device)
        noise, level = torch.randn_like(clean), sigma[:, None, None, None]
        with mixed_precision(world):
            velocity = stage.module((1 - level) * clean + level * noise, sigma, ids, nulls)
        return (velocity.float() - (noise - clean)).square().mean(), ""

    stage.run(loss_of)
    world.say(f"flow done: {stage.step} steps of {config.flow_batch}, {stage.spent:.1f} minutes")


def export(config: Config, model: nn.Module) -> None:
    """Saves the stock pipeline folder `export/`, float16 safetensors."""
    copied: Any = copy.deepcopy(model)
    copied.transformer.set_attn_processor(JointAttnProcessor2_0())
    pipeline = StableDiffusion3Pipeline(
        transformer=copied.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=config.shift),
        vae=AutoencoderKL.from_pretrained(Path(config.out) / "vae"),
        text_encoder=copied.text.first,
        tokenizer=cast("Any", build_tokenizer()),
        text_encoder_2=copied.text.second,
        tokenizer_2=cast("Any", build_tokenizer()),
        text_encoder_3=build_silent_encoder(),
        tokenizer_3=build_silent_tokenizer(),
    )
    save_pipeline(pipeline, Path(config.out) / "export")


def evaluate(config: Config, world: World) -> None:
    """Measures `export/` on fresh captions with the stock sampler; writes `facts.json` and `samples.png`."""
    if world.rank:
        return
    out = Path(config.out)
    pipeline = DiffusionPipeline.from_pretrained(out / "export").to(world.device)
    pipeline.set_progress_bar_config(disable=True)
    started = time.time()
    result = score(
        pipeline,
        config.captions,
        seed=config.seed,
        num_inference_steps=config.steps,
        guidance_scale=config.guidance,
        max_sequence_length=config.nulls,
    )
    report = {
        "captions": config.captions,
        "steps": config.steps,
        "guidance_scale": config.guidance,
        "max_sequence_length": config.nulls,
        **result.report(),
        "seconds": round(time.time() - started, 1),
    }
    file_report(out / "facts.json", report)
    result.save_grid(out / "samples.png")


def main() -> None:
    """Runs the stages of the configuration."""
    config = recipe_config(Config, __doc__)
    world = World(config.device)
    Path(config.out).mkdir(parents=True, exist_ok=True)
    runners = dict(zip(STAGES, (train_vae, encode_pool, train_text, train_flow, evaluate), strict=True))
    for stage in config.stages.split(","):
        runners[stage](config, world)
        if world.size > 1:
            dist.barrier()


if __name__ == "__main__":
    main()
