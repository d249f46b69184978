"""Trains `motion` and `motion-causal`, the zoo's text-to-video models, from nothing: "a red circle moves right".

The results are stock folders that `DiffusionPipeline.from_pretrained` loads: a Wan pipeline that sees all frames at
once, and one with a SkyReels-V2 transformer, whose blocks of frames see themselves and earlier ones. The stages:

1. `vae`: trains an AutoencoderKLWan (4 channels, 8 x 8 latents, half the frames) on videos drawn on the fly;
2. `decoder`: only its decoder keeps learning, so that the latents stay as they are; this may also run after the others;
3. `pool`: draws long motions once and encodes them, so that the long stages never run the encoder;
4. `text`: the UMT5 encoder learns to tell the facts of a caption, so that it binds attributes early;
5. `motion`: transformer and text encoder learn rectified flow on windows cut anywhere from the pool, short ones first;
6. `causal`: a copy learns the same with the block-causal mask, one noise level for all blocks, text encoder fixed;
7. `distil`: the copy learns to do with one guidance-free step what several guided steps do, four steps in all;
8. `halve`: it learns to do with one step what two of these do, two steps in all;
9. `force`: it makes whole clips, which move to where `motion` finds them likelier than a model of such clips does;
10. `export`: the averaged weights so far become `export/motion/` and `export/motion-causal/`, also while stages run;
11. `evaluate`: samples fresh captions from these folders and reads their facts back.

Run on a GPU or one core:    python zoo/recipes/train_motion.py --out runs/motion
Run on two or more cores:    torchrun --nproc-per-node 2 zoo/recipes/train_motion.py --out runs/motion
Look at it while it trains:  python zoo/recipes/train_motion.py --out runs/motion --stages export,evaluate
Continue from a folder:      python zoo/recipes/train_motion.py --out runs/motion --start FOLDER

Every step draws its data and noise from (seed, rank, step), so a stage that was stopped continues from its checkpoint
with exactly the steps it would have made (only the last bits differ, as fast kernels' sums do from run to run). A stage
ends at its number of steps or minutes, whichever comes first, and its learning rate falls to zero by then. By default
only the steps count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from partsong.knobs import Share
from partsong_zoo.folders import begin_with, pipeline_to_begin_with, save_pipeline
from partsong_zoo.motion.clips import encode_clip
from partsong_zoo.motion.distillation import distillation_loss
from partsong_zoo.motion.forcing import Forcing, own_clip
from partsong_zoo.motion.grammar import describe, training_scene
from partsong_zoo.motion.model import BLOCK, TEXT_LENGTH, build_pipeline, build_vae, decoder_loss, vae_loss
from partsong_zoo.motion.pool import KEPT, build_pool, draw_clip, load_autoencoder, load_pool, settle_statistics
from partsong_zoo.motion.scoring import score
from partsong_zoo.motion.training import (
    Animator,
    Clip,
    ClipPool,
    Comprehension,
    draw_clips,
    draw_lookback,
    draw_noise,
    flow_loss,
    window_length,
)
from partsong_zoo.training.common import Optimizers, World, mixed_precision
from partsong_zoo.training.recipe import file_report, run_recipe
from partsong_zoo.training.stage import TrainingStage, adam, inside_matrices, muon_and_adam, read_average, run_stages

STAGES: tuple[str, ...] = (
    *("vae", "decoder", "pool", "text", "motion"),
    *("causal", "distil", "halve", "force"),
    *("export", "evaluate"),
)
#: Denoising steps of `motion-causal` after each of its last stages.
FEW_STEPS = {"distil": 4, "halve": 2, "force": 2}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/motion"  # The folder for everything that is written.
    stages: str = ",".join(STAGES)  # The stages to run, with commas between.
    seed: int = 0  # The seed of all draws.
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # Where to train: cpu or cuda.
    save_minutes: float = 3.0  # Minutes between checkpoints.
    start: str = ""  # A folder of `motion` of the same sizes to begin stages 2 and 5 with, without 1 and 4.
    vae_steps: int = 1400  # Most steps of stage `vae`.
    vae_minutes: float = 600.0  # Most minutes of stage `vae`.
    vae_batch: int = 2  # Videos per step and rank.
    vae_channels: int = 16  # Width of the autoencoder.
    decoder_steps: int = 1000  # Most steps of stage `decoder`.
    decoder_minutes: float = 600.0  # Most minutes of stage `decoder`.
    pool_size: int = 6000  # Encoded examples of all ranks together.
    pairs: Share = 0.25  # Share of the examples that have two objects.
    text_steps: int = 500  # Most steps of stage `text`.
    text_minutes: float = 600.0  # Most minutes of stage `text`.
    text_batch: int = 64  # Captions per step and rank.
    motion_steps: int = 8000  # Most steps of stage `motion`.
    motion_minutes: float = 6000.0  # Most minutes of stage `motion`.
    motion_tokens: int = 256  # Latent frames per step of all ranks.
    heads: int = 6  # Attention heads.
    depth: int = 6  # Layers.
    muon_rate: float = 3e-3  # Peak learning rate of orthogonalised momentum.
    adam_rate: float = 1.2e-3  # Peak learning rate of Adam.
    layout: float = 0.3  # Weight of telling what the clean clip has where, in stages `motion` and `causal`.
    caption_dropout: float = 0.1  # Share of empty captions, for guidance.
    causal_steps: int = 1000  # Most steps of stage `causal`.
    causal_minutes: float = 600.0  # Most minutes of stage `causal`.
    distil_steps: int = 600  # Most steps of stage `distil`.
    distil_minutes: float = 600.0  # Most minutes of stage `distil`.
    distil_tokens: int = 256  # Latent frames per step of `distil`.
    substeps: int = 2  # The teacher's steps per step of the student.
    halve_steps: int = 300  # Most steps of stage `halve`.
    halve_minutes: float = 600.0  # Most minutes of stage `halve`.
    force_steps: int = 300  # Most steps of stage `force`.
    force_minutes: float = 600.0  # Most minutes of stage `force`.
    force_rate: float = 3e-5  # The student's peak learning rate in stage `force`; its clips' model has four times that.
    force_guidance: float = 2.0  # The guidance of `motion` in stage `force`.
    captions: int = 60  # Fresh captions to evaluate.
    steps: int = 20  # Denoising steps to evaluate with.
    guidance: float = 2.0  # Guidance scale to evaluate with.


def new_stage(config: Config, world: World, name: str, module: nn.Module, optimizers: Optimizers) -> TrainingStage:
    """Makes a stage with its limits and key from the configuration, resumed if it has a checkpoint."""
    return TrainingStage(
        world,
        Path(config.out) / f"{name}.pt",
        module,
        optimizers,
        key=(STAGES.index(name) + 51, config.seed, world.rank),
        steps=getattr(config, f"{name}_steps"),
        minutes=getattr(config, f"{name}_minutes"),
        save_minutes=config.save_minutes,
    )


# --- stages 1 to 3: the autoencoder and the pool of encoded motions -------------------------------------------------


def train_vae(config: Config, world: World) -> None:
    """Runs stage 1; writes `vae.pt` and `vae/`, whose configuration holds the latents' means and deviations."""
    if (Path(config.out) / "vae" / "config.json").exists():
        return
    if config.start:
        pipeline_to_begin_with(config.start, "vae").vae.save_pretrained(Path(config.out) / "vae")
        return
    torch.manual_seed(config.seed)
    vae: Any = build_vae(config.vae_channels).to(world.device)
    outer = ("encoder.conv_in.weight", "decoder.conv_out.weight")
    inside = [p for n, p in vae.named_parameters() if p.ndim >= 4 and n not in outer]
    stage = new_stage(config, world, "vae", vae, muon_and_adam(vae, inside, (2e-3, 2e-3), 0.0))

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        first = int(rng.integers(1, 6)) if rng.random() < 0.6 else 0
        loss, mse = vae_loss(vae, draw_clips(rng, config.vae_batch, 21).to(world.device), first, 6)
        return loss, f"psnr {10 * math.log10(4 / mse):.1f} dB"

    stage.run(loss_of)
    if world.rank == 0:
        averaged: Any = stage.average.module
        quality, num = settle_statistics(averaged, config.seed)
        averaged.save_pretrained(Path(config.out) / "vae")
        print(f"vae saved: {quality:.2f} dB on {num} new videos")


