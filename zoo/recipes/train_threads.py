"""Teaches a causal language model to think in threads: multiplications and countdowns, forked and joined.

"4729*386=?" is worked out in a thread per digit of the second factor, and the results are added up. With
`--mode sequential` the same work is written one thread after the other, for a model to compare with.

There are five stages:

1. `data`: writes some texts to `data-MODE.jsonl`, to look at or to train elsewhere;
2. `sft`: trains on such texts, drawn anew at every step, with the mask and positions of their threads;
3. `grpo`: goes on by group-relative policy optimisation. It samples the model itself by the runtime that forks and
   joins, and rewards right answers, more so if the longest chain of tokens is short;
4. `export`: the averaged weights of the last of these become the stock folder `export/MODE/`;
5. `evaluate`: answers fresh problems greedily, by the same runtime, and counts right answers, tokens in all and on the
   longest chain.

Small model, one core:  OMP_NUM_THREADS=1 python zoo/recipes/train_threads.py --out runs/threads
Its sequential twin:    OMP_NUM_THREADS=1 python zoo/recipes/train_threads.py --out runs/threads --mode sequential
Reinforced, then:       python zoo/recipes/train_threads.py --out runs/threads --stages grpo,export,evaluate
A model of your own:    accelerate launch zoo/recipes/train_threads.py --out runs/mine --model FOLDER --device cuda
                            --rate 1e-5 --batch 8
One that forks already: python zoo/recipes/train_threads.py --out runs/mine --model FOLDER --stages grpo,export,evaluate

Every step draws its problems from (seed, step, process), so a stage that was stopped continues from its checkpoint with
exactly the steps it would have made; `sft` does so to the last bit on one core.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from partsong.errors import ArgumentError
from partsong.evals.reasoning.outcome import table_rows
from partsong.evals.reasoning.problem import Problem as Asked
from partsong.evals.reasoning.suite import evaluate as evaluated
from partsong.evals.reasoning.suite import greedy
from partsong.knobs import check_knobs, type_hints
from partsong.reasoning import Parameters
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.strategies.fork_join import fork_join
from partsong.reasoning.threads import FORMATS, Format
from partsong.seeds import derive
from partsong_zoo.products.model import build_model, build_tokenizer, save_model
from partsong_zoo.products.problems import Family, answer_of, check, examples
from partsong_zoo.products.rollouts import Rollout, rewards_of, roll_out
from partsong_zoo.products.training import AcceleratorWorld, as_json, draw_problems, solution_parts, speech_of, text_of
from partsong_zoo.training.common import Optimizers, schedule
from partsong_zoo.training.policy_loss import per_token, policy_loss
from partsong_zoo.training.recipe import file_report, recipe_config
from partsong_zoo.training.stage import TrainingStage, adam, inside_matrices, muon_and_adam, read_average, stages_of
from partsong_zoo.training.thread_batch import ThreadBatch, pack_threads
from partsong_zoo.training.thread_training import ThreadLesson

STAGES: tuple[str, ...] = ("data", "sft", "grpo", "export", "evaluate")
TRAINED: tuple[str, ...] = ("grpo", "sft")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Holds the knobs of the recipe; every field is also a command-line flag."""

    out: str = "runs/threads"  # The folder for everything that is written.
    stages: str = "data,sft,export,evaluate"  # The stages to run, with commas between.
    mode: Literal["threads", "sequential"] = "threads"  # How solutions are written.
    format: str = "multiverse"  # The format of the threads.
    join: Literal["keys", "text"] = "keys"  # How threads join: by their keys, or as text read again.
    family: Family = "product"  # The kind of problems.
    model: str = ""  # A folder with your own model. Default: a small one of random weights.
    seed: int = 0  # The seed of all draws.
    device: str = "cpu"  # Where to train: cpu or cuda.
    precision: str = "bf16"  # Mixed precision of accelerate.
    save_minutes: float = 2.0  # Minutes between checkpoints.
    steps: int = 1800  # Steps of `sft`.
    batch: int = 32  # Problems per step of `sft`.
    heads: int = 4  # Attention heads.
    depth: int = 4  # Layers.
    rate: float = 3e-3  # Peak learning rate of Adam in `sft`.
    muon_rate: float = 6e-3  # Peak learning rate of orthogonalised momentum.
    grpo_steps: int = 40  # Batches of samples in `grpo`.
    grpo_rate: float = 1e-4  # Peak learning rate in `grpo`.
    questions: int = 8  # Problems per batch of samples.
    group: int = 8  # Samples per problem.
    updates: int = 2  # Steps per batch of samples.
    reward: Literal["accelerated", "alternating"] = "accelerated"  # How answers are rewarded.
    scale: Literal["none", "deviation"] = "none"  # How advantages are scaled.
    normalise: Literal["token", "sequence", "constant"] = "token"  # How texts of different length count.
    divergence: float = 0.0  # Weight of the pull towards the model before `grpo`.
    max_tokens: int = 160  # Most tokens of a thread.
    problems: int = 1000  # Fresh problems to evaluate.


