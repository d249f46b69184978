"""Trains `shapes-unet`, the zoo's Stable Diffusion pipeline, from nothing: the scenes of `shapes` through a UNet.

The result is a stock Stable Diffusion folder that `DiffusionPipeline.from_pretrained` loads. There are six stages:

1. `autoencoder`: trains an AutoencoderKL (a 4 x 16 x 16 latent) on scenes drawn on the fly;
2. `pool`: draws scenes once and encodes them, so that the long stage never runs the encoder;
3. `text`: the CLIP text encoder learns to tell a caption's facts, so that it binds attributes early;
4. `unet`: the UNet and the text encoder learn velocities on the latents, with captions worded anew at every use, and
   the UNet learns to tell where it is and what stands there;
5. `export`: the averaged weights so far become the pipeline folder `export/`, also while stage 4 still runs;
6. `evaluate`: samples fresh captions from `export/` and reads their facts back.

Run on a GPU or one core:    python zoo/recipes/train_shapes_unet.py --out runs/shapes-unet
Run on two or more cores:    torchrun --nproc-per-node 2 zoo/recipes/train_shapes_unet.py --out runs/shapes-unet
Look at it while it trains:  python zoo/recipes/train_shapes_unet.py --out runs/shapes-unet --stages export,evaluate
Continue from a folder:      python zoo/recipes/train_shapes_unet.py --out runs/shapes-unet --start FOLDER

Every step draws its data and noise from (seed, rank, step), so a stage that was stopped continues from its checkpoint
with exactly the steps it would have made (only the last bits differ, as fast kernels' sums do from run to run). A stage
ends at its number of steps or minutes, whichever comes first, and its learning rate falls to zero by then. By default
only the steps count.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from diffusers import AutoencoderKL, DiffusionPipeline, StableDiffusionPipeline
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch import Tensor, nn

from partsong_zoo.folders import begin_with, pipeline_to_begin_with, save_pipeline
from partsong_zoo.shapes.comprehension import build_heads, text_loss
from partsong_zoo.shapes.grammar import describe, parse
from partsong_zoo.shapes.model import build_vae, token_ids
from partsong_zoo.shapes.pool import autoencoder_loss, build_pool, pictures, rank_pool, restored_quality
from partsong_zoo.shapes.scenes import Thing, draw_things, generator
from partsong_zoo.shapes.scoring import score
from partsong_zoo.shapes_unet.model import (
    Painter,
    TextEncoder,
    build_scheduler,
    build_tokenizer,
    draw_timesteps,
    fold_statistics,
)
from partsong_zoo.shapes_unet.muon import KernelMuon
from partsong_zoo.shapes_unet.positions import draw_layout
from partsong_zoo.training.common import Optimizers, World, mixed_precision
from partsong_zoo.training.recipe import file_report, run_recipe
from partsong_zoo.training.stage import TrainingStage, adam, read_average, run_stages

STAGES: tuple[str, ...] = ("autoencoder", "pool", "text", "unet", "export", "evaluate")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/shapes-unet"  # The folder for everything that is written.
    stages: str = ",".join(STAGES)  # The stages to run, with commas between.
    seed: int = 0  # The seed of all draws.
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # Where to train: cpu or cuda.
    save_minutes: float = 4.0  # Minutes between checkpoints.
    autoencoder_steps: int = 2000  # Most steps of stage `autoencoder`.
    autoencoder_minutes: float = 600.0  # Most minutes of stage `autoencoder`.
    autoencoder_batch: int = 16  # Pictures per step and rank.
    autoencoder_channels: int = 16  # Width of the autoencoder.
    pool_size: int = 60_000  # Encoded examples of all ranks together.
    text_steps: int = 600  # Most steps of stage `text`.
    text_minutes: float = 600.0  # Most minutes of stage `text`.
    text_batch: int = 128  # Captions per step and rank.
    unet_steps: int = 3000  # Most steps of stage `unet`.
    unet_minutes: float = 6000.0  # Most minutes of stage `unet`.
    unet_batch: int = 64  # Pictures per step of all ranks.
    start: str = ""  # A pipeline folder of the same sizes to begin stage 4 with, without stages 1 and 3.
    width: int = 64  # Channels of the UNet at 16 x 16.
    depth: int = 2  # Transformer layers per attention at 8 x 8.
    muon_rate: float = 2e-3  # Peak learning rate of orthogonalised momentum.
    adam_rate: float = 1.2e-3  # Peak learning rate of Adam.
    caption_dropout: float = 0.1  # Share of empty captions, for guidance.
    lean: float = 1.6  # How far the timesteps lean to noise at first; in the end not at all.
    wordings: int = 3  # How often a caption is worded anew until it says where something stands.
    positions: float = 0.03  # Weight of telling positions from features.
    layout: float = 0.3  # Weight of telling what the clean picture has there.
    captions: int = 100  # Fresh captions to evaluate.
    steps: int = 28  # Denoising steps to evaluate with.
    guidance: float = 5.0  # Guidance scale to evaluate with.


def new_stage(config: Config, world: World, name: str, module: nn.Module, optimizers: Optimizers) -> TrainingStage:
    """Makes a stage with its limits and key from the configuration, resumed if it has a checkpoint."""
    return TrainingStage(
        world,
        Path(config.out) / f"{name}.pt",
        module,
        optimizers,
        key=(STAGES.index(name) + 21, config.seed, world.rank),
        steps=getattr(config, f"{name}_steps"),
        minutes=getattr(config, f"{name}_minutes"),
        save_minutes=config.save_minutes,
    )


def attention_for(world: World) -> Any:
    """Picks attention for training: at these lengths a CPU takes far longer for fused attention's backward pass."""
    return AttnProcessor() if world.device.type == "cpu" else AttnProcessor2_0()