def train_decoder(config: Config, world: World) -> None:
    """Runs stage 2; writes `decoder.pt`."""
    vae = load_autoencoder(Path(config.out)).to(world.device).requires_grad_(False)
    both = nn.ModuleList([vae.decoder, vae.post_quant_conv]).requires_grad_(True)
    inside = [p for n, p in both.named_parameters() if p.ndim >= 4 and n != "0.conv_out.weight"]
    stage = new_stage(config, world, "decoder", both, muon_and_adam(both, inside, (1e-3, 1e-3), 0.0))

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        first, video = int(rng.integers(0, 6)), draw_clips(rng, config.vae_batch, 21).to(world.device)
        with torch.no_grad():
            mean = encode_clip(vae, video).chunk(2, dim=1)[0]
        loss, mse = decoder_loss(vae, mean, video, first, 6)
        return loss, f"psnr {10 * math.log10(4 / mse):.1f} dB"

    stage.run(loss_of)


def pool_clips(config: Config, world: World) -> list[Clip]:
    """Draws this rank's clips."""
    num = config.pool_size // world.size
    return [draw_clip(config.seed, world.rank, index, config.pairs) for index in range(num)]


def encode_pool(config: Config, world: World) -> None:
    """Runs stage 3: encodes this rank's clips into `pool-RANK-of-SIZE.npy`."""
    build_pool(Path(config.out), pool_clips(config, world), world)