class Work:
    """Holds what all stages share: configuration, processes, tokenizer."""

    def __init__(self, config: Config) -> None:
        check_knobs(type_hints(Config), vars(config))
        if config.format not in FORMATS:
            raise ArgumentError(f"format={config.format!r}; use one of {', '.join(FORMATS)}")
        self.config, self.out = config, Path(config.out)
        self.accelerator = Accelerator(mixed_precision=config.precision, cpu=config.device == "cpu")
        self.world = AcceleratorWorld(self.accelerator)
        if self.accelerator.device.type == "cpu":
            torch.set_num_threads(1)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(config.model) if config.model else build_tokenizer()
        self.speech = speech_of(self.tokenizer)
        self.form: Format | None = FORMATS[config.format] if config.mode == "threads" else None

    def new_model(self) -> Any:
        """Makes a model with random weights, or loads that of the folder."""
        if self.config.model:
            return AutoModelForCausalLM.from_pretrained(
                self.config.model, attn_implementation="sdpa", dtype=torch.float32
            )
        torch.manual_seed(self.config.seed)
        model = build_model(self.config.heads, self.config.depth)
        # For rows this short plain attention is the fastest on a CPU.
        model.set_attn_implementation("eager")
        return model

    def load_average(self, stages: tuple[str, ...] = TRAINED) -> Any:
        """Loads the averaged weights of the last stage that has a checkpoint, on the CPU."""
        for name in stages:
            path = self.out / f"{name}-{self.config.mode}.pt"
            if path.exists():
                model = self.new_model()
                model.load_state_dict(read_average(path))
                return model.eval()
        raise ArgumentError(f"no {self.out}/{stages[-1]}-{self.config.mode}.pt; run the stage {stages[-1]!r} first")

    def new_stage(self, name: str, model: Any, *, steps: int, unit: int = 1, scale: float = 1.0) -> TrainingStage:
        """Makes a stage with a checkpoint `NAME-MODE.pt`, and continues it if there is one."""
        # This comes before the optimizers: one sees the weights through views, which would stay on the old device.
        model = model.to(self.accelerator.device).train()
        return TrainingStage(
            self.world,
            self.out / f"{name}-{self.config.mode}.pt",
            model,
            self.optimizers(model, scale),
            key=(self.config.seed, self.world.rank),
            steps=steps,
            save_minutes=self.config.save_minutes,
            unit=unit,
            report_every=20,
            # The rate is 0 at a share of 0, but even the first of few steps should learn something.
            rate_at=lambda share: schedule(share + 1 / steps),
        )

    def optimizers(self, model: nn.Module, scale: float = 1.0) -> Optimizers:
        """Returns the zoo's optimizers for the small model, and Adam for one that is trained already."""
        if self.config.model or scale != 1.0:
            return [adam(list(model.parameters()), scale * self.config.rate)]
        return muon_and_adam(model, inside_matrices(model), (self.config.muon_rate, self.config.rate), 0.01)

    def rng(self, stage: str, step: int) -> Random:
        """Makes the random generator of a step on this process."""
        return Random(derive(self.config.seed, stage, step, self.accelerator.process_index))

    def problems(self, rng: Random, num: int) -> list[Any]:
        """Draws problems that training may show."""
        return draw_problems(rng, num, self.config.family)

    def pack(self, texts: list[Any]) -> ThreadBatch:
        """Packs texts of tokens into a batch on this process's device."""
        return pack_threads(texts, pad=self.tokenizer.pad_token_id or 0).to(self.accelerator.device)

    def strategy(self) -> Any:
        """Makes the strategy by which the runtime answers in this mode, for a model that knows its format."""
        if self.form is None:
            return greedy
        return partial(fork_join, format=self.form.name, teach=False, max_depth=1, thread_tokens=self.config.max_tokens)