# --- stages 1 and 2: the autoencoder and the pool of encoded scenes ---------------------------------------------------


def train_autoencoder(config: Config, world: World) -> None:
    """Runs stage 1; writes `autoencoder.pt` and `vae/`, whose latents have zero mean and unit variance."""
    if (Path(config.out) / "vae" / "config.json").exists():
        return
    if config.start:
        pipeline_to_begin_with(config.start, "vae").vae.save_pretrained(Path(config.out) / "vae")
        return
    torch.manual_seed(config.seed)
    vae: Any = build_vae(config.autoencoder_channels, scaling_factor=1.0).to(
        world.device, memory_format=torch.channels_last
    )
    vae.set_attn_processor(attention_for(world))
    stage = new_stage(config, world, "autoencoder", vae, [adam(list(vae.parameters()), 2e-3)])

    stage.run(autoencoder_loss(vae, world, config.autoencoder_batch))
    if world.rank == 0:
        finish_autoencoder(config, stage.average.module)


@torch.no_grad()
def finish_autoencoder(config: Config, vae: Any) -> None:
    """Folds the latents' statistics into the weights, measures quality on new scenes, and saves."""
    rng = generator(31, config.seed)
    images = pictures([draw_things(rng) for _ in range(256)]).to(vae.device)
    mean = vae.encode(images).latent_dist.mean
    fold_statistics(vae, mean.mean(dim=(0, 2, 3)), mean.std(dim=(0, 2, 3)))
    quality = restored_quality(vae, images)
    vae.set_attn_processor(AttnProcessor2_0())
    vae.to(memory_format=torch.contiguous_format).save_pretrained(Path(config.out) / "vae")
    print(f"vae saved: {quality:.2f} dB on {len(images)} new scenes")


def pool_scenes(config: Config, world: World) -> list[list[Thing]]:
    """Draws this rank's share of the scenes, the same at every call."""
    share = config.pool_size // world.size
    return [draw_things(generator(32, config.seed, world.rank, index)) for index in range(share)]


def encode_pool(config: Config, world: World) -> None:
    """Runs stage 2: encodes this rank's scenes into `pool-RANK-of-SIZE.npy`, float16."""
    vae: Any = AutoencoderKL.from_pretrained(Path(config.out) / "vae")
    build_pool(rank_pool(Path(config.out), world), pool_scenes(config, world), world, vae)


# --- stage 3: the text encoder ----------------------------------------------------------------------------------------


def training_captions(scenes: list[list[Thing]], rng: np.random.Generator, draws: int = 1) -> list[str]:
    """Writes one caption per scene, worded anew, never a held-out one (empty for the rare scene that has no other).

    Args:
        scenes: what captions are about.
        rng: draws the words.
        draws: how often a caption is worded anew until it says where something stands.
    """
    captions = [describe(things, rng) or "" for things in scenes]
    for _ in range(draws - 1):
        pairs = zip(captions, scenes, strict=True)
        captions = [text if says_where(text) else describe(things, rng) or "" for text, things in pairs]
    return captions


def says_where(caption: str) -> bool:
    """Tells whether a caption gives a place or a relation."""
    if not caption:
        return False
    scene = parse(caption)
    return bool(scene.relations) or any(item.place for item in scene.items)


def train_text(config: Config, world: World) -> None:
    """Runs stage 3; writes `text.pt`."""
    if config.start or (Path(config.out) / "unet.pt").exists():
        return
    torch.manual_seed(config.seed)
    both = nn.ModuleDict({"encoder": TextEncoder(), "heads": build_heads()}).to(world.device)
    encoder, heads = cast("Any", both["encoder"]), cast("Any", both["heads"])

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        captions = [c for c in training_captions([draw_things(rng) for _ in range(config.text_batch)], rng) if c]
        loss, exact = text_loss(encoder, heads, captions)
        return loss, f"all facts right {exact:.2f}"

    new_stage(config, world, "text", both, [adam(list(both.parameters()), 2e-3)]).run(loss_of)


# --- stage 4: the UNet ------------------------------------------------------------------------------------------------


def started_painter(config: Config) -> Painter:
    """Makes the model with the weights of the pipeline to begin with."""
    model = Painter(config.width, config.depth)
    pipeline = pipeline_to_begin_with(config.start, "vae", "text_encoder", "unet")
    begin_with(config.start, model.text.clip, pipeline.text_encoder)
    begin_with(config.start, model.unet, pipeline.unet)
    return model