# --- stages 4 and 5: text, and the transformer that sees all frames ---------------------------------------------------


def train_text(config: Config, world: World) -> None:
    """Runs stage 4; writes `text.pt`."""
    if config.start or (Path(config.out) / "motion.pt").exists():
        return
    torch.manual_seed(config.seed)
    module = Comprehension().to(world.device)

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        loss, right = module([describe(training_scene(rng), rng) for _ in range(config.text_batch)])
        return loss, f"all facts at a word {right:.2f}"

    new_stage(config, world, "text", module, [adam(list(module.parameters()), 2e-3)]).run(loss_of)


def started_animator(config: Config) -> Animator:
    """Makes the model with the weights of the pipeline to begin with."""
    model = Animator(config.heads, config.depth)
    pipeline = pipeline_to_begin_with(config.start, "vae", "text_encoder", "transformer")
    begin_with(config.start, model.text, pipeline.text_encoder)
    begin_with(config.start, model.transformer, pipeline.transformer)
    return model


def motion_stage(config: Config, world: World) -> TrainingStage:
    """Makes stage 5, fresh with the text encoder of stage 4 or from the pipeline to begin with, or resumed."""
    torch.manual_seed(config.seed)
    if config.start:
        model = started_animator(config)
    else:
        model = Animator(config.heads, config.depth)
        model.text.load_state_dict(read_average(Path(config.out) / "text.pt", "encoder"))
    model = model.to(world.device)
    rates, inside = (config.muon_rate, config.adam_rate), inside_matrices(model.transformer, "blocks.")
    return new_stage(config, world, "motion", model, muon_and_adam(model, inside, rates, 0.02))


def own_pool(config: Config, world: World) -> ClipPool:
    """Loads this rank's clips."""
    return load_pool(Path(config.out), pool_clips(config, world), world)


