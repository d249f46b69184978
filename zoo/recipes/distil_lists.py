"""Teaches students of `lists-mdlm` to decide more tokens per forward, by seven published methods at equal steps.

All students begin as the zoo's `lists-mdlm`, which is also their teacher, and see the same texts: the teacher's own
answers, decoded one token at a time and kept if they are right. There are four stages:

1. `trajectories`: writes `texts.safetensors`, the texts with the order in which their tokens were decided;
2. `train`: one student of one method, from one seed; writes `METHOD-SEED.pt`;
3. `export`: its averaged weights so far become `export/METHOD-SEED/`, a stock folder, also while stage 2 runs;
4. `evaluate`: valid answers and tokens per forward on fresh prompts, beside the teacher's.

One student on one core:  OMP_NUM_THREADS=1 python zoo/recipes/distil_lists.py --method dparallel --out runs/distil
Look while it trains:     python zoo/recipes/distil_lists.py --method t3d --out runs/distil --stages export,evaluate
The table of all of them: python benchmarks/text/distil_lists.py --students runs/distil/export --out NAME

`plain` is the control: the loss that the teacher was trained with, on the same texts for as many steps. Where a task
has many answers the texts are drawn at temperature 1; with `--collapsed` they are the likeliest, as in published
recipes, and students forget all answers but one. Every step draws its texts and masks from (seed, step), so a stage
that was stopped continues from its checkpoint with exactly the steps it would have made. All is in float32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from partsong import zoo
from partsong.errors import ArgumentError
from partsong.knobs import Count
from partsong.seeds import derive
from partsong_zoo.folders import load_folder, save_folder
from partsong_zoo.lists.distillation import (
    certainty_loss,
    consistency_loss,
    discrimination_loss,
    group_advantages,
    masked_loss,
    mean_log_prob,
    own_guess,
    reinforcement_loss,
    revision_loss,
)
from partsong_zoo.lists.model import MASK, PAD, build_tokenizer, full_mask
from partsong_zoo.lists.rollouts import ListRollouts, log_probs_of, roll_out_lists
from partsong_zoo.lists.speed import measure_speed
from partsong_zoo.lists.tasks import examples
from partsong_zoo.lists.training import draw_masks
from partsong_zoo.lists.trajectories import (
    ODDS,
    RECORDED,
    ListTrajectories,
    corrupted,
    draw_examples,
    extended,
    half_masks,
    level_masks,
    sample_trajectories,
    snapshot_masks,
    state_masks,
)
from partsong_zoo.training.common import World, schedule
from partsong_zoo.training.recipe import file_report, run_recipe
from partsong_zoo.training.stage import TrainingStage, adam, read_average, run_stages

STAGES: tuple[str, ...] = ("trajectories", "train", "export", "evaluate")
Method = Literal["plain", "dparallel", "d3llm", "cllm", "t3d", "oput", "rediff-noise", "rediff", "lightning"]
METHODS: tuple[str, ...] = get_args(Method)
TEACHER = "lists-mdlm"
#: First integer of the keys of random draws; the method's number is added.
TRAINING = 181
#: How wide the blocks of `d3llm` are in the sixths of a training.
WIDTHS = (4, 4, 8, 8, 12, 24)
#: Shares of the answer that `t3d` masks.
RATIOS = torch.tensor([1.0, 0.75, 0.5, 0.25])


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/distil"  # The folder for everything that is written.
    stages: str = ",".join(STAGES)  # The stages to run, with commas between.
    method: Method = "dparallel"  # How the student is taught.
    start: str = ""  # METHOD-SEED of a finished student to begin with. Default: the teacher.
    seed: int = 0  # The seed of the student's draws; all students share their texts.
    save_minutes: float = 1.0  # Minutes between checkpoints.
    texts: Count = 8000  # Prompts that `trajectories` asks the teacher.
    collapsed: bool = False  # Whether tasks of many answers are shown with the likeliest one only.
    steps: Count = 300  # Steps of `train`.
    minutes: float = math.inf  # Most minutes of `train`.
    batch: Count = 64  # Texts per step.
    rate: float = 5e-4  # Peak learning rate.
    width: Count = 8  # Places of a block of `dparallel`.
    entropy: float = 2.0  # Weight of the entropy in `dparallel` and `d3llm`.
    temperature: float = 0.5  # Temperature of that entropy.
    consistency: float = 1.0  # Weight of the consistency in `cllm`.
    whole: float = 0.5  # Share of the texts that `oput` masks whole, as decoding begins; the others have random masks.
    beta: float = 1.0  # How strongly a log-probability counts in `t3d`.
    alpha: float = 0.5  # Weight of the fake texts in `t3d`.
    path: float = 0.2  # Weight of the cross-entropy along the trajectory in `t3d`.
    level: Count = 4  # Tokens of a level of that trajectory.
    reinforced_rate: float = 1e-4  # Peak learning rate of `lightning`.
    group: Count = 8  # Answers to a prompt in `lightning`.
    updates: Count = 2  # Steps per batch of answers in `lightning`.
    threshold: float = 0.5  # Nats at which `lightning` decides a place.
    prompts: Count = 100  # Fresh prompts per task to evaluate.

    @property
    def name(self) -> str:
        """Returns the student's name."""
        return f"{self.method}-{self.seed}"