def unet_stage(config: Config, world: World) -> TrainingStage:
    """Makes stage 4, fresh with the text encoder of stage 3 or from the pipeline to begin with, or resumed."""
    torch.manual_seed(config.seed)
    if config.start:
        model = started_painter(config)
    else:
        model = Painter(config.width, config.depth)
        model.text.load_state_dict(read_average(Path(config.out) / "text.pt", "encoder"))
    model = model.to(world.device)
    model.unet.set_attn_processor(attention_for(world))
    # Orthogonalised momentum for the matrices inside the blocks, Adam for the rest.
    inside = [
        p
        for n, p in model.unet.named_parameters()
        if "blocks." in n or "mid_block" in n
        if p.ndim >= 2 and "time_emb" not in n
    ]
    chosen = {id(p) for p in inside}
    others = [p for p in model.parameters() if id(p) not in chosen]
    muon = KernelMuon(inside, lr=config.muon_rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
    return new_stage(config, world, "unet", model, [(muon, config.muon_rate), adam(others, config.adam_rate)])


def train_unet(config: Config, world: World) -> None:
    """Runs stage 4; writes `unet.pt`."""
    stage, scheduler = unet_stage(config, world), build_scheduler()
    latents = np.load(rank_pool(Path(config.out), world))
    scenes, batch = pool_scenes(config, world), config.unet_batch // world.size
    layouts = np.stack([draw_layout(things) for things in scenes]).astype(np.float16)

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        picked = rng.integers(len(latents), size=batch)
        captions = training_captions([scenes[i] for i in picked], rng, config.wordings)
        dropped = rng.random(batch) < config.caption_dropout
        ids = token_ids(["" if drop else c for c, drop in zip(captions, dropped, strict=True)])
        timesteps = draw_timesteps(batch, rng, config.lean * (1 - stage.progress))
        clean: Any = torch.from_numpy(latents[picked]).float()
        noise: Any = torch.from_numpy(rng.standard_normal(clean.shape, dtype=np.float32))
        noisy = scheduler.add_noise(clean, noise, cast("Any", timesteps))
        target = scheduler.get_velocity(clean, noise, cast("Any", timesteps)).to(world.device)
        with mixed_precision(world):
            velocity = stage.module(noisy.to(world.device), timesteps.to(world.device), ids.to(world.device))
        layout = torch.from_numpy(layouts[picked]).float().to(world.device)
        where, what = stage.module.positions.losses(layout)
        error = (velocity.float() - target).square().mean()
        loss = error + config.positions * where + config.layout * what
        return loss, f"error {error:.4f} where {where:.3f} what {what:.3f}"

    stage.run(loss_of)
    world.say(f"unet done: {stage.step} steps of {config.unet_batch}, {stage.spent:.1f} minutes")


# --- stages 5 and 6 ---------------------------------------------------------------------------------------------------


def export(config: Config, world: World) -> None:
    """Runs stage 5: saves the stock pipeline folder `export/`, float16 safetensors."""
    if world.rank:
        return
    out = Path(config.out)
    model = Painter(config.width, config.depth)
    model.load_state_dict(read_average(out / "unet.pt"))
    pipeline = StableDiffusionPipeline(
        vae=cast("Any", AutoencoderKL.from_pretrained(out / "vae")),
        text_encoder=model.text.clip,
        tokenizer=build_tokenizer(),
        unet=model.unet,
        scheduler=cast("Any", build_scheduler()),
        safety_checker=cast("Any", None),
        feature_extractor=cast("Any", None),
        requires_safety_checker=False,
    )
    save_pipeline(pipeline, out / "export")
    pipeline.tokenizer.backend_tokenizer.model.save(str(out / "export" / "tokenizer"))  # vocab.json and merges.txt


def evaluate(config: Config, world: World) -> None:
    """Runs stage 6: measures `export/` on fresh captions with the stock sampler; writes facts and samples."""
    if world.rank:
        return
    out, started = Path(config.out), time.time()
    pipeline = DiffusionPipeline.from_pretrained(out / "export").to(world.device)
    pipeline.set_progress_bar_config(disable=True)
    knobs = {"num_inference_steps": config.steps, "guidance_scale": config.guidance}
    result = score(pipeline, config.captions, seed=config.seed, **knobs)
    report = {
        "captions": config.captions,
        **knobs,
        **result.report(),
        "seconds": round(time.time() - started, 1),
    }
    file_report(out / "facts.json", report)
    result.save_grid(out / "samples.png")


def run(config: Config, world: World) -> None:
    """Runs the stages of the configuration."""
    if config.start:
        started_painter(config)  # A wrong folder ends here, before any work.
    runners = (train_autoencoder, encode_pool, train_text, train_unet, export, evaluate)
    run_stages(config, world, dict(zip(STAGES, runners, strict=True)))


def main() -> None:
    """Runs the recipe."""
    run_recipe(Config, __doc__, run)


if __name__ == "__main__":
    main()
