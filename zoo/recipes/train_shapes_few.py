"""Trains `shapes-few`: what `shapes` draws in 28 guided steps, in one, two or four steps without guidance.

The student begins as the shipped transformer of `shapes`, with more blocks that are silent at first, and its
teacher is that transformer with guidance. There are seven stages; each of 3 to 5 continues from the one before:

1. `pool`: draws scenes once and encodes them;
2. `reader`: a small network learns to read facts from latents;
3. `discrete`: the student learns to predict the same clean sample at two neighbouring points of the teacher's path;
4. `continuous`: the same with the exact derivative along the path (sCM);
5. `matching`: beside that, samples of the student move to where the teacher finds them likelier than a model of the
   student's own samples does (DMD; both together are rCM), and to where the reader finds what their captions ask for;
6. `export`: writes a stock pipeline folder;
7. `evaluate`: reads the facts of fresh pictures in one, two and four steps.

Run on one core:  OMP_NUM_THREADS=1 python zoo/recipes/train_shapes_few.py --out runs/shapes-few
Continue it:      python zoo/recipes/train_shapes_few.py --out runs/on --start DIR --stages pool,reader,matching,export

Every step draws its data and noise from (seed, step), so a stage that was stopped continues from its checkpoint with
exactly the steps it would have made.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from partsong import zoo
from partsong.errors import ArgumentError
from partsong.knobs import Number, Share, Whole
from partsong_zoo.few_steps import build_few_step_scheduler
from partsong_zoo.folders import begin_with, pipeline_to_begin_with, save_pipeline
from partsong_zoo.shapes.grammar import describe
from partsong_zoo.shapes.latent_reader import LatentReader, asked_facts, fact_loss, scene_facts, with_another
from partsong_zoo.shapes.model import Generator, deepened, token_ids
from partsong_zoo.shapes.pool import build_pool, draw_scenes, load_pool, shipped_model
from partsong_zoo.shapes.scenes import Thing, generator
from partsong_zoo.shapes.scoring import score
from partsong_zoo.training.common import World
from partsong_zoo.training.consistency import (
    LAST_TIME,
    Velocity,
    clean_estimate,
    continuous_loss,
    discrete_loss,
    draw_times,
    fake_loss,
    guided,
    matching_loss,
    shifted_times,
    trig_velocity,
)
from partsong_zoo.training.recipe import file_report, run_recipe
from partsong_zoo.training.stage import TrainingStage, adam, muon_and_adam, read_average, run_stages

STAGES: tuple[str, ...] = ("pool", "reader", "discrete", "continuous", "matching", "export", "evaluate")
#: The stages that train the student.
TRAINED = STAGES[2:5]
#: Times at which samples of stage 5 are noised again, in turns: those of two steps, and of four with and without the
#: last. In half of the turns there is only the first step, which has most to do and with which all others begin.
WALKS = ((), (1.2,), (), (1.4, 1.2), (), (1.2,), (), (1.4, 1.2, 0.9))
#: Samples are read with noise up to this time, so that no invisible change passes for a fact.
READ_TIME = 0.6
#: The exported scheduler's shift towards noise.
SHIFT = 3.0
#: First integers of the keys of random draws.
POOL, TRAINING, OTHERS = 171, 172, 173


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/shapes-few"  # The folder for everything that is written.
    stages: str = ",".join(STAGES)  # The stages to run, with commas between.
    seed: int = 0  # The seed of all draws.
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # Where to train: cpu or cuda.
    start: str = ""  # A folder of `shapes-few` of the same sizes that the student begins with.
    save_minutes: float = 1.0  # Minutes between checkpoints.
    minutes: float = 6000.0  # Most minutes of each of stages 3 to 5, whose rates fall to zero by then.
    pool_size: int = 24_000  # Encoded examples.
    guidance: float = 5.0  # The teacher's guidance, which the student learns with everything else.
    batch: int = 48  # Pictures per step.
    copies: Annotated[int, Whole(0, 5)] = 4  # Blocks that the student has more than its teacher.
    reader_steps: int = 2000  # Steps of stage 2.
    reader_batch: int = 64  # Its pictures per step.
    discrete_steps: int = 1000  # Steps of stage 3.
    discrete_rate: float = 3e-4  # Its peak learning rate.
    levels: int = 12  # Points of the path in the first third of stage 3; they double at each third.
    continuous_steps: int = 300  # Steps of stage 4.
    continuous_rate: float = 1e-4  # Its peak learning rate.
    warm_steps: int = 100  # Steps over which the derivative's part of stage 4 rises.
    matching_steps: int = 400  # Steps of stage 5.
    matching_rate: float = 1e-4  # The student's peak learning rate in stage 5.
    fake_rate: float = 4e-4  # That of the model of its samples.
    consistency: Share = 1.0  # Share of the steps of stage 5 that hold the student to consistency as well.
    reading: Annotated[float, Number(0.0)] = 10.0  # Weight of facts that the reader misses in samples, in stage 5.
    captions: int = 200  # Fresh captions of stage 7.


# --- stage 1 ----------------------------------------------------------------------------------------------------------


def pool_scenes(config: Config) -> list[list[Thing]]:
    """Draws the scenes, the same at every call."""
    return draw_scenes(config.pool_size, POOL, config.seed)


def encode_pool(config: Config, world: World) -> None:
    """Runs stage 1: writes `pool.npy`, float16."""
    build_pool(Path(config.out) / "pool.npy", pool_scenes(config), world)


def train_reader(config: Config, world: World) -> None:
    """Runs stage 2; writes `reader.pt`."""
    torch.manual_seed(config.seed)
    scenes, out = pool_scenes(config), Path(config.out)
    others = [with_another(things, generator(OTHERS, config.seed, index)) for index, things in enumerate(scenes[::2])]
    build_pool(out / "others.npy", others, world)
    latents = np.concatenate([load_pool(out / "pool.npy", scenes), load_pool(out / "others.npy", others)])
    facts = scene_facts([*scenes, *others])
    reader = LatentReader().to(world.device)
    inside = [p for n, p in reader.named_parameters() if p.ndim == 4 and n.startswith("blocks.")]
    stage = TrainingStage(
        world,
        out / "reader.pt",
        reader,
        muon_and_adam(reader, inside, (3e-3, 2e-3), 0.01),
        key=(TRAINING, config.seed, STAGES.index("reader")),
        steps=config.reader_steps,
        save_minutes=config.save_minutes,
    )

    def loss_of(rng: np.random.Generator) -> tuple[Tensor, str]:
        # Half of them have an object that pictures never have.
        firsts = np.where(rng.random(config.reader_batch) < 0.5, 0, len(scenes))
        rows = rng.integers(firsts, np.where(firsts == 0, len(scenes), len(latents)))
        clean = torch.from_numpy(latents[rows]).float().to(world.device)
        time = torch.from_numpy(rng.uniform(0, 1, len(rows))).float().to(world.device)
        noise = torch.from_numpy(rng.standard_normal(clean.shape, dtype=np.float32)).to(world.device)
        wanted = facts[torch.from_numpy(rows)].to(world.device)
        return fact_loss(reader(noised(clean, noise, time), time), wanted, torch.ones_like(wanted)).mean(), ""

    stage.run(loss_of)


# --- stages 3 to 5 ----------------------------------------------------------------------------------------------------


def noised(clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """Returns points of the path, of one time or one for each sample."""
    time = time.view(-1, 1, 1, 1)
    return time.cos() * clean + time.sin() * noise


def trained_model(world: World, copies: int = 0) -> Generator:
    """Returns the shipped models; their transformer gets `copies` more blocks and is the part that is trained."""
    model = shipped_model(world)
    model.transformer = deepened(model.transformer, copies)
    model.transformer.requires_grad_(True)
    return model


class Players(nn.Module):
    """Holds what is trained: the student, and in the last stage a model of the student's samples."""

    def __init__(self, student: nn.Module, fake: nn.Module | None = None) -> None:
        super().__init__()
        self.student = student
        self.fake = nn.Identity() if fake is None else fake


