"""Trains `shapes-experts`: four experts apart, each on a cluster of the scenes of `shapes`, and a router between them.

Every expert begins as the shipped transformer of `shapes` and learns changes of low rank on its own cluster, apart from
the others. A monolith learns as many numbers from all scenes in as many steps as all experts together. There are seven
stages:

1. `pool`: draws scenes once and encodes them;
2. `clusters`: sorts them by k-means of their mean latents;
3. `experts`: trains one expert after the other; each could as well be trained on a machine of its own;
4. `monolith`: trains the monolith;
5. `router`: two layers learn which cluster a noisy latent is of, from it, the timestep and the caption;
6. `export`: what `put_experts` reads goes to `export/`, and the monolith to `monolith.safetensors`;
7. `evaluate`: reads facts of the monolith and of the mixture, and counts how often the router is right at each noise
   level.

Run on one core:  OMP_NUM_THREADS=1 python zoo/recipes/train_shapes_experts.py --out runs/shapes-experts

Every step draws its data and noise from (seed, step), so a stage that was stopped continues from its checkpoint with
exactly the steps it would have made.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from partsong import zoo
from partsong_zoo.shapes.grammar import describe
from partsong_zoo.shapes.model import Generator, draw_sigmas, token_ids
from partsong_zoo.shapes.pool import build_pool, draw_scenes, encode, load_pool, shipped_model
from partsong_zoo.shapes.scenes import Thing, generator
from partsong_zoo.shapes.scoring import score
from partsong_zoo.shapes_experts.clusters import Clusters, find_clusters
from partsong_zoo.shapes_experts.loading import changed_transformer, put_experts, save_changes, save_experts
from partsong_zoo.shapes_experts.low_rank import LowRankChanges
from partsong_zoo.training.common import World, mixed_precision
from partsong_zoo.training.recipe import file_report, run_recipe
from partsong_zoo.training.stage import TrainingStage, adam, read_average, run_stages

STAGES: tuple[str, ...] = ("pool", "clusters", "experts", "monolith", "router", "export", "evaluate")
#: First integers of the keys of random draws.
POOL, CLUSTERS, EXPERT, MONOLITH, ROUTER, FRESH = 161, 162, 163, 164, 165, 166
#: Noise levels at which the router is measured.
LEVELS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.4, 0.2)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/shapes-experts"  # The folder for everything that is written.
    stages: str = ",".join(STAGES)  # The stages to run, with commas between.
    seed: int = 0  # The seed of all draws.
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # Where to train: cpu or cuda.
    save_minutes: float = 1.0  # Minutes between checkpoints.
    pool_size: int = 24_000  # Encoded examples.
    experts: int = 4  # Experts, one for each cluster.
    steps: int = 1600  # Steps of all experts together, and of the monolith.
    batch: int = 96  # Pictures per step.
    rank: int = 16  # Rank of an expert's changes; the monolith's is that of all experts together.
    rate: float = 1.5e-3  # Peak learning rate of experts and monolith.
    router_steps: int = 1000  # Steps of the router.
    router_batch: int = 96  # Pictures per step of the router.
    router_heads: int = 4  # Its attention heads.
    router_rate: float = 2e-3  # Its peak learning rate.
    shift: float = 3.0  # The scheduler's shift towards noise.
    caption_dropout: float = 0.1  # Share of empty captions, for guidance.
    top_k: int = 1  # Experts asked for a sample.
    temperature: float = 1.0  # What the router's logits are divided by.
    captions: int = 100  # Fresh captions to evaluate.
    scenes: int = 500  # Fresh scenes to ask the router about.
    denoising_steps: int = 28  # Denoising steps to evaluate with.


# --- stages 1 and 2: encoded scenes and their clusters ----------------------------------------------------------------


def pool_scenes(config: Config) -> list[list[Thing]]:
    """Draws the scenes, the same at every call."""
    return draw_scenes(config.pool_size, POOL, config.seed)


def encode_pool(config: Config, world: World) -> None:
    """Runs stage 1: writes `pool.npy`, float16."""
    build_pool(Path(config.out) / "pool.npy", pool_scenes(config), world)


def read_pool(config: Config) -> NDArray[np.float16]:
    """Reads what stage 1 has written."""
    return load_pool(Path(config.out) / "pool.npy", pool_scenes(config))


def sort_clusters(config: Config, world: World) -> None:
    """Runs stage 2: writes `clusters.npz`."""
    path = Path(config.out) / "clusters.npz"
    if path.exists():
        return
    latents = read_pool(config)
    clusters = find_clusters(latents, config.experts, seed=CLUSTERS + config.seed)
    sizes = np.bincount(clusters.labels(latents), minlength=config.experts)
    world.say(f"clusters of {', '.join(map(str, sizes))} scenes")
    with path.with_suffix(".new").open("wb") as file:
        np.savez(file, mean=clusters.mean, scale=clusters.scale, centres=clusters.centres)
    path.with_suffix(".new").replace(path)


def read_clusters(config: Config) -> Clusters:
    """Reads what stage 2 has written."""
    with np.load(Path(config.out) / "clusters.npz") as saved:
        return Clusters(**saved)


# --- stages 3 to 5: experts, monolith, router -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Draws noisy latents with captions.

    Attributes:
        latents: Clean latents.
        scenes: What they show.
        config: The recipe's.
    """

    latents: NDArray[np.float16]
    scenes: list[list[Thing]]
    config: Config

    def draw(self, rows: NDArray[Any], rng: np.random.Generator, device: torch.device) -> dict[str, Tensor]:
        """Returns clean latents, noise, and the arguments of `Generator` for some rows."""
        captions = [describe(self.scenes[row], rng) or "" for row in rows]
        dropped = rng.random(len(rows)) < self.config.caption_dropout
        ids = token_ids(["" if drop else c for c, drop in zip(captions, dropped, strict=True)])
        clean = torch.from_numpy(self.latents[rows]).float()
        sigma, noise = draw_sigmas(len(rows), self.config.shift), torch.randn_like(clean)
        level, nulls = sigma[:, None, None, None], torch.where(torch.rand(len(rows)) < 0.5, 1, 256)
        drawn = {"clean": clean, "noise": noise, "noisy": (1 - level) * clean + level * noise}
        drawn |= {"sigma": sigma, "ids": ids, "nulls": nulls}
        return {name: tensor.to(device) for name, tensor in drawn.items()}


