"""Trains `shapes`, the zoo's text-to-image model, from nothing: "a red circle left of a blue square" at 64 x 64.

The result is a stock Stable-Diffusion-3 pipeline folder that `DiffusionPipeline.from_pretrained` loads. Four stages,
each resumable and skipped when its result is there:

1. `vae`: a small convolutional autoencoder (a 4 x 16 x 16 latent), trained on scenes drawn on the fly;
2. `pool`: scenes drawn once and encoded, so that the long stage never runs the encoder;
3. `text`: two small CLIP text encoders learn to tell a caption's facts, so that attribute binding is there early;
4. `flow`: the transformer learns rectified flow on the latents, captions worded afresh at every use.

Run on a GPU or one core:    python recipes/train_shapes.py --out runs/shapes
Run on two or more cores:    torchrun --nproc-per-node 2 recipes/train_shapes.py --out runs/shapes
Measure an exported folder:  python recipes/train_shapes.py --stages evaluate --out runs/shapes --captions 200

One thread per process and several processes (gradients averaged over gloo) beat many threads on a busy CPU. Data,
weights and noise follow `--seed` and the number of processes. Every stage ends at its number of steps or minutes,
whichever comes first, and its learning rate falls to zero by then; the minutes only matter when they are made short.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import tyro
from diffusers import AutoencoderKL, DiffusionPipeline, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from diffusers.models.attention_processor import JointAttnProcessor2_0
from PIL import Image
from torch import Tensor, nn

from partsong.zoo.shapes.comprehension import build_heads, text_loss
from partsong.zoo.shapes.drawing import paint
from partsong.zoo.shapes.grammar import describe
from partsong.zoo.shapes.model import (
    Generator,
    TextEncoders,
    build_silent_encoder,
    build_silent_tokenizer,
    build_tokenizer,
    build_vae,
    draw_sigmas,
    token_ids,
    vae_loss,
)
from partsong.zoo.shapes.scenes import Thing, draw_things, generator
from partsong.zoo.shapes.scoring import score
from partsong.zoo.training import Average, World, mixed_precision, schedule

PLAIN: dict[str, Any] = dict.fromkeys(("mid_block_add_attention", "use_quant_conv", "use_post_quant_conv"), False)
STAGES: tuple[str, ...] = ("vae", "pool", "text", "flow", "evaluate")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/shapes"
    stages: str = ",".join(STAGES[:4])
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    vae_steps: int = 1050
    vae_minutes: float = 60.0
    vae_batch: int = 16
    vae_channels: int = 16
    pool_size: int = 60_000
    text_steps: int = 570
    text_minutes: float = 60.0
    text_batch: int = 128
    flow_steps: int = 2410
    flow_minutes: float = 600.0
    flow_batch: int = 96
    heads: int = 6
    depth: int = 6
    muon_rate: float = 3e-3
    adam_rate: float = 1.2e-3
    shift: float = 3.0
    caption_dropout: float = 0.1
    export_minutes: float = 10.0
    captions: int = 60
    steps: int = 28
    guidance: float = 5.0
    nulls: int = 1


def pictures(scenes: list[list[Thing]]) -> Tensor:
    """Draws scenes: `[batch, 3, 64, 64]` in [-1, 1]."""
    array = np.stack([paint(things) for things in scenes])
    return torch.from_numpy(array).permute(0, 3, 1, 2).float() / 127.5 - 1.0


# --- stage 1: the autoencoder -----------------------------------------------------------------------------------------


def train_vae(config: Config, world: World) -> None:
    """Stage 1; writes `vae/` with the latent's mean and scale in its configuration."""
    if (Path(config.out) / "vae" / "config.json").exists():
        return
    torch.manual_seed(config.seed)
    vae: Any = build_vae(config.vae_channels, **PLAIN).to(world.device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    torch.manual_seed(1000 * config.seed + world.rank)
    start, progress = time.time(), 0.0
    for step in range(config.vae_steps):
        if step % 10 == 0:
            progress = max(step / config.vae_steps, world.minutes(start) / config.vae_minutes)
        if progress >= 1:
            break
        optimizer.param_groups[0]["lr"] = 2e-3 * schedule(progress)
        rng = generator(11, config.seed, world.rank, step)
        images = pictures([draw_things(rng) for _ in range(config.vae_batch)]).to(world.device)
        # Convolutions this narrow gain nothing from bfloat16 on a CPU.
        with mixed_precision(world, enabled=world.device.type == "cuda"):
            loss, mse = vae_loss(vae, images.contiguous(memory_format=torch.channels_last))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        world.average(list(vae.parameters()))
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            world.say(f"vae {step} {progress:.2f} loss {loss.item():.4f} psnr {10 * math.log10(4 / mse):.1f} dB")
    if world.rank == 0:
        finish_vae(config, vae)


@torch.no_grad()
def finish_vae(config: Config, vae: Any) -> None:
    """Measures latent statistics and quality on new scenes, and saves."""
    rng = generator(12, config.seed)
    images = pictures([draw_things(rng) for _ in range(256)]).to(vae.device)
    mean = vae.encode(images).latent_dist.mean
    mse = (vae.decode(mean).sample.clamp(-1, 1) - images).square().mean(dim=(1, 2, 3))
    vae.register_to_config(shift_factor=float(mean.mean()), scaling_factor=float(1 / mean.std()))
    vae.save_pretrained(Path(config.out) / "vae")
    print(f"vae saved: {float((10 * torch.log10(4 / mse)).mean()):.2f} dB on {len(images)} new scenes")


# --- stage 2: the pool of encoded scenes ------------------------------------------------------------------------------


def pool_scenes(config: Config, world: World) -> list[list[Thing]]:
    """This rank's share of the scenes, the same at every call."""
    share = config.pool_size // world.size
    return [draw_things(generator(13, config.seed, world.rank, index)) for index in range(share)]


@torch.no_grad()
def build_pool(config: Config, world: World) -> None:
    """Stage 2: encodes this rank's scenes into `pool-RANK-of-SIZE.npy`, float16, normalised."""
    path = Path(config.out) / f"pool-{world.rank}-of-{world.size}.npy"
    if path.exists():
        return
    vae = cast("Any", AutoencoderKL.from_pretrained(Path(config.out) / "vae")).to(world.device)
    scenes, parts = pool_scenes(config, world), []
    for first in range(0, len(scenes), 64):
        images = pictures(scenes[first : first + 64]).to(world.device)
        mean = vae.encode(images).latent_dist.mean
        latents = (mean - vae.config.shift_factor) * vae.config.scaling_factor
        parts.append(latents.cpu().half().numpy())
        if first % 6400 == 0:
            world.say(f"pool {first} of {len(scenes)}")
    np.save(path, np.concatenate(parts))


# --- stage 3: the text encoders ---------------------------------------------------------------------------------------


def training_captions(scenes: list[list[Thing]], rng: np.random.Generator) -> list[str]:
    """One caption per scene, freshly worded, never a held-out one."""
    return [describe(things, rng) or "" for things in scenes]


def train_text(config: Config, world: World) -> None:
    """Stage 3; writes `text.pt`."""
    path = Path(config.out) / "text.pt"
    if path.exists():
        return
    torch.manual_seed(config.seed)
    text = TextEncoders().to(world.device)
    heads = build_heads().to(world.device)
    parameters = [*text.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    start, progress = time.time(), 0.0
    for step in range(config.text_steps):
        if step % 10 == 0:
            progress = max(step / config.text_steps, world.minutes(start) / config.text_minutes)
        if progress >= 1:
            break
        optimizer.param_groups[0]["lr"] = 2e-3 * schedule(progress)
        rng = generator(15, config.seed, world.rank, step)
        captions = [c for c in training_captions([draw_things(rng) for _ in range(config.text_batch)], rng) if c]
        loss, exact = text_loss(text, heads, captions)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        world.average(parameters)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 50 == 0:
            world.say(f"text {step} {progress:.2f} loss {loss.item():.4f} all facts right {exact:.2f}")
    if world.rank == 0:
        torch.save(text.state_dict(), path)


# --- stage 4: the transformer -----------------------------------------------------------------------------------------


class Flow:
    """The state of stage 4: model, average, optimizers, step; it saves and resumes."""

    def __init__(self, config: Config, world: World) -> None:
        torch.manual_seed(config.seed)
        self.config, self.world = config, world
        model = Generator(config.heads, config.depth)
        model.text.load_state_dict(torch.load(Path(config.out) / "text.pt", weights_only=True))
        self.model = model.to(world.device)
        self.average = Average(self.model)
        self.parameters = list(self.model.parameters())
        blocks = self.model.transformer.transformer_blocks
        matrices = [p for n, p in blocks.named_parameters() if p.ndim == 2 and ("attn." in n or "ff" in n)]
        chosen = {id(p) for p in matrices}
        others = [p for p in self.parameters if id(p) not in chosen]
        # Orthogonalised momentum for the products inside the blocks, Adam for embeddings, modulation and text.
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=config.muon_rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=config.adam_rate, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.step, self.spent = 0, 0.0
        self.path = Path(config.out) / "flow.pt"
        if self.path.exists():
            self._resume()

    def _resume(self) -> None:
        state = torch.load(self.path, map_location=self.world.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average.module.load_state_dict(state["average"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.spent, self.average.count = state["step"], state["spent"], state["step"]
        self.world.say(f"resumed at step {self.step}")

    def save(self) -> None:
        """Writes the checkpoint (replacing the old one at once) and the pipeline folder, on rank 0."""
        if self.world.rank:
            return
        state = {
            "model": self.model.state_dict(),
            "average": self.average.module.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "spent": self.spent,
        }
        torch.save(state, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)
        export(self.config, self.average.module)

    def update(self, latents: Tensor, ids: Tensor, rate: float) -> float:
        """One training step on one batch, at `rate` times the peak learning rates; the loss before it."""
        sigma = draw_sigmas(len(latents), self.config.shift).to(latents.device)
        nulls = torch.where(torch.rand(len(latents)) < 0.5, 1, 256).to(latents.device)
        noise = torch.randn_like(latents)
        level = sigma[:, None, None, None]
        with mixed_precision(self.world):
            velocity = self.model((1 - level) * latents + level * noise, sigma, ids, nulls)
        loss = (velocity.float() - (noise - latents)).square().mean()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.world.average(self.parameters)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer, peak in zip(self.optimizers, (self.config.muon_rate, self.config.adam_rate), strict=True):
            optimizer.param_groups[0]["lr"] = rate * peak
            optimizer.step()
        self.step += 1
        if self.world.rank == 0:
            self.average.update(self.model)
        return float(loss.detach())


def train_flow(config: Config, world: World) -> None:
    """Stage 4; writes `flow.pt` and `export/` every `export_minutes` and at the end."""
    flow = Flow(config, world)
    latents = np.load(Path(config.out) / f"pool-{world.rank}-of-{world.size}.npy")
    scenes = pool_scenes(config, world)
    batch = config.flow_batch // world.size
    torch.manual_seed(1000 * config.seed + 10 * flow.step + world.rank)
    start, before, exported, losses, progress = time.time(), flow.spent, flow.spent, [], 0.0
    while True:
        if flow.step % 10 == 0:
            flow.spent = before + world.minutes(start)
            progress = max(flow.step / config.flow_steps, flow.spent / config.flow_minutes)
        if progress >= 1:
            break
        rng = generator(14, config.seed, world.rank, flow.step)
        picked = rng.integers(len(latents), size=batch)
        captions = training_captions([scenes[i] for i in picked], rng)
        dropped = rng.random(batch) < config.caption_dropout
        ids = token_ids(["" if drop else c for c, drop in zip(captions, dropped, strict=True)])
        clean = torch.from_numpy(latents[picked]).float().to(world.device)
        losses.append(flow.update(clean, ids.to(world.device), schedule(progress)))
        if flow.step % 50 == 0:
            world.say(
                f"flow {flow.step} {progress:.3f} loss {np.mean(losses):.4f} "
                f"{flow.step * config.flow_batch / max(60 * flow.spent, 1):.1f} samples/s"
            )
            losses.clear()
        if flow.step % 10 == 0 and flow.spent - exported >= config.export_minutes:
            flow.save()
            exported = flow.spent
    flow.save()
    world.say(f"flow done: {flow.step} steps of {config.flow_batch}, {flow.spent:.1f} minutes")


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
    folder = Path(config.out) / "export"
    pipeline.to(dtype=torch.float16).save_pretrained(folder)
    # Transformers loads the type its configuration names, diffusers float32; a plain call must get one type.
    for path in folder.glob("*/config.json"):
        settings = {k: v for k, v in json.loads(path.read_text()).items() if k != "_name_or_path"}
        if path.parent.name.startswith("text_encoder"):
            settings["dtype"] = "float32"
        path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


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
        "facts_read": round(result.facts_read, 4),
        "all_right": round(result.all_right, 4),
        "by_kind": {kind: [round(share, 4), count] for kind, (share, count) in result.by_kind().items()},
        "seconds": round(time.time() - started, 1),
    }
    (out / "facts.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    grid = Image.fromarray(np.rint(result.grid() * 255).astype(np.uint8))
    grid.resize((2 * grid.width, 2 * grid.height), Image.Resampling.NEAREST).save(out / "samples.png")


def main() -> None:
    """Runs the stages asked for."""
    config = tyro.cli(Config, description=cast("str", __doc__).splitlines()[0])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    world = World(config.device)
    Path(config.out).mkdir(parents=True, exist_ok=True)
    runners = dict(zip(STAGES, (train_vae, build_pool, train_text, train_flow, evaluate), strict=True))
    for stage in config.stages.split(","):
        runners[stage](config, world)
        if world.size > 1:
            dist.barrier()


if __name__ == "__main__":
    main()