@dataclass(frozen=True, kw_only=True)
class Example:
    """Holds the draws of one step.

    Attributes:
        clean: latents, `[batch, 4, 16, 16]`.
        noise: as many.
        texts: captions.
        captions: their token ids.
        rest: draws whatever else a loss needs.
    """

    clean: Tensor
    noise: Tensor
    texts: list[str]
    captions: Tensor
    rest: torch.Generator

    def at(self, time: Tensor) -> Tensor:
        """Returns the points of the path at some times."""
        return noised(self.clean, self.noise, time)

    def fresh_noise(self) -> Tensor:
        """Draws more noise."""
        return torch.randn(self.clean.shape, generator=self.rest).to(self.clean.device)


class Lessons:
    """Makes the losses of a stage.

    Args:
        config: the recipe's.
        world: the ranks.
    """

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.scenes = pool_scenes(config)
        self.latents = load_pool(Path(config.out) / "pool.npy", self.scenes)
        self.teacher, self.fake = shipped_model(world), trained_model(world)
        self.student = trained_model(world, config.copies)
        self.reader = load_reader(config, world)
        self.grids = [shifted_times(config.levels * 2**third).to(world.device) for third in range(3)]

    def draw(self, rng: np.random.Generator) -> Example:
        """Draws the examples of a step; captions are never empty, since the student is not guided."""
        rows, texts = list[int](), list[str]()
        while len(rows) < self.config.batch:
            row = int(rng.integers(len(self.latents)))
            if (text := describe(self.scenes[row], rng)) is not None:
                rows.append(row)
                texts.append(text)
        captions = token_ids(texts).to(self.world.device)
        clean = torch.from_numpy(self.latents[rows]).float().to(self.world.device)
        rest = torch.Generator().manual_seed(int(rng.integers(2**62)))
        noise = torch.randn(clean.shape, generator=rest).to(self.world.device)
        return Example(clean=clean, noise=noise, texts=texts, captions=captions, rest=rest)

    def velocity(self, model: Generator, captions: Tensor) -> Velocity:
        """Binds captions to a model, on the trigonometric path."""
        nulls = torch.ones(len(captions), device=self.world.device)  # as the pipeline's max_sequence_length=1
        return trig_velocity(lambda latents, level: model(latents, level, captions, nulls))

    def taught(self, example: Example) -> Velocity:
        """Returns the guided teacher."""
        empty = token_ids([""] * len(example.captions)).to(self.world.device)
        parts = self.velocity(self.teacher, example.captions), self.velocity(self.teacher, empty)
        return guided(*parts, self.config.guidance)

    def discrete(self, step: int, rng: np.random.Generator) -> Tensor:
        """Returns the loss of stage 3; neighbouring points come closer in the course of it."""
        example, grid = self.draw(rng), self.grids[min(3 * step // self.config.discrete_steps, 2)]
        place = torch.randint(1, len(grid), (len(example.clean),), generator=example.rest)
        times = grid[place].float(), grid[place - 1].float()
        points = example.at(times[0])
        with torch.no_grad():
            teacher = self.taught(example)(points, times[0])
        student = self.velocity(self.student, example.captions)
        return discrete_loss(student, student, teacher, points, times)

    def continuous(self, step: int, rng: np.random.Generator, warm_steps: int | None = None) -> Tensor:
        """Returns the loss of stage 4."""
        warm_steps = self.config.warm_steps if warm_steps is None else warm_steps
        example = self.draw(rng)
        time = draw_times(len(example.clean), example.rest).to(self.world.device)
        points = example.at(time)
        with torch.no_grad():
            teacher = self.taught(example)(points, time)
        student = self.velocity(self.student, example.captions)
        warmth = min(1.0, step / warm_steps) if warm_steps else 1.0
        return continuous_loss(student, teacher, points, time, warmth=warmth)

    def matching(self, step: int, rng: np.random.Generator) -> Tensor:
        """Returns the loss of stage 5: matching, the reader's, what the model of samples learns, and consistency."""
        example, grid = self.draw(rng), self.grids[-1]
        sample = self.own_sample(example, WALKS[step % len(WALKS)])
        time = grid[torch.randint(1, len(grid), (len(sample),), generator=example.rest)].float()
        noise = example.fresh_noise()
        points = noised(sample.detach(), noise, time)
        learned = self.velocity(self.fake, example.captions)(points, time)
        with torch.no_grad():
            velocities = (self.taught(example)(points, time), learned.detach())
            estimates = [clean_estimate(points, time, velocity) for velocity in velocities]
        loss = matching_loss(sample, *estimates) + fake_loss(learned, sample.detach(), noise, time)
        if self.config.reading:
            loss = loss + self.config.reading * self.missing(example, sample)
        if rng.random() < self.config.consistency:
            loss = loss + self.continuous(step, rng, warm_steps=0)
        return loss

    def missing(self, example: Example, sample: Tensor) -> Tensor:
        """Computes what captions ask for and the reader does not find in samples with a little noise, in nats."""
        assert self.reader is not None, "refused before the stage begins"
        time = (READ_TIME * torch.rand(len(sample), generator=example.rest)).to(sample.device)
        logits = self.reader(noised(sample, example.fresh_noise(), time), time)
        return fact_loss(logits, *(facts.to(sample.device) for facts in asked_facts(example.texts))).mean()

    def own_sample(self, example: Example, between: Sequence[float]) -> Tensor:
        """Draws with the student, noising its sample again at some times; only the last step has a gradient."""
        student = self.velocity(self.student, example.captions)
        points, sample = example.noise, example.noise
        for number, now in enumerate((LAST_TIME, *between)):
            time = torch.full((len(points),), now, device=points.device)
            if number:
                points = noised(sample, example.fresh_noise(), time)
            with torch.set_grad_enabled(number == len(between)):
                sample = clean_estimate(points, time, student(points, time))
        return sample


def load_reader(config: Config, world: World) -> LatentReader | None:
    """Loads what stage 2 has trained, if it has."""
    if not (path := Path(config.out) / "reader.pt").exists():
        return None
    reader = LatentReader()
    reader.load_state_dict(read_average(path))
    return reader.requires_grad_(False).to(world.device)


def train(config: Config, world: World, name: str) -> None:
    """Runs one of the stages 3 to 5; writes `NAME.pt`."""
    lessons = Lessons(config, world)
    if name == "matching" and config.reading and lessons.reader is None:
        raise ArgumentError(f"no {config.out}/reader.pt; run the stage 'reader' first, or use --reading 0")
    student, fake = lessons.student.transformer, lessons.fake.transformer
    if config.start:
        begin_with(config.start, student, pipeline_to_begin_with(config.start, "transformer").transformer)
    for before in TRAINED[: TRAINED.index(name)]:
        if (Path(config.out) / f"{before}.pt").exists():
            student.load_state_dict(student_weights(config, before))
    optimizers = [adam(list(student.parameters()), getattr(config, f"{name}_rate"))]
    if name == "matching":
        optimizers.append(adam(list(fake.parameters()), config.fake_rate))
    stage = TrainingStage(
        world,
        Path(config.out) / f"{name}.pt",
        Players(student, fake if name == "matching" else None),
        optimizers,
        key=(TRAINING, config.seed, STAGES.index(name)),
        steps=getattr(config, f"{name}_steps"),
        minutes=config.minutes,
        save_minutes=config.save_minutes,
        report_every=20,
    )
    stage.run(lambda rng: (getattr(lessons, name)(stage.step, rng), ""))


def student_weights(config: Config, stage: str) -> dict[str, Tensor]:
    """Reads the student's averaged weights at the end of a stage."""
    return read_average(Path(config.out) / f"{stage}.pt", "student")


# --- stages 6 and 7 ---------------------------------------------------------------------------------------------------


def export(config: Config, world: World) -> None:
    """Runs stage 6: writes the stock pipeline folder `export/` from the last stage that was trained."""
    out, pipeline = Path(config.out), zoo.load("shapes")
    last = [stage for stage in TRAINED if (out / f"{stage}.pt").exists()][-1]
    pipeline.register_modules(transformer=deepened(pipeline.transformer, config.copies))
    pipeline.transformer.load_state_dict(student_weights(config, last))
    pipeline.scheduler = build_few_step_scheduler(SHIFT)
    save_pipeline(pipeline, out / "export")
    world.say(f"exported the student of stage {last}")


def evaluate(config: Config, world: World) -> None:
    """Runs stage 7; writes `facts.json`."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(Path(config.out) / "export").to(world.device)
    pipeline.set_progress_bar_config(disable=True)
    report: dict[str, Any] = {"captions": config.captions}
    for steps in (1, 2, 4):
        asked = {"num_inference_steps": steps, "guidance_scale": 1.0, "max_sequence_length": 1}
        result = score(pipeline, config.captions, seed=config.seed, **asked)
        report[f"{steps} steps"] = {"facts_read": round(result.facts_read, 4), "all_right": round(result.all_right, 4)}
    file_report(Path(config.out) / "facts.json", report)


def run(config: Config, world: World) -> None:
    """Runs the stages of the configuration."""
    if config.start:  # A wrong folder ends here, before any work.
        begun = pipeline_to_begin_with(config.start, "transformer").transformer
        begin_with(config.start, trained_model(world, config.copies).transformer, begun)
    runners: dict[str, Any] = {"pool": encode_pool, "reader": train_reader}
    runners |= {name: functools.partial(train, name=name) for name in TRAINED}
    run_stages(config, world, runners | {"export": export, "evaluate": evaluate})


def main() -> None:
    """Runs the recipe."""
    run_recipe(Config, __doc__, run)


if __name__ == "__main__":
    main()