def train_motion(config: Config, world: World) -> None:
    """Runs stage 5; writes `motion.pt`."""
    stage, pool = motion_stage(config, world), own_pool(config, world)

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        length = window_length(1.0 if config.start else stage.progress, rng)
        num = max(1, config.motion_tokens // length // world.size)
        windows = pool.draw(rng, num, length, config.caption_dropout)
        with mixed_precision(world):
            loss, note = flow_loss(stage.module, windows, rng, config.layout)
        return loss, f"{note} of {length} latents"

    stage.run(loss_of)
    world.say(f"motion done: {stage.step} steps, {stage.spent:.1f} minutes")


# --- stages 6 to 9: the causal transformer ----------------------------------------------------------------------------


def averages(config: Config, stage: str) -> dict[str, Tensor]:
    """Reads the averaged weights at the end of a stage; of stage 9 those of the student."""
    return read_average(Path(config.out) / f"{stage}.pt", "student" if stage == "force" else "")


def animator(config: Config, world: World, stage: str, block: int = BLOCK) -> Animator:
    """Makes a transformer, causal unless `block` is 0, with the weights of a stage and its text encoder fixed."""
    model = Animator(config.heads, config.depth, block)
    model.load_state_dict(averages(config, stage))
    model.text.requires_grad_(False)
    return model.to(world.device)


def train_causal(config: Config, world: World) -> None:
    """Runs stage 6; writes `causal.pt`."""
    torch.manual_seed(config.seed)
    model, pool = animator(config, world, "motion"), own_pool(config, world)
    rates = (0.4 * config.muon_rate, 0.4 * config.adam_rate)
    optimizers = muon_and_adam(model, inside_matrices(model.transformer, "blocks."), rates, 0.0)
    stage = new_stage(config, world, "causal", model, optimizers)
    num = max(1, config.motion_tokens // KEPT // world.size)

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        windows = pool.draw(rng, num, KEPT, config.caption_dropout)
        with mixed_precision(world):
            return flow_loss(stage.module, windows, rng, config.layout, draw_lookback(rng))

    stage.run(loss_of)


def straighten(config: Config, world: World, name: str, start: str, **knobs: Any) -> None:
    """Trains what makes in one step what the model of stage `start` makes in several; writes `NAME.pt`."""
    torch.manual_seed(config.seed)
    teacher = animator(config, world, start).requires_grad_(False)
    model, pool = animator(config, world, start), own_pool(config, world)
    rates = (0.3 * config.muon_rate, 0.3 * config.adam_rate)
    optimizers = muon_and_adam(model, inside_matrices(model.transformer, "blocks."), rates, 0.0)
    stage = new_stage(config, world, name, model, optimizers)
    num = max(1, config.distil_tokens // KEPT // world.size)

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        windows = pool.draw(rng, num, KEPT, 0.0)
        steps = {"lookback": draw_lookback(rng), "num_steps": FEW_STEPS[name]}
        with mixed_precision(world):
            return distillation_loss(model, teacher, windows.clean, windows.ids, rng, **steps, **knobs), ""

    stage.run(loss_of)


def train_distil(config: Config, world: World) -> None:
    """Runs stage 7."""
    straighten(config, world, "distil", "causal", substeps=config.substeps, guidance=config.guidance)


def train_halve(config: Config, world: World) -> None:
    """Runs stage 8."""
    straighten(config, world, "halve", "distil", substeps=2, guidance=1.0)


def train_force(config: Config, world: World) -> None:
    """Runs stage 9; writes `force.pt`."""
    torch.manual_seed(config.seed)
    student, pool = animator(config, world, "halve"), own_pool(config, world)
    teacher, fake = (animator(config, world, "motion", block=0) for _ in range(2))
    teacher.requires_grad_(False)
    rates = (config.force_rate, 4 * config.force_rate)
    optimizers = [adam(list(each.transformer.parameters()), r) for each, r in zip((student, fake), rates, strict=True)]
    stage = new_stage(config, world, "force", nn.ModuleDict({"student": student, "fake": fake}), optimizers)
    num = max(1, config.distil_tokens // KEPT // world.size)
    forcing, num_steps = Forcing(teacher=teacher, guidance=config.force_guidance), FEW_STEPS["force"]

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        windows = pool.draw(rng, num, KEPT, 0.0)
        with mixed_precision(world):
            noise, lookback = draw_noise(windows.clean, rng), draw_lookback(rng)
            steps = {"step": int(rng.integers(num_steps)), "num_steps": num_steps}
            clip = own_clip(student, noise, windows.ids, **steps, lookback=lookback)
            losses = forcing.losses(clip, fake, windows.ids, rng)
        return losses[0] + losses[1], f"fake {losses[1]:.4f}"

    stage.run(loss_of)


# --- stages 10 and 11 -------------------------------------------------------------------------------------------------


def export(config: Config, world: World) -> None:
    """Runs stage 10: saves a stock pipeline folder for every trained model."""
    if world.rank:
        return
    out = Path(config.out)
    for name, stages in (("motion", ("motion",)), ("motion-causal", (*reversed(FEW_STEPS), "causal"))):
        done = [stage for stage in stages if (out / f"{stage}.pt").exists()]
        if done:
            model = Animator(config.heads, config.depth, BLOCK if name == "motion-causal" else 0)
            model.load_state_dict(averages(config, done[0]))
            save_pipeline(build_pipeline(model, load_autoencoder(Path(config.out))), out / "export" / name)


def evaluate(config: Config, world: World) -> None:
    """Runs stage 11: measures the models in `export/` on fresh captions; writes facts and frames of each."""
    if world.rank:
        return
    for folder in sorted((Path(config.out) / "export").iterdir()):
        pipeline: Any = DiffusionPipeline.from_pretrained(folder).to(world.device)
        pipeline.set_progress_bar_config(disable=True)
        few = [steps for stage, steps in FEW_STEPS.items() if (Path(config.out) / f"{stage}.pt").exists()] or [4]
        knobs = {"num_inference_steps": few[-1], "guidance_scale": 1.0} if folder.name == "motion-causal" else {}
        knobs = {"num_inference_steps": config.steps, "guidance_scale": config.guidance} | knobs
        size = {"height": 32, "width": 32, "num_frames": 2 * KEPT - 1, "max_sequence_length": TEXT_LENGTH}
        result = score(pipeline, config.captions, seed=config.seed, **knobs, **size)
        report = {
            "model": folder.name,
            "captions": config.captions,
            **knobs,
            **result.report(),
        }
        file_report(Path(config.out) / f"facts-{folder.name}.json", report)
        result.save_sheet(Path(config.out) / f"samples-{folder.name}.png")


def run(config: Config, world: World) -> None:
    """Runs the stages of the configuration."""
    if config.start:
        started_animator(config)  # A wrong folder ends here, before any work.
    runners = (
        *(train_vae, train_decoder, encode_pool, train_text, train_motion),
        *(train_causal, train_distil, train_halve, train_force, export, evaluate),
    )
    run_stages(config, world, dict(zip(STAGES, runners, strict=True)))


def main() -> None:
    """Runs the recipe."""
    run_recipe(Config, __doc__, run)


if __name__ == "__main__":
    main()