def train_changes(config: Config, world: World, name: str, rows: NDArray[Any], rank: int, steps: int) -> None:
    """Trains changes of the shipped transformer on some rows of the pool; writes `NAME.pt`."""
    torch.manual_seed(config.seed)
    model = shipped_model(world)
    changes = LowRankChanges.of(model.transformer, rank=rank).to(world.device)
    number = int(name.rpartition("-")[2]) if name.startswith("expert-") else 0
    stage = TrainingStage(
        world,
        Path(config.out) / f"{name}.pt",
        changes,
        [adam(list(changes.parameters()), config.rate)],
        key=(EXPERT if name.startswith("expert-") else MONOLITH, config.seed, number),
        steps=steps,
        save_minutes=config.save_minutes,
        report_every=20,
    )
    examples = Examples(latents=read_pool(config), scenes=pool_scenes(config), config=config)

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        drawn = examples.draw(rows[rng.integers(len(rows), size=config.batch)], rng, world.device)
        with mixed_precision(world):
            velocity = model(drawn["noisy"], drawn["sigma"], drawn["ids"], drawn["nulls"])
        return (velocity.float() - (drawn["noise"] - drawn["clean"])).square().mean(), ""

    with changes.attached(model.transformer):
        stage.run(loss_of)


def train_experts(config: Config, world: World) -> None:
    """Runs stage 3; writes `expert-0.pt` and so on."""
    labels = read_clusters(config).labels(read_pool(config))
    for number in range(config.experts):
        rows = (labels == number).nonzero()[0]
        train_changes(config, world, f"expert-{number}", rows, config.rank, config.steps // config.experts)


def train_monolith(config: Config, world: World) -> None:
    """Runs stage 4; writes `monolith.pt`."""
    rows = np.arange(config.pool_size)
    train_changes(config, world, "monolith", rows, config.rank * config.experts, config.steps)


def new_router(config: Config, world: World) -> Generator:
    """Makes an untrained router: a transformer of two layers that returns a channel for every expert."""
    torch.manual_seed(config.seed)
    router, base = Generator(config.router_heads, 2, config.experts), shipped_model(world)
    router.text = base.text
    return router.to(world.device)


def train_router(config: Config, world: World) -> None:
    """Runs stage 5; writes `router.pt`."""
    router = new_router(config, world)
    stage = TrainingStage(
        world,
        Path(config.out) / "router.pt",
        router.transformer,
        [adam(list(router.transformer.parameters()), config.router_rate, decay=0.01)],
        key=(ROUTER, config.seed),
        steps=config.router_steps,
        save_minutes=config.save_minutes,
    )
    latents = read_pool(config)
    labels = torch.from_numpy(read_clusters(config).labels(latents)).to(world.device)
    examples = Examples(latents=latents, scenes=pool_scenes(config), config=config)

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        rows = rng.integers(config.pool_size, size=config.router_batch)
        drawn = examples.draw(rows, rng, world.device)
        with mixed_precision(world):
            output = router(drawn["noisy"], drawn["sigma"], drawn["ids"], drawn["nulls"])
        logits, wanted = output.float().mean(dim=(2, 3)), labels[torch.from_numpy(rows).to(world.device)]
        right = (logits.argmax(dim=1) == wanted).float().mean()
        return torch.nn.functional.cross_entropy(logits, wanted), f"right {float(right):.2f}"

    stage.run(loss_of)


# --- stages 6 and 7 ---------------------------------------------------------------------------------------------------


def averaged(config: Config, name: str) -> dict[str, Tensor]:
    """Reads the averaged weights of a stage."""
    return read_average(Path(config.out) / f"{name}.pt")


def export(config: Config, world: World) -> None:
    """Runs stage 6: writes `export/` and `monolith.safetensors`."""
    out = Path(config.out)
    experts = [LowRankChanges.read(averaged(config, f"expert-{number}")) for number in range(config.experts)]
    router = new_router(config, world).transformer
    router.load_state_dict(averaged(config, "router"))
    save_experts(experts, router.cpu(), out / "export", top_k=config.top_k, temperature=config.temperature)
    save_changes(LowRankChanges.read(averaged(config, "monolith")), out / "monolith.safetensors")


@torch.no_grad()
def router_accuracy(config: Config, router: Any, *, with_captions: bool) -> dict[str, float]:
    """Returns how often a router names the cluster of fresh scenes at each noise level.

    Args:
        config: The recipe's.
        router: What `put_experts` loads.
        with_captions: Whether it may read them; else they are empty, as in the branch without a caption of guidance.
    """
    base = shipped_model(World("cpu"))
    scenes = draw_scenes(config.scenes, FRESH, config.seed)
    latents = encode(zoo.load("shapes").vae, scenes)
    labels = torch.from_numpy(read_clusters(config).labels(latents))
    rng = generator(FRESH, config.seed)
    ids = token_ids([(describe(things, rng) or "") if with_captions else "" for things in scenes])
    tokens, pooled = base.text(ids)
    tokens = torch.cat([tokens, torch.zeros_like(tokens[:, :1])], dim=1)
    clean = torch.from_numpy(latents).float()
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(config.seed))
    shares = {}
    for level in LEVELS:
        noisy, time = (1 - level) * clean + level * noise, torch.full((len(clean),), 1000 * level)
        logits = router(noisy, tokens, pooled, time).sample.mean(dim=(2, 3))
        shares[f"{level:g}"] = round(float((logits.argmax(dim=1) == labels).float().mean()), 4)
    return shares