def write_data(work: Work, num: int = 100) -> None:
    """Runs stage 1: writes `data-MODE.jsonl`, a question and the parts of its solution per line."""
    lines = []
    for problem in work.problems(work.rng("data", 0), num):
        parts = solution_parts(problem, work.form)
        lines.append(json.dumps({"question": problem.question, "parts": as_json(parts)}))
    (work.out / f"data-{work.config.mode}.jsonl").write_text("\n".join(lines) + "\n")


def sft(work: Work) -> TrainingStage:
    """Runs stage 2: writes `sft-MODE.pt`."""
    config = work.config
    stage = work.new_stage("sft", work.new_model(), steps=config.steps)
    lesson = work.accelerator.prepare(ThreadLesson(stage.module))

    def loss_of(_: np.random.Generator) -> tuple[Tensor, str]:
        problems = work.problems(work.rng("sft", stage.step), config.batch)
        texts = [text_of(one, work.form, work.speech, joined=config.join == "keys") for one in problems]
        with work.accelerator.autocast():
            return lesson(work.pack(texts)), ""

    stage.run(loss_of)
    return stage


def grpo(work: Work) -> TrainingStage:
    """Runs stage 3, from `sft-MODE.pt`, or from a model of your own that has had no `sft` here.

    Writes `grpo-MODE.pt` and a line per batch to `grpo-MODE.jsonl`.
    """
    config = work.config
    is_untrained = config.model and not (work.out / f"sft-{config.mode}.pt").exists()
    model = work.new_model() if is_untrained else work.load_average(("sft",))
    reference = copy.deepcopy(model).to(work.accelerator.device) if config.divergence else None
    steps, scale = config.grpo_steps * config.updates, config.grpo_rate / config.rate
    stage = work.new_stage("grpo", model, steps=steps, unit=config.updates, scale=scale)
    lesson = work.accelerator.prepare(ThreadLesson(stage.module))
    options: dict[str, Any] = {"normalise": config.normalise, "divergence_weight": config.divergence}
    if config.normalise == "constant":
        options["most_tokens"] = 16 * config.max_tokens
    samples: dict[str, Any] = {}

    def loss_of(_: np.random.Generator) -> tuple[Tensor, str]:
        with work.accelerator.autocast():
            if stage.step % config.updates == 0:
                samples.update(_draw_samples(work, lesson, stage.module, stage.step // config.updates, reference))
            of_samples = (samples[name] for name in ("old", "advantages", "texts"))
            new = lesson(samples["batch"], 1.0)
            return policy_loss(new, *of_samples, reference=samples["reference"], **options).loss, ""

    stage.run(loss_of)
    return stage


def _draw_samples(work: Work, lesson: Any, model: Any, number: int, reference: Any) -> dict[str, Any]:
    """Draws samples of the model as it is, and computes what the loss needs of them."""
    config = work.config
    rollouts = asyncio.run(_roll_out(work, model, number))
    rewards, advantages = rewards_of(rollouts, number, reward=config.reward, scale=config.scale, group=config.group)
    batch = work.pack([rollout.tokens for rollout in rollouts])
    texts = batch.texts[batch.learn]
    with torch.no_grad():
        old = lesson(batch, 1.0)
        of_reference = None if reference is None else ThreadLesson(reference)(batch, 1.0)
    line = {
        "step": number,
        "reward": sum(rewards) / len(rewards),
        "right": sum(rollout.right for rollout in rollouts) / len(rollouts),
        "forked": sum(rollout.forked for rollout in rollouts) / len(rollouts),
        "tokens_total": sum(rollout.total for rollout in rollouts) / len(rollouts),
        "tokens_critical": sum(rollout.critical for rollout in rollouts) / len(rollouts),
    }
    if work.accelerator.is_main_process:
        with (work.out / f"grpo-{config.mode}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        _log.info("%s", line)
    values = torch.tensor(advantages, device=texts.device)
    return {
        "batch": batch,
        "old": old,
        "advantages": per_token(values, texts),
        "texts": texts,
        "reference": of_reference,
    }


async def _roll_out(work: Work, model: Any, number: int) -> list[Rollout]:
    config = work.config
    # A new engine has no keys of older weights; without packing it shares the weights that are trained.
    engine = LocalEngine(model.eval(), tokenizer=work.tokenizer, pack=False, name="policy")
    rng = work.rng("grpo", number)
    problems = [problem for _ in range(config.questions) for problem in work.problems(rng, 1)]
    seed = derive(config.seed, "rollouts", number, work.accelerator.process_index)
    try:
        return await roll_out(
            engine, problems, work.form, work.speech, num=config.group, seed=seed, max_tokens=config.max_tokens
        )
    finally:
        await engine.close()
        model.train()


def export(work: Work) -> None:
    """Runs stage 4: saves a stock folder of the latest stage that has a checkpoint."""
    folder, model = work.out / "export" / work.config.mode, work.load_average()
    if not work.config.model:
        save_model(model, folder)
        return
    model.save_pretrained(folder)
    work.tokenizer.save_pretrained(folder)


def evaluate(work: Work) -> None:
    """Runs stage 5: measures the model in `export/`; writes `scores-MODE.json`."""
    family = work.config.family
    problems = [
        Asked(task=family, number=n, question=one.question, gold=str(one.target), extract=answer_of,
              check=partial(_right, one.question))
        for n, one in enumerate(examples(work.config.problems, work.config.seed + 1, family))
    ]  # fmt: skip
    folder, parameters = work.out / "export" / work.config.mode, Parameters(temperature=0, max_tokens=512)

    async def measure() -> list[Any]:
        engine = LocalEngine(folder, device=work.config.device)
        try:
            return await evaluated(
                problems, {work.config.mode: work.strategy()}, engine, parameters=parameters, together=16
            )
        finally:
            await engine.close()

    rows = table_rows(asyncio.run(measure()))
    file_report(work.out / f"scores-{work.config.mode}.json", rows)


def _right(question: str, answer: str | None) -> bool:
    return answer is not None and check(question, answer)


def run(config: Config) -> None:
    """Runs the stages of the configuration."""
    asked = stages_of(config.stages, STAGES)
    work = Work(config)
    work.out.mkdir(parents=True, exist_ok=True)
    stages: dict[str, Callable[[Work], Any]] = {
        "data": write_data, "sft": sft, "grpo": grpo, "export": export, "evaluate": evaluate,
    }  # fmt: skip
    for stage in asked:
        if stage in ("sft", "grpo") or work.accelerator.is_main_process:
            stages[stage](work)
        work.accelerator.wait_for_everyone()


def main() -> None:
    """Runs the recipe."""
    config = recipe_config(Config, __doc__)
    run(config)


if __name__ == "__main__":
    main()