# --- stage 1 ----------------------------------------------------------------------------------------------------------


def teacher_model(config: Config) -> LlamaForCausalLM:
    """Loads the teacher, frozen. Plain attention is the fastest on a CPU for rows this short."""
    model = zoo.load(TEACHER).model
    model.set_attn_implementation("eager")
    return model.requires_grad_(False)


def record(config: Config, world: World) -> None:
    """Runs stage 1: writes `texts.safetensors`, unless it is there."""
    path = Path(config.out) / "texts.safetensors"
    if path.exists():
        return
    texts = sample_trajectories(teacher_model(config), config.texts, seed=0, collapsed=config.collapsed)
    world.say(f"{len(texts.ids)} of {config.texts} answers are right")
    save_file({name: tensor.contiguous() for name, tensor in texts._asdict().items()}, path)


def read_texts(config: Config) -> ListTrajectories:
    """Reads what stage 1 has written."""
    path = Path(config.out) / "texts.safetensors"
    if not path.is_file():
        raise ArgumentError(f"no {path}; run the stage 'trajectories' first")
    return ListTrajectories(**load_file(path))


# --- stage 2 ----------------------------------------------------------------------------------------------------------


class Lessons:
    """Makes the losses of the methods.

    Args:
        config: the recipe's.
        world: the ranks.
        players: the `student` that is trained, and for `t3d` the `reference` that it is compared with.
    """

    def __init__(self, config: Config, world: World, players: Any) -> None:
        self.config, self.world = config, world
        self.student = players["student"]
        self.reference: Any = players["reference"] if config.method == "t3d" else None
        self.texts = read_texts(config)
        self.teacher = teacher_model(config)
        self.samples: dict[str, Any] = {}

    def draw(self, rng: np.random.Generator) -> tuple[ListTrajectories, torch.Generator]:
        """Draws the texts of a step, and makes a generator for all else; half of the batches have a canvas of 24."""
        rows = torch.from_numpy(rng.integers(len(self.texts.ids), size=self.config.batch))
        texts = extended(self.texts.rows(rows), 2 * RECORDED if rng.random() < 0.5 else RECORDED)
        return texts, torch.Generator().manual_seed(int(rng.integers(2**62)))

    def logits(self, model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
        """Returns the logits of every place."""
        return model(tokens, attention_mask=full_mask(tokens != PAD), use_cache=False).logits

    def masked(self, texts: ListTrajectories, masks: Tensor) -> Tensor:
        """Returns the student's logits with some places masked."""
        return self.logits(self.student, texts.ids.masked_fill(masks, MASK))

    def loss(self, step: int, rng: np.random.Generator) -> Tensor:
        """Returns the loss of a step of the configured method."""
        if self.config.method == "lightning":
            return self.lightning(step, rng)
        texts, draw = self.draw(rng)
        methods: dict[str, Callable[[], Tensor]] = {
            "plain": lambda: self.plain(texts, rng),
            "dparallel": lambda: self.dparallel(texts, draw),
            "d3llm": lambda: self.d3llm(texts, draw, step / self.config.steps),
            "cllm": lambda: self.cllm(texts, draw),
            "t3d": lambda: self.t3d(texts, draw, step),
            "oput": lambda: self.oput(texts, rng, draw),
            "rediff-noise": lambda: self.rediff(texts, draw, revises=False),
            "rediff": lambda: self.rediff(texts, draw, revises=2 * step >= self.config.steps),
        }
        return methods[self.config.method]()

    def plain(self, texts: ListTrajectories, rng: np.random.Generator) -> Tensor:
        """Returns the loss of the control: random masks, and the others."""
        masks, _ = draw_masks(texts.canvas, rng)
        both = (masks, texts.canvas & ~masks)
        return sum((masked_loss(self.masked(texts, each), texts.ids, each) for each in both), torch.tensor(0.0))

    def certain(self, texts: ListTrajectories, masks: Tensor) -> Tensor:
        """Returns certainty forcing with some places masked."""
        knobs = {"weight": self.config.entropy, "temperature": self.config.temperature}
        return certainty_loss(self.masked(texts, masks), texts.ids, masks, **knobs)

    def dparallel(self, texts: ListTrajectories, draw: torch.Generator) -> Tensor:
        """Returns certainty forcing with half of a block masked, and with the other half."""
        first, second = half_masks(texts.canvas, self.config.width, draw)
        return self.certain(texts, first) + self.certain(texts, second)

    def d3llm(self, texts: ListTrajectories, draw: torch.Generator, share: float) -> Tensor:
        """Returns certainty forcing at moments of the trajectories; blocks grow with time, and so do their masks."""
        ratio = 0.8 * (share + (1 - share) * torch.rand(len(texts.ids), generator=draw))
        width = WIDTHS[min(int(share * len(WIDTHS)), len(WIDTHS) - 1)]
        first, second = snapshot_masks(texts, width, ratio, draw)
        return (self.certain(texts, first) + masked_loss(self.masked(texts, second), texts.ids, second)) / 4

    def cllm(self, texts: ListTrajectories, draw: torch.Generator) -> Tensor:
        """Returns the consistency of a state with the next one, or one three quarters of the way to the end."""
        sizes = texts.canvas.sum(1)
        early = (torch.rand(len(sizes), generator=draw) * (sizes - 1)).long()
        far = early + (3 * (sizes - early) / 4).ceil().long()
        late = torch.where(torch.rand(len(sizes), generator=draw) < 0.5, early + 1, far.minimum(sizes - 1))
        masks, left = state_masks(texts, early), state_masks(texts, late)
        with torch.no_grad():
            target = self.masked(texts, left)
        logits = self.masked(texts, masks)
        return masked_loss(logits, texts.ids, masks) + self.config.consistency * consistency_loss(logits, target, left)

    def t3d(self, texts: ListTrajectories, draw: torch.Generator, step: int) -> Tensor:
        """Returns the discrimination of texts from guesses of one step, and the cross-entropy along trajectories.

        At each third of the training the student as it is becomes the reference.
        """
        if step and step % math.ceil(self.config.steps / 3) == 0:
            self.reference.load_state_dict(self.student.state_dict())
        chances = (8 * RATIOS).exp()
        ratio = RATIOS[torch.multinomial(chances, len(texts.ids), replacement=True, generator=draw)]
        masks = state_masks(texts, ((1 - ratio) * texts.canvas.sum(1)).long())
        logits = self.masked(texts, masks)
        with torch.no_grad():
            reference = self.logits(self.reference, texts.ids.masked_fill(masks, MASK))
        fakes = own_guess(reference, texts.ids, masks, barred=MASK)
        real, fake = (
            (mean_log_prob(logits, tokens, masks), mean_log_prob(reference, tokens, masks))
            for tokens in (texts.ids, fakes)
        )
        path, learned = level_masks(texts, self.config.level, draw)
        along = masked_loss(self.masked(texts, path), texts.ids, learned)
        return (
            discrimination_loss(real, fake, beta=self.config.beta, alpha=self.config.alpha) + self.config.path * along
        )

    def oput(self, texts: ListTrajectories, rng: np.random.Generator, draw: torch.Generator) -> Tensor:
        """Returns the cross-entropy behind masks, and behind the student's own guesses in their place."""
        some, _ = draw_masks(texts.canvas, rng)
        is_whole = torch.rand(len(some), 1, generator=draw) < self.config.whole
        masks = torch.where(is_whole, texts.canvas, some)
        logits = self.masked(texts, masks)
        guess = own_guess(logits, texts.ids, masks, barred=MASK)
        return masked_loss(logits, texts.ids, masks) + masked_loss(self.logits(self.student, guess), texts.ids, masks)

    def rediff(self, texts: ListTrajectories, draw: torch.Generator, *, revises: bool) -> Tensor:
        """Returns the loss of either stage: of masks and random tokens, or of what is wrong in the student's drafts."""
        ratio = torch.rand(len(texts.ids), generator=draw)
        if not revises:
            tokens, chosen = corrupted(texts, ratio, draw)
            return masked_loss(self.logits(self.student, tokens), texts.ids, chosen)
        masks = state_masks(texts, ((1 - ratio) * texts.canvas.sum(1)).long())
        with torch.no_grad():
            draft = own_guess(self.masked(texts, masks), texts.ids, masks, barred=MASK)
        return revision_loss(self.logits(self.student, draft), draft, texts.ids, texts.canvas)

    def lightning(self, step: int, rng: np.random.Generator) -> Tensor:
        """Returns the loss of a batch of sampled answers, which is drawn anew every few steps."""
        if step % self.config.updates == 0:
            self.samples = self.sample(step // self.config.updates, rng)
        if not self.samples:
            return 0.0 * next(self.student.parameters()).sum()  # no group had anything to teach
        names = ("old", "reference", "advantages", "right")
        new = log_probs_of(self.student, self.samples["rollouts"])
        return reinforcement_loss(new, *(self.samples[name] for name in names))

    def sample(self, number: int, rng: np.random.Generator) -> dict[str, Any]:
        """Draws answers of the student as it is, and computes what the loss needs of them."""
        config = self.config
        asked = draw_examples(config.batch // config.group, derive(config.seed, "reinforcement", number))
        draw = torch.Generator().manual_seed(int(rng.integers(2**62)))
        prompts = [example.prompt for example in asked]
        whole = roll_out_lists(self.student, prompts, config.group, draw, threshold=config.threshold)
        advantages, kept = group_advantages(whole.right, whole.speed)
        self.world.say(f"right {whole.right.float().mean():.3f}, {whole.speed.mean():.2f} tokens per forward")
        rows = kept[whole.answer // config.group].nonzero().flatten()
        if not len(rows):
            return {}
        rollouts = ListRollouts(whole.right, whole.speed, *(tensor[rows] for tensor in whole[2:]))
        of_token = rollouts.answer[rollouts.decided.nonzero()[:, 0]]
        with torch.no_grad():
            old, reference = (log_probs_of(model, rollouts) for model in (self.student, self.teacher))
        return {
            "rollouts": rollouts,
            "old": old,
            "reference": reference,
            "advantages": advantages.flatten()[of_token],
            "right": whole.right.flatten()[of_token],
        }


def train(config: Config, world: World) -> None:
    """Runs stage 2: writes `METHOD-SEED.pt`."""
    student = teacher_model(config).requires_grad_(True)
    if config.start:
        student.load_state_dict(load_student(config, config.start))
    players = nn.ModuleDict({"student": student})
    if config.method == "t3d":  # kept with the student, since a training that was stopped needs it again
        players["reference"] = copy.deepcopy(student).requires_grad_(False)
    lessons = Lessons(config, world, players)
    is_reinforced = config.method == "lightning"
    stage = TrainingStage(
        world,
        Path(config.out) / f"{config.name}.pt",
        players,
        [adam(list(student.parameters()), config.reinforced_rate if is_reinforced else config.rate)],
        key=(TRAINING + METHODS.index(config.method), config.seed, world.rank),
        steps=config.steps,
        minutes=config.minutes,
        save_minutes=config.save_minutes,
        unit=config.updates if is_reinforced else 1,
        report_every=20,
        # The rate is 0 at a share of 0, but even the first of few steps should learn something.
        rate_at=lambda share: schedule(min(share + 1 / config.steps, 1.0)),
    )
    stage.run(lambda rng: (lessons.loss(stage.step, rng), ""))


def load_student(config: Config, name: str) -> dict[str, Tensor]:
    """Reads a student's averaged weights."""
    path = Path(config.out) / f"{name}.pt"
    if not path.is_file():
        raise ArgumentError(f"no {path}; run the stage 'train' first")
    return read_average(path, "student")


# --- stages 3 and 4 ---------------------------------------------------------------------------------------------------


def export(config: Config, world: World) -> None:
    """Runs stage 3: saves a stock folder."""
    model = teacher_model(config)
    model.load_state_dict(load_student(config, config.name))
    save_folder(model, build_tokenizer(), Path(config.out) / "export" / config.name)


def evaluate(config: Config, world: World) -> None:
    """Runs stage 4: measures teacher and student on fresh prompts; writes `scores-METHOD-SEED.json`."""
    models = {TEACHER: zoo.load(TEACHER).model, config.name: load_folder(Path(config.out) / "export" / config.name)}
    report: dict[str, Any] = {"prompts_per_task": config.prompts, "rule": "entropy-bound"}
    for name, model in models.items():
        rows = {}
        for family in ODDS:
            asked = examples(config.prompts, seed=config.seed + 1, families=[family])
            row = measure_speed(model, asked, "entropy-bound")
            rows[family] = {key: round(row[key], 3) for key in ("accuracy", "tokens_per_forward")}
        report[name] = rows
    file_report(Path(config.out) / f"scores-{config.name}.json", report)


def run(config: Config, world: World) -> None:
    """Runs the stages of the configuration."""
    run_stages(config, world, {"trajectories": record, "train": train, "export": export, "evaluate": evaluate})


def main() -> None:
    """Runs the recipe."""
    run_recipe(Config, __doc__, run, device="cpu")


if __name__ == "__main__":
    main()