def evaluate(config: Config, world: World) -> None:
    """Runs stage 7; writes `facts.json`."""
    out, row = Path(config.out), zoo.MODELS["shapes"]
    knobs = {**row.defaults, "num_inference_steps": config.denoising_steps}
    report: dict[str, Any] = {"captions": config.captions, **knobs}
    for name in ("monolith", "experts"):
        pipeline = zoo.load("shapes")
        pipeline.set_progress_bar_config(disable=True)
        if name == "monolith":
            pipeline.transformer = changed_transformer(row.folder, out / "monolith.safetensors")
        else:
            put_experts(pipeline, row.folder, out / "export")
            for words, given in (("with captions", True), ("without", False)):
                accuracy = router_accuracy(config, pipeline.transformer.router, with_captions=given)
                report[f"router is right, {words}"] = accuracy
        result = score(pipeline.to(world.device), config.captions, seed=config.seed, **knobs)
        report[name] = {"facts_read": round(result.facts_read, 4), "all_right": round(result.all_right, 4)}
    file_report(out / "facts.json", report)


def run(config: Config, world: World) -> None:
    """Runs the stages of the configuration."""
    training = (encode_pool, sort_clusters, train_experts, train_monolith, train_router)
    runners = dict(zip(STAGES, (*training, export, evaluate), strict=True))
    run_stages(config, world, runners)


def main() -> None:
    """Runs the recipe."""
    run_recipe(Config, __doc__, run)


if __name__ == "__main__":
    main()
